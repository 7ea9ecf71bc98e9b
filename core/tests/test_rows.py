"""Index arithmetic on packed rows, against its definition."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.rows import supervised_run


@given(st.lists(st.text("#.", min_size=1, max_size=9), max_size=5))
def test_runs_end_with_the_supervision_and_with_the_document(masks: list[str]) -> None:
    supervised = torch.tensor([each == "#" for mask in masks for each in mask], dtype=torch.bool)
    documents = torch.tensor([i for i, mask in enumerate(masks) for _ in mask], dtype=torch.int64)
    want = [len(mask[start:]) - len(mask[start:].lstrip("#")) for mask in masks for start in range(len(mask))]
    assert supervised_run(supervised, documents).tolist() == want
