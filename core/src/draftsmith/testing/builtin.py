"""What the kit must be told of the built-in losses and masks, for ``draftsmith plugins check``."""

from __future__ import annotations

import torch

from draftsmith.interfaces import Slots
from draftsmith.masks.forms import block_slots, concatenate_slots, document_slots
from draftsmith.testing.check import LossCheck, MaskCheck

__all__ = ["AnchoredCheck", "AnchoredCausalCheck", "CausalCheck", "CrossEntropyCheck", "OverlapCheck"]


class CrossEntropyCheck(LossCheck):
    """Zero only where the teacher is certain."""

    zero_at_teacher = False


class OverlapCheck(LossCheck):
    """The overlap has a kink where p = q, so its gradient there is one of several."""

    smooth_at_teacher = False


class CausalCheck(MaskCheck):
    """Rows alone: the rule knows no steps."""

    def slots(self) -> tuple[Slots, Slots]:
        rows = document_slots([5, 4], total=11)
        return rows, rows


class AnchoredCausalCheck(MaskCheck):
    """Blocks that hang on anchors of two documents."""

    def slots(self) -> tuple[Slots, Slots]:
        rows = document_slots([5, 4], total=11)
        blocks = block_slots(rows, torch.tensor([0, 2, 3, 7]), 3)
        return blocks, concatenate_slots([rows, blocks])


class AnchoredCheck(AnchoredCausalCheck):
    """Slots that see their whole block: a window is as wide to both sides."""

    symmetric_window = True
