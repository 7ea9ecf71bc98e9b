"""The train stage as a whole, on a tiny verifier's captured states."""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import signal
from pathlib import Path

import attrs
import pytest
import torch
from rich.console import Console

from draftsmith import api
from draftsmith.capture.run import run_capture
from draftsmith.checkpoint.training import checkpoints, load_training_weights, read_newest
from draftsmith.data.dataset import open_prepared
from draftsmith.errors import (
    ConfigError,
    FingerprintMismatch,
    NumericsError,
    OutputError,
    RanksLost,
    SampleCorrupt,
    SampleError,
    Stopped,
)
from draftsmith.hookspecs import hookimpl
from draftsmith.losses.options import LogAcceptanceOptions
from draftsmith.stages import Stage
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.train import loop, step
from draftsmith.train.run import prepare_training, run_train, train_fingerprint
from draftsmith.train.signals import StopRequest

pytestmark = pytest.mark.slow

TINY = Path(__file__).parent / "tiny"


@pytest.fixture(scope="module")
def case():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TINY))
        yield importlib.import_module("draftsmith_tiny.case")


@pytest.fixture(scope="module")
def captured(case, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    verifier = make_tiny_verifier(folder / "verifier", "llama")
    recipe = case.write_recipe(folder, verifier, conversations=40, train={"epochs": 2})
    case.prepare_and_capture(recipe)
    return recipe


@pytest.fixture
def run(case, captured, tmp_path):
    """``run(key=value)``: the captured run with changes of ``train:``, in a folder of its own."""
    output = tmp_path / "run"
    shutil.copytree(captured.parent / "run", output)

    def make(**train):
        changes = [f"train.{key}={'null' if value is None else value}" for key, value in train.items()]
        return case.resolved(captured, [f"output={output}", *changes])

    return make


def log_of(run):
    return [json.loads(line) for line in (run.folders.training / "metrics.jsonl").read_text().splitlines()]


def test_a_run_from_start_to_end(run):
    resolved, text = run(validate_every=4), io.StringIO()
    record = run_train(resolved, Console(file=text, width=60))
    said = text.getvalue()
    assert "parameters are trained" in said
    assert "full" in said
    steps = record.summary["steps"]
    log = log_of(resolved)
    assert [line["step"] for line in log if line["phase"] == "train"] == list(range(1, steps + 1))
    for epoch in range(resolved.recipe.train.epochs):
        samples = sum(line["samples"] for line in log if line["phase"] == "train" and line["epoch"] == epoch)
        assert samples == len(open_prepared(resolved.folders.prepared).train)
    validated = [line["step"] for line in log if line["phase"] == "validation"]
    assert validated == sorted({*range(4, steps + 1, 4), steps})
    train = [line["loss"] for line in log if line["phase"] == "train"]
    assert sum(train[-4:]) < sum(train[:4])
    for line in log:
        prefixes = [value for name, value in line.items() if name.startswith("prefix_")]
        assert line["eal"] == pytest.approx(1 + sum(prefixes))
        assert 0 < line["coverage"] < 1
    best = max((line for line in log if line["phase"] == "validation"), key=lambda line: (line["eal"], -line["loss"]))
    assert record.summary["best_step"] == best["step"]
    assert record.summary["best"]["eal"] == best["eal"]
    _, step = load_training_weights(resolved.folders.training)
    assert step == best["step"]
    # A complete stage is not run again.
    before = (resolved.folders.training / "metrics.jsonl").stat().st_mtime_ns
    assert run_train(resolved) == Stage("train", resolved.folders.training).record()
    assert (resolved.folders.training / "metrics.jsonl").stat().st_mtime_ns == before


def test_other_settings_are_another_training(run):
    run_train(run(epochs=1))
    with pytest.raises(FingerprintMismatch, match="learning_rate"):
        run_train(run(epochs=1, learning_rate=0.5))
    assert run_train(run(epochs=1, learning_rate=0.002), overwrite=True).complete


def test_a_run_that_cannot_be_built_takes_the_place_of_no_other(run):
    run_train(run(epochs=1))
    other = run(epochs=1, learning_rate=0.5)
    files = {path: path.read_bytes() for path in other.folders.training.rglob("*") if path.is_file()}
    (other.folders.states / "manifest.json").unlink()
    with pytest.raises(OutputError, match="manifest"):
        run_train(other, overwrite=True)
    assert {path: path.read_bytes() for path in other.folders.training.rglob("*") if path.is_file()} == files


def test_what_only_decides_when_to_write_may_change(run):
    assert train_fingerprint(run()) == train_fingerprint(run(checkpoint_every=3, keep_checkpoints=7))
    assert train_fingerprint(run()) != train_fingerprint(run(seed=1))


def test_the_defaults_of_losses_within_a_loss_decide_what_is_trained(case, captured):
    resolved = case.resolved(captured, ["loss={name: sum, options: {terms: {nla: 0.5}}}"])
    part = attrs.fields(LogAcceptanceOptions).floor
    assert train_fingerprint(resolved)["loss"]["parts"] == {"loss.options.terms.nla": {"floor": part.default}}
    bare = case.resolved(captured, ["loss={name: sum, options: {terms: {ce: 0.5}}}"])
    assert "parts" not in train_fingerprint(bare)["loss"]


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not(run):
    weights = []
    for seed in (0, 0, 1):
        resolved = run(epochs=1, seed=seed)
        run_train(resolved, overwrite=True)
        weights.append(dict(read_newest(resolved.folders.training).model))
        shutil.rmtree(resolved.folders.training)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_without_validation_rows_the_last_is_the_best(run, monkeypatch):
    from draftsmith.train import run as module

    whole = module.prepare_training

    def without(*arguments, **named):
        training = whole(*arguments, **named)
        return attrs.evolve(training, validation_rows=attrs.evolve(training.validation_rows, bins=()))

    monkeypatch.setattr(module, "prepare_training", without)
    resolved = run(epochs=1)
    record = run_train(resolved)
    assert record.summary["best_step"] == record.summary["steps"]
    assert load_training_weights(resolved.folders.training)[1] == record.summary["steps"]


def job_of(training, resolved, **changes):
    values = {
        "config": resolved.recipe.train,
        "objective": training.objective,
        "optimizers": training.optimizers,
        "device": training.device,
        "order": training.order,
        "load": training.load,
        "validation_bins": training.validation_rows.bins,
        "load_validation": training.load_validation,
        "folder": resolved.folders.training,
        "log": None,
        "events": None,
        "stop": StopRequest(),
    }
    return loop.Job(**{**values, **changes})


def test_validation_leaves_no_trace(run):
    resolved = run()
    training = prepare_training(resolved)
    model = training.model
    model.train()
    model.norm.eval()  # a module that its author keeps in evaluation mode stays there
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    first = loop.validate(job_of(training, resolved))
    second = loop.validate(job_of(training, resolved))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(first[name], second[name]) for name in first)
    # The modes come back after a failure as well.
    with pytest.raises(AttributeError):
        loop.validate(job_of(training, resolved, objective=attrs.evolve(training.objective, algorithm=None)))
    assert [module.training for module in model.modules()] == modes


