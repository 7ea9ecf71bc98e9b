"""Losses that depend on the draft only through its probabilities, which the core has already at hand.

Shapes: C positions of a chunk, V_d draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from draftsmith.interfaces import PositionLoss, TeacherChunk
from draftsmith.plugins.results import check_gradient, check_losses

__all__ = ["DraftChunk", "ProbabilityLoss", "TeacherProbabilities", "dot", "negative_entropy", "probabilities"]


class DraftChunk(NamedTuple):
    """The draft at C positions. Both tensors belong to the loss, which may overwrite them.

    Attributes:
        log_q: [C, V_d], log-softmax of the logits.
        q: [C, V_d], its exponential.
    """

    log_q: Tensor
    q: Tensor


class TeacherProbabilities(TeacherChunk):
    """A :class:`TeacherChunk` that carries what several steps predicting the same rows would else recompute.

    Attributes:
        p: [C, V_d], exponential of ``log_p``.
        negative_entropy: [C], sum p log p.
    """

    p: Tensor
    negative_entropy: Tensor

    @classmethod
    def build(
        cls, log_p: Tensor, kept_mass: Tensor, top: Tensor, p: Tensor, negative_entropy: Tensor
    ) -> TeacherProbabilities:
        chunk = cls(log_p, kept_mass, top)
        chunk.p = p
        chunk.negative_entropy = negative_entropy
        return chunk

    def part(self, rows: slice) -> TeacherProbabilities:
        """The rows *rows*, as views."""
        return TeacherProbabilities.build(
            self.log_p[rows], self.kept_mass[rows], self.top[rows], self.p[rows], self.negative_entropy[rows]
        )


def probabilities(teacher: TeacherChunk) -> Tensor:
    """p [C, V_d] of *teacher*; read only."""
    return teacher.p if isinstance(teacher, TeacherProbabilities) else teacher.log_p.exp()


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise dot products [C] of two [C, V_d], without a temporary of that size."""
    product: Tensor = torch.linalg.vecdot(a, b)
    return product


def negative_entropy(teacher: TeacherChunk) -> Tensor:
    """sum p log p [C] of *teacher*."""
    if isinstance(teacher, TeacherProbabilities):
        return teacher.negative_entropy
    return dot(teacher.log_p.exp(), teacher.log_p)


class ProbabilityLoss(PositionLoss):
    """A loss of softmax(logits) alone, so indifferent to a constant added to a position's logits.

    The core computes log-probabilities for its metrics anyway; a loss of this kind starts from them instead of from
    the logits. A subclass writes :meth:`of_log_q`, differentiable, and :meth:`with_gradient`, in closed form.

    Attributes:
        keeps: names of the tensors of ``draft`` that :meth:`with_gradient` leaves as they are, and does not return.
            Where losses are summed, they need no copies.
    """

    keeps: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def of_log_q(self, log_q: Tensor, teacher: TeacherChunk) -> Tensor:
        """Loss [C] from the draft's log-probabilities [C, V_d], differentiable in them."""

    @abstractmethod
    def with_gradient(self, draft: DraftChunk, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
        """Loss [C] and its gradient in the *logits* [C, V_d]. May overwrite ``draft``, never ``teacher``."""

    def value(self, logits: Tensor, teacher: TeacherChunk) -> Tensor:
        return check_losses(self.of_log_q, self.of_log_q(torch.log_softmax(logits, dim=-1), teacher), logits.shape[0])

    def value_and_grad(self, logits: Tensor, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            log_q = torch.log_softmax(logits, dim=-1)
            found = self.with_gradient(DraftChunk(log_q, log_q.exp()), teacher)
        return check_gradient(self, "with_gradient", found, logits)
