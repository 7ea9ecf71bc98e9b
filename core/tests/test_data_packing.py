"""Bin packing: nothing lost, nothing overfull, nearly full rows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.data.packing import fill, pack, shuffle_bins

lengths_and_capacity = st.integers(8, 300).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=120), st.just(capacity))
)


@given(lengths_and_capacity)
def test_every_document_is_in_exactly_one_row_and_no_row_is_overfull(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    bins = pack(lengths, capacity)
    assert sorted(index for each in bins for index in each) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in each) <= capacity for each in bins)


@given(lengths_and_capacity)
def test_at_most_one_row_is_half_empty(case: tuple[list[int], int]) -> None:
    # Two rows filled to half or less would fit into one: no sensible packing leaves them apart by much.
    lengths, capacity = case
    bins = pack(lengths, capacity)
    fewest = -(-sum(lengths) // capacity)
    assert len(bins) <= max(1, 2 * fewest)


@given(lengths_and_capacity)
def test_packing_is_deterministic_and_does_not_depend_on_who_asks_first(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    assert pack(lengths, capacity) == pack(list(lengths), capacity)


@pytest.mark.parametrize(
    ("low", "high", "count", "capacity"),
    [
        (60, 185, 300, 1024),
        (60, 185, 2000, 2048),
        (40, 600, 1500, 2048),
        (200, 400, 2000, 1024),
        (300, 2048, 900, 8192),
    ],
)
def test_rows_are_at_least_98_percent_full(low: int, high: int, count: int, capacity: int) -> None:
    generator = random.Random(1)
    lengths = [generator.randint(low, high) for _ in range(count)]
    bins = pack(lengths, capacity)
    # With few rows even the fewest thinkable cannot be fuller than this.
    best = sum(lengths) / (-(-sum(lengths) // capacity) * capacity)
    assert fill(bins, lengths, capacity) >= min(0.98, best)


def test_long_tailed_lengths_fill_rows_too() -> None:
    generator = random.Random(2)
    lengths = [min(4096, 20 + int(generator.lognormvariate(5.5, 0.9))) for _ in range(5000)]
    assert fill(pack(lengths, 4096), lengths, 4096) >= 0.98


def test_a_document_longer_than_a_row_gets_one_of_its_own() -> None:
    bins = pack([50, 10, 20], 30)
    assert [0] in bins
    assert sorted(map(sorted, bins)) == [[0], [1, 2]]
    assert fill(bins, [50, 10, 20], 30) == 1.0


def test_nothing_makes_no_rows() -> None:
    assert pack([], 10) == []
    assert fill([], [], 10) == 1.0


@pytest.mark.parametrize(("lengths", "capacity"), [([0], 10), ([3], 0)])
def test_senseless_lengths_are_refused(lengths: list[int], capacity: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pack(lengths, capacity)


@given(st.lists(st.lists(st.integers(), min_size=1), min_size=2, max_size=20), st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_has_its_own_order_and_the_same_documents(bins: list[list[int]], seed: int, epoch: int) -> None:
    shuffled = shuffle_bins(bins, seed, epoch)
    assert sorted(map(sorted, shuffled)) == sorted(map(sorted, bins))
    assert shuffled == shuffle_bins(bins, seed, epoch)


def test_epochs_and_seeds_differ() -> None:
    bins = [[i, i + 100, i + 200] for i in range(50)]
    orders = [shuffle_bins(bins, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
