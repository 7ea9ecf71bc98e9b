"""Attention of blocks that hang on anchors: B slots each, after the rows before their anchor.

A block stands for what a draft reads in one pass once the anchor's token is known and its features are not. Its
slots, at the positions position(anchor) + 0 … B - 1, see the context rows *strictly before* the anchor in the anchor's
document, and the slots of their own block: all of them, or up to their own where the block is causal. A window W
counts positions: :class:`draftsmith.masks.rules.Anchored`.

Shapes: T context rows, N blocks of B slots, h query heads, g key/value heads (g divides h), d head dimension.
"""

from __future__ import annotations

from typing import Literal

import torch
from attrs import field, frozen
from torch import Tensor

from draftsmith.attention.forms import flex_masked_attention, masked_attention
from draftsmith.interfaces import Slots
from draftsmith.masks.forms import block_slots, concatenate_slots, document_slots
from draftsmith.masks.rules import Anchored, AnchoredCausal

__all__ = ["AnchoredBlocks", "anchored_attention"]


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
    rule = (AnchoredCausal if causal else Anchored)(window)
    slots = blocks.slots(query.device)
    keys = concatenate_slots([blocks.context_slots(context_key.shape[0], query.device), slots])
    key, value = torch.cat([context_key, block_key]), torch.cat([context_value, block_value])
    if form in ("dense", "linear"):
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
