"""Losses of the overlap alpha = sum min(p, q), the probability that a sampled draft token is accepted.

LK losses: arXiv 2602.23881. p is renormalised over the draft vocabulary here; metrics use the full vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.interfaces import TeacherChunk
from draftsmith.losses.base import DraftChunk, ProbabilityLoss, dot, negative_entropy, probabilities

__all__ = ["Hybrid", "NegativeLogAcceptance", "TotalVariation"]


def _overlap(log_q: Tensor, teacher: TeacherChunk) -> Tensor:
    return torch.minimum(log_q.exp(), probabilities(teacher)).sum(-1)


def _overlap_gradient(draft: DraftChunk, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
    """alpha [C] and d alpha / dz [C, V_d] = q (1[q <= p] - s), s = sum q 1[q <= p]. Overwrites ``log_q`` only."""
    p = probabilities(teacher)
    alpha = torch.minimum(draft.q, p, out=draft.log_q).sum(-1)
    # The comparison as 0.0 or 1.0 in the same buffer: no boolean mask, no conversion.
    below = torch.le(draft.q, p, out=draft.log_q).mul_(draft.q)
    mass = below.sum(-1, keepdim=True)
    return alpha, below.addcmul_(draft.q, mass, value=-1.0)


class TotalVariation(ProbabilityLoss):
    """1 - alpha, half the L1 distance."""

    keeps = frozenset({"q"})

    def of_log_q(self, log_q: Tensor, teacher: TeacherChunk) -> Tensor:
        return 1.0 - _overlap(log_q, teacher)

    def with_gradient(self, draft: DraftChunk, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
        alpha, gradient = _overlap_gradient(draft, teacher)
        return 1.0 - alpha, gradient.neg_()


class NegativeLogAcceptance(ProbabilityLoss):
    """-log max(alpha, floor); no gradient below the floor."""

    keeps = frozenset({"q"})

    def __init__(self, floor: float = 1e-5) -> None:
        self.floor = floor

    def of_log_q(self, log_q: Tensor, teacher: TeacherChunk) -> Tensor:
        return -_overlap(log_q, teacher).clamp_min(self.floor).log()

    def with_gradient(self, draft: DraftChunk, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
        alpha, gradient = _overlap_gradient(draft, teacher)
        floored = alpha.clamp_min(self.floor)
        factor = torch.where(alpha >= self.floor, -1.0 / floored, 0.0)
        return -floored.log(), gradient.mul_(factor[:, None])


class Hybrid(ProbabilityLoss):
    """lam KL + (1 - lam) TV with lam = exp(-eta alpha), lam taken as a constant by the gradient."""

    def __init__(self, eta: float = 3.0) -> None:
        self.eta = eta

    def of_log_q(self, log_q: Tensor, teacher: TeacherChunk) -> Tensor:
        alpha = _overlap(log_q, teacher)
        lam = torch.exp(-self.eta * alpha.detach())
        divergence = negative_entropy(teacher) - dot(probabilities(teacher), log_q)
        return lam * divergence + (1.0 - lam) * (1.0 - alpha)

    def with_gradient(self, draft: DraftChunk, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
        p = probabilities(teacher)
        divergence = negative_entropy(teacher) - dot(p, draft.log_q)
        alpha, gradient = _overlap_gradient(draft, teacher)
        lam = torch.exp(-self.eta * alpha)
        value = lam * divergence + (1.0 - lam) * (1.0 - alpha)
        gradient.mul_((lam - 1.0)[:, None])
        return value, gradient.addcmul_(draft.q.sub_(p), lam[:, None])
