"""The observer. Imported when a recipe asks for it; MLflow's own variables (MLFLOW_TRACKING_URI, …) steer it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draftsmith import api
from draftsmith.hookspecs import hookimpl

#: Outcomes of a run, as MLflow has them.
_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow:
    """One run of MLflow for each start of a training, tagged with its output folder."""

    def __init__(self, output: Path) -> None:
        # Fails here, at once, where MLflow is not installed: draftsmith logs it in a line, and trains all the same.
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()
        self._output = output
        self._run: str | None = None

    @hookimpl
    def draftsmith_run_started(self, event: api.RunStarted) -> None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "draftsmith")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        tags = {"draftsmith.output": str(self._output), "draftsmith.first_step": str(event.first_step)}
        run = self._client.create_run(experiment, run_name=self._output.name, tags=tags)
        self._run = run.info.run_id
        for key, value in _leaves(event.recipe):
            self._client.log_param(self._run, key, str(value)[:500])  # every store takes that

    @hookimpl
    def draftsmith_step_finished(self, event: api.StepFinished) -> None:
        for name, value in {**event.metrics, "tokens": event.tokens}.items():
            if self._run is not None:
                self._client.log_metric(self._run, f"{event.phase}/{name}", value, step=event.step)

    @hookimpl
    def draftsmith_checkpoint_saved(self, event: api.CheckpointSaved) -> None:
        if self._run is not None and event.best:
            self._client.set_tag(self._run, "draftsmith.best_step", str(event.step))

    @hookimpl
    def draftsmith_run_finished(self, event: api.RunFinished) -> None:
        if self._run is not None:
            self._client.set_terminated(self._run, status=_STATUS[event.outcome])
            self._run = None


def _leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
