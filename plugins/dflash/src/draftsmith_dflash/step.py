"""DFlash's training recipe: what the core drives. The network is in model.py, the serving path in replay.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftsmith.interfaces import AlgorithmSetup, DraftAlgorithm, Drafter, DraftSlots, PackedRow
from draftsmith_dflash.batch import Batch
from draftsmith_dflash.options import BlockOptions, LayerAttention, Layout

__all__ = ["BlockAlgorithm", "DFlash", "position_weights"]


def position_weights(options: BlockOptions, step: Tensor) -> Tensor:
    """float32 [N]: the fixed weight of slots at *step* (ones for ``d_pace``, whose weights follow from the scores)."""
    raise NotImplementedError


class BlockAlgorithm(DraftAlgorithm):
    """Anchored blocks in either layout. A subclass says the layout, how each layer attends, and what slots it makes.

    ``make_batch``, ``build_model`` and the position weights (D-PACE's included) are done here.
    """

    #: which rows of a block predict; a subclass may set it per instance, before ``super().__init__(setup)``
    layout: Layout = "bonus_anchor"

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self.options: BlockOptions = setup.options

    def layer_attention(self) -> Sequence[LayerAttention]:
        """Window and causality of every layer."""
        raise NotImplementedError

    def build_model(self) -> nn.Module:
        raise NotImplementedError

    def make_batch(self, row: PackedRow, generator: torch.Generator) -> Batch:
        raise NotImplementedError

    def hidden(self, model: nn.Module, batch: Batch) -> Tensor:
        """The backbone: normed hidden states [N, H] of the batch's slots."""
        raise NotImplementedError

    def forward(self, model: nn.Module, batch: Batch) -> DraftSlots:
        """Slots with one term, hidden times head. Subclasses add terms with ``attrs.evolve``."""
        raise NotImplementedError


class DFlash(BlockAlgorithm):
    """One denoising step: every mask row of a block predicts the token at its own position."""

    def drafter(self, model: nn.Module) -> Drafter:
        raise NotImplementedError
