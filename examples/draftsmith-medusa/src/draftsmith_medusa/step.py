"""The training forward: every head of every chain, side by side. Projection, loss and resume are draftsmith's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.interfaces import DraftAlgorithm, Drafter, DraftSlots, PackedRow
from draftsmith.rows import ChainStep, ShiftedRow, chain_slots, chain_steps, shift_by_one
from draftsmith_medusa.model import MedusaHeads
from draftsmith_medusa.replay import MedusaDrafter


class Batch(NamedTuple):
    """Rows with the verifier's last hidden state of x_t, normed [R, H], and the chains that begin there.

    Head k of row t proposes x_{t+2+k}: vLLM hands the heads the state that the bonus token x_{t+1} was sampled from.
    """

    rows: ShiftedRow
    steps: tuple[ChainStep, ...]
    hidden: Tensor


class Medusa(DraftAlgorithm):
    def build_model(self) -> nn.Module:
        return MedusaHeads(self.setup)

    def make_batch(self, row: PackedRow, generator: torch.Generator) -> Batch:
        rows = shift_by_one(row)
        hidden = self.setup.weights.final_norm(row.taps[rows.packed_index - 1].float())
        return Batch(rows, chain_steps(rows, self.setup.options.num_heads), hidden)

    def forward(self, model: nn.Module, batch: Batch) -> DraftSlots:
        assert isinstance(model, MedusaHeads)
        outputs = [head(batch.hidden[alive.rows]) for head, alive in zip(model.blocks, batch.steps, strict=True)]
        decay = self.setup.options.step_decay
        return chain_slots(batch.rows, batch.steps, outputs, model.lm_head.weight, decay=decay)

    def drafter(self, model: nn.Module) -> Drafter:
        assert isinstance(model, MedusaHeads)
        return MedusaDrafter(model, self.setup.weights.final_norm)