def damage(resolved, count, table="train"):
    """Cut the states' files of *count* samples."""
    from draftsmith.data.dataset import open_prepared

    names = getattr(open_prepared(resolved.folders.prepared), table).sample_ids[:count]
    for name in names:
        (path,) = resolved.folders.states.rglob(f"{name}.safetensors")
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - 8)
    return names


def test_a_bad_sample_stops_the_run_by_name_or_is_skipped_and_counted(run):
    resolved = run(epochs=1)
    names = damage(resolved, 2)
    with pytest.raises(SampleCorrupt) as caught:
        run_train(resolved)
    assert caught.value.sample_id in names
    text = io.StringIO()
    record = run_train(run(epochs=1, bad_samples="skip"), Console(file=text, width=200))
    assert sorted(record.summary["skipped"]) == sorted(names)
    assert all(text.getvalue().count(f"sample {name}: ") == 1 for name in names)


def test_rows_of_which_nothing_can_be_read_are_steps_all_the_same(run, monkeypatch):
    """The forward runs for every row: whoever trains with others must not be missed in one."""
    resolved = run(epochs=1, bad_samples="skip", tokens_per_row=64, rows_per_step=2, validate_every=1)
    names = damage(resolved, 20)
    damage(resolved, 1000, "validation")
    training = prepare_training(resolved)
    ids = training.load._table.sample_ids
    lost = [bin_ for bin_ in training.order.bins if all(ids[index] in names for index in bin_)]
    assert lost
    scored = []
    score_row = step.score_row

    def watched(objective, row, generator):
        score = score_row(objective, row, generator)
        scored.append((len(row.sample_ids), score.value.requires_grad or not torch.is_grad_enabled()))
        return score

    monkeypatch.setattr(step, "score_row", watched)
    record = run_train(resolved)
    assert set(names) <= set(record.summary["skipped"])
    assert len(scored) == len(training.order.bins)
    assert sum(samples == 0 for samples, _ in scored) == len(lost)
    assert all(takes_part for _, takes_part in scored)


