"""The observer. Imported when a recipe asks for it; wandb's own variables (WANDB_MODE, WANDB_PROJECT, …) steer it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from draftsmith import api
from draftsmith.hookspecs import hookimpl


class WeightsAndBiases:
    """One run of wandb for an output folder, however often training starts there."""

    def __init__(self, output: Path) -> None:
        # Fails here, at once, where wandb is not installed: draftsmith logs it in a line, and trains all the same.
        import wandb

        self._wandb: Any = wandb
        self._output = output
        self._run: Any = None

    @hookimpl
    def draftsmith_run_started(self, event: api.RunStarted) -> None:
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "draftsmith"),
            name=self._output.name,
            id=hashlib.sha256(str(self._output.resolve()).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(self._output),
            config={**event.recipe, "parameters": {"trained": event.trainable_parameters}},
        )
        # A resumed run repeats steps, which wandb's own step, that only grows, would refuse.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @hookimpl
    def draftsmith_step_finished(self, event: api.StepFinished) -> None:
        if self._run is not None:
            named = {f"{event.phase}/{name}": value for name, value in event.metrics.items()}
            self._run.log({"step": event.step, f"{event.phase}/tokens": event.tokens, **named})

    @hookimpl
    def draftsmith_checkpoint_saved(self, event: api.CheckpointSaved) -> None:
        if self._run is not None and event.best:
            self._run.summary["best_step"] = event.step

    @hookimpl
    def draftsmith_run_finished(self, event: api.RunFinished) -> None:
        if self._run is not None:
            self._run.summary["outcome"] = event.outcome
            self._run.finish(exit_code=int(event.outcome == "failed"))
            self._run = None
