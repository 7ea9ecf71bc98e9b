"""The training forward is that of all recurrent drafts; here stands which network it trains, and how that drafts."""

from __future__ import annotations

from torch import nn

from draftsmith.interfaces import Drafter
from draftsmith.recurrent.training import RecurrentAlgorithm
from draftsmith_toy.model import ToyDraft
from draftsmith_toy.replay import ToyDrafter


class Toy(RecurrentAlgorithm):
    def build_model(self) -> nn.Module:
        return ToyDraft(self.setup)

    def drafter(self, model: nn.Module) -> Drafter:
        assert isinstance(model, ToyDraft)
        return ToyDrafter(model, self.setup.weights.final_norm)
