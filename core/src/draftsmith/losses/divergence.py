"""Divergences between the teacher's and the draft's distribution, with closed-form gradients.

With q = softmax(z), the chain rule from q to z is dL/dz = q (dL/dq - sum q dL/dq).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftsmith.interfaces import TeacherChunk
from draftsmith.losses.base import DraftChunk, ProbabilityLoss, dot, negative_entropy, probabilities

__all__ = ["CrossEntropy", "ForwardKL", "JensenShannon", "ReverseKL"]


class ForwardKL(ProbabilityLoss):
    """sum p (log p - log q); d/dz = q - p."""

    keeps = frozenset({"log_q"})

    def of_log_q(self, log_q: Tensor, teacher: TeacherChunk) -> Tensor:
        return negative_entropy(teacher) - dot(probabilities(teacher), log_q)

    def with_gradient(self, draft: DraftChunk, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
        return self.of_log_q(draft.log_q, teacher), draft.q.sub_(probabilities(teacher))


class CrossEntropy(ProbabilityLoss):
    """-log q[argmax p], p restricted to the draft vocabulary; d/dz = q - onehot."""

    keeps = frozenset({"log_q"})

    def of_log_q(self, log_q: Tensor, teacher: TeacherChunk) -> Tensor:
        return -log_q.gather(-1, teacher.top[:, None]).squeeze(-1)

    def with_gradient(self, draft: DraftChunk, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
        value = self.of_log_q(draft.log_q, teacher)
        minus_one = torch.full_like(value, -1.0)[:, None]
        return value, draft.q.scatter_add_(-1, teacher.top[:, None], minus_one)


class ReverseKL(ProbabilityLoss):
    """sum q (log q - log p); d/dz = q (log q - log p - loss)."""

    def of_log_q(self, log_q: Tensor, teacher: TeacherChunk) -> Tensor:
        return dot(log_q.exp(), log_q - teacher.log_p)

    def with_gradient(self, draft: DraftChunk, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
        ratio = draft.log_q.sub_(teacher.log_p)
        value = dot(draft.q, ratio)
        return value, draft.q.mul_(ratio.sub_(value[:, None]))


class JensenShannon(ProbabilityLoss):
    """(KL(p||m) + KL(q||m)) / 2, m = (p + q) / 2; dL/dq = log(q / m) / 2, the other parts cancel."""

    def of_log_q(self, log_q: Tensor, teacher: TeacherChunk) -> Tensor:
        # log m from log p and log q: it stays finite where p and q both underflow.
        log_m = torch.logaddexp(log_q, teacher.log_p) - math.log(2)
        from_teacher = negative_entropy(teacher) - dot(probabilities(teacher), log_m)
        return 0.5 * (from_teacher + dot(log_q.exp(), log_q - log_m))

    def with_gradient(self, draft: DraftChunk, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
        log_m = torch.logaddexp(draft.log_q, teacher.log_p).sub_(math.log(2))
        from_teacher = negative_entropy(teacher) - dot(probabilities(teacher), log_m)
        ratio = draft.log_q.sub_(log_m)
        from_draft = dot(draft.q, ratio)
        value = 0.5 * (from_teacher + from_draft)
        return value, draft.q.mul_(ratio.sub_(from_draft[:, None]).mul_(0.5))
