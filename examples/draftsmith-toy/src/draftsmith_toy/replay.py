"""The cell's equations written out, for the serving path: draftsmith's kit compares them with the training forward."""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.recurrent.replay import RecurrentDrafter
from draftsmith.reference import norm
from draftsmith_toy.model import ToyDraft


class ToyDrafter(RecurrentDrafter):
    model: ToyDraft

    def step(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """A GRU (arXiv 1406.1078), as torch has it: reset, update, candidate."""
        cell, out = self.model.step.cell, self.model.step.norm
        reset_x, update_x, new_x = (embedded @ cell.weight_ih.T + cell.bias_ih).chunk(3, dim=-1)
        reset_h, update_h, new_h = (state @ cell.weight_hh.T + cell.bias_hh).chunk(3, dim=-1)
        update = torch.sigmoid(update_x + update_h)
        candidate = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        state = (1 - update) * candidate + update * state
        return norm(state, out.weight, out.eps), state
