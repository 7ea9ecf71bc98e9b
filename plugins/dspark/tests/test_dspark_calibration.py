"""Temperatures that are known are found again, and the error falls to nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.interfaces import DraftSlots, ScoredSlots
from draftsmith_dspark.calibration import (
    Chains,
    calibrate,
    expected_calibration_error,
    fit_sequentially,
    fit_shared,
)

K = 4


def chains(temperatures: list[float], *, count: int = 400, hard: bool = False, seed: int = 0) -> Chains:
    """Chains of a head whose logits are *temperatures* times too large."""
    generator = torch.Generator().manual_seed(seed)
    acceptance = 0.1 + 0.88 * torch.rand(count, len(temperatures), generator=generator, dtype=torch.float64)
    logits = torch.logit(acceptance) * torch.tensor(temperatures, dtype=torch.float64)
    if hard:
        acceptance = torch.bernoulli(acceptance, generator=generator)
    present, rows = torch.ones_like(acceptance, dtype=torch.bool), torch.arange(count)
    return Chains(logits=logits, acceptance=acceptance, present=present, row=rows)


def row(lengths: list[int], logits: list[float], acceptance: list[float]) -> tuple[DraftSlots, ScoredSlots, Tensor]:
    """A scored row with one chain for each length; a length of 0 is a block without slots."""
    chain = torch.tensor([place for place, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64)
    step = torch.tensor([step for length in lengths for step in range(length)], dtype=torch.int64)
    slots = DraftSlots(
        terms=(),
        teacher_row=step,
        step=step,
        chain=chain,
        weight=torch.ones(len(step)),
        total_positions=len(step),
        num_steps=K,
    )
    one, yes = torch.ones(len(step)), torch.ones(len(step), dtype=torch.bool)
    scored = ScoredSlots(
        loss=one, correct=yes, acceptance=torch.tensor(acceptance), kept_mass=one, kept=yes, top_probability=one
    )
    return slots, scored, torch.tensor(logits)


@pytest.mark.parametrize("temperatures", [[1.0] * K, [2.5] * K, [0.4] * K, [3.0, 1.0, 0.5, 2.0]])
def test_the_temperature_of_each_slot_is_found_in_order(temperatures: list[float]) -> None:
    made = chains(temperatures)
    assert fit_sequentially(made) == pytest.approx(temperatures, rel=1e-3)
    found = expected_calibration_error(made, torch.tensor(temperatures))
    assert found < 1e-6
    assert found <= expected_calibration_error(made, torch.ones(1))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_the_shared_temperature_is_found(temperature: float) -> None:
    made = chains([temperature] * K)
    assert fit_shared(made) == pytest.approx(temperature, rel=1e-3)


def test_hard_outcomes_are_as_good_as_probabilities_on_the_whole() -> None:
    made = chains([2.0] * K, count=20_000, hard=True)
    assert fit_shared(made) == pytest.approx(2.0, rel=0.05)
    assert fit_sequentially(made) == pytest.approx([2.0] * K, rel=0.25)


@given(st.lists(st.floats(0.2, 5.0), min_size=K, max_size=K), st.integers(0, 5))
def test_a_shared_temperature_never_does_harm_by_its_own_measure(temperatures: list[float], seed: int) -> None:
    """It is the likeliest in its range, which 1 is in."""
    made = chains(temperatures, count=60, seed=seed)

    def surprise(temperature: float) -> float:
        predicted, truth = made.survival(torch.tensor([temperature])), made.true_survival
        return float(torch.nn.functional.binary_cross_entropy(predicted.double(), truth))

    found = fit_shared(made)
    assert all(surprise(found) <= surprise(other) + 1e-9 for other in (1.0, 0.5, 2.0, found * 1.01, found / 1.01))


def test_the_expected_calibration_error_by_hand() -> None:
    """Two bins: predictions of 0.5 that come true at 0.7 and 0.6, and one of 0.9 that comes true at 0.5."""
    confident = float(torch.logit(torch.tensor(0.9)))
    found = Chains.of([row([1, 1, 1], [0.0, 0.0, confident], [0.7, 0.6, 0.5])])
    assert found is not None
    error = expected_calibration_error(found, torch.ones(1))
    assert error == pytest.approx((abs(0.5 - 0.65) * 2 + abs(0.9 - 0.5)) / 3, rel=1e-6)


def test_chains_cut_short_say_nothing_of_what_they_lack() -> None:
    found = Chains.of([row([2, 0, 1], [1.0, -1.0, 3.0], [0.8, 0.5, 0.9]), row([3], [0.0] * 3, [0.5] * 3)])
    assert found is not None
    assert found.present.tolist() == [[True, True, False, False], [True] + [False] * 3, [True] * 3 + [False]]
    assert found.logits[0].tolist() == [1.0, -1.0, 0.0, 0.0]
    assert found.true_survival[0, :2].tolist() == pytest.approx([0.8, 0.4])
    assert fit_sequentially(found)[3] == 1.0  # no chain has a fourth slot
    # slots that are not there have no part in the error either
    alone = Chains.of([row([2, 1], [1.0, -1.0, 3.0], [0.8, 0.5, 0.9])])
    longer = Chains.of([row([2, 1], [1.0, -1.0, 3.0], [0.8, 0.5, 0.9])])
    assert alone is not None
    assert longer is not None
    longer.logits[:, 2:] = 50.0
    assert expected_calibration_error(alone, torch.ones(1)) == expected_calibration_error(longer, torch.ones(1))
    assert fit_shared(alone) == fit_shared(longer)


def rows_of(*parts: Chains) -> list[tuple[DraftSlots, ScoredSlots, Tensor]]:
    """A scored row of each part."""
    return [
        row([K] * part.logits.shape[0], part.logits.flatten().tolist(), part.acceptance.flatten().tolist())
        for part in parts
    ]


def test_the_error_after_is_that_of_rows_without_a_part_in_the_fit() -> None:
    """Every second row is calibrated, the others are twice too sure: each fit is right for its own rows alone."""
    parts = [chains([1.0 + place % 2] * K, count=50, seed=place) for place in range(4)]
    made = calibrate(rows_of(*parts))
    assert made is not None
    assert 1.1 < made.shared < 1.9
    everything = Chains.of(rows_of(*parts))
    assert everything is not None
    swapped = torch.tensor([2.0, 1.0, 2.0, 1.0]).repeat_interleave(50)[:, None]
    assert made.error_shared == pytest.approx(expected_calibration_error(everything, swapped), rel=1e-3)
    assert made.error_by_slot == pytest.approx(made.error_shared, rel=1e-3)
    assert made.error_shared > 2 * expected_calibration_error(everything, torch.tensor([made.shared]))
    assert made.figures()["confidence_ece_held_out"] == 1


def test_where_all_rows_are_alike_the_error_after_is_gone() -> None:
    made = calibrate(rows_of(*(chains([3.0] * K, count=50, seed=place) for place in range(3))))
    assert made is not None
    assert made.error_before > 0.05
    assert made.error_shared < 1e-4
    assert made.error_by_slot < 1e-4


def test_the_figures() -> None:
    made = calibrate([row([K, K], [3.0, -3.0, 2.0, 1.0] * 2, [0.8, 0.3, 0.6, 0.55] * 2)])
    assert made is not None
    figures = made.figures()
    assert figures["confidence_chains"] == 2
    assert figures["confidence_ece_held_out"] == 0  # a single row cannot be split
    assert figures["confidence_ece_by_slot"] < figures["confidence_ece_after"] < figures["confidence_ece_before"]
    assert [figures[f"confidence_temperature_{slot}"] for slot in range(K)] == list(made.by_slot)
    assert all(value == value for value in figures.values())


def test_without_rows_there_is_nothing_to_calibrate() -> None:
    assert calibrate([]) is None
    assert calibrate(iter([])) is None


def test_extreme_logits_stay_finite() -> None:
    found = calibrate([row([K], [1e4, -1e4, 0.0, 1e4], [1.0, 0.0, 1.0, 0.0])])
    assert found is not None
    assert all(torch.isfinite(torch.tensor(value)) for value in found.figures().values())
