"""The capture stage: from prepared rows to stored hidden states and the teacher's statistics of them."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import cattrs
from attrs import define, field

from draftsmith.capture.address import TransportAddress, open_reader, open_writer
from draftsmith.capture.engines import CaptureEngine, CaptureSetup, Request
from draftsmith.capture.plan import Plan, check_disk, check_verifier, human_seconds
from draftsmith.capture.states import (
    MANIFEST,
    SAMPLES,
    SUSPECT,
    TEACHER,
    WORK,
    prepared_record,
    run_transport,
    state_layout,
)
from draftsmith.data.dataset import PreparedData, open_prepared
from draftsmith.device import resolve_dtype, training_device
from draftsmith.errors import FingerprintMismatch, NumericsError, SampleCorrupt, UserError
from draftsmith.interfaces import HiddenStateTransport, StateLayout
from draftsmith.plugins.results import check_ids
from draftsmith.progress import stage_progress
from draftsmith.stages import Stage, StageRecord, write_json_atomically

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from draftsmith.config.resolve import ResolvedRun

__all__ = [
    "capture_fingerprint",
    "capture_settings",
    "capture_setup",
    "dtype_of_verifier",
    "make_engine",
    "run_capture",
]

#: Rows whose tokens are read and sent to an engine at a time, so that a long capture does not hold them all.
_WAVE_ROWS = 4096


def run_capture(run: ResolvedRun, console: Console | None = None, *, overwrite: bool = False) -> StageRecord:
    """Capture the verifier's hidden states of all prepared rows, or find them captured. Goes on where it was killed.

    Raises:
        ConfigError: states are captured while training. VerifierError: a verifier that cannot be captured.
        DiskSpaceError: the states will not fit, or did not.
        FingerprintMismatch: the folder holds states of other inputs.
        NumericsError: the states of more rows than ``capture.refused_share`` allows, or of all, are not finite. What
            is stored stays: a start that allows more goes on from there.
        ServingError, TransportError: the engine or the transport failed; what is stored stays.
    """
    check_verifier(run.verifier, run.requirements)
    if not run.transport.guarantees.persistent or not run.transport.guarantees.random_access:
        raise UserError(
            f"transport {run.transport.name!r} does not keep samples, so capture cannot be a stage of its own",
            where="transport",
            hint="use a persistent transport with random access",
        )
    stage = Stage("capture", run.folders.states)
    state = stage.begin(capture_fingerprint(run), overwrite=overwrite)
    suspect = run.folders.states / SUSPECT
    if state == "complete":
        if not suspect.exists():
            record = stage.record()
            assert record is not None
            return record
        stage.reopen()
    if suspect.exists():
        # The statistics are computed from what is stored: making them anew reads and checks every sample.
        shutil.rmtree(run.folders.states / TEACHER, ignore_errors=True)
    transport = run_transport(run)
    training_device(run.recipe.train)  # what training cannot use is found out before hours of capture
    layout = state_layout(run)
    if overwrite and (state == "fresh" or not _fits(transport, layout)):
        # Of an earlier capture, where the transport is not in the folder. Without --overwrite it may be anybody's.
        transport.remove_all()
    summary = _Capture(run, console, transport, layout, run.capture_engine).make()
    suspect.unlink(missing_ok=True)
    return stage.finish(summary)


def _fits(transport: HiddenStateTransport, layout: StateLayout) -> bool:
    """Whether what is stored, if anything, was captured as this run would."""
    try:
        with open_reader(transport, layout) as reader:
            reader.complete_ids()
    except FingerprintMismatch:
        return False
    return True


def capture_fingerprint(run: ResolvedRun) -> dict[str, Any]:
    """All that the stored states depend on.

    Raises:
        OutputError: there is no complete prepared data.
    """
    options = cattrs.unstructure(run.transport_options)
    return {
        "previous": prepared_record(run).digest,
        **capture_settings(run),
        "transport": {"name": run.transport.name, "options": options},
    }


def capture_settings(run: ResolvedRun) -> dict[str, Any]:
    """What decides the values of the states of a given row.

    Where they are stored does not, and may change between two starts of a training that captures for itself: other
    hosts, another store. Of the transport's options only those count that make it lose something.
    """
    capture, online = run.recipe.capture, run.recipe.online
    options = cattrs.unstructure(run.transport_options)
    defaults = {each.name: each.default for each in attrs.fields(type(run.transport_options))}
    lossy = {name: options[name] for name in run.transport.lossy if options[name] != defaults[name]}
    return {
        "verifier": run.verifier.fingerprint,
        "layer_ids": run.requirements.ids(run.verifier.num_layers),
        "engine": "vllm" if run.recipe.captures_online and online.endpoints else capture.engine,
        "compute_dtype": capture.dtype,
        "dtype": capture.store_dtype,
        **({"transport": lossy} if lossy else {}),
    }


def make_engine(
    name: str,
    run: ResolvedRun,
    transport: HiddenStateTransport,
    layout: StateLayout,
    *,
    longest: int,
) -> CaptureEngine:
    """The engine called *name*; loads nothing before it is entered."""
    setup = capture_setup(run, layout, longest=longest)
    if name == "vllm":
        from draftsmith.capture.engines.vllm import VllmEngine

        setup = attrs.evolve(setup, dtype=dtype_of_verifier(setup))
        address = TransportAddress.of(run.transport, run.transport_options, run.folders.states / SAMPLES, layout)
        return VllmEngine(setup, address)
    from draftsmith.capture.engines.transformers import TransformersEngine

    return TransformersEngine(setup, lambda: open_writer(transport, layout))


def capture_setup(run: ResolvedRun, layout: StateLayout, *, longest: int) -> CaptureSetup:
    """What an engine of *run* is built from; the longest row has *longest* tokens."""
    return CaptureSetup(
        verifier=run.verifier,
        layout=layout,
        dtype=run.recipe.capture.dtype,
        batch_tokens=run.recipe.capture.batch_tokens,
        longest=longest,
        work_folder=run.folders.states / WORK,
        trust_remote_code=run.recipe.trust_remote_code,
    )


def dtype_of_verifier(setup: CaptureSetup) -> str:
    """``auto`` resolved as the other engine resolves it, so that both compute alike."""
    from draftsmith.capture.engines.transformers import own_dtype, verifier_dtype
    from draftsmith.device import resolve_device

    dtype = verifier_dtype(setup.dtype, own_dtype(setup.verifier), resolve_device("auto"))
    return str(dtype).removeprefix("torch.")


@define
class _Capture:
    """One start of the stage."""

    run: ResolvedRun
    console: Console | None
    transport: HiddenStateTransport
    layout: StateLayout
    engine_name: str
    refused: dict[str, str] = field(factory=dict)
    captured_tokens: int = 0
    engine_seconds: float = 0.0
    compute_dtype: str = ""
    teacher_dtype: str | None = None

    def make(self) -> dict[str, Any]:
        prepared = open_prepared(self.run.folders.prepared)
        rows = _Rows(prepared)
        for attempt in range(2):
            self._capture_missing(rows)
            self.transport.compact(self.layout)
            bad = self._statistics(rows, prepared)
            if not bad:
                break
            if attempt:
                sample_id, reason = next(iter(bad.items()))
                raise SampleCorrupt(
                    f"{reason} (and {len(bad) - 1} more, although they were captured twice)",
                    sample_id=sample_id,
                    where=str(self.run.folders.states),
                    hint="check the disk",
                )
            self._say(f"{len(bad)} stored rows cannot be used ({next(iter(bad.values()))}); capturing them again")
            with open_reader(self.transport, self.layout) as reader:
                for sample_id in bad:
                    reader.delete(sample_id)
        return self._finish(rows)

    def _say(self, message: str) -> None:
        if self.console is not None:
            self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _capture_missing(self, rows: _Rows) -> None:
        with open_reader(self.transport, self.layout) as reader:
            complete = check_ids(reader.complete_ids, reader.complete_ids())
        missing = [place for place, each in enumerate(rows.sample_ids) if each not in complete]
        missing = [place for place in missing if rows.sample_ids[place] not in self.refused]
        lengths = [rows.lengths[place] for place in missing]
        plan = Plan.of(self.transport, self.layout, lengths, len(rows.sample_ids) - len(missing))
        self._say(f"capture: {plan.describe()}")
        check_disk(plan, str(self.run.folders.states), ignore=self.run.recipe.capture.ignore_disk_space)
        if not missing:
            return
        self._say(f"loading the verifier ({self.engine_name})")
        engine = make_engine(self.engine_name, self.run, self.transport, self.layout, longest=max(lengths))
        with engine:
            self.compute_dtype = engine.compute_dtype
            self._run_engine(engine, rows, missing, plan.tokens)

    def _run_engine(self, engine: CaptureEngine, rows: _Rows, missing: Sequence[int], tokens: int) -> None:
        told = False
        with stage_progress(self.console, f"capture ({self.engine_name})", tokens, "tokens") as bar:
            for wave in _waves(missing, rows.lengths):
                for done in engine.capture(rows.request(place) for place in wave):
                    self.refused.update(done.refused)
                    self._check_refused(len(rows.sample_ids))
                    self.captured_tokens += done.tokens
                    self.engine_seconds += done.seconds
                    bar.advance(done.tokens)
                    if not told:  # the first rows are the probe: real work, measured
                        told = True
                        rate = done.tokens / max(done.seconds, 1e-9)
                        left = human_seconds((tokens - done.tokens) / rate)
                        self._say(f"{rate:.0f} tokens/s in {engine.compute_dtype}: about {left} to go")

    def _check_refused(self, count: int) -> None:
        """Stop as soon as more of the *count* rows are refused than may be: a draft of what is left would mislead."""
        refused, share = len(self.refused), self.run.recipe.capture.refused_share
        if refused / count > share or refused == count:
            raise NumericsError(
                f"the states of {refused} of {count} rows are refused: {next(iter(self.refused.values()))}",
                where=str(self.run.verifier.path),
                hint="use capture.dtype: float32 (float16 verifiers often overflow in other dtypes), or allow more: "
                f"capture.refused_share is {share:g}. What is stored stays",
            )

    def _statistics(self, rows: _Rows, prepared: PreparedData) -> dict[str, str]:
        if not self.run.requirements.last_hidden:
            return {}
        from draftsmith.capture.statistics import compute_statistics
        from draftsmith.train.scoring import Teacher
        from draftsmith.verifier_weights import load_verifier_weights

        device = training_device(self.run.recipe.train)
        dtype = resolve_dtype(self.run.recipe.train.compute_dtype, device)
        self.teacher_dtype = str(dtype).removeprefix("torch.")
        teacher = Teacher(
            load_verifier_weights(self.run.verifier, trust_remote_code=self.run.recipe.trust_remote_code),
            prepared.vocabulary(),
            device=device,
            compute_dtype=dtype,
        )
        usable = [place for place, each in enumerate(rows.sample_ids) if each not in self.refused]
        tokens = sum(rows.lengths[place] for place in usable)
        with (
            open_reader(self.transport, self.layout) as reader,
            stage_progress(self.console, "teacher statistics", tokens, "tokens") as bar,
        ):
            return compute_statistics(
                self.run.folders.states / TEACHER,
                reader,
                self.layout,
                (rows.tokens(place) for place in usable),
                teacher.statistics,
                lambda count: bar.advance(count),
                self._say,
            )

    def _finish(self, rows: _Rows) -> dict[str, Any]:
        if self.refused:
            self._say(f"{len(self.refused)} rows were refused: {next(iter(self.refused.values()))}")
        kept = [length for each, length in zip(rows.sample_ids, rows.lengths, strict=True) if each not in self.refused]
        write_json_atomically(
            self.run.folders.states / MANIFEST,
            {
                "layout": attrs.asdict(self.layout),
                "transport": self.run.transport.name,
                "samples": len(kept),
                "tokens": sum(kept),
                "refused": self.refused,
                "teacher_dtype": self.teacher_dtype,
            },
        )
        with contextlib.suppress(OSError):
            (self.run.folders.states / WORK).rmdir()
        return {
            "samples": len(kept),
            "tokens": sum(kept),
            "refused": len(self.refused),
            "bytes": self.transport.bytes_for(self.layout, sum(kept), len(kept)),
            "engine": self.engine_name,
            "compute_dtype": self.compute_dtype,
            "captured_tokens": self.captured_tokens,
            "tokens_per_second": round(self.captured_tokens / self.engine_seconds, 1) if self.engine_seconds else None,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


class _Rows:
    """The rows of both splits, each id once."""

    def __init__(self, prepared: PreparedData) -> None:
        self._places: list[tuple[Any, int]] = []
        self.sample_ids: list[str] = []
        self.lengths: list[int] = []
        seen: set[str] = set()
        for table in (prepared.train, prepared.validation):
            for index, (sample_id, length) in enumerate(zip(table.sample_ids, table.lengths, strict=True)):
                if sample_id not in seen:
                    seen.add(sample_id)
                    self._places.append((table, index))
                    self.sample_ids.append(sample_id)
                    self.lengths.append(length)

    def tokens(self, place: int) -> tuple[str, Tensor]:
        table, index = self._places[place]
        return self.sample_ids[place], table[index].token_ids

    def request(self, place: int) -> Request:
        sample_id, token_ids = self.tokens(place)
        return Request(sample_id, token_ids.tolist())


def _waves(places: Sequence[int], lengths: Sequence[int]) -> Iterator[Sequence[int]]:
    """Longest first, so that memory runs out at the beginning or not at all."""
    ordered = sorted(places, key=lambda place: -lengths[place])
    for start in range(0, len(ordered), _WAVE_ROWS):
        yield ordered[start : start + _WAVE_ROWS]
