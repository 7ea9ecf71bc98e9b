"""The serving path, as vLLM's proposer goes it, with the cell's equations written out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftsmith.interfaces import Drafter
from draftsmith.reference import norm
from draftsmith_toy.model import ToyDraft


class ToyDrafter(Drafter):
    def __init__(self, model: ToyDraft, final_norm: nn.Module) -> None:
        self.model, self.final_norm = model, final_norm

    @torch.no_grad()
    def propose(self, token_ids: Tensor, taps: Tensor, num_tokens: int, *, forced: Tensor | None = None) -> Tensor:
        state, token, logits = self.final_norm(taps[-1].float()), token_ids[-1], []
        for step in range(num_tokens):
            state = self._cell(self.model.embed_tokens.weight[token], state)
            normed = norm(state, self.model.norm.weight, self.model.norm.eps)
            logits.append(self.model.lm_head.weight.float() @ normed)
            token = logits[-1].argmax() if forced is None else forced[step]
        return torch.stack(logits)

    def _cell(self, x: Tensor, state: Tensor) -> Tensor:
        """A GRU (arXiv 1406.1078), as torch has it: reset, update, candidate. [H], [H] → [H]."""
        cell = self.model.cell
        reset_x, update_x, new_x = (cell.weight_ih @ x + cell.bias_ih).chunk(3)
        reset_h, update_h, new_h = (cell.weight_hh @ state + cell.bias_hh).chunk(3)
        update = torch.sigmoid(update_x + update_h)
        candidate = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        return (1 - update) * candidate + update * state
