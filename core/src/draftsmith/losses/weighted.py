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
        *others, (last, weight) = self.terms
        total: Tensor | None = None
        gradient: Tensor | None = None
        for loss, factor in others:
            copy = DraftChunk(
                *(each if name in loss.keeps else each.clone() for name, each in draft._asdict().items())
            )
            value, part = loss.with_gradient(copy, teacher)
            total = value.mul_(factor) if total is None else total.add_(value, alpha=factor)
            gradient = part.mul_(factor) if gradient is None else gradient.add_(part, alpha=factor)
        value, part = last.with_gradient(draft, teacher)  # nobody needs the draft any more
        if total is None or gradient is None:
            return value.mul_(weight), part.mul_(weight)
        return total.add_(value, alpha=weight), torch.add(gradient, part, alpha=weight, out=draft.q)
