"""The observer against the real MLflow, which keeps its runs in files, and without it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import draftsmith_mlflow
from draftsmith import api
from draftsmith.testing.public import private_imports
from draftsmith_mlflow.tracker import MLflow

installed = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="MLflow is not installed")


@installed
@pytest.mark.parametrize(
    ("outcome", "status"), [("completed", "FINISHED"), ("stopped", "KILLED"), ("failed", "FAILED")]
)
def test_a_run_as_mlflow_keeps_it(outcome: Any, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    output = tmp_path / "my-draft"
    observer = MLflow(output)
    recipe = {"algorithm": {"name": "mine", "options": {}}, "train": {"epochs": 3}, "verifier": "v" * 9000}
    observer.draftsmith_run_started(
        api.RunStarted(
            output=output, recipe=recipe, total_steps=2, first_step=0, trainable_parameters=7, frozen_parameters=8
        )
    )
    for number in (1, 2):
        observer.draftsmith_step_finished(
            api.StepFinished(step=number, tokens=10 * number, phase="train", metrics={"loss": 1.5 / number})
        )
    observer.draftsmith_checkpoint_saved(api.CheckpointSaved(step=2, path=output, best=True))
    observer.draftsmith_run_finished(api.RunFinished(step=2, outcome=outcome, seconds=1.0))

    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("draftsmith").experiment_id])
    assert (run.info.run_name, run.info.status) == ("my-draft", status)
    assert run.data.params["train.epochs"] == "3"
    assert run.data.params["algorithm.name"] == "mine"
    assert run.data.tags["draftsmith.best_step"] == "2"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [(1, 1.5), (2, 0.75)]
    assert run.data.metrics["train/tokens"] == 20


def test_without_mlflow_it_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(ImportError, match="mlflow"):
        MLflow(tmp_path)


def test_it_imports_nothing_private() -> None:
    assert not private_imports(Path(draftsmith_mlflow.__file__).parent)
