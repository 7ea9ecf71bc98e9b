"""Training that begins from an exported checkpoint: from its weights, or not at all, with the reason."""

from __future__ import annotations

import importlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from draftsmith.checkpoint.training import load_training_weights, trained_tensors
from draftsmith.config.load import load_recipe
from draftsmith.config.resolve import resolve
from draftsmith.config.structure import plain
from draftsmith.errors import CheckpointError, ConfigError, FingerprintMismatch, UserError
from draftsmith.pipeline import check_data
from draftsmith.plugins import load_plugins
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.train.run import prepare_training, run_train, train_fingerprint

pytestmark = pytest.mark.slow

TINY = Path(__file__).parent / "tiny"


@pytest.fixture(scope="module")
def case():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TINY))
        yield importlib.import_module("draftsmith_tiny.case")


@pytest.fixture(scope="module")
def trained(case, tmp_path_factory):
    """A recipe whose training is done, and the checkpoint of it."""
    folder = tmp_path_factory.mktemp("tiny")
    verifier = make_tiny_verifier(folder / "verifier", "llama")
    recipe = case.write_recipe(folder, verifier, conversations=40, train={"epochs": 2})
    case.prepare_and_capture(recipe)
    run = case.resolved(recipe)
    run_train(run)
    training = prepare_training(run)
    weights, _ = load_training_weights(run.folders.training)
    vocabulary = training.objective.algorithm.setup.vocabulary
    # As a format may write it: the verifier's head too, rounded.
    tensors = {**weights, "d2t": vocabulary.d2t, "head.weight": training.model.head.weight.bfloat16()}
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    save_file(tensors, checkpoint / "model.safetensors")
    options = plain(run.algorithm_options)
    (checkpoint / "config.json").write_text(json.dumps({"steps": options["steps"], "width": options["width"]}))
    return recipe, checkpoint


@pytest.fixture
def warm(case, trained, tmp_path):
    """``warm(change=…)``: the run, begun anew from the checkpoint; *change* damages a copy of it first."""
    recipe, checkpoint = trained
    output = tmp_path / "run"
    shutil.copytree(recipe.parent / "run", output, ignore=shutil.ignore_patterns("training"))

    def make(change=lambda folder: None, *overrides):
        copy = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint", dirs_exist_ok=True))
        change(copy)
        return case.resolved(recipe, [f"output={output}", f"train.warm_start={copy}", *overrides])

    return make


def log_of(run):
    return [json.loads(line) for line in (run.folders.training / "metrics.jsonl").read_text().splitlines()]


def edit(**values):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def test_training_begins_from_the_checkpoints_weights(warm, trained):
    run = warm()
    training = prepare_training(run)
    stored = load_file(trained[1] / "model.safetensors")
    for name, tensor in trained_tensors(training.model).items():
        assert torch.equal(tensor, stored[name]), name
    # … and what is the verifier's stays the verifier's, whatever the checkpoint holds.
    head = training.objective.algorithm.setup.weights.lm_head[training.objective.algorithm.setup.vocabulary.t2d]
    assert torch.equal(training.model.head.weight, head.float())
    assert not torch.equal(training.model.head.weight, stored["head.weight"].float())
    assert not training.model.head.weight.requires_grad


def test_the_first_step_of_a_warm_start_has_learnt_already(warm, case, trained):
    cold = log_of(case.resolved(trained[0]))
    run = warm(lambda folder: None, "train.epochs=1")
    run_train(run)
    first, last = (line["loss"] for line in (cold[0], cold[-1]))
    assert abs(log_of(run)[0]["loss"] - last) < 0.25 * (first - last)


def test_one_that_is_resumed_goes_on_and_does_not_begin_again(warm, monkeypatch):
    run, first, second = warm(lambda folder: None, "train.epochs=1"), io.StringIO(), io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr("draftsmith.train.run._summary", lambda *_: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            run_train(run, Console(file=first))
    assert "training begins from the weights in" in first.getvalue()
    run_train(run, Console(file=second))
    assert "going on after step" in second.getvalue()
    assert "begins" not in second.getvalue()


def test_the_weights_are_part_of_the_fingerprint_and_their_place_is_not(warm, trained, case, tmp_path):
    run = warm()
    recipe, checkpoint = trained
    there = case.resolved(recipe, [f"output={run.folders.output}", f"train.warm_start={checkpoint}"])
    cold = case.resolved(recipe, [f"output={run.folders.output}"])
    assert train_fingerprint(run) == train_fingerprint(there)
    assert train_fingerprint(run) != train_fingerprint(cold)
    assert "warm_start" not in train_fingerprint(cold)["train"]
    run_train(run)

    def other(folder):
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, "norm.weight": tensors["norm.weight"] * 1.5}, folder / "model.safetensors")

    with pytest.raises(FingerprintMismatch, match="warm_start"):
        run_train(warm(other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "there is no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "there is no model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"1234"), "damaged"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (edit(speculators_model_type="tall"), "of type 'tall'"),
    ],
)
def test_a_checkpoint_that_cannot_be_begun_from_is_found_before_anything_starts(warm, change, message):
    with pytest.raises(UserError) as caught:
        warm(change)
    (problem,) = caught.value.problems
    assert message in problem.what
    assert "checkpoint" in problem.where
    assert "convert" not in str(problem.hint)  # nothing here does


