"""Attention of blocks that hang on anchors: B slots each, after the rows before their anchor.

A block stands for what a draft reads in one pass once the anchor's token is known and its features are not. Its
slots, at the positions position(anchor) + 0 … B - 1, see the context rows *strictly before* the anchor in the anchor's
document, and the slots of their own block: all of them, or up to their own where the block is causal. A window W
counts positions: :class:`draftsmith.masks.rules.Anchored`.

Shapes: T context rows, N blocks of B slots, h query heads, g key/value heads (g divides h), d head dimension.

Three forms, equal in values and gradients:

* ``linear``: a fused kernel over the context before the anchors of one document, a few blocks at a time that share
  those keys, which also returns the log-sum-exp of its scores; the slots of each block among themselves are a small
  dense product; the two are merged by log-sum-exp. Kept for the backward pass: the output, and one number a query and
  head. Memory is linear in T and in N * B.
* ``dense``: scores [h, N * B, T + N * B] and the mask as a tensor. The reference.
* ``flex``: flex attention with a block mask from the same rule. For GPUs; on CPUs it has no backward pass.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal

import torch
from attrs import field, frozen
from torch import Tensor

from draftsmith.attention.forms import flex_masked_attention, masked_attention
from draftsmith.attention.kernels import by_key_head
from draftsmith.attention.tiles import TILE_ROWS, Tile, additive, device_kind, tiles_backward, tiles_forward
from draftsmith.interfaces import Slots
from draftsmith.masks.forms import block_slots, concatenate_slots, document_slots
from draftsmith.masks.rules import Anchored, AnchoredCausal

__all__ = ["AnchoredBlocks", "anchored_attention"]

#: Scores of the blocks among themselves that are computed at once.
BLOCK_SCORES = {"cpu": 2**18, "accelerator": 2**25}


@frozen(kw_only=True)
class AnchoredBlocks:
    """Where the blocks of a packed row hang. Numbers only: built once a row, used by every layer.

    Attributes:
        anchors: the anchors' rows, strictly ascending, each inside a document.
        document_lengths: rows of each document, one after the other; what is left of T is padding.
        block_size: B. A block may reach beyond its document: its slots' positions go on.

    Raises:
        ValueError: anchors that do not ascend or lie in no document, or a block size below 1.
    """

    anchors: tuple[int, ...] = field(converter=tuple)
    document_lengths: tuple[int, ...] = field(converter=tuple)
    block_size: int

    def __attrs_post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"a block has at least one slot, not {self.block_size}")
        if any(second <= first for first, second in zip(self.anchors, self.anchors[1:], strict=False)):
            raise ValueError("anchors must be distinct and ascend")
        if self.anchors and not 0 <= self.anchors[0] <= self.anchors[-1] < sum(self.document_lengths):
            raise ValueError(
                f"anchors {self.anchors[0]} … {self.anchors[-1]} do not lie in documents of "
                f"{sum(self.document_lengths)} rows"
            )

    def __len__(self) -> int:
        return len(self.anchors)

    def context_slots(self, total: int, device: torch.device | str = "cpu") -> Slots:
        """Slots [T] of the context rows."""
        return document_slots(self.document_lengths, total, device)

    def slots(self, device: torch.device | str = "cpu") -> Slots:
        """Slots [N * B] of the blocks."""
        rows = self.context_slots(sum(self.document_lengths), device)
        return block_slots(rows, torch.tensor(self.anchors, dtype=torch.int64, device=device), self.block_size)


def anchored_attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    blocks: AnchoredBlocks,
    *,
    window: int | None = None,
    causal: bool = False,
    form: Literal["linear", "dense", "flex"] = "linear",
) -> Tensor:
    """Attention of all blocks at once, scaled by 1/sqrt(d).

    Args:
        query: [N * B, h, d], block after block.
        context_key, context_value: [T, g, d].
        block_key, block_value: [N * B, g, d].
        blocks: the anchors.
        window: W; None means no window.
        causal: a slot sees the slots of its block up to its own, not all of them.
        form: see :mod:`draftsmith.attention`.

    Returns:
        [N * B, h, d].

    Raises:
        ValueError: shapes that do not fit *blocks*, heads that do not divide, or an unknown form.
    """
    _check(query, context_key, block_key, blocks)
    if not len(blocks):
        return query * 0.0
    if form == "linear":
        output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            query, context_key, context_value, block_key, block_value, blocks, window, causal
        )
        return output
    rule = (AnchoredCausal if causal else Anchored)(window)
    slots = blocks.slots(query.device)
    keys = concatenate_slots([blocks.context_slots(context_key.shape[0], query.device), slots])
    key, value = torch.cat([context_key, block_key]), torch.cat([context_value, block_value])
    if form == "dense":
        return masked_attention(query, key, value, rule, slots, keys)
    if form == "flex":
        return flex_masked_attention(query, key, value, rule, slots, keys)
    raise ValueError(f"unknown attention form {form!r}; known: linear, dense, flex")


def _check(query: Tensor, context_key: Tensor, block_key: Tensor, blocks: AnchoredBlocks) -> None:
    expected = len(blocks) * blocks.block_size
    for name, rows in (("query", query.shape[0]), ("block_key", block_key.shape[0])):
        if rows != expected:
            raise ValueError(f"{len(blocks)} blocks of {blocks.block_size} slots have {expected} rows, {name} {rows}")
    if sum(blocks.document_lengths) > context_key.shape[0]:
        raise ValueError(f"documents of {sum(blocks.document_lengths)} rows do not fit {context_key.shape[0]}")
    if query.shape[1] % context_key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads cannot share {context_key.shape[1]} key heads evenly")


# --- linear -----------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """The ``linear`` form. Keeps its inputs, the output and the merged log-sum-exp, no scores and no mask."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        block_key: Tensor,
        block_value: Tensor,
        blocks: AnchoredBlocks,
        window: int | None,
        causal: bool,
    ) -> Tensor:
        output, lse = tiles_forward(query, context_key, context_value, _tiles(blocks, window, query))
        _add_blocks(output, lse, query, block_key, block_value, blocks, window, causal)
        result = output.flatten(1, 2).to(query.dtype)
        ctx.plan = (blocks, window, causal)
        ctx.save_for_backward(query, context_key, context_value, block_key, block_value, result, lse)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        blocks, window, causal = ctx.plan
        query, context_key, context_value, block_key, block_value, output, lse = ctx.saved_tensors
        grad = grad.contiguous()
        grad_query, *grad_block = _blocks_backward(
            grad, query, block_key, block_value, output, lse, blocks, window, causal
        )
        tiles = _tiles(blocks, window, query)
        grad_context = tiles_backward(grad, query, context_key, context_value, output, lse, tiles, grad_query)
        return grad_query, *grad_context, *grad_block, None, None, None


