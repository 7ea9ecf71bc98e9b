"""P-EAGLE's training recipe: what the core drives. The network is in model.py, the serving path in replay.py."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from draftsmith.interfaces import AlgorithmSetup, DraftAlgorithm, Drafter, DraftSlots, MaskRule, PackedRow
from draftsmith_peagle.batch import Batch, make_batch
from draftsmith_peagle.mask import element_attention
from draftsmith_peagle.model import PEagleDraft
from draftsmith_peagle.options import PEagleOptions
from draftsmith_peagle.replay import PEagleDrafter

__all__ = ["PEagle"]


class PEagle(DraftAlgorithm):
    """Every row with a target drafts the next token, and sampled ones also those behind it, in the same pass.

    Source: P-EAGLE; its loss is the mean over all elements that have a target.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self.options: PEagleOptions = setup.options
        self.attend = element_attention(setup.mask, setup.attention)

    @classmethod
    def check_attention(
        cls, options: PEagleOptions, mask: MaskRule, form: Literal["auto", "linear", "dense", "flex"]
    ) -> None:
        element_attention(mask, form)

    def build_model(self) -> nn.Module:
        model = self.setup.architecture(self.setup)  # type: ignore[call-arg]
        assert isinstance(model, nn.Module)
        return model

    def make_batch(self, row: PackedRow, generator: torch.Generator) -> Batch:
        """The elements are drawn anew for every row, from *generator* alone."""
        return make_batch(
            row,
            num_depths=self.options.num_depths,
            ratio=self.options.down_sample_ratio,
            minimum=self.options.down_sample_ratio_min,
            max_anchors=self.options.max_anchors,
            generator=generator,
        )

    def forward(self, model: nn.Module, batch: Batch) -> DraftSlots:
        normed: Tensor = model(batch, self.attend)
        return DraftSlots(
            terms=((normed, model.get_parameter("lm_head.weight")),),
            teacher_row=batch.teacher_row,
            step=batch.step,
            chain=batch.chain,
            weight=torch.ones(batch.step.shape, device=batch.step.device),
            total_positions=batch.total_positions,
            num_steps=self.options.num_depths,
        )

    def drafter(self, model: nn.Module) -> Drafter:
        assert isinstance(model, PEagleDraft)
        return PEagleDrafter(model, self.setup.vocabulary.kept_ids())
