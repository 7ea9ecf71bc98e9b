"""Attention of a draft that continues, step by step, from every row of a packed sequence at once.

At step k, row t sees the real (step 0) keys of rows j <= t of its document and the keys of its own continuation at
steps 1 … k, the same row of each later set of keys: :class:`draftsmith.masks.rules.Chained`. With a window W, the
query's position is position(t) + k, so the real keys end at position(t) + k - W and the chain at step k - W.

Shapes: T rows, h query heads, g key/value heads (g divides h), d head dimension, k steps after the first.

Three forms, equal in values and gradients:

* ``linear``: a fused kernel over the real keys, one call per document (and per tile, where a window cuts it), which
  also returns the log-sum-exp of its scores; the k remaining keys of a row are single dot products, merged by
  log-sum-exp. Memory is linear in T.
* ``dense``: scores [h, T, (k + 1) T] and the mask as a tensor. The reference.
* ``flex``: flex attention with a block mask from the same rule. For GPUs; on CPUs it has no backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from draftsmith.interfaces import MaskRule, Slots
from draftsmith.masks.forms import (
    additive_mask,
    concatenate_slots,
    dense_mask,
    document_slots,
    flex_block_mask,
    step_slots,
)
from draftsmith.masks.rules import Chained

__all__ = ["chained_attention", "masked_attention"]

#: Queries per kernel call where a window hides keys and the kernel needs an explicit mask.
WINDOW_TILE = 256


def chained_attention(
    query: Tensor,
    first_key: Tensor,
    first_value: Tensor,
    chain: Sequence[tuple[Tensor, Tensor]] = (),
    *,
    document_lengths: Sequence[int],
    window: int | None = None,
    form: Literal["linear", "dense", "flex"] = "linear",
) -> Tensor:
    """Attention of the k-th step, k = len(chain), scaled by 1/sqrt(d).

    Args:
        query: [T, h, d], of step k.
        first_key, first_value: [T, g, d], of step 0.
        chain: (key, value) of [T, g, d] for the steps 1 … k, the query's own step last.
        document_lengths: rows of each document; what is left of T is padding, whose output is zero.
        window: W; None means no window.
        form: see the module.

    Returns:
        [T, h, d].

    Raises:
        ValueError: documents longer than T, heads that do not divide, or an unknown form.
    """
    total, heads, _ = query.shape
    if sum(document_lengths) > total:
        raise ValueError(f"documents of {sum(document_lengths)} rows do not fit {total}")
    if heads % first_key.shape[1]:
        raise ValueError(f"{heads} query heads cannot share {first_key.shape[1]} key heads evenly")
    if form == "linear":
        flat = [tensor for pair in chain for tensor in pair]
        output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            query, first_key, first_value, tuple(document_lengths), window, *flat
        )
        return output
    rows = document_slots(document_lengths, total, query.device)
    query_slots = step_slots(rows, len(chain))
    key_slots = concatenate_slots([step_slots(rows, step) for step in range(len(chain) + 1)])
    key = torch.cat([first_key, *(each for each, _ in chain)])
    value = torch.cat([first_value, *(each for _, each in chain)])
    if form == "dense":
        return masked_attention(query, key, value, Chained(window), query_slots, key_slots)
    if form == "flex":
        return _flex_attention(query, key, value, Chained(window), query_slots, key_slots)
    raise ValueError(f"unknown attention form {form!r}; known: linear, dense, flex")


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, query_slots: Slots, key_slots: Slots
) -> Tensor:
    """Dense attention under any rule: query [Q, h, d], key and value [N, g, d] → [Q, h, d].

    Queries that see nothing give zeros, without NaN in the backward pass.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,nhd->hqn", query, key) / math.sqrt(query.shape[-1])
    weights = torch.softmax(scores + additive_mask(rule, query_slots, key_slots, scores.dtype), dim=-1)
    sees = dense_mask(rule, query_slots, key_slots).any(-1)
    return torch.einsum("hqn,nhd->qhd", weights, value) * sees[:, None, None]


# --- flex -------------------------------------------------------------------------------------------------------


_COMPILED: dict[str, Any] = {}


