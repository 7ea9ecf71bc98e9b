"""The algorithm's last hand on the trained draft: on the best weights, for the export, and for nothing else."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from draftsmith.checkpoint.export import own_notes
from draftsmith.checkpoint.training import load_final_weights, load_training_weights, read_newest
from draftsmith.errors import CheckpointError, NumericsError, Stopped
from draftsmith.interfaces import DraftAlgorithm
from draftsmith.stages import Stage
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.train import run as run_module
from draftsmith.train.run import run_train

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
    recipe = case.write_recipe(folder, verifier, conversations=40, train={"epochs": 2, "validate_every": 3})
    case.prepare_and_capture(recipe)
    return recipe


@pytest.fixture
def run(case, captured, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(captured.parent / "run", output)
    return case.resolved(captured, [f"output={output}"])


@pytest.fixture
def finishing(case, monkeypatch):
    """``finishing(function)``: the tiny algorithm finishes with *function*."""
    from draftsmith_tiny.algorithm import Tiny

    return lambda function: monkeypatch.setattr(Tiny, "finish", function)


def halve(self, model, validation):
    """Weights halved, and the mean acceptance of two passes over the validation rows."""
    assert not model.training
    with torch.no_grad():
        means = [
            torch.cat([scored.acceptance for _, scored in validation]).mean(),
            torch.cat([scored.acceptance for _, scored in validation]).mean(),
        ]
        model.fc.weight.mul_(0.5)
    assert means[0] == means[1]
    return {"mean": means[0], "rows": len(list(validation))}


def test_what_is_finished_is_exported_and_nothing_else_changes(run, finishing):
    finishing(halve)
    record = run_train(run)
    best, step = load_training_weights(run.folders.training, "best")
    final, of_step = load_final_weights(run.folders.training)
    assert of_step == step == record.summary["best_step"]
    assert torch.equal(final["fc.weight"], best["fc.weight"] * 0.5)
    assert all(torch.equal(final[name], best[name]) for name in best if name != "fc.weight")
    figures = record.summary["finish"]
    assert 0 < figures["mean"] < 1
    assert figures["rows"] > 1
    log = [json.loads(line) for line in (run.folders.training / "metrics.jsonl").read_text().splitlines()]
    assert log[-1] == {"step": step, "phase": "finish", "tokens": record.summary["tokens"], **figures}
    assert own_notes(run, step)["finish"] == figures


def test_the_mean_is_that_of_the_best_validation(run, finishing):
    """The weights scored are the best ones, not the last, and the draws are those of every validation."""
    finishing(halve)
    record = run_train(run)
    alphas = [value for name, value in record.summary["best"].items() if name.startswith("alpha_")]
    assert min(alphas) <= record.summary["finish"]["mean"] <= max(alphas)


def test_an_algorithm_without_a_last_hand_leaves_nothing(run):
    record = run_train(run)
    assert "finish" not in record.summary
    assert "finish" not in own_notes(run, 1)
    assert not (run.folders.training / "finished").exists()
    final, step = load_final_weights(run.folders.training)
    best, best_step = load_training_weights(run.folders.training, "best")
    assert step == best_step
    assert all(torch.equal(final[name], best[name]) for name in best)


def test_the_checkpoint_notes_the_arguments_of_the_chat_template(case, captured):
    run = case.resolved(captured, ["data.template_arguments={enable_thinking: false}"])
    assert own_notes(run, 1)["template_arguments"] == {"enable_thinking": False}
    assert "template_arguments" not in own_notes(case.resolved(captured), 1)


def test_gradients_can_be_taken_between_the_rows(run, finishing):
    def finish(self, model, validation):
        for _, scored in validation:
            assert not scored.loss.requires_grad
            leaf = torch.ones((), requires_grad=True)
            (leaf * scored.acceptance.sum()).backward()
            assert leaf.grad is not None
        return {}

    finishing(finish)
    assert run_train(run).complete
    assert not (run.folders.training / "finished").exists()  # no figures: nothing was changed


def test_a_signal_stops_it_and_the_next_start_finishes(run, finishing):
    def interrupted(self, model, validation):
        os.kill(os.getpid(), signal.SIGTERM)
        return halve(self, model, validation)

    finishing(interrupted)
    with pytest.raises(Stopped):
        run_train(run)
    assert not (run.folders.training / "finished").exists()
    trained = dict(read_newest(run.folders.training).model)
    finishing(halve)
    assert run_train(run).summary["finish"]["rows"] > 1
    assert all(torch.equal(tensor, trained[name]) for name, tensor in read_newest(run.folders.training).model.items())


def test_a_kill_after_it_leads_to_the_same(run, finishing, monkeypatch):
    finishing(halve)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_summary", lambda *_: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            run_train(run)
    before, _ = load_final_weights(run.folders.training)
    log = (run.folders.training / "metrics.jsonl").read_bytes()
    assert not Stage("train", run.folders.training).record().complete
    run_train(run)
    after, _ = load_final_weights(run.folders.training)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert (run.folders.training / "metrics.jsonl").read_bytes() == log


@pytest.mark.parametrize("changed", [DraftAlgorithm.finish, lambda self, model, validation: dict[str, float]()])
def test_what_an_earlier_start_finished_is_not_exported_after_one_that_finishes_nothing(
    run, finishing, monkeypatch, changed
):
    finishing(halve)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_summary", lambda *_: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            run_train(run)
    finishing(changed)
    assert "finish" not in run_train(run).summary
    final, _ = load_final_weights(run.folders.training)
    best, _ = load_training_weights(run.folders.training, "best")
    assert all(torch.equal(final[name], best[name]) for name in best)


def test_a_figure_that_is_not_finite_is_an_error(run, finishing):
    finishing(lambda self, model, validation: {"good": 1.0, "temperature": float("nan")})
    with pytest.raises(NumericsError, match="temperature of the finished"):
        run_train(run)
    assert not (run.folders.training / "finished").exists()


def test_damaged_finished_weights_are_not_exported(run, finishing):
    finishing(halve)
    run_train(run)
    path = run.folders.training / "finished" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"abcd")
    with pytest.raises(CheckpointError, match="its checksum differs"):
        load_final_weights(run.folders.training)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_final_weights(run.folders.training)
