"""What a report is made of: the folders of runs, of evaluations and of sweeps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from draftsmith.config.resolve import RUN_FILE
from draftsmith.errors import DataError, OutputError
from draftsmith.evaluation.results import FILE, Evaluation, read_evaluation
from draftsmith.evaluation.sweep import SWEEP, Sweep, read_sweep
from draftsmith.stages import STAGES, RunFolders, Stage, StageRecord

__all__ = ["Run", "read_source"]

_METRICS = "metrics.jsonl"


@frozen(kw_only=True)
class Run:
    """A run's folder.

    Attributes:
        record: of ``run.json``: the resolved recipe, plugins, versions.
        stages: the records of those that began, in their order.
        metrics: lines of ``metrics.jsonl``.
    """

    name: str
    record: Mapping[str, Any]
    stages: tuple[StageRecord, ...] = ()
    metrics: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)


def read_source(path: Path) -> tuple[str, Run | Evaluation | Sweep]:
    """A name, and the run, the evaluation or the sweep at *path*.

    Raises:
        DataError: there is neither, or it cannot be read.
    """
    name = (path.parent if path.is_file() else path).resolve().name  # "." has one too
    if (path / RUN_FILE).is_file():
        return name, _read_run(path, name)
    if (path / SWEEP).is_file():
        return name, read_sweep(path / SWEEP)
    if path.is_file() or (path / FILE).is_file():
        return name, read_evaluation(path)
    raise DataError(
        "there is neither a run nor an evaluation",
        where=str(path),
        hint=f"name a folder with {RUN_FILE} (a run's output) or {FILE} (of `draftsmith evaluate`)",
    )


def _read_run(path: Path, name: str) -> Run:
    try:
        record = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError(f"it holds a {type(record).__name__}, not an object")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path / RUN_FILE), hint="run again") from error
    folders = RunFolders(path)
    places = {
        "prepare": folders.prepared,
        "capture": folders.states,
        "train": folders.training,
        "export": folders.checkpoint,
        "verify": folders.verification,
    }
    try:
        records = [Stage(name, places[name]).record() for name in STAGES if name in places]
    except OutputError as error:
        raise DataError(error.what, where=error.where, hint=error.hint) from error
    return Run(
        name=name,
        record=record,
        stages=tuple(each for each in records if each is not None),
        metrics=tuple(_metrics(folders.training / _METRICS)),
    )


def _metrics(path: Path) -> Iterator[Mapping[str, Any]]:
    """Complete lines; the last one may be cut while a training runs."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
