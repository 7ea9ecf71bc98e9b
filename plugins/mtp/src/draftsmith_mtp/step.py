"""MTP's training recipe: what the core drives. The network is in model.py, the serving path in replay.py."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from draftsmith.interfaces import AlgorithmSetup, DraftAlgorithm, Drafter, DraftSlots, MaskRule, PackedRow
from draftsmith.rows import chain_slots
from draftsmith_mtp.batch import Batch, make_batch
from draftsmith_mtp.families import family_of
from draftsmith_mtp.mask import chain_attention, continues_all
from draftsmith_mtp.model import MtpDraft
from draftsmith_mtp.options import MtpOptions
from draftsmith_mtp.replay import MtpDrafter

__all__ = ["Mtp"]


class Mtp(DraftAlgorithm):
    """The native head drafts ``num_steps`` tokens from every supervised row, fed its own hidden states.

    Source: FastMTP (arXiv 2509.18362); the loss is sum_k w_k · mean over the slots of step k, w_k = step_decay^k, the
    weights of all steps summing to one.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self.options: MtpOptions = setup.options
        self.family = family_of(setup.verifier.text_config)
        self.attend = chain_attention(setup.mask, setup.attention)
        self.continue_all = continues_all(setup.mask)

    @classmethod
    def check_attention(
        cls, options: MtpOptions, mask: MaskRule, form: Literal["auto", "linear", "dense", "flex"]
    ) -> None:
        chain_attention(mask, form)

    def build_model(self) -> nn.Module:
        model = self.setup.architecture(self.setup)  # type: ignore[call-arg]
        assert isinstance(model, nn.Module)
        return model

    def make_batch(self, row: PackedRow, generator: torch.Generator) -> Batch:
        """Deterministic: nothing is sampled."""
        return make_batch(row, self.options.num_steps, self._feed)

    def _feed(self, last: Tensor) -> Tensor:
        """What vLLM's class of this family hands its head, from the last layer's output [R, H]."""
        if self.family.feeds == "raw":
            return last
        normed: Tensor = self.setup.weights.final_norm(last.float())
        return normed.to(last.dtype)

    def forward(self, model: nn.Module, batch: Batch) -> DraftSlots:
        normed: list[Tensor] = model(batch, self.attend, continue_all=self.continue_all)
        head = model.get_parameter("lm_head.weight")
        return chain_slots(batch, batch.steps, normed, head, decay=self.options.step_decay)

    def drafter(self, model: nn.Module) -> Drafter:
        assert isinstance(model, MtpDraft)
        return MtpDrafter(model, self.setup.weights.final_norm)
