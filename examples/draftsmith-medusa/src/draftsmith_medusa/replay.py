"""The serving path, as vLLM's proposer goes it: each head on the state at the newest verified token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from draftsmith.interfaces import Drafter
from draftsmith_medusa.model import MedusaHeads


class MedusaDrafter(Drafter):
    starts_at_once: ClassVar[int] = 64

    def __init__(self, model: MedusaHeads, final_norm: nn.Module) -> None:
        self.model, self.final_norm = model, final_norm

    def propose(self, token_ids: Tensor, taps: Tensor, num_tokens: int, *, forced: Tensor | None = None) -> Tensor:
        return self._heads(taps[-1:], num_tokens)[0]

    def propose_each(
        self, token_ids: Tensor, taps: Tensor, bonus: Sequence[int], num_tokens: int, *, forced: Tensor | None = None
    ) -> Tensor:
        return self._heads(taps[torch.tensor(bonus, device=taps.device) - 1], num_tokens)

    @torch.no_grad()
    def _heads(self, taps: Tensor, num_tokens: int) -> Tensor:
        """[S, H], the last layer's output at the newest verified token of each start → [S, K, V_d]."""
        hidden = self.final_norm(taps.float())
        head = self.model.lm_head.weight.float()
        return torch.stack([block(hidden) @ head.T for block in list(self.model.blocks)[:num_tokens]], dim=1)
