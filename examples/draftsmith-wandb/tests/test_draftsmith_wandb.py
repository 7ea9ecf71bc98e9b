"""The observer against the real wandb, which writes a file offline, and without it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import draftsmith_wandb
from draftsmith import api
from draftsmith.testing.public import private_imports
from draftsmith_wandb.tracker import WeightsAndBiases

installed = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


def step(number: int) -> api.StepFinished:
    return api.StepFinished(step=number, tokens=10 * number, phase="train", metrics={"loss": 1.5 / number})


@installed
def test_a_run_and_what_it_repeats_after_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    output = tmp_path / "my-draft"
    output.mkdir()
    for first in (0, 2):
        observer = WeightsAndBiases(output)
        started = {"total_steps": 4, "first_step": first, "trainable_parameters": 7, "frozen_parameters": 8}
        observer.draftsmith_run_started(
            api.RunStarted(output=output, recipe={"train": {"epochs": 3}}, **started)  # type: ignore[arg-type]
        )
        run = observer._run
        assert run.config["train"] == {"epochs": 3}
        for number in range(first + 1, 5):
            observer.draftsmith_step_finished(step(number))
        assert run.summary["train/loss"] == 1.5 / 4
        assert run.summary["step"] == 4
        observer.draftsmith_checkpoint_saved(api.CheckpointSaved(step=3, path=output, best=True))
        assert run.summary["best_step"] == 3
        observer.draftsmith_run_finished(api.RunFinished(step=4, outcome="completed", seconds=1.0))
        observer.draftsmith_step_finished(step(5))  # nobody listens any more
    files = sorted((output / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({each.name for each in files}) == 1  # one run, that both starts belong to
    assert all(each.stat().st_size > 0 for each in files)


def test_without_wandb_it_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="wandb"):
        WeightsAndBiases(tmp_path)


def test_it_imports_nothing_private() -> None:
    assert not private_imports(Path(draftsmith_wandb.__file__).parent)
