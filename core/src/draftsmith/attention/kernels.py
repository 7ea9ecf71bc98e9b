"""The fused kernels behind the memory-linear forms: attention that also returns its log-sum-exp.

Parts of one softmax, computed apart, are merged by their log-sum-exp. The backward pass of a fused kernel recomputes
weights as exp(score - lse) and uses the output only through the row sums of (gradient x output). Given the *merged*
log-sum-exp and output, it therefore returns the exact gradients of its part of the merged attention.

Tensors are [b, n, rows, d], log-sum-exp [b, n, rows]. A mask of None means causal on as many keys as queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["by_key_head", "kernel_backward", "kernel_forward", "kernel_keys", "kernel_view"]


def by_key_head(tensor: Tensor, kv_heads: int) -> Tensor:
    """[T, h, d] → [T, g, h/g, d], a view."""
    return tensor.view(tensor.shape[0], kv_heads, -1, tensor.shape[2])


def kernel_view(tensor: Tensor, kv_heads: int) -> Tensor:
    """Queries [R, h, d] → [g, h/g, R, d]: key heads are the batch, so that they need no copy per query head."""
    return by_key_head(tensor, kv_heads).permute(1, 2, 0, 3)


def kernel_keys(tensor: Tensor, group: int) -> Tensor:
    """Keys [R, g, d] → [g, h/g, R, d], of stride zero over the query heads that share them."""
    return tensor.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)


def kernel_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
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


def kernel_backward(
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
