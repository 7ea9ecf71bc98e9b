"""The training forward: all chains side by side, a step a token. Projection, loss and resume are draftsmith's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.interfaces import DraftAlgorithm, Drafter, DraftSlots, PackedRow
from draftsmith.rows import ChainStep, ShiftedRow, chain_slots, chain_steps, shift_by_one
from draftsmith_toy.model import ToyDraft
from draftsmith_toy.replay import ToyDrafter


class Batch(NamedTuple):
    """Rows with the verifier's last hidden state of x_t, normed [R, H], and the chains that begin there."""

    rows: ShiftedRow
    steps: tuple[ChainStep, ...]
    hidden: Tensor


class Toy(DraftAlgorithm):
    def build_model(self) -> nn.Module:
        return ToyDraft(self.setup)

    def make_batch(self, row: PackedRow, generator: torch.Generator) -> Batch:
        rows = shift_by_one(row)
        hidden = self.setup.weights.final_norm(row.taps[rows.packed_index - 1].float())
        return Batch(rows, chain_steps(rows, self.setup.options.num_tokens), hidden)

    def forward(self, model: nn.Module, batch: Batch) -> DraftSlots:
        assert isinstance(model, ToyDraft)
        state, outputs = batch.hidden[batch.steps[0].rows], []
        for step, alive in enumerate(batch.steps):
            # The chains that go on; each is fed what the verifier wrote there, as if it had drafted it.
            state = model(batch.rows.token_ids[alive.rows + step], state[alive.kept])
            outputs.append(model.norm(state))
        decay = self.setup.options.step_decay
        return chain_slots(batch.rows, batch.steps, outputs, model.lm_head.weight, decay=decay)

    def drafter(self, model: nn.Module) -> Drafter:
        assert isinstance(model, ToyDraft)
        return ToyDrafter(model, self.setup.weights.final_norm)