def test_what_is_bad_is_captured_anew_at_the_next_start(run):
    resolved = run(epochs=1)
    names = damage(resolved, 2)
    (lost,) = resolved.folders.states.rglob(f"{names[1]}.safetensors")
    lost.unlink()
    text = io.StringIO()
    with pytest.raises(SampleError):
        run_train(resolved, Console(file=text, width=200))
    assert "the next `draftsmith capture`" in text.getvalue()
    record = run_capture(resolved)
    assert record.summary["captured_tokens"] > 0
    assert run_train(resolved).summary["skipped"] == []
    assert run_capture(resolved) == record


def test_a_lost_manifest_is_written_anew_at_the_next_start(run):
    resolved = run(epochs=1)
    (resolved.folders.states / "manifest.json").unlink()
    with pytest.raises(OutputError, match="manifest"):
        run_train(resolved)
    run_capture(resolved)
    run_train(resolved)


def test_damaged_statistics_are_computed_anew_at_the_next_start(run):
    resolved = run(epochs=1)
    (part,) = (resolved.folders.states / "teacher").iterdir()
    os.truncate(part, 100)
    with pytest.raises(OutputError, match="statistics cannot be read"):
        run_train(resolved)
    assert run_capture(resolved).summary["captured_tokens"] == 0
    run_train(resolved)


def test_flex_attention_is_refused_where_it_cannot_train(run):
    with pytest.raises(ConfigError, match="backward"):
        run_train(run(attention="flex", device="cpu"))


def test_states_that_are_not_finite_never_reach_a_weight(run, monkeypatch):
    """Past a reader that does not look, the step itself refuses, and names the sample."""
    from draftsmith_tiny import transport

    resolved = run(epochs=1, checkpoint_every=1)
    from draftsmith.data.dataset import open_prepared

    victim = open_prepared(resolved.folders.prepared).train.sample_ids[0]
    get = transport.FilesReader.get

    def poisoned(self, sample_id, **kwargs):
        sample = get(self, sample_id, **kwargs)
        return (
            attrs.evolve(sample, hidden_states=sample.hidden_states * float("nan")) if sample_id == victim else sample
        )

    monkeypatch.setattr(transport.FilesReader, "get", poisoned)
    with pytest.raises(NumericsError) as caught:
        run_train(resolved)
    assert caught.value.where == f"samples {victim}"
    if checkpoints(resolved.folders.training):
        newest = read_newest(resolved.folders.training)
        assert all(torch.isfinite(tensor).all() for tensor in newest.model.values())


