"""Every attention form of a mask, derived from its one rule.

Shapes: Q queries, N keys. All functions take slots of one dimension: ``Slots`` of [Q] and of [N].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.errors import ConfigError, Problem
from draftsmith.interfaces import MaskRule, Slots
from draftsmith.plugins.results import check_sees

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "additive_mask",
    "block_slots",
    "concatenate_slots",
    "dense_mask",
    "document_slots",
    "flex_block_mask",
    "refuse_other_forms",
    "step_slots",
]


def document_slots(lengths: Sequence[int], total: int | None = None, device: torch.device | str = "cpu") -> Slots:
    """Step-0 slots [T] of documents packed one after the other; rows beyond their end are padding.

    Args:
        lengths: tokens of each document.
        total: T; by default the sum of *lengths*.

    Raises:
        ValueError: the documents are longer than *total*.
    """
    used = sum(lengths)
    total = used if total is None else total
    if used > total:
        raise ValueError(f"documents of {used} tokens do not fit a row of {total}")
    counts = torch.tensor([*lengths, total - used], dtype=torch.int64)
    documents = torch.repeat_interleave(torch.tensor([*range(len(lengths)), -1], dtype=torch.int64), counts)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    index = torch.arange(total)
    slots = Slots(index, documents, index - starts, torch.zeros_like(index))
    return Slots(*(each.to(device) for each in slots))


def step_slots(rows: Slots, step: int) -> Slots:
    """The slots that continue the step-0 slots *rows* by *step* drafted tokens: same row, later position."""
    return Slots(rows.index, rows.document, rows.position + step, torch.full_like(rows.index, step))


def block_slots(rows: Slots, anchors: Tensor, block_size: int) -> Slots:
    """Slots [N * B] of blocks of *block_size* = B that hang on the rows *anchors* [N] of the step-0 slots *rows*.

    Slot s of a block has its anchor's index and document, position(anchor) + s, and step s + 1.
    """
    slot = torch.arange(block_size, device=anchors.device).repeat(anchors.shape[0])
    hung = Slots(*(each[anchors].repeat_interleave(block_size) for each in rows))
    return Slots(hung.index, hung.document, hung.position + slot, slot + 1)


def concatenate_slots(parts: Sequence[Slots]) -> Slots:
    """Slots one after the other, as keys of several steps are."""
    return Slots(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def dense_mask(rule: MaskRule, query: Slots, key: Slots) -> Tensor:
    """bool [Q, N]: True where the query sees the key."""
    seen = rule(Slots(*(each[:, None] for each in query)), Slots(*(each[None, :] for each in key)))
    return check_sees(rule, seen, (query.index.shape[0], key.index.shape[0]))


def additive_mask(rule: MaskRule, query: Slots, key: Slots, dtype: torch.dtype = torch.float32) -> Tensor:
    """[Q, N]: 0 where the query sees the key and -inf elsewhere, to be added to the scores.

    A query that sees nothing (padding) gets a row of zeros: its output is then meaningless, and finite, where a row
    of -inf would make NaN that spreads through the backward pass.
    """
    visible = dense_mask(rule, query, key)
    hidden = ~visible & visible.any(-1, keepdim=True)
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(hidden, float("-inf"))


def flex_block_mask(rule: MaskRule, query: Slots, key: Slots, block_size: int = 128) -> BlockMask:
    """Block mask of flex attention over [Q, N]; queries that see nothing come out as zeros there."""
    from torch.nn.attention.flex_attention import create_block_mask

    # Of one query and key: what is traced below is not to be slowed down, and may hold nothing but tensors.
    one, other = (Slots(*(each[:1] for each in slots)) for slots in (query, key))
    check_sees(rule, rule(one, other), one.index.shape)

    def mask_mod(batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        return rule(Slots(*(each[query_index] for each in query)), Slots(*(each[key_index] for each in key)))

    return create_block_mask(
        mask_mod,
        B=None,
        H=None,
        Q_LEN=query.index.shape[0],
        KV_LEN=key.index.shape[0],
        device=str(query.index.device),
        BLOCK_SIZE=block_size,
    )


def refuse_other_forms(rule: MaskRule, form: str, built_in: str) -> None:
    """For an algorithm that attends densely by any rule but one, which alone has further forms.

    Args:
        form: ``auto``, ``linear``, ``dense`` or ``flex``.
        built_in: name of the rule that has them all.

    Raises:
        ConfigError: *form* is one that *rule* does not have.
    """
    if form in ("linear", "flex"):
        raise ConfigError(
            [
                Problem(
                    f"the mask {type(rule).__name__} has no {form} form here",
                    where="train.attention",
                    hint=f"use attention: dense (or auto), or the mask `{built_in}`",
                )
            ]
        )
