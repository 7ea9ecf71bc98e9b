"""Conformance tests of losses per position.

from draftsmith.testing.losses import LossTests

class TestFocal(LossTests):
    @pytest.fixture
    def loss(self):
        return Focal(gamma=2.0)
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.interfaces import PositionLoss, TeacherChunk

__all__ = ["LossTests", "teacher_chunk"]


def teacher_chunk(logits: Tensor, kept_mass: Tensor | None = None) -> TeacherChunk:
    """The teacher whose restricted logits [C, V_d] are given; its kept mass is 1 unless given as [C]."""
    log_p = torch.log_softmax(logits, dim=-1)
    mass = torch.ones_like(log_p[:, 0]) if kept_mass is None else kept_mass
    return TeacherChunk(log_p, mass, log_p.argmax(-1))


class LossTests:
    """What every :class:`~draftsmith.interfaces.PositionLoss` must satisfy. Override the fixture ``loss``.

    Attributes:
        zero_at_teacher: the loss of a draft equal to its teacher is zero, and so is its gradient.
        smooth_at_teacher: False for a loss with a kink there, of which the gradient is one of several.
        random_scale: spread of the random logits; larger ones make more peaked distributions.
    """

    zero_at_teacher: bool = True
    smooth_at_teacher: bool = True
    random_scale: float = 2.0

    @pytest.fixture
    def loss(self) -> PositionLoss:
        raise NotImplementedError("override the fixture `loss` with an instance of the loss to test")

    def draw(
        self, positions: int = 7, vocabulary: int = 33, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, TeacherChunk]:
        generator = torch.Generator().manual_seed(5)
        draft, teacher = (
            self.random_scale * torch.randn(positions, vocabulary, generator=generator, dtype=dtype) for _ in range(2)
        )
        mass = torch.rand(positions, generator=generator, dtype=dtype)
        # A draft near its teacher in every other position: a loss may behave differently there.
        draft[::2] = teacher[::2] + 0.1 * draft[::2]
        return draft, teacher_chunk(teacher, mass)

    def test_one_finite_value_a_position(self, loss: PositionLoss) -> None:
        logits, teacher = self.draw()
        value = loss.value(logits, teacher)
        assert value.shape == (logits.shape[0],)
        assert value.isfinite().all()

    def test_gradient_is_that_of_the_value(self, loss: PositionLoss) -> None:
        logits, teacher = self.draw()
        leaf = logits.clone().requires_grad_(True)
        expected_value = loss.value(leaf, teacher)
        (expected,) = torch.autograd.grad(expected_value.sum(), leaf)
        value, gradient = loss.value_and_grad(logits.clone(), teacher)
        assert not value.requires_grad
        assert not gradient.requires_grad
        torch.testing.assert_close(value, expected_value.detach(), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-11)

    def test_positions_are_independent(self, loss: PositionLoss) -> None:
        logits, teacher = self.draw()
        whole, whole_gradient = loss.value_and_grad(logits.clone(), teacher)
        for row in range(logits.shape[0]):
            part = TeacherChunk(*(each[row : row + 1] for each in teacher))
            value, gradient = loss.value_and_grad(logits[row : row + 1].clone(), part)
            torch.testing.assert_close(value, whole[row : row + 1])
            torch.testing.assert_close(gradient, whole_gradient[row : row + 1])

    def test_the_teacher_is_not_overwritten(self, loss: PositionLoss) -> None:
        logits, teacher = self.draw()
        before = [each.clone() for each in teacher]
        loss.value_and_grad(logits.clone(), teacher)
        for old, new in zip(before, teacher, strict=True):
            torch.testing.assert_close(new, old, rtol=0, atol=0)

    def test_zero_where_the_draft_is_the_teacher(self, loss: PositionLoss) -> None:
        """One that is not meant to be says zero_at_teacher = False in its item's conformance class."""
        logits, _ = self.draw()
        value, gradient = loss.value_and_grad(logits.clone(), teacher_chunk(logits))
        if self.zero_at_teacher:
            torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-9)
            if self.smooth_at_teacher:
                torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-9)
        else:
            assert (value > 0).any()

    def test_a_step_against_the_gradient_lowers_it(self, loss: PositionLoss) -> None:
        logits, teacher = self.draw()
        logits = logits[1::2]
        teacher = TeacherChunk(*(each[1::2] for each in teacher))
        value, gradient = loss.value_and_grad(logits.clone(), teacher)
        after = loss.value(logits - 1e-3 * gradient, teacher)
        assert (after < value).all()

    def test_finite_on_extreme_logits(self, loss: PositionLoss) -> None:
        logits, _ = self.draw(dtype=torch.float32)
        teacher = teacher_chunk(-60.0 * logits)
        value, gradient = loss.value_and_grad(60.0 * logits, teacher)
        assert value.isfinite().all()
        assert gradient.isfinite().all()
