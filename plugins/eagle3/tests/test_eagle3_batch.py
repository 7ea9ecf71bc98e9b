"""The shift and the chains, on rows small enough to write down."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.errors import ConfigError
from draftsmith.interfaces import PackedRow
from draftsmith.masks.rules import Causal, Chained
from draftsmith_eagle3.batch import make_batch
from draftsmith_eagle3.options import Eagle3Options
from draftsmith_eagle3.step import Eagle3


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


def test_two_documents_and_padding() -> None:
    batch = make_batch(packed(["..###", ".", "####"], padding=2), 3)
    # rows: (x1 x2 x3 x4) of the first document, none of the second, (x7 x8 x9) of the third
    assert batch.token_ids.tolist() == [101, 102, 103, 104, 107, 108, 109]
    assert batch.packed_index.tolist() == [1, 2, 3, 4, 7, 8, 9]
    assert batch.taps.flatten().tolist() == [0, 1, 2, 3, 6, 7, 8]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.document_lengths == (4, 3)
    assert batch.total_positions == 12
    # step 0 needs two supervised tokens from x_{t+1} on, step 1 three, step 2 four
    assert [each.rows.tolist() for each in batch.steps] == [[1, 2, 4, 5], [1, 4], []]
    assert [each.chains.tolist() for each in batch.steps] == [[0, 1, 2, 3], [0, 2], []]
    assert [each.kept.tolist() for each in batch.steps] == [[0, 1, 2, 3], [0, 2], []]


def test_a_gap_between_two_answers_ends_the_chains() -> None:
    batch = make_batch(packed([".##..###"]), 2)
    assert [each.rows.tolist() for each in batch.steps] == [[0, 4, 5], [4]]


def test_nothing_at_all() -> None:
    for masks in (["."], ["#"], [], ["...."]):
        batch = make_batch(packed(masks, padding=3), 2)
        assert [each.rows.numel() for each in batch.steps] == [0, 0]


@given(st.lists(st.text("#.", min_size=1, max_size=9), max_size=5), st.integers(1, 4), st.integers(0, 3))
def test_every_slot_is_one_that_serving_would_draft(masks: list[str], steps: int, padding: int) -> None:
    row = packed(masks, padding)
    batch = make_batch(row, steps)
    got = {
        (int(batch.packed_index[each]), step) for step, alive in enumerate(batch.steps) for each in alive.rows.tolist()
    }
    want = set()
    begin = 0
    for mask in masks:
        for bonus in range(1, len(mask)):
            for step in range(steps):
                if set(mask[bonus : bonus + step + 2]) == {"#"} and bonus + step + 1 < len(mask):
                    want.add((begin + bonus, step))
        begin += len(mask)
    assert got == want
    for before, after in zip(batch.steps, batch.steps[1:], strict=False):
        assert torch.equal(before.rows[after.kept], after.rows)
        assert torch.equal(before.chains[after.kept], after.chains)


def test_forms_that_only_the_built_in_rule_has_are_refused_when_asked() -> None:
    Eagle3.check_attention(Eagle3Options(), Chained(None), "linear")
    Eagle3.check_attention(Eagle3Options(), Causal(None), "dense")
    with pytest.raises(ConfigError, match="the mask Causal has no linear form"):
        Eagle3.check_attention(Eagle3Options(), Causal(None), "linear")