def test_a_signal_in_the_last_validation_costs_the_export_nothing(run, monkeypatch):
    """The step is saved before it is validated, and validated on resume: the checkpoint must learn of it."""
    resolved = run(epochs=2)
    run_train(resolved)
    folder = resolved.folders.training
    whole, log = read_newest(folder).state, (folder / "metrics.jsonl").read_bytes()
    assert whole.best.step == whole.step
    shutil.rmtree(folder)
    validate = loop.validate

    def interrupted(job):
        if (folder / "metrics.jsonl").read_bytes().count(b'"train"') == whole.step:
            os.kill(os.getpid(), signal.SIGTERM)
        return validate(job)

    monkeypatch.setattr(loop, "validate", interrupted)
    with pytest.raises(Stopped):
        run_train(resolved)
    assert read_newest(folder).state.validated < whole.step
    monkeypatch.setattr(loop, "validate", validate)
    run_train(resolved)
    assert read_newest(folder).state == whole
    assert load_training_weights(folder)[1] == whole.step
    assert (folder / "metrics.jsonl").read_bytes() == log


def test_the_launchers_signal_does_not_cut_short_what_is_said_of_a_lost_rank():
    """It sends SIGTERM to the ranks that are left, perhaps while one is on its way to say why it ends."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(NumericsError), StopRequest():
            raise NumericsError("the loss is not finite")
        assert signal.getsignal(signal.SIGTERM) is before
        with pytest.raises(RanksLost), StopRequest():
            raise RanksLost("another process of this training has ended")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_statistics_of_a_teacher_that_rounds_otherwise_are_not_used(run, dtype):
    """The capture's are of the dtype that its recipe trained in; training in another one computes its own."""
    resolved = run(epochs=1, compute_dtype=dtype)
    training = prepare_training(resolved)
    captured_in = json.loads((resolved.folders.states / "manifest.json").read_text())["teacher_dtype"]
    row = training.load(training.rows.bins[0]).row
    assert training.statistics == (captured_in == dtype)
    assert (row.teacher_token is not None) == training.statistics
    text = io.StringIO()
    run_train(resolved, Console(file=text, width=300))
    assert ("computed in another dtype" in text.getvalue()) == (captured_in != dtype)


class Recorder:
    def __init__(self):
        self.events = []

    @hookimpl
    def draftsmith_run_started(self, event):
        self.events.append(event)

    @hookimpl
    def draftsmith_step_finished(self, event):
        self.events.append(event)

    @hookimpl
    def draftsmith_checkpoint_saved(self, event):
        assert (event.path / "state.json").exists()
        self.events.append(event)

    @hookimpl
    def draftsmith_run_finished(self, event):
        self.events.append(event)


def test_observers_hear_everything_in_order(run, monkeypatch):
    from draftsmith.observers import Dispatcher
    from draftsmith.observers.dispatch import handlers_of
    from draftsmith.train import run as module

    recorder = Recorder()
    monkeypatch.setattr(module, "open_observers", lambda run: Dispatcher([("it", handlers_of(recorder))]))
    resolved = run(epochs=1, validate_every=None)
    record = run_train(resolved)
    events = recorder.events
    assert isinstance(events[0], api.RunStarted)
    assert (events[0].first_step, events[0].total_steps) == (0, record.summary["steps"])
    steps = [event.step for event in events if isinstance(event, api.StepFinished) and event.phase == "train"]
    assert steps == list(range(1, record.summary["steps"] + 1))
    assert [type(event) for event in events[-3:]] == [api.StepFinished, api.CheckpointSaved, api.RunFinished]
    assert events[-3].phase == "validation"
    assert events[-2].best
    assert (events[-1].outcome, events[-1].step) == ("completed", record.summary["steps"])


def test_states_must_be_captured_first(run):
    resolved = run()
    shutil.rmtree(resolved.folders.states)
    with pytest.raises(OutputError, match="not captured yet"):
        run_train(resolved)
    assert not resolved.folders.training.exists()
