"""The training loop, top to bottom.

A run is a sequence of optimiser steps; everything that one of them depends on is a function of the recipe, the data
and the step's number, or is in the :class:`~draftsmith.checkpoint.training.TrainingState`. Between two steps come
the duties of the step just done, in this order: validate, save, stop if asked to.

Several ranks run this same loop side by side, each with its own rows; whatever they decide by is the same on all. The
first one alone has a log, a console and observers, and writes checkpoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs
import torch
from attrs import field, frozen
from torch import nn

from draftsmith import api
from draftsmith.checkpoint.training import (
    Best,
    TrainingState,
    load_training_weights,
    load_weights_into,
    prune,
    random_states,
    remove_finished,
    trained_tensors,
    update_state,
    write_checkpoint,
    write_finished,
)
from draftsmith.config.schema import TrainConfig
from draftsmith.errors import DataError, DraftsmithError, NumericsError, Stopped, mark_shared
from draftsmith.interfaces import DraftAlgorithm, DraftSlots, ScoredSlots
from draftsmith.plugins.results import check_metrics
from draftsmith.progress import stage_progress
from draftsmith.train.distributed import ALONE, Ranks
from draftsmith.train.log import MetricsLog
from draftsmith.train.metrics import Pairs, add_pairs, divide
from draftsmith.train.optimizers import Optimizers
from draftsmith.train.rows import Interrupted, LoadedRow, Order, RowLoader, Waits, derived_seed, to_device
from draftsmith.train.schedule import rate_factor, warmup_steps
from draftsmith.train.signals import StopRequest
from draftsmith.train.step import Objective, RowScore, gather_rows, score_row, train_step

if TYPE_CHECKING:
    from rich.console import Console

Value = TypeVar("Value")
#: (sample id, reason) of samples that were left out of a row.
Skipped = tuple[tuple[str, str], ...]
#: Of a row its tokens, its samples, and what was left out of it.
Contents = tuple[int, int, Skipped]

#: Metrics shown beside the progress bar.
_SHOWN = ("loss", "eal", "position_0_acc")

__all__ = ["Events", "Job", "finish", "train", "validate"]


class Events(Protocol):
    """Where observer events go."""

    def step_finished(self, event: api.StepFinished) -> None: ...
    def checkpoint_saved(self, event: api.CheckpointSaved) -> None: ...


@frozen(kw_only=True)
class Job:
    """Everything that training needs and that does not change while it runs.

    Attributes:
        order: bins of every optimiser step.
        load: bin → training row.
        validation_bins, load_validation: the same for validation, in a fixed order; empty: no validation.
        folder: the training folder.
        environment: see :class:`~draftsmith.checkpoint.training.TrainingState`.
        warn: prints a message for the user.
        told: samples that the user was told about.
        waits: how long the trainer waited for rows.
        idle: shares of the time that somebody waited for another, by name, for the progress and the observers.
        ranks: this process among those that run the loop.
    """

    config: TrainConfig
    objective: Objective
    optimizers: Optimizers
    device: torch.device
    order: Order
    load: RowLoader
    validation_bins: tuple[tuple[int, ...], ...]
    load_validation: RowLoader
    folder: Path
    log: MetricsLog
    events: Events
    stop: StopRequest
    environment: Mapping[str, str] = field(factory=dict)
    console: Console | None = None
    warn: Callable[[str], None] = lambda message: None
    told: set[str] = field(factory=set)
    waits: Waits = field(factory=Waits)
    idle: Callable[[], Mapping[str, float]] = dict
    ranks: Ranks = ALONE

    @property
    def validate_every(self) -> int:
        return self.config.validate_every or self.order.steps_per_epoch

    @property
    def checkpoint_every(self) -> int:
        return self.config.checkpoint_every or self.order.steps_per_epoch


def train(job: Job, state: TrainingState, saved: int) -> TrainingState:
    """Train from *state* to the end.

    Args:
        state: where to begin; the weights, moments and generators are already those of this state.
        saved: step of the checkpoint that is on disk, or -1.

    Raises:
        Stopped: a signal came; the state is saved.
        SampleError, TransportError, ServingError: the rows of the next step cannot be had; the state is saved.
        NumericsError, DiskSpaceError: training cannot go on; the last checkpoint is untouched.
    """
    total, first = job.order.total_steps, state.step

    def bins() -> Iterator[Sequence[int]]:
        return (bin_ for step in job.order.steps_from(first) for bin_ in job.ranks.mine(step))

    rows = job.load.rows(bins, stopped=lambda: _is_told_to_stop(job), waits=job.waits)
    _exchange(job, None)  # a signal may have come to some rank while the weights were loading
    with closing(rows), stage_progress(job.console, "train", _all_tokens(job), "tokens") as bar:
        bar.advance(state.tokens)
        while True:
            if _validation_is_due(job, state):
                state = _with_validation(job, state)
                if state.step == saved and state.validated == saved:
                    _save(job, state, amend=True)
            if state.step != saved and _checkpoint_is_due(job, state):
                saved = _save(job, state)
            if job.stop:
                if state.step != saved:
                    _save(job, state)
                _exchange(job, None)  # none leaves while the first one writes: a launcher would end them all
                raise mark_shared(_stopped(job, state))
            if state.step == total:
                return state
            started = time.monotonic()
            loaded, outcome = _load(rows, len(_places(job, state.step)))
            found = _exchange(job, (outcome, _read(loaded)))
            outcomes = [each for each, _ in found]
            if "failed" in outcomes and state.step not in (0, saved):
                _save(job, state)  # what was trained so far is as good as it was
            if isinstance(loaded, DraftsmithError):
                raise loaded
            if "failed" in outcomes:
                job.ranks.exchange(None)  # which raises what the other rank raises
            if "stopped" in outcomes:
                continue  # to the duties of the step that was the last one
            in_order = job.ranks.in_order([each for _, each in found])
            state, tokens, shown = _one_step(job, state, loaded, in_order, started)
            bar.advance(tokens, **shown)


def _load(rows: Iterator[LoadedRow], count: int) -> tuple[list[LoadedRow] | DraftsmithError, str]:
    """This rank's rows of the next step, or why there are none: a signal came before they were there, or an error."""
    try:
        return [next(rows) for _ in range(count)], "loaded"
    except Interrupted:
        return [], "stopped"
    except DraftsmithError as error:
        return error, "failed"


