"""The fused kernels behind the memory-linear forms: attention that also returns its log-sum-exp.

Parts of one softmax, computed apart, are merged by their log-sum-exp. The backward pass of a fused kernel recomputes
weights as exp(score - lse) and uses the output only through the row sums of (gradient x output). Given the *merged*
log-sum-exp and output, it therefore returns the exact gradients of its part of the merged attention.

Queries are [b, n, R, d] and keys [b, K, d]: n query heads share the keys of each of b. Log-sum-exp is [b, n, R]. A
mask [R, K] is added to the scores; None means causal, on as many keys as queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["by_key_head", "kernel_backward", "kernel_forward", "kernel_keys", "kernel_view"]

#: Scores of one tile of the backward pass on a CPU, of float32: what fits its L2 cache; and its fewest query rows.
TILE_SCORES = 2**18
TILE_ROWS = 32


def by_key_head(tensor: Tensor, kv_heads: int) -> Tensor:
    """[T, h, d] → [T, g, h/g, d], a view."""
    return tensor.view(tensor.shape[0], kv_heads, -1, tensor.shape[2])


def kernel_view(tensor: Tensor, kv_heads: int) -> Tensor:
    """Queries [R, h, d] → [g, h/g, R, d]: key heads are the batch, so that they need no copy per query head."""
    return by_key_head(tensor, kv_heads).permute(1, 2, 0, 3)


def kernel_keys(tensor: Tensor) -> Tensor:
    """Keys [K, g, d] → [g, K, d], a view."""
    return tensor.transpose(0, 1)


def kernel_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [b, n, R, d] in the dtype of *query*, and log-sum-exp [b, n, R] in float32 or wider."""
    aten = torch.ops.aten
    key, value = (_shared(each, query.shape[1]) for each in (key, value))
    if query.device.type == "cpu":
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask is None, attn_mask=mask
        )
        return output, lse
    if mask is None and query.dtype in (torch.float16, torch.bfloat16):
        output, lse = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[:2]
        return output, lse[..., : query.shape[2]]
    output, lse = aten._scaled_dot_product_efficient_attention(
        query, key, value, _aligned(mask, query), True, 0.0, mask is None
    )[:2]
    return output, lse[..., : query.shape[2]]


def kernel_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [b, n, R, d], [b, K, d], [b, K, d], given the output and log-sum-exp of the whole softmax."""
    if query.device.type == "cpu":
        return _tiled_backward(grad, query, key, value, output, lse, mask)
    key, value = (_shared(each, query.shape[1]) for each in (key, value))
    with _strict_determinism():
        grad_query, grad_key, grad_value = _accelerator_backward(grad, query, key, value, output, lse, mask)
    return grad_query, grad_key.sum(1), grad_value.sum(1)


def _shared(keys: Tensor, group: int) -> Tensor:
    """Keys [b, K, d] → [b, n, K, d], of stride zero over the query heads that share them."""
    return keys.unsqueeze(1).expand(-1, group, -1, -1)


def _tiled_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass on CPUs: a few query rows at a time, whose scores fit the cache.

    torch's own kernel multiplies one head at a time, and without the processor's bfloat16 instructions. Here the
    query heads that share keys are rows of one product, and what is subtracted of its results a row, the log-sum-exp
    and the sum of (gradient x output), is part of it: one column more of the queries, against ones. So no result
    needs more digits than the dtype of the products has, and none is written wider.
    """
    batch, group, rows, dim = query.shape
    keys, wide = key.shape[1], lse.dtype
    scale = 1.0 / math.sqrt(dim)
    queries = _less(query * scale, lse)
    grads = _less(grad, (grad.to(wide) * output).sum(-1))
    key_columns, value_columns = (_with_ones(each).transpose(1, 2) for each in (key, value))
    grad_query = torch.empty_like(query)
    grad_key, grad_value = (torch.zeros(batch, keys, dim, dtype=wide) for _ in range(2))
    for tile in _row_tiles(rows, batch * group * keys):
        seen = keys if mask is not None else tile.stop  # causal: nothing after the tile's last row
        q, g = (each[:, :, tile].reshape(batch, -1, each.shape[-1]) for each in (queries, grads))
        weight = torch.bmm(q, key_columns[..., :seen])
        by_head = weight.view(batch, group, -1, seen)
        if mask is None:
            by_head[..., tile].masked_fill_(_later(tile, weight), float("-inf"))
        else:
            by_head.add_(mask[tile])
        weight.exp_()
        grad_value[:, :seen] += torch.bmm(weight.transpose(1, 2), g[..., :dim])
        grad_score = torch.bmm(g, value_columns[..., :seen]).mul_(weight)
        grad_query[:, :, tile] = torch.bmm(grad_score, key[:, :seen]).view(batch, group, -1, dim)
        grad_key[:, :seen] += torch.bmm(grad_score.transpose(1, 2), q[..., :dim])
    return grad_query.mul_(scale), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _less(rows: Tensor, number: Tensor) -> Tensor:
    """[…, d] → […, d + 2]: columns whose product with ones subtracts *number* […], in two parts to keep its digits."""
    first = number.to(rows.dtype)
    rest = (number - first.to(number.dtype)).to(rows.dtype)
    return torch.cat((rows, -first[..., None], -rest[..., None]), -1)


def _with_ones(keys: Tensor) -> Tensor:
    return torch.cat((keys, keys.new_ones(*keys.shape[:-1], 2)), -1)


def _row_tiles(rows: int, scores: int) -> Iterator[slice]:
    """Slices of *rows*, each of which has *scores*, of TILE_SCORES at most where that leaves TILE_ROWS."""
    size = min(rows, max(TILE_ROWS, TILE_SCORES // max(1, scores)))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _later(tile: slice, like: Tensor) -> Tensor:
    """bool [rows, rows]: the keys of a tile that come after its queries."""
    count = tile.stop - tile.start
    return torch.ones(count, count, dtype=torch.bool, device=like.device).triu(1)


def _accelerator_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    aten = torch.ops.aten
    # The kernel keeps no random state without dropout, but asks for the tensors that would hold it.
    state = torch.zeros((), dtype=torch.int64, device=query.device)
    rows = query.shape[2]
    if mask is None and query.dtype in (torch.float16, torch.bfloat16):
        flash: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, output, lse.contiguous(), None, None, rows, rows, 0.0, True, state, state
        )
        return flash
    padded = torch.full((*lse.shape[:2], -(-rows // 32) * 32), float("inf"), dtype=torch.float32, device=lse.device)
    padded[..., :rows] = lse
    efficient: tuple[Tensor, Tensor, Tensor, Tensor] = aten._scaled_dot_product_efficient_attention_backward(
        grad,
        query,
        key,
        value,
        _aligned(mask, query),
        output,
        padded,
        state,
        state,
        0.0,
        [True, True, True, False],
        mask is None,
    )
    return efficient[:3]


@contextmanager
def _strict_determinism() -> Iterator[None]:
    """Where deterministic algorithms are asked for with ``warn_only``, ask without it.

    Both kernels have a deterministic backward pass, and take it only then; with ``warn_only`` they add up gradients
    in whatever order, and warn (torch's ``native/transformers/cuda/attention_backward.cu``).
    """
    asked, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if not (asked and warn_only):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def _aligned(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The bias as the memory-efficient kernel wants it: expanded, and with a row stride divisible by 8."""
    if mask is None:
        return None
    rows, keys = mask.shape
    stored = torch.zeros(rows, -(-keys // 8) * 8, dtype=mask.dtype, device=mask.device)
    stored[:, :keys] = mask
    return stored[:, :keys].expand(*query.shape[:2], rows, keys)
