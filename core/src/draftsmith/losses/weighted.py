"""A weighted sum of losses that are asked for by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import torch
from torch import Tensor

from draftsmith.interfaces import TeacherChunk
from draftsmith.losses import BUILTIN_LOSSES
from draftsmith.losses.base import DraftChunk, ProbabilityLoss
from draftsmith.losses.options import SumOptions

__all__ = ["WeightedSum"]


def _build(name: str) -> ProbabilityLoss:
    reference = {item.name: item.implementation for item in BUILTIN_LOSSES}[name]
    module, _, attribute = reference.partition(":")
    built: ProbabilityLoss = getattr(importlib.import_module(module), attribute)()
    return built


class WeightedSum(ProbabilityLoss):
    """sum of weight x loss over the built-in losses that *terms* names, each with its default options.

    Raises:
        ValueError: *terms* is empty or names something else than a built-in loss.
    """

    def __init__(self, terms: Mapping[str, float] | None = None) -> None:
        options = SumOptions() if terms is None else SumOptions(terms=dict(terms))
        self.terms = [(_build(name), float(weight)) for name, weight in options.terms.items()]

    def of_log_q(self, log_q: Tensor, teacher: TeacherChunk) -> Tensor:
        return torch.stack([weight * loss.of_log_q(log_q, teacher) for loss, weight in self.terms]).sum(0)

    def with_gradient(self, draft: DraftChunk, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
        total, gradient = torch.zeros_like(draft.q[:, 0]), torch.zeros_like(draft.q)
        for loss, weight in self.terms:
            value, part = loss.with_gradient(DraftChunk(draft.log_q.clone(), draft.q.clone()), teacher)
            total.add_(value, alpha=weight)
            gradient.add_(part, alpha=weight)
        return total, gradient