# --- the context of the anchors


def _tiles(blocks: AnchoredBlocks, window: int | None, like: Tensor) -> Iterator[Tile]:
    """The blocks of each document in tiles of so many query rows, or one block. Without context there is none."""
    size = blocks.block_size
    most = max(1, TILE_ROWS[device_kind(like)] // size)
    anchors = blocks.anchors
    for end, length in zip(accumulate(blocks.document_lengths), blocks.document_lengths, strict=True):
        low, high = bisect_left(anchors, end - length), bisect_left(anchors, end)
        for start in range(low, high, most):
            stop = min(start + most, high)
            # A window hides what lies before the first slot's: the slots that follow stand later.
            first = end - length if window is None else max(end - length, anchors[start] - window + 1)
            if first < anchors[stop - 1]:
                context = slice(first, anchors[stop - 1])
                mask = _mask(anchors[start:stop], context, size, window, like)
                yield Tile(slice(start * size, stop * size), context, mask)


def _mask(anchors: tuple[int, ...], context: slice, size: int, window: int | None, like: Tensor) -> Tensor:
    """[Q, K]: which of the rows *context* the slots of the blocks at *anchors* see."""
    ends = torch.tensor(anchors, device=like.device)[:, None, None]  # [n, 1, 1]
    keys = torch.arange(context.start, context.stop, device=like.device)
    hidden = (keys >= ends).expand(-1, size, -1)  # [n, B, K]
    if window is not None:
        # Rows of one document are as far apart as their positions.
        slot = torch.arange(size, device=like.device)[:, None]
        hidden = hidden | (keys <= ends + slot - window)
    return additive(hidden, like).flatten(0, 1)


# --- the slots of a block among themselves


def _block_rows(blocks: AnchoredBlocks, heads: int, kind: str) -> Iterator[slice]:
    """Row slices of whole blocks whose scores fit the budget."""
    size = blocks.block_size
    most = max(1, BLOCK_SCORES[kind] // (size * size * heads))
    for start in range(0, len(blocks), most):
        yield slice(start * size, min(start + most, len(blocks)) * size)


def _block_queries(rows: Tensor, kv_heads: int, size: int) -> Tensor:
    """[n * B, h, d] → [n * g, h/g * B, d]: the query heads that share keys are rows of one product."""
    count, heads, dim = rows.shape
    by_block = rows.view(count // size, size, kv_heads, heads // kv_heads, dim)
    return by_block.permute(0, 2, 3, 1, 4).reshape(-1, heads // kv_heads * size, dim)


def _block_keys(rows: Tensor, size: int) -> Tensor:
    """[n * B, g, d] → [n * g, B, d]."""
    count, kv_heads, dim = rows.shape
    return rows.view(count // size, size, kv_heads, dim).transpose(1, 2).reshape(-1, size, dim)


def _by_row(products: Tensor, kv_heads: int, size: int) -> Tensor:
    """[n * g, h/g * B, d] → [n * B, g, h/g, d], undoing :func:`_block_queries`."""
    dim = products.shape[-1]
    return products.view(-1, kv_heads, products.shape[1] // size, size, dim).permute(0, 3, 1, 2, 4).flatten(0, 1)


def _hidden_slots(size: int, window: int | None, causal: bool, device: torch.device) -> Tensor | None:
    """bool [B, B], True where a slot does not see another of its block; None where each sees all."""
    slot = torch.arange(size, device=device)
    ahead = slot - slot[:, None]
    hidden = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
    if window is not None and window < size:
        hidden = hidden | (ahead.abs() >= window)
    return hidden if causal or (window is not None and window < size) else None


def _block_scores(query: Tensor, key: Tensor, hidden: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Scaled scores of :func:`_block_queries` and :func:`_block_keys`, [n * g, h/g * B, B], in *dtype*."""
    scores = torch.bmm(query, key.transpose(1, 2)).to(dtype).mul_(1.0 / math.sqrt(query.shape[-1]))
    if hidden is not None:
        scores.view(scores.shape[0], -1, *hidden.shape).masked_fill_(hidden, float("-inf"))
    return scores


def _add_blocks(
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: AnchoredBlocks,
    window: int | None,
    causal: bool,
) -> None:
    """Merge the blocks' own slots into *output* and *lse* of the context, in place."""
    size, kv_heads = blocks.block_size, key.shape[1]
    hidden = _hidden_slots(size, window, causal, query.device)
    for rows in _block_rows(blocks, query.shape[1], device_kind(query)):
        scores = _block_scores(
            _block_queries(query[rows], kv_heads, size), _block_keys(key[rows], size), hidden, lse.dtype
        )
        own = _by_row(scores.logsumexp(-1, keepdim=True), kv_heads, size).squeeze(-1)  # [n * B, g, h/g]
        merged = torch.logaddexp(lse[rows], own)
        weights = scores.sub_(_block_queries(merged.flatten(1)[..., None], kv_heads, size)).exp_()
        products = torch.bmm(weights.to(value.dtype), _block_keys(value[rows], size))
        output[rows] *= torch.exp(lse[rows] - merged)[..., None]
        output[rows] += _by_row(products, kv_heads, size)
        lse[rows] = merged


def _blocks_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    blocks: AnchoredBlocks,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries (as far as they see their own block), and of the blocks' keys and values."""
    size, kv_heads = blocks.block_size, key.shape[1]
    hidden = _hidden_slots(size, window, causal, query.device)
    grad_query, grad_key, grad_value = (
        torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (query, key, value)
    )
    scale = 1.0 / math.sqrt(query.shape[-1])
    for rows in _block_rows(blocks, query.shape[1], device_kind(query)):
        delta = (grad[rows].to(lse.dtype) * output[rows]).sum(-1, keepdim=True)
        lse_rows, delta = (_block_queries(x, kv_heads, size) for x in (lse[rows].flatten(1)[..., None], delta))
        q, g = (_block_queries(each[rows], kv_heads, size) for each in (query, grad))
        k, v = (_block_keys(each[rows], size) for each in (key, value))
        weights = _block_scores(q, k, hidden, lse.dtype).sub_(lse_rows).exp_()
        scores = torch.bmm(g, v.transpose(1, 2)).to(lse.dtype).sub_(delta).mul_(weights).mul_(scale).to(q.dtype)
        weights = weights.to(g.dtype)
        by_key_head(grad_query[rows], kv_heads).copy_(_by_row(torch.bmm(scores, k), kv_heads, size))
        for target, left, right in ((grad_key, scores, q), (grad_value, weights, g)):
            product = torch.bmm(left.transpose(1, 2), right)  # [n * g, B, d]
            target[rows] = product.view(-1, kv_heads, size, product.shape[-1]).transpose(1, 2).flatten(0, 1)
    return grad_query, grad_key, grad_value
