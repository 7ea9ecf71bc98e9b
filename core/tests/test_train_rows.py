"""Packed rows: order, assembly, bad samples, reading ahead."""

from __future__ import annotations

import itertools
import threading
import time

import attrs
import pytest
import torch
from attrs import frozen

from draftsmith.errors import DataError, SampleCorrupt, SampleMissing
from draftsmith.interfaces import HiddenStateReader, HiddenStateSample, StateLayout
from draftsmith.train.rows import (
    Document,
    Order,
    RowLoader,
    assemble,
    check_plan,
    derived_seed,
    plan_rows,
    read_ahead,
    to_device,
)

A, H = 2, 3


@frozen
class Row:
    sample_id: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor


class Rows(list):
    @property
    def sample_ids(self):
        return [row.sample_id for row in self]

    @property
    def lengths(self):
        return [len(row.token_ids) for row in self]

    @property
    def supervised(self):
        return [int(row.loss_mask.sum()) for row in self]


class Memory(HiddenStateReader):
    """A transport that holds its samples in memory."""

    def __init__(self, samples):
        self.samples = {sample.sample_id: sample for sample in samples}

    def get(self, sample_id, *, expected_tokens=None):
        if sample_id not in self.samples:
            raise SampleMissing("not there", sample_id=sample_id)
        return self.samples[sample_id]

    def complete_ids(self):
        return frozenset(self.samples)

    def delete(self, sample_id):
        self.samples.pop(sample_id, None)


class States:
    layout = StateLayout(fingerprint="f", layer_ids=tuple(range(A + 1)), hidden_size=H, dtype="bfloat16")

    def __init__(self, samples):
        self.reader = Memory(samples)

    def teacher(self, sample_id):
        tokens = len(self.reader.samples[sample_id].token_ids)
        return torch.arange(tokens), torch.linspace(0, 1, tokens)


def make_row(name, length, first_supervised=0):
    token_ids = torch.arange(length) + 100 * int(name)
    return Row(name, token_ids, torch.arange(length) >= first_supervised)


def make_sample(row, seed=0):
    generator = torch.Generator().manual_seed(seed + int(row.sample_id))
    states = torch.randn(len(row.token_ids), A + 1, H, generator=generator).bfloat16()
    return HiddenStateSample(sample_id=row.sample_id, token_ids=row.token_ids, hidden_states=states)


def make_document(name, length, **kwargs):
    row = make_row(name, length, **kwargs)
    sample = make_sample(row)
    return Document(row=row, sample=sample, teacher=(torch.arange(length), torch.ones(length)))


def test_positions_restart_and_documents_are_numbered():
    documents = [make_document("1", 4, first_supervised=2), make_document("2", 3)]
    row = assemble(documents, capacity=10)
    assert row.input_ids.tolist() == [100, 101, 102, 103, 200, 201, 202]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert row.document_ids.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert row.loss_mask.tolist() == [False, False, True, True, True, True, True]
    assert row.taps.shape == (7, A * H)
    assert row.last_hidden.shape == (7, H)
    assert row.sample_ids == ("1", "2")
    states = documents[1].sample.hidden_states
    assert torch.equal(row.taps[5], torch.cat([states[1, 0], states[1, 1]]))
    assert torch.equal(row.last_hidden[5], states[1, 2])
    assert row.teacher_token.tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_a_document_longer_than_the_row_is_cut_in_every_field():
    row = assemble([make_document("1", 9)], capacity=5)
    fields = ("input_ids", "position_ids", "document_ids", "loss_mask", "taps", "last_hidden", "teacher_logsumexp")
    assert {len(getattr(row, name)) for name in fields} == {5}


def test_padding_belongs_to_no_document_and_is_not_supervised():
    row = assemble([make_document("1", 3)], capacity=8, pad_to=8)
    assert row.document_ids.tolist() == [0, 0, 0, -1, -1, -1, -1, -1]
    assert not row.loss_mask[3:].any()
    assert not row.taps[3:].any()
    with pytest.raises(ValueError, match="padded"):
        assemble([make_document("1", 3)], capacity=8, pad_to=2)


def test_features_are_cast_and_the_teachers_input_is_not():
    row = to_device(assemble([make_document("1", 3)], capacity=8), torch.device("cpu"), torch.float32)
    assert (row.taps.dtype, row.last_hidden.dtype) == (torch.float32, torch.bfloat16)


