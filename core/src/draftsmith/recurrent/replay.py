"""The serving path of a recurrent draft, as vLLM's proposer goes it, for many starts side by side.

Shapes: S starts, H the verifier's width, K tokens, V_t vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftsmith.interfaces import Drafter
from draftsmith.recurrent.training import RecurrentDraft

__all__ = ["RecurrentDrafter"]


class RecurrentDrafter(Drafter):
    """Drafts token by token; left to write are the step's equations once more, with nothing of its module but the
    weights. The kit compares them with the training forward at every start and step.

    Args:
        model: what was trained.
        final_norm: the verifier's.
    """

    starts_at_once = 64

    def __init__(self, model: RecurrentDraft, final_norm: nn.Module) -> None:
        self.model, self.final_norm = model, final_norm

    @abstractmethod
    def step(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The newest tokens' embeddings [S, H] and the states before them [S, H] → what the head reads, and the states
        after them, [S, H] each."""

    def propose(self, token_ids: Tensor, taps: Tensor, num_tokens: int, *, forced: Tensor | None = None) -> Tensor:
        bonus = token_ids.shape[0] - 1
        return self.propose_each(
            token_ids, taps, [bonus], num_tokens, forced=None if forced is None else forced[None]
        )[0]

    @torch.no_grad()
    def propose_each(
        self,
        token_ids: Tensor,
        taps: Tensor,
        bonus: Sequence[int],
        num_tokens: int,
        *,
        forced: Tensor | None = None,
    ) -> Tensor:
        starts = torch.tensor(bonus, device=token_ids.device)
        state, token = self.final_norm(taps[starts - 1].float()), token_ids[starts]
        embeddings, head, logits = self.model.embed_tokens.weight, self.model.lm_head.weight.float(), []
        for k in range(num_tokens):
            output, state = self.step(embeddings[token], state)
            logits.append(output @ head.T)
            token = logits[-1].argmax(-1) if forced is None else forced[:, k]
        return torch.stack(logits, dim=1)
