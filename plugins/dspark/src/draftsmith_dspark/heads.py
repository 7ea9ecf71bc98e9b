"""What DSpark adds to the backbone: the correction of a slot's logits by the token before it, and the confidence.

Source: DSpark (DeepSeek); names and shapes are those of vLLM's ``qwen3_dspark.py`` where it has them, else those of
the speculators format.

Shapes: N slots of n blocks, K slots a block at most, H draft width, r rank, V_t and V_d target and draft vocabulary.
e is the embedding of the token before the slot's, h the slot's normed hidden state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.layers import initialise
from draftsmith_dspark.options import MarkovKind

__all__ = [
    "ConfidenceHead",
    "GatedMarkov",
    "MarkovHead",
    "RecurrentMarkov",
    "SlotOrder",
    "VanillaMarkov",
    "markov_head",
]

#: Standard deviation of fresh embeddings; with a projection of zeros the first correction is none at all.
EMBEDDING_RANGE = 0.01


class SlotOrder(NamedTuple):
    """Where slots stand: int64 [N] each, by block, and within one by step, without gaps.

    Attributes:
        chain: block of each slot.
        step: its place in the block.
    """

    chain: Tensor
    step: Tensor


class MarkovHead(nn.Module):
    """bias = W2 u, with u [N, r] made of e and, in some kinds, of h and the slots before.

    Args:
        target_size, draft_size: V_t and V_d. The token before is a *target* id, the corrected logits are draft ids.
    """

    def __init__(self, target_size: int, draft_size: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(target_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_size, bias=False)

    def initialise(self, std: float) -> None:
        """Fresh weights, from torch's global generator; *std* is that of further matrices."""
        initialise(self, std)
        nn.init.normal_(self.markov_w1.weight, std=EMBEDDING_RANGE)
        nn.init.zeros_(self.markov_w2.weight)

    def embed(self, previous: Tensor) -> Tensor:
        """e [N, r] of int64 *previous* [N], target ids."""
        embedded: Tensor = self.markov_w1(previous)
        return embedded

    @abstractmethod
    def low_rank(self, hidden: Tensor, embedded: Tensor, order: SlotOrder) -> Tensor:
        """u [N, r] from h [N, H] and e [N, r]."""


class VanillaMarkov(MarkovHead):
    """u = e: a bigram table of rank r. The kind that vLLM loads."""

    def low_rank(self, hidden: Tensor, embedded: Tensor, order: SlotOrder) -> Tensor:
        return embedded


class GatedMarkov(MarkovHead):
    """u = sigmoid(G [h; e]) · e: the hidden state says how much of the bigram to believe."""

    def __init__(self, target_size: int, draft_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(target_size, draft_size, rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)
        nn.init.zeros_(self.gate_proj.bias)

    def low_rank(self, hidden: Tensor, embedded: Tensor, order: SlotOrder) -> Tensor:
        gate = self.gate_proj(torch.cat((hidden, embedded.to(hidden.dtype)), -1))
        return torch.sigmoid(gate) * embedded


class RecurrentMarkov(MarkovHead):
    """z = J [s; e; h] in thirds: s' = sigmoid(z1) s + (1 - sigmoid(z1)) tanh(z2), u = tanh(z3).

    The state s [r] starts at zero at a block's first predicting row, and has read every token of the chain by the
    last.
    """

    def __init__(self, target_size: int, draft_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(target_size, draft_size, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)
        nn.init.zeros_(self.joint_proj.bias)

    def low_rank(self, hidden: Tensor, embedded: Tensor, order: SlotOrder) -> Tensor:
        # The share of e and h is one product for all slots; only the state's is sequential.
        own = F.linear(
            torch.cat((embedded.to(hidden.dtype), hidden), -1),
            self.joint_proj.weight[:, self.rank :],
            self.joint_proj.bias,
        )
        weight = self.joint_proj.weight[:, : self.rank]
        blocks = int(order.chain.max()) + 1 if order.chain.numel() else 0
        state = own.new_zeros(blocks, self.rank)
        outputs = [own.new_zeros(0, self.rank)]
        places = [order.step.new_zeros(0)]
        for slots, chains in _by_step(order):
            keep, new, out = (own[slots] + F.linear(state[chains], weight)).chunk(3, -1)
            gate = torch.sigmoid(keep)
            state = state.index_copy(0, chains, gate * state[chains] + (1 - gate) * torch.tanh(new))
            outputs.append(torch.tanh(out))
            places.append(slots)
        return torch.cat(outputs)[torch.argsort(torch.cat(places))]


def _by_step(order: SlotOrder) -> Iterator[tuple[Tensor, Tensor]]:
    """Slots and their blocks, step after step."""
    for step in range(int(order.step.max()) + 1 if order.step.numel() else 0):
        slots = torch.nonzero(order.step == step).flatten()
        yield slots, order.chain[slots]


def markov_head(
    kind: MarkovKind, *, target_size: int, draft_size: int, rank: int, hidden_size: int
) -> MarkovHead | None:
    """A head of *kind*; None for rank 0."""
    if rank == 0:
        return None
    if kind == "vanilla":
        return VanillaMarkov(target_size, draft_size, rank)
    chosen = GatedMarkov if kind == "gated" else RecurrentMarkov
    return chosen(target_size, draft_size, rank, hidden_size)


class ConfidenceHead(nn.Module):
    """Logit of the probability that a slot is accepted, given that those before it were: w · [h; e] + b.

    In float32 whatever the compute dtype, as in vLLM. Its input is h alone where *rank* is 0.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)

    def initialise(self, std: float) -> None:
        """Fresh weights, from torch's global generator; a logit of about zero."""
        initialise(self, std)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """float32 [N] from h [N, H] and e [N, r] (None: of h alone)."""
        inputs = hidden.float() if embedded is None else torch.cat((hidden.float(), embedded.float()), -1)
        with torch.autocast(inputs.device.type, enabled=False):
            return F.linear(inputs, self.proj.weight, self.proj.bias).squeeze(-1)

    def cool(self, temperature: float) -> None:
        """Divide every logit by *temperature* from now on, by way of the weights, in place."""
        with torch.no_grad():
            self.proj.weight.div_(temperature)
            self.proj.bias.div_(temperature)