def test_plan_covers_every_useful_sample_once_and_counts_the_rest():
    rows = Rows([make_row("1", 6), make_row("2", 5, 5), make_row("3", 30, 12), make_row("4", 30, 3), make_row("5", 4)])
    plan = plan_rows(rows, 10)
    assert sorted(itertools.chain(*plan.bins)) == [0, 3, 4]
    # 2 has nothing supervised, 3 nothing within the row; 3 and 4 are cut.
    assert (plan.truncated, plan.dropped, plan.tokens) == (2, 2, 20)
    assert plan.fill == 1.0
    assert all(sum(min(rows.lengths[i], 10) for i in bin_) <= 10 for bin_ in plan.bins)


def test_rows_refused_at_capture_are_not_missed():
    plan = plan_rows(Rows([make_row("1", 6), make_row("2", 5)]), 10, {"1": "not finite"})
    assert (plan.bins, plan.dropped) == (((1,),), 1)


def test_nothing_supervised_is_an_error():
    with pytest.raises(DataError, match="no training row"):
        check_plan(plan_rows(Rows([make_row("1", 5, 5)]), 10))


def order(bins=7, rows_per_step=2, epochs=3, seed=0):
    return Order(bins=tuple((i,) for i in range(bins)), rows_per_step=rows_per_step, epochs=epochs, seed=seed)


def test_every_epoch_trains_every_row_once_in_another_order():
    steps = list(order().steps_from(0))
    assert len(steps) == order().total_steps == 12
    epochs = [list(itertools.chain(*itertools.chain(*steps[e * 4 : e * 4 + 4]))) for e in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [len(step) for step in steps[:4]] == [2, 2, 2, 1]


@pytest.mark.parametrize("first", [0, 1, 4, 5, 11, 12])
def test_the_rest_of_a_run_is_a_function_of_the_step(first):
    assert list(order().steps_from(first)) == list(order().steps_from(0))[first:]


def test_seeds_differ_by_purpose():
    seeds = {derived_seed(0, "row", 1, 0), derived_seed(0, "row", 0, 1), derived_seed(1, "row", 1, 0)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def loader(rows, samples, **kwargs):
    return RowLoader(rows, States(samples), capacity=10, **kwargs)


def test_a_bad_sample_stops_or_is_skipped_by_policy():
    rows = Rows([make_row("1", 4), make_row("2", 3)])
    samples = [make_sample(rows[1])]
    with pytest.raises(SampleMissing, match="sample 1"):
        loader(rows, samples)([0, 1])
    loaded = loader(rows, samples, bad_samples="skip")([0, 1])
    assert loaded.row.sample_ids == ("2",)
    assert loaded.skipped == (("1", "sample 1: not there"),)
    nothing = loader(rows, [], bad_samples="skip")([0, 1])
    assert (nothing.tokens, len(nothing.skipped)) == (0, 2)


@pytest.mark.parametrize("statistics", [True, False])
def test_a_row_of_which_nothing_could_be_read_is_padding_of_the_same_form(statistics):
    rows = Rows([make_row("1", 4), make_row("2", 3)])
    read = loader(rows, [make_sample(each) for each in rows], statistics=statistics)([0, 1]).row
    row = loader(rows, [], bad_samples="skip", statistics=statistics)([0, 1]).row
    assert row.document_ids.tolist() == [-1]
    assert row.sample_ids == ()
    assert not row.loss_mask.any()
    for field in attrs.fields(type(row)):
        ours, usual = getattr(row, field.name), getattr(read, field.name)
        if isinstance(usual, torch.Tensor):
            assert (ours.dtype, ours.shape[1:]) == (usual.dtype, usual.shape[1:]), field.name
        else:
            assert field.name == "sample_ids" or ours is usual is None


def test_states_of_other_tokens_are_corrupt():
    rows = Rows([make_row("1", 4)])
    other = attrs.evolve(make_sample(rows[0]), token_ids=torch.arange(4))
    with pytest.raises(SampleCorrupt, match="other tokens"):
        loader(rows, [other])([0])


def test_reading_ahead_keeps_the_order_and_the_place_of_an_error():
    def load(item):
        time.sleep(0.001 * (item % 3))
        if item == 5:
            raise SampleMissing("not there", sample_id="5")
        return item * 10

    results = read_ahead(load, iter(range(9)))
    assert [next(results) for _ in range(5)] == [0, 10, 20, 30, 40]
    with pytest.raises(SampleMissing):
        next(results)


def test_closing_ends_the_thread_and_reads_no_more():
    seen = []
    before = threading.active_count()
    results = read_ahead(lambda item: seen.append(item) or item, itertools.count(), depth=2)
    next(results)
    results.close()
    assert threading.active_count() == before
    assert len(seen) <= 5
