"""The capture stage on a tiny verifier: what is stored, what is not done again, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from attrs import evolve
from rich.console import Console
from safetensors.torch import load_file, save_file

from draftsmith.api import CaptureRequirements, TransportGuarantees
from draftsmith.capture import run as stage
from draftsmith.capture.address import TransportAddress
from draftsmith.capture.engines.transformers import find_decoder, hidden_states, load_verifier
from draftsmith.capture.plan import human_bytes
from draftsmith.capture.run import run_capture
from draftsmith.capture.states import open_states, run_transport, state_layout
from draftsmith.capture.statistics import StatisticsDamaged, StatisticsTable
from draftsmith.data.dataset import open_prepared
from draftsmith.data.prepare import run_prepare
from draftsmith.errors import (
    DiskSpaceError,
    FingerprintMismatch,
    NumericsError,
    OutputError,
    SampleMissing,
    UserError,
    VerifierError,
)
from draftsmith.testing.verifiers import make_tiny_verifier


@pytest.fixture(scope="module")
def prepared(case, tmp_path_factory):
    """A prepared run; tests work on copies of it."""
    folder = tmp_path_factory.mktemp("capture")
    verifier = make_tiny_verifier(folder / "verifier", "llama")
    recipe = case.write_recipe(folder, verifier, conversations=12)
    run_prepare(case.resolved(recipe))
    return recipe


@pytest.fixture
def make_run(case, prepared, tmp_path):
    shutil.copytree(prepared.parent / "run", tmp_path / "run")

    def make(*overrides):
        return case.resolved(prepared, [f"output={tmp_path / 'run'}", *overrides])

    return make


def rows_of(run):
    data = open_prepared(run.folders.prepared)
    return [*data.train, *data.validation]


def reopen(run):
    """Mark the stage as not complete, as a kill would have left it."""
    path = run.folders.states / "stage.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "complete": False}))


def test_what_is_stored_is_what_the_verifier_computes(make_run) -> None:
    run = make_run("train.compute_dtype=float32")  # the teacher's, which is compared with float32 below
    output = io.StringIO()
    record = run_capture(run, Console(file=output, width=200))
    rows, states = rows_of(run), open_states(run)
    model = load_verifier(run.verifier.path, dtype=torch.float32, device=torch.device("cpu"))
    head = model.get_output_embeddings()
    assert states.layout.layer_ids == (1, run.verifier.num_layers - 1, run.verifier.num_layers)
    for row in rows:
        sample = states.reader.get(row.sample_id, expected_tokens=len(row.token_ids))
        assert torch.equal(sample.token_ids, row.token_ids)
        expected = hidden_states(model, row.token_ids[None], None, states.layout.layer_ids)[0]
        torch.testing.assert_close(sample.hidden_states.float(), expected, rtol=1e-2, atol=1e-3)
        # the teacher's statistics belong to the stored states, not to those before rounding
        logits = head(find_decoder(model).norm(sample.hidden_states[:, -1].float()))
        token, logsumexp = states.teacher(row.sample_id)
        assert token.dtype == torch.int64
        assert logsumexp.dtype == torch.float32
        torch.testing.assert_close(logsumexp, logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits.gather(1, token[:, None])[:, 0], logits.amax(-1), rtol=1e-5, atol=1e-5)
    assert record.summary["samples"] == len(rows)
    assert record.summary["tokens"] == record.summary["captured_tokens"] == sum(len(row.token_ids) for row in rows)
    assert record.summary["refused"] == 0
    assert record.summary["engine"] == "transformers"
    told = output.getvalue()
    assert f"{len(rows)} rows, {record.summary['tokens']} tokens" in told
    assert "free" in told or states.transport.free_bytes() is None
    assert "tokens/s in" in told


def test_a_complete_capture_is_not_done_again(make_run, monkeypatch) -> None:
    run = make_run()
    first = run_capture(run)
    monkeypatch.setattr(stage, "make_engine", lambda *a, **k: pytest.fail("captured again"))
    assert run_capture(run).summary == first.summary


def test_only_what_is_missing_is_captured(make_run, monkeypatch) -> None:
    run = make_run()
    run_capture(run)
    rows = rows_of(run)
    lost = {rows[0].sample_id, rows[3].sample_id}
    run_transport(run).remove_all(lost)
    reopen(run)
    asked: list[str] = []
    make_engine = stage.make_engine

    def watched(*arguments, **keywords):
        engine = make_engine(*arguments, **keywords)
        capture = engine.capture

        def note(requests):
            requests = list(requests)
            asked.extend(each.sample_id for each in requests)
            return capture(requests)

        engine.capture = note
        return engine

    monkeypatch.setattr(stage, "make_engine", watched)
    record = run_capture(run)
    assert sorted(asked) == sorted(lost)
    assert record.summary["samples"] == len(rows)
    assert all(open_states(run).reader.get(row.sample_id) for row in rows)


def test_a_damaged_sample_is_captured_again(make_run) -> None:
    """Damage that happened before the statistics were computed is found by them, and mended."""
    run = make_run()
    run_capture(run)
    victim = rows_of(run)[2].sample_id
    path = run.folders.states / "samples" / f"{victim}.safetensors"
    os.truncate(path, path.stat().st_size - 8)
    shutil.rmtree(run.folders.states / "teacher")
    reopen(run)
    output = io.StringIO()
    run_capture(run, Console(file=output, width=200))
    assert "1 stored rows cannot be used" in output.getvalue()
    assert open_states(run).reader.get(victim).sample_id == victim


def test_other_inputs_are_not_reused(make_run, case, prepared) -> None:
    run = make_run()
    run_capture(run)
    with pytest.raises(FingerprintMismatch, match="dtype"):
        run_capture(make_run("capture.store_dtype=float32"))
    others = evolve(run, requirements=CaptureRequirements(layer_ids=(2,)))
    with pytest.raises(FingerprintMismatch, match="layer_ids"):
        run_capture(others)
    with pytest.raises(FingerprintMismatch):  # the reader as well, whatever the stage's record says
        _ = run_transport(run).reader(state_layout(others))
    record = run_capture(others, overwrite=True)
    assert record.summary["samples"] == len(rows_of(run))
    assert open_states(others).layout.layer_ids == (2, run.verifier.num_layers)


def test_another_template_or_tokenizer_is_another_layout(make_run) -> None:
    run = make_run()
    fingerprint = state_layout(run).fingerprint
    path = run.folders.prepared / "stage.json"
    original = json.loads(path.read_text())
    for key in ("tokenizer", "chat_template", "template_arguments"):
        assert key in original["fingerprint"]
        changed = {**original, "fingerprint": {**original["fingerprint"], key: "other"}}
        path.write_text(json.dumps(changed))
        assert state_layout(run).fingerprint != fingerprint, key


def test_prepared_data_must_be_there(make_run) -> None:
    run = make_run()
    shutil.rmtree(run.folders.prepared)
    with pytest.raises(OutputError, match="no complete prepared data"):
        run_capture(run)
    with pytest.raises(OutputError, match="no complete capture"):
        open_states(run)


@pytest.fixture
def partly_bad(case, tmp_path):
    """A function that resolves a run of 12 rows, and the ids of those that hold a bad token: some, not the longest."""
    verifier = make_tiny_verifier(tmp_path / "verifier", "llama")
    recipe = case.write_recipe(tmp_path, verifier, conversations=12)
    run_prepare(case.resolved(recipe))
    rows = sorted(rows_of(case.resolved(recipe)), key=lambda row: -len(row.token_ids))
    candidates = set(rows[-1].token_ids.tolist()) - set(rows[0].token_ids.tolist())
    holders = {token: [row.sample_id for row in rows if token in row.token_ids] for token in candidates}
    token = max(candidates, key=lambda each: (len(holders[each]), each))
    assert len(holders[token]) > 2
    damage(verifier, token)
    shutil.rmtree(tmp_path / "run" / "prepared")
    run_prepare(case.resolved(recipe))
    return (lambda *overrides: case.resolved(recipe, overrides)), set(holders[token])


def test_states_that_are_not_finite_are_refused_and_counted(partly_bad) -> None:
    make, bad = partly_bad
    run, output = make("capture.refused_share=1"), io.StringIO()
    record = run_capture(run, Console(file=output, width=200))
    states = open_states(run)
    assert set(states.refused) == bad
    assert record.summary["refused"] == len(bad)
    assert f"{len(bad)} rows were refused" in output.getvalue()
    assert states.reader.complete_ids() == {row.sample_id for row in rows_of(run)} - bad
    with pytest.raises(SampleMissing):
        states.teacher(next(iter(bad)))


def test_a_capture_that_refuses_too_many_rows_stops_and_can_go_on(partly_bad) -> None:
    make, bad = partly_bad
    count, less = len(rows_of(make())), "capture.batch_tokens=1"
    assert make().recipe.capture.refused_share == 0.1
    with pytest.raises(
        NumericsError, match=rf"{int(0.1 * count) + 1} of {count} rows are refused: .* not finite"
    ) as e:
        run_capture(make(less))
    assert "capture.refused_share is 0.1" in str(e.value)
    with pytest.raises(OutputError, match="no complete capture"):
        open_states(make())
    transport = run_transport(make())
    with transport.reader(state_layout(make())) as reader:
        stored = reader.complete_ids()
    assert stored
    # Exactly as many as are refused may be: then it goes on, and keeps what it has.
    run = make(less, f"capture.refused_share={len(bad) / count}")
    record = run_capture(run)
    assert record.summary["refused"] == len(bad)
    assert record.summary["samples"] == count - len(bad)
    lengths = {row.sample_id: len(row.token_ids) for row in rows_of(run)}
    assert record.summary["captured_tokens"] == sum(n for each, n in lengths.items() if each not in stored)


def test_nothing_but_nan_stops_the_run(case, tmp_path) -> None:
    verifier = make_tiny_verifier(tmp_path / "verifier", "llama")
    damage(verifier, slice(None))
    recipe = case.write_recipe(tmp_path, verifier, conversations=4)
    run = case.resolved(recipe, ["capture.refused_share=1"])
    run_prepare(run)
    with pytest.raises(NumericsError, match="4 of 4 rows are refused"):
        run_capture(run)


def damage(verifier: Path, tokens) -> None:
    path = verifier / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][tokens] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_disk_that_is_too_small_stops_it_before_it_starts(make_run, monkeypatch) -> None:
    run = make_run()
    kind = type(run_transport(run))
    monkeypatch.setattr(kind, "free_bytes", lambda self: 1000)
    monkeypatch.setattr(stage, "make_engine", lambda *a, **k: pytest.fail("started"))
    with pytest.raises(DiskSpaceError, match="1000 B are free") as caught:
        run_capture(run)
    assert "ignore_disk_space" in str(caught.value)
    monkeypatch.undo()
    monkeypatch.setattr(kind, "free_bytes", lambda self: 1000)
    assert run_capture(make_run("capture.ignore_disk_space=true")).complete


def test_what_compaction_needs_on_top_must_be_free_as_well(make_run, monkeypatch) -> None:
    run = make_run()
    kind = type(run_transport(run))
    lengths = [len(row.token_ids) for row in rows_of(run)]
    at_rest = run_transport(run).bytes_for(state_layout(run), sum(lengths), len(lengths))
    asked = []

    def twice(self, layout, tokens, samples, *, longest):
        asked.append((tokens, samples, longest))
        return 2 * at_rest

    monkeypatch.setattr(kind, "free_bytes", lambda self: int(1.5 * at_rest))
    monkeypatch.setattr(kind, "peak_bytes_for", twice)
    monkeypatch.setattr(stage, "make_engine", lambda *a, **k: pytest.fail("started"))
    output = io.StringIO()
    with pytest.raises(DiskSpaceError, match="will take up to"):
        run_capture(run, Console(file=output, width=200))
    assert asked == [(sum(lengths), len(lengths), max(lengths))]
    assert f"at most {human_bytes(2 * at_rest)} while they are stored" in output.getvalue()
    monkeypatch.undo()
    monkeypatch.setattr(kind, "free_bytes", lambda self: int(1.5 * at_rest))
    assert run_capture(run).complete


def test_hybrid_verifiers_are_refused_before_anything(make_run) -> None:
    run = make_run()
    config = {**run.verifier.text_config, "layer_types": ["mamba"] * run.verifier.num_layers}
    with pytest.raises(VerifierError, match="hybrid"):
        run_capture(evolve(run, verifier=evolve(run.verifier, text_config=config)))
    assert not run.folders.states.exists()


def test_a_transport_that_keeps_nothing_is_refused(make_run) -> None:
    run = make_run()
    passing = TransportGuarantees(persistent=False, random_access=False, concurrent_writers=True)
    with pytest.raises(UserError, match="does not keep samples"):
        run_capture(evolve(run, transport=evolve(run.transport, guarantees=passing)))


def test_captured_states_travel_into_workers(make_run) -> None:
    run = make_run()
    run_capture(run)
    states = open_states(run)
    sample_id = rows_of(run)[0].sample_id
    states.reader.get(sample_id)
    states.teacher(sample_id)
    copied = pickle.loads(pickle.dumps(states))
    assert torch.equal(copied.reader.get(sample_id).hidden_states, states.reader.get(sample_id).hidden_states)
    assert torch.equal(copied.teacher(sample_id)[1], states.teacher(sample_id)[1])


def test_an_address_opens_the_same_transport_elsewhere(make_run) -> None:
    run = make_run()
    run_capture(run)
    layout = state_layout(run)
    address = TransportAddress.of(run.transport, run.transport_options, run_transport(run).location, layout)
    travelled = TransportAddress.from_json(json.loads(json.dumps(address.to_json())))
    assert travelled.state_layout() == layout
    opened = travelled.open()
    assert opened.options == run.transport_options
    assert opened.reader(layout).complete_ids() == {row.sample_id for row in rows_of(run)}


def test_states_of_somebody_else_are_not_removed(make_run, tmp_path) -> None:
    """Where a transport keeps its samples outside of the run's folder, what is there already may be anybody's."""
    run = make_run()
    run_capture(run)
    theirs = run.folders.states / "samples"
    mine = make_run(f"output={tmp_path / 'mine'}", "capture.store_dtype=float32")
    shutil.copytree(run.folders.prepared, mine.folders.prepared)
    before = sorted(path.name for path in theirs.iterdir())

    def elsewhere(_run):
        return type(run_transport(run))(run.transport_options, theirs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "run_transport", elsewhere)
        for _ in range(2):  # a fresh start, and one after the failed one
            with pytest.raises(FingerprintMismatch):
                run_capture(mine)
            assert sorted(path.name for path in theirs.iterdir()) == before
        run_capture(mine, overwrite=True)
    assert "float32" in (theirs / "layout.json").read_text()


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def statistics_of(run) -> dict[str, list[torch.Tensor]]:
    table = StatisticsTable(run.folders.states / "teacher")
    return {row.sample_id: [each.clone() for each in table(row.sample_id)] for row in rows_of(run)}


def test_no_bit_of_the_statistics_can_change_unnoticed(make_run) -> None:
    run = make_run()
    run_capture(run)
    (part,) = (run.folders.states / "teacher").iterdir()
    sample_id, header = rows_of(run)[0].sample_id, 8 + int.from_bytes(part.read_bytes()[:8], "little")
    expected = [each.clone() for each in StatisticsTable(part.parent)(sample_id)]
    for offset in [*range(header), *range(header, part.stat().st_size, 13)]:
        flip(part, offset)
        if offset >= header:
            with pytest.raises(StatisticsDamaged, match="checksum differs") as caught:
                StatisticsTable(part.parent)(sample_id)
            assert str(part) in str(caught.value)
        else:  # what the header says beside the tensors, such as the format's name, decides nothing
            with contextlib.suppress(StatisticsDamaged):
                assert all(map(torch.equal, StatisticsTable(part.parent)(sample_id), expected))
        flip(part, offset)
    assert all(map(torch.equal, open_states(run).teacher(sample_id), expected))


@pytest.mark.parametrize("damage", ["cut", "flipped", "lost", "old"])
def test_damaged_statistics_are_computed_anew(make_run, monkeypatch, damage) -> None:
    run = make_run()
    run_capture(run)
    (part,) = (run.folders.states / "teacher").iterdir()
    expected = statistics_of(run)
    if damage == "cut":
        os.truncate(part, 100)
    elif damage == "flipped":
        flip(part, part.stat().st_size - 1)
    elif damage == "lost":
        part.unlink()
    else:  # as they were before they had a checksum
        save_file(load_file(part), part, metadata={"format": "draftsmith.teacher_statistics", "version": "1"})
    if damage != "lost":
        with pytest.raises(StatisticsDamaged, match=r"cannot be read|checksum differs"):
            statistics_of(run)
    reopen(run)
    monkeypatch.setattr(stage, "make_engine", lambda *a, **k: pytest.fail("captured again"))
    output = io.StringIO()
    run_capture(run, Console(file=output, width=200))
    assert (f"({part.name}); computing them anew" in output.getvalue()) == (damage != "lost")
    torch.testing.assert_close(statistics_of(run), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_a_capture_that_is_killed_goes_on(case, prepared, tmp_path) -> None:
    """kill -9 in the middle, the same command again: what was complete is neither lost nor done again."""
    shutil.copytree(prepared.parent / "run", tmp_path / "run")
    overrides = [f"output={tmp_path / 'run'}", "capture.batch_tokens=1"]
    command = [sys.executable, "-m", "draftsmith", "capture", str(prepared)]
    command += [word for override in overrides for word in ("--set", override)]
    run = case.resolved(prepared, overrides)
    samples = run.folders.states / "samples"
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 300
    while len(list(samples.glob("[0-9a-f]*.safetensors"))) < 4:
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    stored = {path.name: path.stat().st_mtime_ns for path in samples.glob("[0-9a-f]*.safetensors")}
    assert not json.loads((run.folders.states / "stage.json").read_text())["complete"]
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "are there already" in again.stdout + again.stderr
    assert {name: (samples / name).stat().st_mtime_ns for name in stored} == stored
    states = open_states(run)
    assert all(len(states.reader.get(row.sample_id).token_ids) == len(row.token_ids) for row in rows_of(run))
