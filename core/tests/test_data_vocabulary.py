"""The vocabulary map: vLLM's offset convention, selection, files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftsmith.data.vocabulary import build_vocabulary, coverage, load_occurring, load_vocabulary, save_vocabulary
from draftsmith.errors import DataError, DiskSpaceError

counts_and_size = st.lists(st.integers(0, 6), min_size=1, max_size=80).flatmap(
    lambda counts: st.tuples(st.just(torch.tensor(counts)), st.integers(1, len(counts)))
)


@given(counts_and_size)
def test_d2t_and_t2d_say_the_same(case: tuple[torch.Tensor, int]) -> None:
    counts, size = case
    vocabulary = build_vocabulary(counts, size)
    assert vocabulary.d2t.dtype == torch.int64
    assert vocabulary.d2t.shape == (size,)
    assert vocabulary.t2d.dtype == torch.bool
    assert vocabulary.t2d.shape == counts.shape
    assert torch.equal(vocabulary.t2d.nonzero().flatten(), torch.arange(size) + vocabulary.d2t)


@given(counts_and_size)
def test_the_most_frequent_are_kept_ties_by_lower_id(case: tuple[torch.Tensor, int]) -> None:
    counts, size = case
    kept = build_vocabulary(counts, size).kept_ids().tolist()
    expected = sorted(range(len(counts)), key=lambda token: (-int(counts[token]), token))[:size]
    assert kept == sorted(expected)


@given(counts_and_size)
def test_coverage_is_the_share_of_occurrences(case: tuple[torch.Tensor, int]) -> None:
    counts, size = case
    vocabulary = build_vocabulary(counts, size)
    share = coverage(vocabulary, counts)
    assert 0.0 <= share <= 1.0
    if int(counts.sum()):
        assert share == pytest.approx(sum(int(counts[t]) for t in vocabulary.kept_ids()) / int(counts.sum()))
    if size == len(counts):
        assert share == 1.0


def test_the_whole_vocabulary_is_the_identity() -> None:
    vocabulary = build_vocabulary(torch.tensor([0, 3, 1]))
    assert vocabulary.is_identity
    assert vocabulary.d2t.tolist() == [0, 0, 0]


def test_fewer_distinct_tokens_than_places_fill_up_with_the_lowest_unused_ids() -> None:
    counts = torch.zeros(10, dtype=torch.int64)
    counts[7] = 5
    assert build_vocabulary(counts, 4).kept_ids().tolist() == [0, 1, 2, 7]


@pytest.mark.parametrize("size", [0, 11])
def test_a_draft_vocabulary_larger_than_the_verifiers_is_refused(size: int) -> None:
    with pytest.raises(DataError, match="cannot be taken from the verifier's 10") as raised:
        build_vocabulary(torch.ones(10, dtype=torch.int64), size)
    assert raised.value.where == "vocabulary.draft_size"


def test_files_come_back_as_written(tmp_path: Path) -> None:
    counts = torch.tensor([4, 0, 9, 2, 0, 1])
    vocabulary = build_vocabulary(counts, 3)
    path = tmp_path / "vocabulary.safetensors"
    save_vocabulary(path, vocabulary, counts, torch.tensor([True, True, True, True, False, True]))
    read = load_vocabulary(path)
    assert load_occurring(path) == {0, 1, 2, 3, 5}
    assert torch.equal(read.d2t, vocabulary.d2t)
    assert torch.equal(read.t2d, vocabulary.t2d)
    assert [file.name for file in tmp_path.iterdir()] == ["vocabulary.safetensors"]


def test_a_full_disk_leaves_the_map_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, counts = tmp_path / "vocabulary.safetensors", torch.tensor([4, 0, 9, 2])
    save_vocabulary(path, build_vocabulary(counts, 2), counts, counts > 0)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskSpaceError):
        save_vocabulary(path, build_vocabulary(counts, 3), counts, counts > 0)
    assert load_vocabulary(path).draft_size == 2
    assert [file.name for file in tmp_path.iterdir()] == ["vocabulary.safetensors"]


def test_a_contradicting_map_is_refused(tmp_path: Path) -> None:
    vocabulary = build_vocabulary(torch.tensor([4, 0, 9, 2]), 2)
    absolute = vocabulary.kept_ids()  # what some third parties store instead of offsets
    save_file({"d2t": absolute, "t2d": vocabulary.t2d, "occurs": vocabulary.t2d.clone()}, tmp_path / "v.safetensors")
    with pytest.raises(DataError, match="contradict"):
        load_vocabulary(tmp_path / "v.safetensors")


@pytest.mark.parametrize("content", [None, b"no safetensors"])
def test_a_missing_or_damaged_map_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "v.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        load_vocabulary(path)
