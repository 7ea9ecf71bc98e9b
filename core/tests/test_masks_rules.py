"""The built-in mask rules pass the conformance kit, and equal the tables of the specification."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.interfaces import MaskRule
from draftsmith.masks import BUILTIN_MASKS
from draftsmith.masks.forms import (
    additive_mask,
    block_slots,
    concatenate_slots,
    dense_mask,
    document_slots,
    step_slots,
)
from draftsmith.masks.rules import Anchored, AnchoredCausal, Causal, Chained
from draftsmith.testing.builtin import AnchoredCausalCheck, AnchoredCheck, CausalCheck
from draftsmith.testing.check import MaskCheck
from draftsmith.train.served_mask import same_in_effect


class TestChained(MaskCheck):
    item = "chained"


class TestCausal(CausalCheck):
    item = "causal"


class TestAnchored(AnchoredCheck):
    item = "anchored"


class TestAnchoredCausal(AnchoredCausalCheck):
    item = "anchored_causal"


def _table(mask: torch.Tensor) -> list[str]:
    return ["".join("#" if cell else "." for cell in row) for row in mask.tolist()]


def _chained(lengths: list[int], step: int, window: int | None, total: int | None = None) -> torch.Tensor:
    rows = document_slots(lengths, total)
    keys = concatenate_slots([step_slots(rows, each) for each in range(step + 1)])
    return dense_mask(Chained(window), step_slots(rows, step), keys)


def test_third_step_of_one_document() -> None:
    assert _table(_chained([6], step=2, window=None)) == [
        "#.....#.....#.....",
        "##.....#.....#....",
        "###.....#.....#...",
        "####.....#.....#..",
        "#####.....#.....#.",
        "######.....#.....#",
    ]


def test_two_documents_keep_their_diagonals() -> None:
    assert _table(_chained([4, 2], step=1, window=None)) == [
        "#.....#.....",
        "##.....#....",
        "###.....#...",
        "####.....#..",
        "....#.....#.",
        "....##.....#",
    ]


def test_the_window_slides_with_the_step() -> None:
    # At step 1 the query of row 4 stands at position 5 and sees positions 3, 4, 5: two real keys and its own.
    assert _table(_chained([5], step=1, window=3))[4] == "...##" + "....#"
    # At step 3 the window of three holds the chain alone.
    assert _table(_chained([5], step=3, window=3))[4] == "....." + "....#" * 3
    assert _table(_chained([5], step=3, window=2))[4] == "....." * 2 + "....#" * 2


def _serving_cache(position: int, step: int, window: int | None) -> set[tuple[int, int]]:
    """(step, position) of the keys that a serving cache shows to the step-th draft from a start, by counting."""
    cache = [(0, each) for each in range(position + 1)] + [(each, position + each) for each in range(1, step + 1)]
    now = position + step
    return {(s, p) for s, p in cache if window is None or now - window < p <= now}


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    step=st.integers(0, 4),
    window=st.none() | st.integers(1, 7),
    padding=st.integers(0, 3),
)
def test_chained_is_the_serving_cache(lengths: list[int], step: int, window: int | None, padding: int) -> None:
    total = sum(lengths) + padding
    mask = _chained(lengths, step, window, total)
    rows = document_slots(lengths, total)
    for row in range(total):
        seen = {
            (s, int(rows.position[j]) + s)
            for s in range(step + 1)
            for j in range(total)
            if mask[row, s * total + j] and rows.document[j] == rows.document[row]
        }
        expected = set() if row >= sum(lengths) else _serving_cache(int(rows.position[row]), step, window)
        assert seen == expected
        assert int(mask[row].sum()) == len(expected)


def _anchored(rule: MaskRule, length: int, anchors: list[int], size: int) -> list[str]:
    rows = document_slots([length])
    blocks = block_slots(rows, torch.tensor(anchors), size)
    context, own = dense_mask(rule, blocks, rows), dense_mask(rule, blocks, blocks)
    return [" ".join(pair) for pair in zip(_table(context), _table(own), strict=True)]


def test_blocks_see_what_is_before_their_anchor_and_themselves() -> None:
    assert _anchored(Anchored(), 6, [1, 3], 3) == [
        "#..... ###...",
        "#..... ###...",
        "#..... ###...",
        "###... ...###",
        "###... ...###",
        "###... ...###",
    ]


def test_causal_blocks_in_a_window() -> None:
    # The window counts positions: each slot of a block stands one later, and sees one context row less.
    assert _anchored(AnchoredCausal(3), 6, [1, 3], 3) == [
        "#..... #.....",
        "#..... ##....",
        "...... ###...",
        ".##... ...#..",
        "..#... ...##.",
        "...... ...###",
    ]


def test_a_window_of_blocks_that_look_ahead_is_as_wide_to_both_sides() -> None:
    assert _anchored(Anchored(2), 3, [2], 4) == [
        ".#. ##..",
        "... ###.",
        "... .###",
        "... ..##",
    ]


def test_padding_gives_a_finite_softmax() -> None:
    rows = document_slots([2], total=4)
    mask = additive_mask(Causal(), rows, rows)
    assert mask[2:].eq(0).all()
    assert torch.softmax(mask, -1).isfinite().all()


def test_documents_must_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        document_slots([3, 3], total=5)


def test_registered_under_their_names() -> None:
    assert {item.name: item.implementation.rpartition(":")[2] for item in BUILTIN_MASKS} == {
        "causal": "Causal",
        "chained": "Chained",
        "anchored": "Anchored",
        "anchored_causal": "AnchoredCausal",
    }


class SameChain(MaskRule):
    """Chained in other words."""

    def __call__(self, query, key):
        before = (key.index - query.index) * (key.step == 0) <= 0
        own = (key.step == 0) | ((key.index == query.index) & (key.step <= query.step))
        seen = (query.document == key.document) & (key.document >= 0) & before & own
        return seen if self.window is None else seen & (query.position - key.position < self.window)


class Near(Chained):
    """Chained, but nothing that lies more than 60 rows behind."""

    def __call__(self, query, key):
        return super().__call__(query, key) & (key.index > query.index - 60)


@pytest.mark.parametrize(
    ("rule", "served", "tokens", "same"),
    [
        (SameChain(), Chained(), 3, True),
        (SameChain(4), Chained(4), 3, True),
        (SameChain(4), Chained(), 3, False),
        (Causal(), Chained(), 3, False),
        (Causal(), Chained(), 1, True),  # what is drafted once is never seen
        (Near(), Chained(), 3, False),
        (Chained(60), Chained(), 3, False),
        (Anchored(), AnchoredCausal(), 3, False),
        (Chained(), Anchored(), 3, False),
        (type("Mine", (AnchoredCausal,), {})(), AnchoredCausal(), 3, True),
    ],
)
def test_masks_are_told_apart_by_what_they_show(rule: MaskRule, served: MaskRule, tokens: int, same: bool) -> None:
    assert same_in_effect(rule, served, tokens=tokens, length=100) is same


def test_a_reach_that_no_row_has_is_no_difference() -> None:
    assert same_in_effect(Near(), Chained(), tokens=3, length=60)
