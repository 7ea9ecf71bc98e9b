"""Anchors and blocks, on rows small enough to write down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.interfaces import PackedRow
from draftsmith_dflash.batch import Batch, make_batch

MASK = 99


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


def blocks(row: PackedRow, seed: int = 0, **changes: Any) -> Batch:
    values: dict[str, Any] = {"block_size": 3, "max_anchors": 100, "mask_token_id": MASK, "layout": "bonus_anchor"}
    return make_batch(row, **{**values, **changes}, generator=torch.Generator().manual_seed(seed))


def test_two_documents_and_padding() -> None:
    batch = blocks(packed(["..###", ".", "..####"], padding=2))
    # anchors: x_2 and x_3 of the first document, then those at 8, 9 and 10: each has a supervised successor
    assert batch.blocks.anchors == (2, 3, 8, 9, 10)
    assert batch.blocks.document_lengths == (5, 1, 6)
    assert batch.blocks.block_size == 3
    assert batch.taps.flatten().tolist() == list(range(12))
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5]
    assert batch.token_ids.tolist() == [[token, MASK, MASK] for token in (102, 103, 108, 109, 110)]
    assert batch.block_positions.tolist() == [[2, 3, 4], [3, 4, 5], [2, 3, 4], [3, 4, 5], [4, 5, 6]]
    # row k >= 1 of a block predicts the token at its own position, as long as that is the verifier's
    assert batch.rows.tolist() == [1, 2, 4, 7, 8, 10, 11, 13]
    assert batch.chain.tolist() == [0, 0, 1, 2, 2, 3, 3, 4]
    assert batch.step.tolist() == [0, 1, 0, 0, 1, 0, 1, 0]
    assert batch.teacher_row.tolist() == [2, 3, 3, 8, 9, 9, 10, 10]
    assert batch.previous.tolist() == [102, 103, 103, 108, 109, 109, 110, 110]
    assert batch.total_positions == 14


def test_every_row_predicts_in_the_other_layout() -> None:
    batch = blocks(packed(["..####"]), layout="anchor_first")
    assert batch.blocks.anchors == (2, 3, 4)
    assert batch.rows.tolist() == [0, 1, 2, 3, 4, 6]
    assert batch.step.tolist() == [0, 1, 2, 0, 1, 0]
    assert batch.teacher_row.tolist() == [2, 3, 4, 3, 4, 4]


def test_a_gap_between_two_answers_ends_the_chains() -> None:
    batch = blocks(packed([".###..###"]))
    assert batch.blocks.anchors == (1, 2, 6, 7)
    assert batch.step.tolist() == [0, 1, 0, 0, 1, 0]


def test_no_draft_begins_with_the_first_token() -> None:
    """Nothing is verified before it, so that vLLM has no features to draft from."""
    assert blocks(packed(["####"])).blocks.anchors == (1, 2)


@pytest.mark.parametrize("masks", [["."], ["#"], ["##"], [], ["...."], [".#.#."]])
def test_nothing_at_all(masks: list[str]) -> None:
    batch = blocks(packed(masks, padding=3))
    assert len(batch.blocks) == batch.rows.numel() == batch.teacher_row.numel() == 0
    assert batch.token_ids.shape == (0, 3)


def test_the_budget_is_each_documents_own_and_draws_are_new() -> None:
    row = packed(["." + "#" * 20, ".###", "." + "#" * 10])
    seen: set[tuple[int, ...]] = set()
    for seed in range(40):
        anchors = blocks(row, seed, max_anchors=3).blocks.anchors
        assert anchors == blocks(row, seed, max_anchors=3).blocks.anchors  # random by the generator alone
        counts = [sum(first <= each < last for each in anchors) for first, last in ((0, 21), (21, 25), (25, 36))]
        assert counts == [3, 2, 3]
        seen.add(anchors)
    assert len(seen) > 30
    drawn = {anchor for anchors in seen for anchor in anchors}
    assert drawn == {*range(1, 20), 22, 23, *range(26, 35)}, "some anchor is never drawn"


@given(
    st.lists(st.text("#.", min_size=1, max_size=9), max_size=5),
    st.integers(2, 5),
    st.integers(1, 4),
    st.sampled_from(["bonus_anchor", "anchor_first"]),
    st.integers(0, 3),
)
def test_every_slot_is_one_that_serving_would_draft(
    masks: list[str], size: int, budget: int, layout: str, padding: int
) -> None:
    row = packed(masks, padding)
    batch = blocks(row, block_size=size, max_anchors=budget, layout=layout)
    predicting = size - (layout == "bonus_anchor")
    want: dict[int, int] = {}  # anchor → supervised steps
    begin = 0
    for mask in masks:
        eligible = {}
        for anchor in range(1, len(mask)):
            run = len(mask[anchor:]) - len(mask[anchor:].lstrip("#"))
            if run >= 2:
                eligible[begin + anchor] = min(run - 1, predicting)
        drawn = [each for each in batch.blocks.anchors if each in eligible]
        assert len(drawn) == min(budget, len(eligible))
        want.update({each: eligible[each] for each in drawn})
        begin += len(mask)
    assert sorted(want) == list(batch.blocks.anchors)
    slots = [(anchor, step) for anchor, steps in want.items() for step in range(steps)]
    anchors = torch.tensor(batch.blocks.anchors, dtype=torch.int64)
    assert list(zip(anchors[batch.chain].tolist(), batch.step.tolist(), strict=True)) == slots
    assert batch.teacher_row.tolist() == [anchor + step for anchor, step in slots]
    assert batch.previous.tolist() == [100 + anchor + step for anchor, step in slots]
    # a slot stands one position before the token that it predicts, or at it
    positions = batch.block_positions.flatten()[batch.rows]
    predicted = row.position_ids[batch.teacher_row] + 1
    assert torch.equal(positions + (layout == "anchor_first"), predicted)
    assert torch.equal(batch.rows // size, batch.chain)