def _flex_kernel(device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if device.type == "cpu":
        # Uncompiled, a check of values: torch's CPU template has no backward pass and does not compile every mask.
        return flex_attention
    if "flex" not in _COMPILED:
        # Once per process. Lengths change from row to row and step to step, so they are dynamic.
        _COMPILED["flex"] = torch.compile(flex_attention, dynamic=True)
    return _COMPILED["flex"]


def _flex_attention(
    query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, query_slots: Slots, key_slots: Slots
) -> Tensor:
    mask = flex_block_mask(rule, query_slots, key_slots)
    batched = [each.transpose(0, 1)[None] for each in (query, key, value)]
    output: Tensor = _flex_kernel(query.device)(*batched, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
    return output[0].transpose(0, 1)


# --- linear -----------------------------------------------------------------------------------------------------


class _Tile(NamedTuple):
    """One kernel call: queries [start, stop) on keys [first, stop). ``mask`` is additive, or None: causal."""

    start: int
    stop: int
    first: int
    mask: Tensor | None


def _tiles(lengths: Sequence[int], reach: int | None, like: Tensor) -> Iterator[_Tile]:
    """Cut documents into kernel calls. *reach* is how many real keys, the query's own included, a row still sees."""
    offset = 0
    for length in lengths:
        end = offset + length
        if not length:
            continue
        if reach is None or length <= reach:
            yield _Tile(offset, end, offset, None)
        else:
            for start in range(offset, end, WINDOW_TILE):
                stop = min(start + WINDOW_TILE, end)
                first = max(offset, start - reach + 1)
                rows = torch.arange(start, stop, device=like.device)[:, None]
                keys = torch.arange(first, stop, device=like.device)[None, :]
                hidden = (keys > rows) | (keys <= rows - reach)
                mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
                yield _Tile(start, stop, first, mask.masked_fill_(hidden, float("-inf")))
        offset = end


class _Linear(torch.autograd.Function):
    """The ``linear`` form. Saves the output and the merged log-sum-exp, no scores.

    The backward pass of a fused attention kernel recomputes weights as exp(score - lse) and uses the output only
    through the row sums of (gradient x output). Given the *merged* log-sum-exp and output, it therefore returns the
    exact gradients of the real keys' part of the merged attention.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Sequence[int],
        window: int | None,
        *chain: Tensor,
    ) -> Tensor:
        steps = len(chain) // 2
        reach = None if window is None else window - steps
        ctx.plan = (lengths, reach, steps, window)
        output, lse = _first_attention(query, key, value, lengths, reach)
        grouped = _group(query, key.shape[1])  # [T, g, h/g, d]
        visible = _visible_steps(steps, window)
        if visible:
            scale = 1.0 / math.sqrt(query.shape[-1])
            scores = torch.stack(
                [(grouped * chain[2 * i].unsqueeze(2)).sum(-1, dtype=lse.dtype) for i in visible], -1
            ).mul_(scale)  # [T, g, h/g, visible]
            merged = torch.logaddexp(lse, scores.logsumexp(-1))
            output.mul_(torch.exp(lse - merged)[..., None])
            for place, i in enumerate(visible):
                weight = torch.exp(scores[..., place] - merged)[..., None]
                output.addcmul_(weight, chain[2 * i + 1].unsqueeze(2).to(output.dtype))
            lse = merged
        used = sum(lengths)
        output[used:] = 0.0
        result = output.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse, *chain)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        lengths, reach, steps, window = ctx.plan
        query, key, value, output, lse, *chain = ctx.saved_tensors
        grad = grad.contiguous()
        used = sum(lengths)
        grad_query, grad_key, grad_value = _first_backward(grad, query, key, value, output, lse, lengths, reach)
        grad_chain: list[Tensor | None] = [None] * (2 * steps)
        visible = _visible_steps(steps, window)
        if visible:
            scale = 1.0 / math.sqrt(query.shape[-1])
            kv_heads = key.shape[1]
            q, g, o = (_group(each, kv_heads)[:used] for each in (query, grad, output))
            delta = (g * o).sum(-1, dtype=lse.dtype)
            grad_q = _group(grad_query, kv_heads)[:used]
            for i in visible:
                k, v = (chain[2 * i + part][:used].unsqueeze(2) for part in (0, 1))
                score = (q * k).sum(-1, dtype=lse.dtype).mul_(scale)
                weight = torch.exp(score - lse[:used])
                grad_score = ((g * v).sum(-1, dtype=lse.dtype) - delta).mul_(weight).mul_(scale)
                weight, grad_score = weight[..., None].to(g.dtype), grad_score[..., None].to(g.dtype)
                grad_q.add_(grad_score * k)
                grad_chain[2 * i] = _padded((grad_score * q).sum(2), chain[2 * i])
                grad_chain[2 * i + 1] = _padded((weight * g).sum(2), chain[2 * i + 1])
        return grad_query, grad_key, grad_value, None, None, *grad_chain


def _visible_steps(steps: int, window: int | None) -> list[int]:
    """Indices into the chain (step - 1) of the steps s with k - W < s <= k."""
    oldest = 0 if window is None else max(0, steps - window)
    return list(range(oldest, steps))


def _group(tensor: Tensor, kv_heads: int) -> Tensor:
    """[T, h, d] → [T, g, h/g, d], a view."""
    return tensor.view(tensor.shape[0], kv_heads, -1, tensor.shape[2])


def _padded(part: Tensor, like: Tensor) -> Tensor:
    if part.shape[0] == like.shape[0]:
        return part
    full = torch.zeros_like(like)
    full[: part.shape[0]] = part
    return full


def _kernel_view(tensor: Tensor, kv_heads: int) -> Tensor:
    """Queries [R, h, d] → [g, h/g, R, d]: key heads are the batch, so that they need no copy per query head."""
    return _group(tensor, kv_heads).permute(1, 2, 0, 3)


def _kernel_keys(tensor: Tensor, group: int) -> Tensor:
    """Keys [R, g, d] → [g, h/g, R, d], of stride zero over the query heads that share them."""
    return tensor.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)


def _first_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], reach: int | None
) -> tuple[Tensor, Tensor]:
    """Attention on the real keys: output float32 or wider [T, g, h/g, d] and log-sum-exp [T, g, h/g]."""
    total, heads, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    output = torch.zeros(total, kv_heads, group, dim, dtype=wide, device=query.device)
    lse = torch.full((total, kv_heads, group), float("-inf"), dtype=wide, device=query.device)
    if reach is not None and reach <= 0:  # the window holds nothing but the chain
        return output, lse
    for start, stop, first, mask in _tiles(lengths, reach, query):
        out, log_sum = _kernel_forward(
            _kernel_view(query[start:stop], kv_heads),
            _kernel_keys(key[first:stop], group),
            _kernel_keys(value[first:stop], group),
            mask,
        )
        output[start:stop] = out.permute(2, 0, 1, 3)
        lse[start:stop] = log_sum.permute(2, 0, 1)
    return output, lse


def _first_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    lengths: Sequence[int],
    reach: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = key.shape[1]
    group = query.shape[1] // kv_heads
    grad_query, grad_key, grad_value = (
        torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (query, key, value)
    )
    if reach is not None and reach <= 0:
        return grad_query, grad_key, grad_value
    for start, stop, first, mask in _tiles(lengths, reach, query):
        part = _kernel_backward(
            _kernel_view(grad[start:stop], kv_heads),
            _kernel_view(query[start:stop], kv_heads),
            _kernel_keys(key[first:stop], group),
            _kernel_keys(value[first:stop], group),
            _kernel_view(output[start:stop], kv_heads),
            lse[start:stop].permute(1, 2, 0),
            mask,
        )
        grad_query[start:stop] = part[0].permute(2, 0, 1, 3).flatten(1, 2)
        grad_key[first:stop] += part[1].sum(1).transpose(0, 1)
        grad_value[first:stop] += part[2].sum(1).transpose(0, 1)
    return grad_query, grad_key, grad_value


# --- kernels ----------------------------------------------------------------------------------------------------
# Tensors are [b, n, rows, d], log-sum-exp [b, n, rows]. A mask of None means causal on as many keys as queries.


def _kernel_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
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


def _kernel_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    aten = torch.ops.aten
    if query.device.type == "cpu":
        gradients: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, lse.contiguous(), 0.0, mask is None, attn_mask=mask
        )
        return gradients
    with _strict_determinism():
        return _accelerator_backward(grad, query, key, value, output, lse, mask)


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
