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
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from draftsmith.attention.forms import flex_masked_attention, masked_attention
from draftsmith.attention.kernels import by_key_head, kernel_backward, kernel_forward, kernel_keys, kernel_view
from draftsmith.masks.forms import concatenate_slots, document_slots, step_slots
from draftsmith.masks.rules import Chained

__all__ = ["chained_attention"]

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
        return flex_masked_attention(query, key, value, Chained(window), query_slots, key_slots)
    raise ValueError(f"unknown attention form {form!r}; known: linear, dense, flex")


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
        grouped = by_key_head(query, key.shape[1])  # [T, g, h/g, d]
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
            q, g, o = (by_key_head(each, kv_heads)[:used] for each in (query, grad, output))
            delta = (g * o).sum(-1, dtype=lse.dtype)
            grad_q = by_key_head(grad_query, kv_heads)[:used]
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


def _padded(part: Tensor, like: Tensor) -> Tensor:
    if part.shape[0] == like.shape[0]:
        return part
    full = torch.zeros_like(like)
    full[: part.shape[0]] = part
    return full


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
        out, log_sum = kernel_forward(
            kernel_view(query[start:stop], kv_heads),
            kernel_keys(key[first:stop]),
            kernel_keys(value[first:stop]),
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
    grad_query, grad_key, grad_value = (
        torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (query, key, value)
    )
    if reach is not None and reach <= 0:
        return grad_query, grad_key, grad_value
    for start, stop, first, mask in _tiles(lengths, reach, query):
        part = kernel_backward(
            kernel_view(grad[start:stop], kv_heads),
            kernel_view(query[start:stop], kv_heads),
            kernel_keys(key[first:stop]),
            kernel_keys(value[first:stop]),
            kernel_view(output[start:stop], kv_heads),
            lse[start:stop].permute(1, 2, 0),
            mask,
        )
        grad_query[start:stop] = part[0].permute(2, 0, 1, 3).flatten(1, 2)
        grad_key[first:stop] += part[1].transpose(0, 1)
        grad_value[first:stop] += part[2].transpose(0, 1)
    return grad_query, grad_key, grad_value
