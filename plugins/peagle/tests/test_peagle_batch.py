"""COD sampling, on rows small enough to write down, and what holds of every draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.interfaces import PackedRow
from draftsmith_peagle.batch import Batch, make_batch, sample_anchors


def packed(masks: list[str], padding: int = 0) -> PackedRow:
    """Documents given by their loss masks; token i of the row is 100 + i, its features are [i]."""
    total = sum(map(len, masks)) + padding
    documents = [i for i, mask in enumerate(masks) for _ in mask] + [-1] * padding
    positions = [position for mask in masks for position in range(len(mask))] + [0] * padding
    supervised = [each == "#" for mask in masks for each in mask] + [False] * padding
    return PackedRow(
        input_ids=100 + torch.arange(total),
        position_ids=torch.tensor(positions, dtype=torch.int64),
        document_ids=torch.tensor(documents, dtype=torch.int64),
        loss_mask=torch.tensor(supervised, dtype=torch.bool),
        taps=torch.arange(total, dtype=torch.float32)[:, None],
        last_hidden=torch.zeros(total, 1),
    )


def batch_of(row: PackedRow, seed: int = 0, **changes: Any) -> Batch:
    values: dict[str, Any] = {"num_depths": 3, "ratio": 1.0, "minimum": 1.0, "max_anchors": None}
    return make_batch(row, **{**values, **changes}, generator=torch.Generator().manual_seed(seed))


def elements(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.anchor.tolist(), batch.depth.tolist(), strict=True))


def test_two_documents_and_padding() -> None:
    batch = batch_of(packed(["..####", ".", "####"], padding=2))
    # rows: (x1 … x5) of the first document, none of the second, (x8 x9 x10) of the third
    assert batch.token_ids.tolist() == [101, 102, 103, 104, 105, 108, 109, 110]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.document_lengths == batch.chains.document_lengths == (5, 3)
    # a row has a target where x_{t+1} and x_{t+2} are the verifier's
    assert batch.starts.tolist() == [1, 2, 3, 5, 6]
    # an element of depth d where they are up to x_{a+2+d}: none of row 3, whose next is the document's last
    assert elements(batch) == [(1, 1), (1, 2), (2, 1), (5, 1)]
    assert batch.teacher_row.tolist() == [2, 3, 4, 8, 9, 3, 4, 4, 9]
    assert batch.step.tolist() == [0, 0, 0, 0, 0, 1, 2, 1, 1]
    assert batch.chain.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 3]
    assert batch.total_positions == 13


def test_a_gap_between_two_answers_ends_the_chains() -> None:
    batch = batch_of(packed([".###..####"]))
    assert batch.starts.tolist() == [0, 1, 5, 6, 7]
    assert elements(batch) == [(0, 1), (5, 1), (5, 2), (6, 1)]


@pytest.mark.parametrize("masks", [["."], ["#"], [".#"], [], ["...."], [".#.#."]])
def test_nothing_at_all(masks: list[str]) -> None:
    batch = batch_of(packed(masks, padding=3))
    assert len(batch.chains) == batch.starts.numel() == batch.teacher_row.numel() == 0


def test_one_depth_is_the_next_token_alone() -> None:
    batch = batch_of(packed(["." + "#" * 9]), num_depths=1)
    assert batch.starts.numel() == 8
    assert len(batch.chains) == 0


def test_a_row_begins_with_the_verifiers_tokens() -> None:
    """The case in which sampling as published meets anchors before the row, and chains that wrap around."""
    for seed in range(200):
        batch = batch_of(packed(["#" * 12]), seed, num_depths=6, ratio=0.7, minimum=0.2)
        assert all(anchor >= 0 for anchor, _ in elements(batch))


def test_draws_are_new_and_fixed_by_the_generator() -> None:
    row = packed(["." + "#" * 20, "." + "#" * 10])
    draws = [batch_of(row, seed, ratio=0.7, minimum=0.2, num_depths=5) for seed in range(30)]
    for seed, batch in enumerate(draws):
        assert elements(batch) == elements(batch_of(row, seed, ratio=0.7, minimum=0.2, num_depths=5))
    assert len({tuple(elements(each)) for each in draws}) == 30
    drawn = {each for batch in draws for each in elements(batch)}
    everything = set(elements(batch_of(row, num_depths=5)))
    assert {each for each in drawn if each[1] <= 2} == {each for each in everything if each[1] <= 2}


def test_a_budget_of_anchors_is_the_rows() -> None:
    row = packed(["." + "#" * 40, "." + "#" * 40])
    seen = set()
    for seed in range(40):
        batch = batch_of(row, seed, max_anchors=10, num_depths=4)
        assert batch.starts.numel() == 78, "the next token is trained everywhere"
        depths = batch.depth.tolist()
        # |seeds| - d of them, unless a seed is the first of its answer, or a chain has come to an answer's end
        assert 7 <= depths.count(1) <= 9
        assert depths.count(2) <= 8
        seen.update(batch.chains.rows)
    assert seen == {*range(38), *range(40, 78)}, "some row is never continued"


supervised = st.lists(st.text("#.", min_size=1, max_size=12), max_size=5)
shares = st.floats(0.01, 1.0)


@given(supervised, st.integers(1, 6), shares, st.floats(0, 1), st.none() | st.integers(1, 9), st.integers(0, 3))
def test_every_element_is_a_row_that_serving_would_have(
    masks: list[str], depths: int, ratio: float, minimum: float, most: int | None, padding: int
) -> None:
    row = packed(masks, padding)
    batch = batch_of(row, num_depths=depths, ratio=ratio, minimum=minimum, max_anchors=most)
    found = elements(batch)
    assert len(set(found)) == len(found)
    starts = set(batch.starts.tolist())
    for anchor, depth in found:
        assert 0 < depth < depths
        # all of its ancestors are there, down to the row that it continues, which has a target of its own
        assert anchor in starts
        assert all((anchor, before) in found for before in range(1, depth))
    slots = [(start, 0) for start in batch.starts.tolist()] + found
    for place, (anchor, depth) in enumerate(slots):
        bonus = int(batch.packed_index[anchor])
        assert anchor >= 0
        assert bonus >= 1
        span = slice(bonus, bonus + depth + 2)
        assert row.loss_mask[span].tolist() == [True] * (depth + 2)  # up to the target, which the row has
        assert len(set(row.document_ids[bonus - 1 : bonus + depth + 2].tolist())) == 1
        assert int(batch.teacher_row[place]) == bonus + depth
        assert batch.starts[batch.chain[place]] == anchor
        assert int(batch.step[place]) == depth


@given(supervised, st.integers(1, 6), st.integers(0, 3))
def test_with_all_of_them_every_slot_of_serving_is_there(masks: list[str], depths: int, padding: int) -> None:
    row = packed(masks, padding)
    batch = batch_of(row, num_depths=depths)
    got = {(int(batch.packed_index[start]), 0) for start in batch.starts.tolist()}
    got |= {(int(batch.packed_index[anchor]), depth) for anchor, depth in elements(batch)}
    want, begin = set(), 0
    for mask in masks:
        for bonus in range(1, len(mask)):
            for depth in range(depths):
                if set(mask[bonus : bonus + depth + 2]) == {"#"} and bonus + depth + 1 < len(mask):
                    want.add((begin + bonus, depth))
        begin += len(mask)
    # The budget of depth d is the seeds less d: never fewer than what the ends of the answers leave.
    assert got == want


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(1, 8),
    shares,
    st.floats(0, 1),
    st.none() | st.integers(1, 50),
    st.integers(0, 5),
)
def test_sizes_are_those_of_the_published_rule(
    answers: list[int], depths: int, ratio: float, minimum: float, most: int | None, seed: int
) -> None:
    run = torch.tensor([left for answer in answers for left in [*range(answer, 0, -1), 0]], dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    seeds = min(int((run >= 2).sum()), run.shape[0] if most is None else most)
    before: set[int] | None = None
    for depth, anchors in enumerate(sample_anchors(run, depths, ratio, minimum, most, generator), 1):
        budget = int((seeds - depth) * max(ratio**depth, minimum))
        found = anchors.tolist()
        assert found == sorted(set(found))
        assert len(found) <= budget
        if before is not None:
            assert set(found) <= before
            # all that can be continued, or as many as the budget allows
            able = {each for each in before if int(run[each]) >= depth + 2}
            assert len(found) == min(budget, len(able))
        before = set(found)
