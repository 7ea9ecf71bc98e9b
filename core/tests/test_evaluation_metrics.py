"""The figures of an evaluation: their definitions, and the identities between them."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.evaluation.metrics import (
    Losslessness,
    RequestTimes,
    Spread,
    acceptance_length,
    acceptance_per_position,
    agree,
    conditional_acceptance,
    difference,
    draft_acceptance_rate,
    largest_relative_gap,
    median_over_requests,
    speed_up,
    spread,
    tokens_per_second,
)
from draftsmith.serving.vllm_process import DraftCounters

K = 5
ROUNDS = st.lists(
    st.integers(0, K).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))), max_size=40
)
RATES = st.lists(st.floats(0.1, 1e4), min_size=1, max_size=7)


def test_the_figures_of_a_few_rounds():
    # Three rounds of three tokens each: all accepted, one accepted, none.
    counters = DraftCounters.of_rounds([(3, 3), (3, 1), (3, 0)], 3)
    assert counters == DraftCounters(drafts=3, drafted=9, accepted=4, accepted_per_position=(2, 1, 1))
    assert acceptance_length(counters) == 1 + 4 / 3
    assert acceptance_per_position(counters) == (2 / 3, 1 / 3, 1 / 3)
    assert conditional_acceptance(counters) == (2 / 3, 1 / 2, 1.0)
    assert draft_acceptance_rate(counters) == 4 / 9


def test_what_was_not_counted_is_none():
    nothing = DraftCounters.none(2)
    assert acceptance_length(nothing) is None
    assert acceptance_per_position(nothing) == (None, None)
    assert conditional_acceptance(nothing) == (None, None)
    assert draft_acceptance_rate(nothing) is None
    rejected = DraftCounters.of_rounds([(2, 0)], 2)
    assert conditional_acceptance(rejected) == (0.0, None)
    assert acceptance_length(rejected) == 1.0


@given(ROUNDS)
def test_the_length_is_one_more_than_the_sum_of_the_marginal_shares(rounds):
    counters = DraftCounters.of_rounds(rounds, K)
    if not rounds:
        assert acceptance_length(counters) is None
        return
    shares = acceptance_per_position(counters)
    assert math.isclose(acceptance_length(counters), 1 + sum(shares))
    assert all(0 <= late <= early <= 1 for early, late in itertools.pairwise(shares))


@given(ROUNDS)
def test_a_marginal_share_is_the_product_of_the_conditional_ones(rounds):
    counters = DraftCounters.of_rounds(rounds, K)
    product = 1.0
    for share, conditional in zip(acceptance_per_position(counters), conditional_acceptance(counters), strict=True):
        if conditional is None:
            assert not share
            continue
        product *= conditional
        assert math.isclose(share, product, abs_tol=1e-12)


@given(ROUNDS, ROUNDS)
def test_the_difference_of_two_readings_is_what_came_in_between(first, second):
    before = DraftCounters.of_rounds(first, K)
    after = before + DraftCounters.of_rounds(second, K)
    assert difference(before, after) == DraftCounters.of_rounds(second, K)
    if second:
        with pytest.raises(ValueError, match="fallen"):
            difference(after, before)


def test_a_difference_holds_where_positions_were_added():
    before = DraftCounters.of_rounds([(1, 1)], 1)
    after = before + DraftCounters.of_rounds([(3, 3)], 3)
    assert difference(before, after).accepted_per_position == (1, 1, 1)


def test_the_largest_gap_is_relative_and_leaves_rare_positions_out():
    first = DraftCounters(drafts=100, drafted=300, accepted=93, accepted_per_position=(60, 30, 3))
    second = DraftCounters(drafts=100, drafted=300, accepted=89, accepted_per_position=(60, 27, 2))
    assert largest_relative_gap(first, second) == pytest.approx(1 / 3)
    assert largest_relative_gap(first, second, at_least=0.05) == pytest.approx(0.1)
    assert largest_relative_gap(first, DraftCounters.none(3)) == 0.0


def test_times_of_a_request():
    times = RequestTimes(tokens=5, first_token=0.5, last_token=2.5)
    assert times.inter_token_latency == 0.5
    assert times.tokens_per_second == 2.0
    assert RequestTimes(tokens=1, first_token=0.5, last_token=0.5).inter_token_latency is None
    assert RequestTimes(tokens=3).tokens_per_second is None
    assert median_over_requests([1.0, None, 3.0]) == 2.0
    assert median_over_requests([None]) is None
    assert tokens_per_second(10, 4.0) == 2.5
    assert tokens_per_second(10, 0.0) is None


@given(RATES)
def test_a_spread_holds_its_median(values):
    found = spread([*values, None])
    assert found is not None
    assert found.low <= found.median <= found.high
    assert found.count == len(values)
    assert agree(found, found)


def test_spreads_agree_where_they_overlap():
    one = Spread(median=2, low=1, high=3, count=3)
    assert agree(one, Spread(median=4, low=3, high=5, count=3))
    assert not agree(one, Spread(median=4, low=3.1, high=5, count=3))
    assert spread([None]) is None


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_how_often_chance_parts_two_evaluations(count):
    ways = list(itertools.combinations(range(2 * count), count))
    parted = 0
    for ours in ways:
        one, two = spread(ours), spread(set(range(2 * count)) - set(ours))
        assert one is not None
        assert two is not None
        parted += not agree(one, two)
    assert (parted, len(ways)) == (2, math.comb(2 * count, count))


@given(RATES, st.floats(0.01, 100))
def test_a_machine_that_slows_down_leaves_the_ratio(rates, factor):
    # In each repetition all methods are slowed alike; the ratio is that of each repetition.
    found = speed_up([rate * factor for rate in rates], rates)
    assert found is not None
    assert math.isclose(found.low, factor, rel_tol=1e-9)
    assert math.isclose(found.high, factor, rel_tol=1e-9)


def test_the_speed_up_takes_repetitions_that_both_have():
    assert speed_up([4.0, None, 9.0], [2.0, 1.0, 3.0, 5.0]) == Spread(median=2.5, low=2.0, high=3.0, count=2)
    assert speed_up([], [1.0]) is None


def test_losslessness_tells_ties_from_differences():
    tied = Losslessness.of(10, [(1e-6, True), (3e-4, True)])
    assert (tied.identical, tied.ties, tied.differing, tied.largest_gap) == (8, 2, 0, 3e-4)
    assert tied.lossless
    wrong = Losslessness.of(10, [(1e-6, True), (None, False)])
    assert (wrong.differing, wrong.lossless, wrong.largest_gap) == (1, False, 1e-6)
    assert Losslessness.of(3, []) == Losslessness(prompts=3, identical=3, ties=0)
