"""What draftsmith's conformance kit must know of the loss."""

from __future__ import annotations

from draftsmith.testing.check import LossCheck


class FocalCheck(LossCheck):
    """A cross-entropy: zero only where the teacher is certain."""

    zero_at_teacher = False
