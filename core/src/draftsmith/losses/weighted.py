"""A weighted sum of losses that are asked for by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.interfaces import PositionLoss, TeacherChunk
from draftsmith.losses.base import DraftChunk, ProbabilityLoss
from draftsmith.losses.options import SumTerm
from draftsmith.plugins.results import check_gradient, check_losses

__all__ = ["WeightedSum"]


class WeightedSum(PositionLoss):
    """sum of weight x loss. Where all of them depend on the draft's probabilities alone, so does the sum.

    Args:
        terms: name → weight, or weight and options.
        parts: the losses themselves, in that order; the core builds them from whichever plugin registers the names.
    """

    def __new__(cls, terms: Mapping[str, Any], parts: Sequence[PositionLoss]) -> WeightedSum:
        of_probabilities = all(isinstance(each, ProbabilityLoss) for each in parts)
        return super().__new__(_SumOfProbabilities if of_probabilities else cls)

    def __init__(self, terms: Mapping[str, float | SumTerm], parts: Sequence[PositionLoss]) -> None:
        weights = [term.weight if isinstance(term, SumTerm) else float(term) for term in terms.values()]
        self.terms: list[tuple[Any, float]] = list(zip(parts, weights, strict=True))

    def value(self, logits: Tensor, teacher: TeacherChunk) -> Tensor:
        rows = logits.shape[0]
        found = [weight * check_losses(loss.value, loss.value(logits, teacher), rows) for loss, weight in self.terms]
        return torch.stack(found).sum(0)

    def value_and_grad(self, logits: Tensor, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
        return _sum(
            (check_gradient(loss, "value_and_grad", loss.value_and_grad(logits.clone(), teacher), logits), weight)
            for loss, weight in self.terms
        )


class _SumOfProbabilities(ProbabilityLoss, WeightedSum):
    def of_log_q(self, log_q: Tensor, teacher: TeacherChunk) -> Tensor:
        rows = log_q.shape[0]
        found = [
            weight * check_losses(loss.of_log_q, loss.of_log_q(log_q, teacher), rows) for loss, weight in self.terms
        ]
        return torch.stack(found).sum(0)

    def with_gradient(self, draft: DraftChunk, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
        last = len(self.terms) - 1

        def own(place: int, loss: ProbabilityLoss) -> DraftChunk:
            """What *loss* may overwrite: after the last one nobody needs the draft any more."""
            if place == last:
                return draft
            return DraftChunk(*(x if name in loss.keeps else x.clone() for name, x in draft._asdict().items()))

        return _sum(
            (check_gradient(loss, "with_gradient", loss.with_gradient(own(place, loss), teacher), draft.log_q), weight)
            for place, (loss, weight) in enumerate(self.terms)
        )


def _sum(found: Iterable[tuple[tuple[Tensor, Tensor], float]]) -> tuple[Tensor, Tensor]:
    """The weighted sum of pairs (value [C], gradient [C, V_d]), of which one at a time is held; in the first pair."""
    total: tuple[Tensor, Tensor] | None = None
    for (value, gradient), weight in found:
        if total is None:
            total = value.mul_(weight), gradient.mul_(weight)
        else:
            total[0].add_(value, alpha=weight)
            total[1].add_(gradient, alpha=weight)
    assert total is not None
    return total
