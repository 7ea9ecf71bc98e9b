"""The serving path, written the slow way: one pass of the backbone, then the Markov chain, token by token.

Shares no code with the training forward, on purpose: the two are compared in tests. Only the parameters are the
model's. Source: vLLM's ``v1/worker/gpu/spec_decode/dspark/speculator.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith_dflash.options import LayerAttention, Layout
from draftsmith_dflash.replay import BlockDrafter
from draftsmith_dspark.heads import GatedMarkov, RecurrentMarkov
from draftsmith_dspark.model import DSparkDraft

__all__ = ["DSparkDrafter"]


class DSparkDrafter(BlockDrafter):
    """Drafts one sequence, in float32.

    Args:
        model, layers, mask_token_id, layout: as of :class:`BlockDrafter`.
        kept_ids: int64 [V_d], the target id of every draft id.

    Attributes:
        confidence: float32 [K], logits of the last proposal's confidence; None without the head.
    """

    def __init__(
        self,
        model: DSparkDraft,
        layers: Sequence[LayerAttention],
        mask_token_id: int,
        layout: Layout,
        kept_ids: Tensor,
    ) -> None:
        super().__init__(model, layers, mask_token_id, layout)
        self.draft = model
        self.kept_ids = kept_ids
        self.confidence: Tensor | None = None

    @torch.no_grad()
    def propose(self, token_ids: Tensor, taps: Tensor, num_tokens: int, *, forced: Tensor | None = None) -> Tensor:
        hidden = self.backbone(token_ids, taps, num_tokens)
        base = hidden @ self.draft.lm_head.weight.float().T
        previous = int(token_ids[-1])
        state: Tensor | None = None
        logits, confidence = [], []
        for slot in range(num_tokens):
            embedded = self._embedding(previous)
            bias, state = self._bias(hidden[slot], embedded, state)
            logits.append(base[slot] + bias)
            confidence.append(self._confidence(hidden[slot], embedded))
            chosen = self.kept_ids[int(logits[-1].argmax())] if forced is None else forced[slot]
            previous = int(chosen)
        self.confidence = None if self.draft.confidence_head is None else torch.stack(confidence)
        return torch.stack(logits)

    def _embedding(self, token: int) -> Tensor:
        """e [r] of a target id; [0] where the rank is 0."""
        head = self.draft.markov_head
        return torch.zeros(0) if head is None else head.markov_w1.weight[token]

    def _bias(self, hidden: Tensor, embedded: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What is added to a slot's logits [V_d] (0 without a head), and the state after it."""
        head = self.draft.markov_head
        if head is None:
            return hidden.new_zeros(()), None
        low_rank = embedded
        if isinstance(head, GatedMarkov):
            gate = head.gate_proj.weight @ torch.cat((hidden, embedded)) + head.gate_proj.bias
            low_rank = embedded / (1 + torch.exp(-gate))
        elif isinstance(head, RecurrentMarkov):
            before = torch.zeros_like(embedded) if state is None else state
            z = head.joint_proj.weight @ torch.cat((before, embedded, hidden)) + head.joint_proj.bias
            keep, new, out = z.view(3, -1)
            share = 1 / (1 + torch.exp(-keep))
            state = share * before + (1 - share) * torch.tanh(new)
            low_rank = torch.tanh(out)
        return head.markov_w2.weight @ low_rank, state

    def _confidence(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The logit of a slot; 0 without a head."""
        head = self.draft.confidence_head
        if head is None:
            return hidden.new_zeros(())
        inputs = torch.cat((hidden, embedded)) if self.draft.options.confidence_with_markov else hidden
        return head.proj.weight[0] @ inputs + head.proj.bias[0]
