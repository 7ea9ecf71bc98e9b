"""Scalars for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith.stages import RunFolders

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoard"]


class TensorBoard:
    """Writes ``train/NAME`` and ``validation/NAME`` by optimiser step into ``training/tensorboard`` of the output.

    A run that resumes from a checkpoint repeats the steps after it. Their earlier values are purged (``purge_step``),
    so that the curves are those of the run that really led to the weights.
    """

    def __init__(self, output: Path) -> None:
        # Fails here, at once, where TensorBoard is not installed.
        from torch.utils.tensorboard import SummaryWriter

        self._open = SummaryWriter
        self._folder = RunFolders(output).training / "tensorboard"
        self._writer: SummaryWriter | None = None

    @hookimpl
    def draftsmith_run_started(self, event: api.RunStarted) -> None:
        # first_step steps are done; the next values have the number after it.
        purge = event.first_step + 1 if event.first_step or self._folder.exists() else None
        self._writer = self._open(str(self._folder), purge_step=purge)
        self._writer.add_scalar("parameters/trainable", event.trainable_parameters, event.first_step)
        self._writer.add_scalar("parameters/frozen", event.frozen_parameters, event.first_step)

    @hookimpl
    def draftsmith_step_finished(self, event: api.StepFinished) -> None:
        if self._writer is None:
            return
        for name, value in event.metrics.items():
            self._writer.add_scalar(f"{event.phase}/{name}", value, event.step)
        self._writer.add_scalar(f"{event.phase}/tokens", event.tokens, event.step)

    @hookimpl
    def draftsmith_checkpoint_saved(self, event: api.CheckpointSaved) -> None:
        if self._writer is not None:
            self._writer.flush()

    @hookimpl
    def draftsmith_run_finished(self, event: api.RunFinished) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
