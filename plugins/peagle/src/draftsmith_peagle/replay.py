"""The serving path, written the slow way: what vLLM does in a round of parallel drafting.

Shares no code with the training forward, on purpose: the two are compared in tests, so that a mistake in either is
seen. Only the parameters and the rotary frequencies are the model's.

A round (vLLM's ``llm_base_proposer``): the rows of the newly verified tokens, with ids shifted left by one and the
bonus token last, positions not shifted; then K - 1 mask rows at the positions that follow, all in one causal pass.
The row of the bonus token and the mask rows give the K tokens. What mask rows leave in the cache is overwritten in the
next round.

A verified row looks only back, so it is the same in every round that has it. So rounds that start at different tokens
of one sequence run side by side here: the verified rows once, of which each sees those before its bonus token, and
mask rows of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define
from torch import Tensor

from draftsmith_eagle3.replay import NetworkDrafter
from draftsmith_peagle.model import PEagleDraft

__all__ = ["PEagleDrafter"]

_VERIFIED = -1


@define
class _Rows:
    """Where the rows of a pass stand, all int64 [rows].

    Attributes:
        position: in the sequence.
        start: to which of the starts a mask row belongs; _VERIFIED: to none.
        verified: how many verified rows it sees, without a window.
    """

    position: Tensor
    start: Tensor
    verified: Tensor

    def visible(self, window: int | None) -> Tensor:
        """bool [rows, rows]: which see which."""
        position, start = self.position[None, :], self.start[None, :]
        own = (start == self.start[:, None]) & (position <= self.position[:, None])
        seen = torch.where(start == _VERIFIED, position < self.verified[:, None], own)
        return seen if window is None else seen & (self.position[:, None] - position < window)


class PEagleDrafter(NetworkDrafter):
    """Drafts all tokens of a round in one pass. What was drafted before is not read: *forced* changes nothing."""

    def __init__(self, model: PEagleDraft, kept_ids: Tensor) -> None:
        super().__init__(model, kept_ids)
        self.draft = model

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
        device = self.head.device
        verified = torch.tensor(list(bonus), device=device)  # rows before each bonus token
        count, starts, masks = int(verified.max()), len(verified), num_tokens - 1
        real = torch.arange(count, device=device)
        rows = _Rows(
            position=torch.cat((real, (verified[:, None] + torch.arange(masks, device=device)).flatten())),
            start=torch.cat(
                (torch.full_like(real, _VERIFIED), torch.arange(starts, device=device).repeat_interleave(masks))
            ),
            verified=torch.cat((real + 1, verified.repeat_interleave(masks))),
        )
        mask_row, mask_hidden = self.draft.mask_row().float(), self.fused(self.draft.mask_hidden[0])
        embedding = torch.cat(
            (self.embedded(token_ids[1 : count + 1].to(device)), mask_row.expand(starts * masks, -1))
        )
        features = self.fused(taps[:count].to(device, torch.float32))
        hidden = torch.cat((features, mask_hidden.expand(starts * masks, -1)))
        hidden = self.layers(
            embedding, hidden, rows.position, rows.visible(self.config.sliding_window), self.empty_caches()
        )
        own = hidden[count:].view(starts, masks, self.config.hidden_size)
        drafting = torch.cat((hidden[verified - 1][:, None], own), dim=1)  # [starts, K, H]
        return self.norm(drafting, self.model.norm.weight) @ self.head.T