@pytest.mark.usefixtures("case")
def test_what_comes_after_training_needs_the_checkpoint_no_more(trained, tmp_path):
    loaded = load_recipe(trained[0], [f"train.warm_start={tmp_path / 'gone'}"])
    registry = load_plugins()
    assert resolve(loaded, registry, ["export", "verify"]).recipe.train.warm_start
    for stage in ("prepare", "train"):
        with pytest.raises(UserError, match=r"there is no config\.json"):
            resolve(loaded, registry, [stage])


def test_what_the_format_refuses_is_reported(warm, case, monkeypatch):
    from draftsmith_tiny.algorithm import TinyFormat

    from draftsmith.errors import Problem

    def problems(self, config, options, verifier):
        assert options.width == config["width"]
        yield Problem("wrong way up", where="width", hint="turn it")

    monkeypatch.setattr(TinyFormat, "warm_start_problems", problems)
    with pytest.raises(ConfigError, match="wrong way up") as caught:
        warm()
    assert caught.value.problems[0].hint == "turn it"


def test_other_layers_are_refused(warm, monkeypatch):
    from draftsmith_tiny.algorithm import TinyFormat

    from draftsmith.api import CaptureRequirements

    monkeypatch.setattr(TinyFormat, "capture", lambda self, config, verifier: CaptureRequirements(layer_ids=(0, 1)))
    with pytest.raises(ConfigError, match=r"layers \[0, 1\]"):
        warm()


def test_a_malformed_config_names_the_file(warm, monkeypatch):
    from draftsmith_tiny.algorithm import TinyFormat

    monkeypatch.setattr(TinyFormat, "capture", lambda self, config, verifier: config["nothing"])
    with pytest.raises(CheckpointError, match="malformed") as caught:
        warm()
    assert "config.json" in str(caught.value.where)


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (torch.zeros(128, dtype=torch.int64), r"128 tokens, \d+ of them not in.*\n.*prepare what the checkpoint"),
        (torch.full((128,), 900), "outside the verifier's"),
    ],
)
def test_another_vocabulary_is_refused(warm, d2t, message):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, "d2t": d2t}, folder / "model.safetensors")

    run = warm(change)
    with pytest.raises(CheckpointError, match=message):
        prepare_training(run)
    with pytest.raises(CheckpointError, match=message):
        check_data(run)  # before anything is captured


def test_the_vocabulary_is_compared_once_there_is_one(warm):
    run = warm()
    check_data(run)
    shutil.rmtree(run.folders.prepared)
    check_data(run)


@pytest.mark.parametrize(("draft_size", "theirs"), [("64", 128), ("null", 128), ("128", 320)])
def test_a_vocabulary_of_another_size_is_refused_before_anything_starts(warm, draft_size, theirs):
    def full(folder):
        tensors = load_file(folder / "model.safetensors")
        del tensors["d2t"]
        save_file(tensors, folder / "model.safetensors")

    change = full if theirs == 320 else lambda folder: None
    with pytest.raises(ConfigError, match=f"has {theirs} tokens, this run's") as caught:
        warm(change, f"vocabulary.draft_size={draft_size}")
    (problem,) = caught.value.problems
    assert "train.warm_start" in problem.where
    assert problem.hint == f"set vocabulary.draft_size to {theirs}"


def test_a_vocabulary_in_another_order_is_refused(warm):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        places = torch.arange(len(tensors["d2t"]))
        tensors["d2t"] = (tensors["d2t"] + places).flip(0) - places
        save_file(tensors, folder / "model.safetensors")

    with pytest.raises(CheckpointError, match="in another order"):
        prepare_training(warm(change))


def test_tensors_of_another_shape_are_refused(warm):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, "norm.weight": torch.ones(3)}, folder / "model.safetensors")

    with pytest.raises(CheckpointError, match=r"do not fit the draft"):
        prepare_training(warm(change))


def test_asking_imports_no_torch(trained):
    code = (
        "import sys; from pathlib import Path\n"
        "from draftsmith.checkpoint.warm_start import warm_start_problems as ask\n"
        "from draftsmith import api\n"
        "schema = api.CheckpointSchema(name='x', summary='', implementation='nowhere:X', speculators_types=('x',))\n"
        f"config = Path({str(trained[1])!r}) / 'config.json'\n"
        'config.write_text(\'{"speculators_model_type": "y"}\')\n'
        "(problem,) = ask(config.parent, schema, None, None, None)\n"
        "assert 'begins from x' in problem.what and 'torch' not in sys.modules\n"
    )
    before = (trained[1] / "config.json").read_text()
    try:
        subprocess.run([sys.executable, "-c", code], check=True)
    finally:
        (trained[1] / "config.json").write_text(before)