def _read(loaded: list[LoadedRow] | DraftsmithError) -> list[Contents]:
    if isinstance(loaded, DraftsmithError):
        return []
    return [(row.tokens, len(row.row.sample_ids), row.skipped) for row in loaded]


def _one_step(
    job: Job,
    state: TrainingState,
    loaded: Sequence[LoadedRow],
    found: Sequence[Contents],
    started: float,
) -> tuple[TrainingState, int, dict[str, object]]:
    """The next optimiser step: its state, its tokens, and what the progress bar shows.

    Args:
        loaded: this rank's rows.
        found: what all ranks' rows hold, by place.
        started: when the step began to wait for its rows.
    """
    step = state.step
    left_out = [each for _, _, skipped in found for each in skipped]
    _tell_skipped(job, left_out)
    rates = job.optimizers.set_rate(_rate_factor(job, step))
    result = train_step(
        job.objective,
        job.optimizers,
        [to_device(row.row, job.device, job.objective.compute_dtype) for row in loaded],
        [_generator(job, "row", step, place) for place in _places(job, step)],
        clip_norm=job.config.clip_norm,
        ranks=job.ranks,
    )
    tokens = sum(count for count, _, _ in found)
    skipped = tuple(dict.fromkeys((*state.skipped, *(name for name, _ in left_out))))
    state = attrs.evolve(state, step=step + 1, tokens=state.tokens + tokens, skipped=skipped)
    _check_some_tokens(job, state)
    values = {**divide(result.pairs), "gradient_norm": result.gradient_norm}
    values |= {f"learning_rate_{name}": rate for name, rate in rates.items()}
    counts = {"tokens": state.tokens, "samples": sum(count for _, count, _ in found)}
    job.log.write({"step": state.step, "phase": "train", "epoch": job.order.epoch_of(step), **counts, **values})
    seconds = time.monotonic() - started
    idle = job.idle()
    job.events.step_finished(
        api.StepFinished(
            step=state.step,
            tokens=state.tokens,
            phase="train",
            metrics={**values, "tokens_per_second": tokens / max(seconds, 1e-9), **idle},
        )
    )
    shown: dict[str, object] = {name: value for name, value in values.items() if name in _SHOWN}
    shown |= {name: f"{share:.0%}" for name, share in idle.items()}
    return state, tokens, {"step": float(state.step), **shown}


# --- the duties between two steps ----------------------------------------------------------------------------------


def _validation_is_due(job: Job, state: TrainingState) -> bool:
    if not job.validation_bins or state.step == 0 or state.validated == state.step or job.stop:
        return False
    return state.step % job.validate_every == 0 or state.step == job.order.total_steps


def _checkpoint_is_due(job: Job, state: TrainingState) -> bool:
    if state.step == 0:
        return False
    best = state.best is not None and state.best.step == state.step
    return best or state.step % job.checkpoint_every == 0 or state.step == job.order.total_steps


