"""Attention of blocks that hang on anchors: B slots each, after the rows before their anchor.

A block stands for what a draft reads in one pass once the anchor's token is known and its features are not. Its
slots, at the positions position(anchor) + 0 … B - 1, see the context rows *strictly before* the anchor in the anchor's
document, and the slots of their own block: all of them, or up to their own where the block is causal. A window W
counts positions: :class:`draftsmith.masks.rules.Anchored`.

Shapes: T context rows, N blocks of B slots, h query heads, g key/value heads (g divides h), d head dimension.

Three forms, equal in values and gradients:

* ``linear``: a fused kernel over tiles, a tile being a few blocks of one document: its keys are the context up to the
  last of their anchors, which they share, and their own slots. No other rows of the packed row are touched, and what
  is kept for the backward pass is the output and one number a query and head. Memory is linear in T and in N * B.
* ``dense``: scores [h, N * B, T + N * B] and the mask as a tensor. The reference.
* ``flex``: flex attention with a block mask from the same rule. For GPUs; on CPUs it has no backward pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from attrs import field, frozen
from torch import Tensor

from draftsmith.attention.forms import flex_masked_attention, masked_attention
from draftsmith.attention.kernels import by_key_head, kernel_backward, kernel_forward, kernel_keys, kernel_view
from draftsmith.interfaces import Slots
from draftsmith.masks.forms import block_slots, concatenate_slots, document_slots
from draftsmith.masks.rules import Anchored, AnchoredCausal

__all__ = ["AnchoredBlocks", "anchored_attention"]

#: Query rows of a tile. Its blocks see the keys of each other's slots masked, which many blocks would make many; on an
#: accelerator fewer and larger tiles are faster all the same.
TILE_ROWS = {"cpu": 80, "accelerator": 512}


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


class _Tile(NamedTuple):
    """One kernel call: the query rows *slots* on the context rows [first, anchors[-1]) and on their own slots."""

    slots: slice
    first: int
    anchors: tuple[int, ...]

    @property
    def context(self) -> slice:
        return slice(self.first, self.anchors[-1])


def _tiles(blocks: AnchoredBlocks, window: int | None, rows: int) -> Iterator[_Tile]:
    """Cut the blocks of each document into tiles of at most *rows* query rows, and of one block at least."""
    size, most = blocks.block_size, max(1, rows // blocks.block_size)
    anchors = blocks.anchors
    for end, length in zip(accumulate(blocks.document_lengths), blocks.document_lengths, strict=True):
        low, high = bisect_left(anchors, end - length), bisect_left(anchors, end)
        for start in range(low, high, most):
            stop = min(start + most, high)
            # A window hides what lies before the first slot's: the slots that follow stand later.
            first = end - length if window is None else max(end - length, anchors[start] - window + 1)
            yield _Tile(slice(start * size, stop * size), first, anchors[start:stop])


def _mask(tile: _Tile, size: int, window: int | None, causal: bool, like: Tensor) -> Tensor:
    """[Q, K] of the dtype of *like*: 0 where a query of the tile sees a key, else -inf. Every query sees itself."""
    device = like.device
    anchors = torch.tensor(tile.anchors, device=device)[:, None, None]  # [n, 1, 1]
    slot = torch.arange(size, device=device)
    keys = torch.arange(tile.context.start, tile.context.stop, device=device)
    before = (keys < anchors).expand(-1, size, -1)  # [n, B, K]
    ahead = slot - slot[:, None]  # [B, B], position of the key less the query's
    own = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    if window is not None:
        # Rows of one document are as far apart as their positions.
        before = before & (keys > anchors + slot[:, None] - window)
        own = own & (ahead.abs() < window)
    count = len(tile.anchors)
    among = torch.zeros(count, size, count, size, dtype=torch.bool, device=device)
    among.diagonal(dim1=0, dim2=2).copy_(own[..., None])
    seen = torch.cat((before, among.flatten(2)), -1).flatten(0, 1)
    return torch.zeros(seen.shape, dtype=like.dtype, device=device).masked_fill_(~seen, float("-inf"))


class _Linear(torch.autograd.Function):
    """The ``linear`` form. Keeps its inputs, the output and the log-sum-exp, no scores and no mask."""

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
        kv_heads = context_key.shape[1]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        wide = torch.promote_types(query.dtype, torch.float32)
        lse = torch.empty(query.shape[:2], dtype=wide, device=query.device)
        for tile in _tiles(blocks, window, _tile_rows(query)):
            out, log_sum = kernel_forward(
                kernel_view(query[tile.slots], kv_heads),
                kernel_keys(_joined(tile, context_key, block_key)),
                kernel_keys(_joined(tile, context_value, block_value)),
                _mask(tile, blocks.block_size, window, causal, query),
            )
            by_key_head(output[tile.slots], kv_heads).copy_(out.permute(2, 0, 1, 3))
            lse[tile.slots] = log_sum.permute(2, 0, 1).flatten(1)
        ctx.plan = (blocks, window, causal)
        ctx.save_for_backward(query, context_key, context_value, block_key, block_value, output, lse)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        blocks, window, causal = ctx.plan
        query, context_key, context_value, block_key, block_value, output, lse = ctx.saved_tensors
        grad, kv_heads = grad.contiguous(), context_key.shape[1]
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        # Tiles of one document add to the same context rows: in float32, as one sum would be.
        grad_context = [torch.zeros(each.shape, dtype=lse.dtype, device=each.device) for each in (context_key,) * 2]
        grad_block = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (block_key,) * 2]
        for tile in _tiles(blocks, window, _tile_rows(query)):
            part, *grad_keys = kernel_backward(
                kernel_view(grad[tile.slots], kv_heads),
                kernel_view(query[tile.slots], kv_heads),
                kernel_keys(_joined(tile, context_key, block_key)),
                kernel_keys(_joined(tile, context_value, block_value)),
                kernel_view(output[tile.slots], kv_heads),
                kernel_view(lse[tile.slots, :, None], kv_heads).squeeze(-1),
                _mask(tile, blocks.block_size, window, causal, query),
            )
            by_key_head(grad_query[tile.slots], kv_heads).copy_(part.permute(2, 0, 1, 3))
            rows = tile.context.stop - tile.context.start
            for each, context, block in zip(grad_keys, grad_context, grad_block, strict=True):
                context[tile.context] += each[:, :rows].transpose(0, 1)
                block[tile.slots] = each[:, rows:].transpose(0, 1)
        return grad_query, *(each.to(context_key.dtype) for each in grad_context), *grad_block, None, None, None


def _joined(tile: _Tile, context: Tensor, block: Tensor) -> Tensor:
    """The tile's keys (or values), [K, g, d]: of the context, then of its own slots."""
    return torch.cat((context[tile.context], block[tile.slots]))


def _tile_rows(like: Tensor) -> int:
    return TILE_ROWS["cpu" if like.device.type == "cpu" else "accelerator"]
