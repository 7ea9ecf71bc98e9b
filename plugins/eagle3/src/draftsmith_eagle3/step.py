"""EAGLE-3's training recipe: what the core drives. The network is in model.py, the serving path in replay.py."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from draftsmith.interfaces import AlgorithmSetup, DraftAlgorithm, Drafter, DraftSlots, MaskRule, PackedRow
from draftsmith.rows import chain_slots
from draftsmith_eagle3.batch import Batch, make_batch
from draftsmith_eagle3.mask import chain_attention
from draftsmith_eagle3.model import Eagle3Draft
from draftsmith_eagle3.options import Eagle3Options
from draftsmith_eagle3.replay import Eagle3Drafter

__all__ = ["Eagle3"]


class Eagle3(DraftAlgorithm):
    """Training-time test: every supervised row drafts ``ttt_steps`` tokens, fed back its own hidden states.

    Source: EAGLE-3 (arXiv 2503.01840), section 3; the loss is sum_k decay^k · mean over positions of step k.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self.options: Eagle3Options = setup.options
        self.attend = chain_attention(setup.mask, setup.attention)

    @classmethod
    def check_attention(
        cls, options: Eagle3Options, mask: MaskRule, form: Literal["auto", "linear", "dense", "flex"]
    ) -> None:
        chain_attention(mask, form)

    def build_model(self) -> nn.Module:
        model = self.setup.architecture(self.setup)  # type: ignore[call-arg]
        assert isinstance(model, nn.Module)
        return model

    def make_batch(self, row: PackedRow, generator: torch.Generator) -> Batch:
        """Deterministic: nothing is sampled."""
        return make_batch(row, self.options.ttt_steps)

    def forward(self, model: nn.Module, batch: Batch) -> DraftSlots:
        normed: list[Tensor] = model(batch, self.attend)
        head = model.get_parameter("lm_head.weight")
        return chain_slots(batch, batch.steps, normed, head, decay=self.options.step_decay)

    def drafter(self, model: nn.Module) -> Drafter:
        assert isinstance(model, Eagle3Draft)
        return Eagle3Drafter(model, self.setup.vocabulary.kept_ids())