def _with_validation(job: Job, state: TrainingState) -> TrainingState:
    """*state* with the validation of its step, unless a signal interrupted it: then it is due again on resume."""
    pairs = validate(job)
    if pairs is None:
        return state
    values = divide(pairs)
    # Where not one row could be read there is nothing to be best by.
    eal, loss = values.get("eal", 0.0), values.get("loss", float("inf"))
    best = Best(step=state.step, eal=eal, loss=loss, metrics=values)
    job.log.write({"step": state.step, "phase": "validation", "tokens": state.tokens, **values})
    job.events.step_finished(
        api.StepFinished(step=state.step, tokens=state.tokens, phase="validation", metrics=values)
    )
    best = best if best.beats(state.best) else state.best or best
    return attrs.evolve(state, validated=state.step, validation=values, best=best)


def validate(job: Job) -> Pairs | None:
    """Score all validation rows; None where a signal came in between.

    Changes nothing: the modules' train or eval modes and the global generators are as before, whatever happens.
    """
    parts: list[Pairs] = []
    places = range(len(job.validation_bins))
    with closing(_scored_validation(job, job.ranks.mine(places))) as rows:
        for _ in range(0, len(places), job.ranks.world):
            if job.stop:
                return None
            scores: list[RowScore] = []
            left_out: Skipped | None = ()
            try:
                if (scored := next(rows, None)) is not None:
                    scores, left_out = [scored[0]], scored[1]
            except Interrupted:
                left_out = None
            for skipped in _exchange(job, left_out):
                if skipped is None:
                    return None
                _tell_skipped(job, skipped)
            parts += [row.pairs for row in gather_rows(job.ranks, scores)]
    return add_pairs(parts)


def finish(job: Job, state: TrainingState) -> dict[str, float]:
    """Let the algorithm put its last hand on the best weights, and store what comes of it for the export.

    It asks for all validation rows, so of several ranks the first does it alone.

    Returns:
        The algorithm's figures; without any, nothing was changed, and nothing is stored.

    Raises:
        Stopped: a signal came in between; the trained weights are as they were.
        NumericsError: a figure is not finite.
    """
    algorithm, model = job.objective.algorithm, job.objective.model
    remove_finished(job.folder)  # of a start that was killed right after it: this one may have another last hand
    if type(algorithm).finish is DraftAlgorithm.finish:
        return {}
    weights, step = load_training_weights(job.folder, "best", job.warn)
    load_weights_into(model, weights)
    model.eval()
    try:
        figures = check_metrics(algorithm.finish, algorithm.finish(model, _ValidationSlots(job)))
    except Interrupted:
        job.stop.agree([job.stop.received])
        raise _stopped(job, state) from None
    bad = [name for name, value in figures.items() if not math.isfinite(value)]
    if bad:
        raise NumericsError(f"{', '.join(bad)} of the finished draft is not finite", where=str(job.folder))
    if not figures:
        return {}
    write_finished(job.folder, step, trained_tensors(model))
    job.log.write({"step": step, "phase": "finish", "tokens": state.tokens, **figures})
    job.events.step_finished(api.StepFinished(step=step, tokens=state.tokens, phase="finish", metrics=figures))
    return figures


