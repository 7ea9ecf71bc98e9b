"""Position weights, and rows without an anchor."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.losses.divergence import CrossEntropy
from draftsmith.testing.algorithm import AlgorithmCase, Material, make_material, tiny_case
from draftsmith.train.scoring import Teacher
from draftsmith.train.step import Objective, score_row
from draftsmith_dflash.options import DFlashOptions, position_gamma
from draftsmith_dflash.step import pace_weights, position_weights


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "llama")


def objective(case: AlgorithmCase, **changes: Any) -> Objective:
    setup = case.algorithm.setup
    values: dict[str, Any] = {
        "algorithm": case.algorithm,
        "model": case.algorithm.build_model(),
        "teacher": Teacher(setup.weights, setup.vocabulary, device="cpu", compute_dtype=torch.float32),
        "loss": CrossEntropy(),
        "reduction": "weighted_mean",
        "out_of_vocabulary": "renormalise",
        "compute_dtype": torch.float32,
    }
    return Objective(**{**values, **changes})


@pytest.mark.parametrize(
    ("options", "gamma"),
    [
        ({"block_size": 8}, 4.0),
        ({"block_size": 9}, 5.0),
        ({"block_size": 10}, 5.0),
        ({"block_size": 16}, 7.0),
        ({"block_size": 16, "gamma": 2.5}, 2.5),
    ],
)
def test_exponential_weights_decay_as_the_block_size_asks(options: dict[str, Any], gamma: float) -> None:
    chosen = DFlashOptions(**options)
    assert position_gamma(chosen) == gamma
    weights = position_weights(chosen, torch.tensor([0, 1, 6, 0]))
    assert weights.tolist() == pytest.approx([1, math.exp(-1 / gamma), math.exp(-6 / gamma), 1])


def test_even_weights() -> None:
    assert position_weights(DFlashOptions(position_weights="uniform"), torch.arange(3)).tolist() == [1, 1, 1]


slot = st.tuples(st.floats(0, 1, width=32), st.booleans())


@given(st.lists(st.lists(slot, min_size=1, max_size=5), max_size=4), st.floats(0.125, 1, width=32))
def test_pace_weights_are_their_definition(chains: list[list[tuple[float, bool]]], a: float) -> None:
    want = []
    for slots in chains:
        factors = [(1 - a) * q + a if counted else 1.0 for q, counted in slots]
        reached = [math.prod(factors[: j + 1]) for j in range(len(slots))]
        want += [
            counted * sum(c for j, c in enumerate(reached) if j >= k and slots[j][1]) or 0.0
            for k, (_, counted) in enumerate(slots)
        ]
    flat = [each for slots in chains for each in slots]
    chain = torch.tensor([i for i, slots in enumerate(chains) for _ in slots], dtype=torch.int64)
    step = torch.tensor([k for slots in chains for k in range(len(slots))], dtype=torch.int64)
    counted = torch.tensor([each for _, each in flat], dtype=torch.bool)
    confidence = torch.tensor([q for q, _ in flat], dtype=torch.float32)
    got = pace_weights(confidence, chain, step, counted, a)
    assert got.tolist() == pytest.approx(want, rel=1e-4, abs=1e-5)


def test_pace_weights_reach_the_loss(material: Material) -> None:
    case = tiny_case(material, "dflash", options={"num_layers": 1, "position_weights": "d_pace"}, draft_size=64)
    for policy in ("renormalise", "mask"):
        score = score_row(objective(case, out_of_vocabulary=policy), case.row, torch.Generator().manual_seed(0))
        assert score.scored is not None
        counted = score.scored.kept if policy == "mask" else torch.ones_like(score.scored.kept)
        assert bool(counted.any())
        q = torch.exp(-score.scored.loss.detach())
        want = pace_weights(q, score.slots.chain, score.slots.step, counted, 0.5)
        torch.testing.assert_close(score.slots.weight, want)
        loss = score.scored.loss.detach()
        assert score.value.item() == pytest.approx(float((loss * want)[counted].sum() / want[counted].sum()), rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"position_weights": "d_pace"}, {"hidden_size": 32}])
def test_a_row_without_an_anchor_is_a_zero_loss_that_takes_part(material: Material, options: dict[str, Any]) -> None:
    """Every trained weight gets a gradient, of zeros."""
    case = tiny_case(material, "dflash", options={"num_layers": 1, **options})
    whole = objective(case)
    empty = attrs.evolve(case.row, loss_mask=torch.zeros_like(case.row.loss_mask))
    score = score_row(whole, empty, torch.Generator().manual_seed(0))
    assert score.value.item() == 0
    assert score.value.requires_grad
    score.value.backward()  # type: ignore[no-untyped-call]
    trained = {name: p.grad for name, p in whole.model.named_parameters() if p.requires_grad}
    assert not [name for name, gradient in trained.items() if gradient is None or bool((gradient != 0).any())]


def test_anchors_are_drawn_anew_and_fixed_by_the_generator(material: Material) -> None:
    case = tiny_case(material, "dflash", options={"num_layers": 1, "max_anchors": 2})
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 0, 1, 2)]
    draws = [case.algorithm.make_batch(case.row, each).blocks.anchors for each in generators]
    assert draws[0] == draws[1]
    assert len(set(draws)) > 1
