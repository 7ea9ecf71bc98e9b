"""The built-in losses pass the conformance kit, and equal their definitions."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from attrs import asdict

from draftsmith.interfaces import PositionLoss, TeacherChunk
from draftsmith.losses import BUILTIN_LOSSES, SumOptions
from draftsmith.losses.divergence import CrossEntropy, ForwardKL, JensenShannon, ReverseKL
from draftsmith.losses.overlap import Hybrid, NegativeLogAcceptance, TotalVariation
from draftsmith.losses.weighted import WeightedSum
from draftsmith.testing.losses import LossTests, teacher_chunk


class TestForwardKL(LossTests):
    @pytest.fixture
    def loss(self) -> PositionLoss:
        return ForwardKL()


class TestReverseKL(LossTests):
    @pytest.fixture
    def loss(self) -> PositionLoss:
        return ReverseKL()


class TestJensenShannon(LossTests):
    @pytest.fixture
    def loss(self) -> PositionLoss:
        return JensenShannon()


class TestCrossEntropy(LossTests):
    zero_at_teacher = False

    @pytest.fixture
    def loss(self) -> PositionLoss:
        return CrossEntropy()


class AwayFromTies:
    """The overlap has a kink where p = q, so its gradient there is one of several: only the value is zero."""

    def test_zero_where_the_draft_is_the_teacher(self, loss: PositionLoss) -> None:
        logits, _ = self.draw()  # type: ignore[attr-defined]
        value, _ = loss.value_and_grad(logits.clone(), teacher_chunk(logits))
        torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-9)


class TestTotalVariation(AwayFromTies, LossTests):
    @pytest.fixture
    def loss(self) -> PositionLoss:
        return TotalVariation()


class TestNegativeLogAcceptance(AwayFromTies, LossTests):
    @pytest.fixture
    def loss(self) -> PositionLoss:
        return NegativeLogAcceptance()


class TestHybrid(AwayFromTies, LossTests):
    @pytest.fixture
    def loss(self) -> PositionLoss:
        return Hybrid(eta=3.0)

    def test_a_step_against_the_gradient_lowers_it(self, loss: PositionLoss) -> None:
        """Its weights are constants to the gradient: with them held, a step lowers the mixture."""
        logits, teacher = self.draw()
        _, gradient = loss.value_and_grad(logits.clone(), teacher)
        kl, tv = ForwardKL(), TotalVariation()
        lam = torch.exp(-3.0 * (1.0 - tv.value(logits, teacher)))

        def mixture(z: torch.Tensor) -> torch.Tensor:
            return lam * kl.value(z, teacher) + (1.0 - lam) * tv.value(z, teacher)

        assert (mixture(logits - 1e-3 * gradient) < mixture(logits)).all()


class TestWeightedSum(AwayFromTies, LossTests):
    @pytest.fixture
    def loss(self) -> PositionLoss:
        return WeightedSum({"kl_div": 0.5, "tv": 0.9, "rkl": 0.2})


@pytest.mark.parametrize("name", [item.name for item in BUILTIN_LOSSES])
def test_every_registered_loss_is_built_from_its_options(name: str) -> None:
    item = next(each for each in BUILTIN_LOSSES if each.name == name)
    module, _, attribute = item.implementation.partition(":")
    options = asdict(item.options()) if item.options else {}
    assert isinstance(getattr(importlib.import_module(module), attribute)(**options), PositionLoss)


def _two_tokens(p: float, q: float) -> tuple[torch.Tensor, TeacherChunk]:
    teacher = teacher_chunk(torch.tensor([[p, 1 - p]], dtype=torch.float64).log())
    return torch.tensor([[q, 1 - q]], dtype=torch.float64).log(), teacher


def test_values_by_hand() -> None:
    p, q = 0.8, 0.5
    logits, teacher = _two_tokens(p, q)
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    rkl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    m = (p + q) / 2
    jsd = 0.5 * (
        p * math.log(p / m)
        + (1 - p) * math.log((1 - p) / (1 - m))
        + q * math.log(q / m)
        + (1 - q) * math.log((1 - q) / (1 - m))
    )
    tv, lam = 0.3, math.exp(-3 * 0.7)
    expected = {
        ForwardKL(): kl,
        CrossEntropy(): -math.log(q),
        ReverseKL(): rkl,
        JensenShannon(): jsd,
        TotalVariation(): tv,
        NegativeLogAcceptance(): -math.log(0.7),
        Hybrid(eta=3.0): lam * kl + (1 - lam) * tv,
        WeightedSum({"ce": 0.1, "tv": 0.9}): 0.1 * -math.log(q) + 0.9 * tv,
    }
    for loss, value in expected.items():
        assert loss.value(logits, teacher).item() == pytest.approx(value, abs=1e-12), type(loss).__name__


def test_nla_has_no_gradient_below_its_floor() -> None:
    logits, teacher = _two_tokens(1 - 1e-9, 1e-9)
    value, gradient = NegativeLogAcceptance(floor=1e-3).value_and_grad(logits, teacher)
    assert value.item() == pytest.approx(-math.log(1e-3))
    assert not gradient.any()


@pytest.mark.parametrize("terms", [{}, {"kldiv": 1.0}, {"sum": 1.0}])
def test_a_sum_of_nothing_or_of_unknown_losses_is_refused(terms: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="terms"):
        SumOptions(terms=terms)