class _ValidationSlots:
    """The validation rows that have slots, scored anew on every pass."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[tuple[DraftSlots, ScoredSlots]]:
        job = self._job
        with closing(_scored_validation(job, range(len(job.validation_bins)))) as rows:
            for score, skipped in rows:
                if _is_told_to_stop(job):
                    raise Interrupted
                _tell_skipped(job, skipped)
                if score.scored is not None:
                    yield score.slots, score.scored


def _scored_validation(job: Job, places: Sequence[int]) -> Generator[tuple[RowScore, Skipped], None, None]:
    """Validation rows, and what was left out of each; with the same draws every time, so that they can be compared.

    Raises:
        Interrupted: a signal came, and the next row was not there.
    """
    rows = job.load_validation.rows(
        lambda: (job.validation_bins[place] for place in places),
        stopped=lambda: _is_told_to_stop(job),
        waits=job.waits,
    )
    with closing(rows):
        for place, loaded in zip(places, rows, strict=True):
            row = to_device(loaded.row, job.device, job.objective.compute_dtype)
            with _evaluating(job.objective.model, job.device):  # left before whoever asks goes on
                score = score_row(job.objective, row, _generator(job, "validation", place))
            yield score, loaded.skipped


@contextmanager
def _evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    devices = [device] if device.type == "cuda" else []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _save(job: Job, state: TrainingState, *, amend: bool = False) -> int:
    """Save *state*, remove the checkpoints no longer wanted, tell the observers; returns the step.

    Args:
        amend: the checkpoint of this step is there, without what its interrupted validation would have said.
    """
    checksums = weight_checksums(job.objective.model) if job.ranks.world > 1 else {}
    found = job.ranks.exchange((random_states(job.ranks.rank), checksums))
    _check_same_weights([each for _, each in found])
    generators = {name: value for states, _ in found for name, value in states.items()}
    if not job.ranks.first:
        return state.step
    state = attrs.evolve(state, log_bytes=job.log.sync(), random_states=generators, environment=dict(job.environment))
    if amend:
        path = update_state(job.folder, state)
    else:
        model = trained_tensors(job.objective.model)
        path = write_checkpoint(job.folder, state, model, job.optimizers.state_tensors())
    best = state.best.step if state.best else None
    prune(job.folder, current=state.step, keep=job.config.keep_checkpoints, best=best)
    job.events.checkpoint_saved(api.CheckpointSaved(step=state.step, path=path, best=best == state.step))
    return state.step


def _stopped(job: Job, state: TrainingState) -> Stopped:
    assert job.stop.number is not None
    return Stopped(
        f"training was stopped by {job.stop.name} after step {state.step} of {job.order.total_steps}; it is saved",
        number=job.stop.number,
        where=str(job.folder),
        hint="start the same command again to go on",
    )


# --- agreement of ranks ---------------------------------------------------------------------------------------------


def _exchange(job: Job, value: Value) -> list[Value]:
    """What every rank gave, by rank; and all of them know of the signals that any has received."""
    answers = job.ranks.exchange((job.stop.received, value))
    job.stop.agree(received for received, _ in answers)
    return [each for _, each in answers]


def weight_checksums(model: nn.Module) -> dict[str, int]:
    """Name → sum over the bits of each tensor that is trained."""
    return {
        name: int(tensor.view(torch.int32 if tensor.element_size() == 4 else torch.uint8).sum(dtype=torch.int64))
        for name, tensor in trained_tensors(model).items()
        if tensor.dim()
    }


def _check_same_weights(checksums: Sequence[Mapping[str, int]]) -> None:
    """Ranks do the same arithmetic on the same sums; kernels of another processor may round otherwise, unnoticed."""
    for rank, other in enumerate(checksums):
        different = [name for name, value in checksums[0].items() if other.get(name) != value]
        if different:
            error = NumericsError(
                f"the weights of rank {rank} are not those of rank 0: {', '.join(different[:4])}",
                where="the processes of this training",
                hint="run all of them on hosts with the same processors and versions of torch; the last checkpoint is "
                "intact",
            )
            raise mark_shared(error)


# --- small things ---------------------------------------------------------------------------------------------------


def _places(job: Job, step: int) -> Sequence[int]:
    """The places of this rank's rows among those of the step."""
    return job.ranks.mine(range(_rows_in(job, step)))


def _is_told_to_stop(job: Job) -> bool:
    """Whether this rank received a signal, be it agreed upon or not."""
    return job.stop.received is not None


def _rows_in(job: Job, step: int) -> int:
    """Rows of optimiser step *step*: the last one of an epoch may have fewer."""
    place = step % job.order.steps_per_epoch
    return min(job.order.rows_per_step, len(job.order.bins) - place * job.order.rows_per_step)


def _tell_skipped(job: Job, skipped: Sequence[tuple[str, str]]) -> None:
    """Each bad sample once, not once an epoch."""
    for sample_id, reason in skipped:
        if sample_id not in job.told:
            job.told.add(sample_id)
            job.warn(f"{reason}; it is left out")


def _rate_factor(job: Job, step: int) -> float:
    total = job.order.total_steps
    return rate_factor(job.config.schedule, step, total, warmup_steps(total, job.config.warmup_share))


def _generator(job: Job, *what: Any) -> torch.Generator:
    """The generator of one purpose, from the run's seed: no state to save, the same on every start."""
    return torch.Generator().manual_seed(derived_seed(job.config.seed, *what))


def _all_tokens(job: Job) -> int:
    lengths: Sequence[int] = job.load.lengths
    return sum(lengths[index] for bin_ in job.order.bins for index in bin_) * job.config.epochs


def _check_some_tokens(job: Job, state: TrainingState) -> None:
    if state.tokens == 0 and state.step == job.order.steps_per_epoch:
        error = DataError(
            f"not one sample could be read in a whole epoch; {len(state.skipped)} were left out as bad",
            where=str(job.folder),
            hint="run with train.bad_samples=stop to see the first fault, or capture again",
        )
        raise mark_shared(error)
