"""The built-in losses pass the conformance kit, and equal their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith.errors import ConfigError, UnknownNameError
from draftsmith.interfaces import PositionLoss, TeacherChunk
from draftsmith.losses import BUILTIN_LOSSES
from draftsmith.losses.base import ProbabilityLoss
from draftsmith.losses.divergence import CrossEntropy, ForwardKL, JensenShannon, ReverseKL
from draftsmith.losses.overlap import Hybrid, NegativeLogAcceptance, TotalVariation
from draftsmith.losses.weighted import WeightedSum
from draftsmith.plugins import load_plugins
from draftsmith.testing.losses import LossTests, teacher_chunk
from draftsmith.train.setup import build_loss


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


class TestTotalVariation(LossTests):
    smooth_at_teacher = False  # the overlap has a kink where p = q

    @pytest.fixture
    def loss(self) -> PositionLoss:
        return TotalVariation()


class TestNegativeLogAcceptance(LossTests):
    smooth_at_teacher = False  # the overlap has a kink where p = q

    @pytest.fixture
    def loss(self) -> PositionLoss:
        return NegativeLogAcceptance()


class TestHybrid(LossTests):
    smooth_at_teacher = False  # the overlap has a kink where p = q

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


class Shifted(PositionLoss):
    """Somebody's loss that minds a constant added to the logits, and leaves the gradient to autograd."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def value(self, logits: torch.Tensor, teacher: TeacherChunk) -> torch.Tensor:
        return self.scale * logits.logsumexp(-1).square()


def summed(terms: dict[str, float], *others: tuple[PositionLoss, float]) -> PositionLoss:
    """The built-in losses of *terms* and others, in a sum."""
    parts = [build_loss(load_plugins().losses, name) for name in terms]
    names = {f"other{place}": weight for place, (_, weight) in enumerate(others)}
    return WeightedSum({**terms, **names}, [*parts, *(each for each, _ in others)])


class TestWeightedSum(LossTests):
    smooth_at_teacher = False  # the overlap has a kink where p = q

    @pytest.fixture
    def loss(self) -> PositionLoss:
        return summed({"kl_div": 0.5, "tv": 0.9, "rkl": 0.2})


class TestWeightedSumWithSomebodysLoss(LossTests):
    zero_at_teacher = False

    @pytest.fixture
    def loss(self) -> PositionLoss:
        return summed({"kl_div": 0.5, "rkl": 0.9}, (Shifted(0.3), 2.0))


def test_a_sum_takes_the_short_way_only_where_all_of_it_may() -> None:
    """Its parts then start from log-probabilities, and a constant in the logits is lost: none may depend on it."""
    assert isinstance(summed({"ce": 0.1, "tv": 0.9}), ProbabilityLoss)
    mixed = summed({"ce": 0.1}, (Shifted(1.0), 0.5))
    assert not isinstance(mixed, ProbabilityLoss)
    logits, teacher = _two_tokens(0.8, 0.5)
    expected = 0.1 * -math.log(0.5) + 0.5 * (3.0 + 0.0) ** 2
    value, _ = mixed.value_and_grad(logits + 3.0, teacher)
    assert value.item() == pytest.approx(expected, abs=1e-12)
    assert mixed.value(logits + 3.0, teacher).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", [item.name for item in BUILTIN_LOSSES])
def test_every_registered_loss_is_built_from_its_options(name: str) -> None:
    assert isinstance(build_loss(load_plugins().losses, name), PositionLoss)


def test_terms_of_a_sum_have_options_and_may_be_sums() -> None:
    terms = {
        "nla": {"weight": 0.5, "options": {"floor": 0.25}},
        "sum": {"weight": 2, "options": {"terms": {"lk_hybrid": {"options": {"eta": 7}}, "ce": 0.1}}},
    }
    loss = build_loss(load_plugins().losses, "sum", {"terms": terms})
    (nla, half), (inner, two) = loss.terms
    assert (nla.floor, half, two) == (0.25, 0.5, 2.0)
    assert [(type(each).__name__, weight) for each, weight in inner.terms] == [("Hybrid", 1.0), ("CrossEntropy", 0.1)]
    assert inner.terms[0][0].eta == 7.0


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("kl_dvi", {}, UnknownNameError, "kl_div"),
        ("sum", {"terms": {"kl_dvi": 1}}, UnknownNameError, "kl_div"),
        ("sum", {"terms": {"nla": {"options": {"flor": 1}}}}, ConfigError, "floor"),
        ("sum", {"terms": {}}, ConfigError, "at least one loss"),
        ("nla", {"floor": 3}, ConfigError, "floor"),
    ],
)
def test_what_cannot_be_built_is_said(name: str, options: dict[str, object], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        build_loss(load_plugins().losses, name, options)


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
        summed({"ce": 0.1, "tv": 0.9}): 0.1 * -math.log(q) + 0.9 * tv,
    }
    for loss, value in expected.items():
        assert loss.value(logits, teacher).item() == pytest.approx(value, abs=1e-12), type(loss).__name__


def test_nla_has_no_gradient_below_its_floor() -> None:
    logits, teacher = _two_tokens(1 - 1e-9, 1e-9)
    value, gradient = NegativeLogAcceptance(floor=1e-3).value_and_grad(logits, teacher)
    assert value.item() == pytest.approx(-math.log(1e-3))
    assert not gradient.any()
