"""The captured states of a run: where they are, what they depend on, and how training opens them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.capture.address import open_reader, open_transport
from draftsmith.errors import OutputError
from draftsmith.interfaces import HiddenStateReader, HiddenStateTransport, StateLayout
from draftsmith.stages import Stage, StageRecord, digest

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.capture.statistics import StatisticsTable
    from draftsmith.config.resolve import ResolvedRun

__all__ = ["MANIFEST", "CapturedStates", "open_states", "run_transport", "state_layout", "suspect_capture"]

#: Below the capture's folder: the manifest, the transport's folder, the teacher's statistics, logs.
MANIFEST, SAMPLES, TEACHER, WORK = "manifest.json", "samples", "teacher", "work"
#: There where a bad sample was met in training.
SUSPECT = "suspect"
#: What of the prepare stage's fingerprint decides the tokens of a given row.
_TOKEN_KEYS = ("tokenizer", "chat_template", "template_arguments")


def prepared_record(run: ResolvedRun) -> StageRecord:
    """The record of *run*'s prepare stage.

    Raises:
        OutputError: there is no complete prepared data.
    """
    prepared = Stage("prepare", run.folders.prepared).record()
    if prepared is None or not prepared.complete:
        raise OutputError(
            "there is no complete prepared data",
            where=str(run.folders.prepared),
            hint="run `draftsmith prepare` first",
        )
    return prepared


def state_layout(run: ResolvedRun) -> StateLayout:
    """The layout of *run*'s states, with the fingerprint of all that they depend on.

    Rows are named by their content, so the fingerprint holds what *any* row's states depend on: the verifier, the
    tokenizer and the chat template with its arguments, the layer ids, and the dtypes. States captured while training
    depend on the recipe alone: a server that captures has no prepared data, and the tokens of each sample are compared
    when it is read. States that are deleted after use are of another layout than those that are kept, so that no run
    takes the one for the other, and removes what is to stay.

    Raises:
        OutputError: there is no complete prepared data, and the capture is a stage of its own.
    """
    if run.recipe.captures_online:
        decided_by: dict[str, Any] = {"online": "kept" if run.recipe.online.keep else "deleted after use"}
    else:
        prepared = prepared_record(run)
        decided_by = {"tokens": {key: prepared.fingerprint.get(key) for key in _TOKEN_KEYS}}
    layer_ids = run.requirements.ids(run.verifier.num_layers)
    dtype = run.recipe.capture.store_dtype
    fingerprint = {
        "verifier": run.verifier.fingerprint,
        **decided_by,
        "layer_ids": layer_ids,
        "compute_dtype": run.recipe.capture.dtype,
        "dtype": dtype,
    }
    return StateLayout(
        fingerprint=digest(fingerprint), layer_ids=layer_ids, hidden_size=run.verifier.hidden_size, dtype=dtype
    )


def run_transport(run: ResolvedRun) -> HiddenStateTransport:
    """The run's transport, on the run's folder."""
    return open_transport(run.transport, run.transport_options, run.folders.states / SAMPLES)


class CapturedStates:
    """What training reads: states through the transport's reader, and the teacher's statistics. Picklable.

    Attributes:
        transport: where the states are.
        layout: what every sample looks like.
        folder: the capture's folder.
        refused: id → reason, of rows whose states were not finite: they have none.
        teacher_dtype: torch's name of the dtype in which the teacher's statistics were computed; None: not known.
    """

    def __init__(
        self,
        transport: HiddenStateTransport,
        layout: StateLayout,
        folder: Path,
        refused: dict[str, str] | None = None,
        teacher_dtype: str | None = None,
    ) -> None:
        self.transport = transport
        self.layout = layout
        self.folder = folder
        self.refused = dict(refused or {})
        self.teacher_dtype = teacher_dtype
        self._reader: HiddenStateReader | None = None
        self._teacher: StatisticsTable | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_teacher": None}

    @property
    def reader(self) -> HiddenStateReader:
        """Opened on first use, once per process."""
        if self._reader is None:
            self._reader = open_reader(self.transport, self.layout)
        return self._reader

    def teacher(self, sample_id: str) -> tuple[Tensor, Tensor]:
        """The verifier's full-vocabulary argmax (int64 [T]) and log-sum-exp (float32 [T]) at each token.

        Raises:
            SampleMissing: none are stored for this sample.
        """
        if self._teacher is None:
            from draftsmith.capture.statistics import StatisticsTable

            self._teacher = StatisticsTable(self.folder / TEACHER)
        return self._teacher(sample_id)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def open_states(run: ResolvedRun) -> CapturedStates:
    """Open the states of a complete capture.

    Raises:
        OutputError: there is none, or it is not complete.
        FingerprintMismatch: the states there were captured otherwise (on first reading).
    """
    folder = run.folders.states
    record = Stage("capture", folder).record()
    hint = "run `draftsmith capture` first"
    if record is None or not record.complete:
        raise OutputError("there is no complete capture", where=str(folder), hint=hint)
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        refused = dict(manifest["refused"])
        teacher_dtype = manifest.get("teacher_dtype")
    except (OSError, ValueError, KeyError, TypeError) as error:
        suspect_capture(run)
        raise OutputError(
            f"the manifest of the capture cannot be read: {error}",
            where=str(path),
            hint="run `draftsmith capture` again: it reads all states, and writes it anew",
        ) from error
    return CapturedStates(run_transport(run), state_layout(run), folder, refused, teacher_dtype)


def suspect_capture(run: ResolvedRun) -> None:
    """After a bad sample: the next start of the capture reads every sample, and captures again what is bad.

    Training may go on meanwhile, if it is told to leave out what is bad.
    """
    with contextlib.suppress(OSError):  # the bad sample is what there is to report
        (run.folders.states / SUSPECT).touch()
