"""The train stage: what is trained on what, from where it stopped, and what came of it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch
from attrs import frozen
from torch import nn

from draftsmith import __version__, api
from draftsmith.capture.run import capture_settings
from draftsmith.capture.states import open_states, prepared_record, suspect_capture
from draftsmith.capture.statistics import StatisticsDamaged
from draftsmith.checkpoint.training import (
    TrainingCheckpoint,
    TrainingState,
    load_weights_into,
    read_newest,
    restore_random_states,
    trained_tensors,
)
from draftsmith.checkpoint.warm_start import begin_from, checkpoint_digest
from draftsmith.config.structure import plain
from draftsmith.data.dataset import PreparedData, open_prepared
from draftsmith.device import deterministic_algorithms, resolve_dtype, training_device
from draftsmith.errors import ConfigError, OutputError, Problem, SampleError, Stopped, mark_shared
from draftsmith.observers import Dispatcher, open_observers
from draftsmith.stages import Stage, StageRecord, differences, digest
from draftsmith.train.distributed import ALONE, Ranks, join
from draftsmith.train.log import MetricsLog, NoLog
from draftsmith.train.loop import Job, finish, train
from draftsmith.train.online import OnlineCapture, OnlineRowLoader
from draftsmith.train.online_setup import open_capture
from draftsmith.train.optimizers import Optimizers, build_optimizers
from draftsmith.train.rows import Order, RowLoader, RowPlan, check_plan, derived_seed, plan_rows
from draftsmith.train.scoring import Teacher
from draftsmith.train.setup import ParameterCount, build_algorithm, build_draft, build_loss, count_parameters
from draftsmith.train.signals import StopRequest
from draftsmith.train.step import Objective
from draftsmith.verifier_weights import load_verifier_weights

if TYPE_CHECKING:
    from rich.console import Console

    from draftsmith.config.resolve import ResolvedRun

__all__ = ["METRICS_LOG", "Training", "prepare_training", "run_train", "train_fingerprint"]

METRICS_LOG = "metrics.jsonl"

#: Keys of ``train:`` that change when something is written, or what stops the run, not what is computed.
_HARMLESS = ("bad_samples", "checkpoint_every", "keep_checkpoints", "rank_timeout")


@frozen(kw_only=True)
class Training:
    """Everything built for a training that has not begun. Benchmarks and tests drive it step by step.

    Attributes:
        rows, validation_rows: the packed rows of the two tables.
        order: which rows each optimiser step trains on.
        statistics: the teacher's, of the capture, are of this training's dtype, and are read.
        online: what captures while this trains, not opened yet; None: states were captured before.
        fresh: state-dict names of what a warm start leaves freshly initialised.
        ranks: those that train it.
    """

    objective: Objective
    optimizers: Optimizers
    device: torch.device
    rows: RowPlan
    validation_rows: RowPlan
    order: Order
    load: RowLoader
    load_validation: RowLoader
    parameters: ParameterCount
    statistics: bool
    online: OnlineCapture | None = None
    fresh: tuple[str, ...] = ()
    ranks: Ranks = ALONE

    @property
    def model(self) -> nn.Module:
        return self.objective.model


def run_train(run: ResolvedRun, console: Console | None = None, *, overwrite: bool = False) -> StageRecord:
    """Train the draft; resumes where an earlier start was killed or stopped.

    Started by torchrun, the processes train together, and all return the same.

    Raises:
        Stopped: SIGTERM or SIGINT; the state is saved (exit code 143 or 130).
        FingerprintMismatch: the folder holds a training from other inputs.
        SampleError, TransportError, ServingError: the rows of the next step cannot be had; the state is saved.
        NumericsError, DiskSpaceError: training cannot go on; checkpoints are as they were.
        RanksLost: another process has ended.
    """
    config = run.recipe.train
    with join(config.device, timeout=config.rank_timeout) as ranks:
        record = ranks.share(_run_on(ranks, run, console if ranks.first else None, overwrite=overwrite))
    assert record is not None
    return record


def _run_on(ranks: Ranks, run: ResolvedRun, console: Console | None, *, overwrite: bool) -> StageRecord | None:
    """:func:`run_train` of one of the *ranks*; all but the first return nothing."""
    stage = Stage("train", run.folders.training)
    found = ranks.share(stage.compare(train_fingerprint(run), overwrite=overwrite) if ranks.first else "fresh")
    if found == "complete":
        return stage.record() if ranks.first else None

    def say(message: str) -> None:
        if console is not None:
            console.print(message, markup=False, highlight=False, soft_wrap=True)

    events = _Events(open_observers(run) if ranks.first else Dispatcher())
    started = time.monotonic()
    outcome: Literal["completed", "stopped", "failed"] = "failed"
    record: StageRecord | None = None
    try:
        # Signals are noted from here on: one that comes while the weights load stops before the first step.
        with StopRequest() as stop, deterministic_algorithms():
            training = prepare_training(run, ranks, say, overwrite=overwrite)
            _describe(run, training, say)
            with training.online or contextlib.nullcontext():
                if found == "fresh" and ranks.first:  # not before: a run that cannot be built takes no other's place
                    stage.claim()
                state, figures = _train(run, training, stop, events, console, say)
        if ranks.first:
            record = stage.finish(_summary(training, state) | figures)
        outcome = "completed"
    except Stopped:
        outcome = "stopped"
        raise
    except (SampleError, StatisticsDamaged):
        if run.recipe.captures_online:
            raise
        suspect_capture(run)
        say("the next `draftsmith capture` (or run) reads all states, and captures anew what is bad")
        raise
    finally:
        seconds = time.monotonic() - started
        events.observers.run_finished(api.RunFinished(step=events.step, outcome=outcome, seconds=seconds))
    return record


def train_fingerprint(run: ResolvedRun) -> dict[str, Any]:
    """What the trained weights depend on, by way of the captured states, or of what decides them.

    Raises:
        OutputError: the states are not complete; or the data, where states are captured while training.
    """
    recipe = run.resolved_recipe()
    settings = {name: value for name, value in recipe["train"].items() if name not in _HARMLESS}
    if settings.pop("warm_start") is not None:  # what is in the folder counts, not where it lies
        settings["warm_start"] = checkpoint_digest(_warm_start(run))
    facets = {name: recipe[name] for name in ("algorithm", "architecture", "loss", "mask")}
    parts = {part.where: part.options for part in run.loss_parts if part.options}
    if parts:  # the recipe names them, and leaves their defaults out
        facets["loss"] = {**facets["loss"], "parts": parts}
    return {**_previous(run), **facets, "train": settings, "reduction": _reduction(run)}


def _previous(run: ResolvedRun) -> dict[str, Any]:
    """The inputs of the train stage in its fingerprint: the stage before it, and what it does of that stage's work."""
    if run.recipe.captures_online:
        return {"previous": prepared_record(run).digest, "capture": capture_settings(run)}
    captured = Stage("capture", run.folders.states).record()
    if captured is None or not captured.complete:
        raise OutputError(
            "the hidden states are not captured yet", where=str(run.folders.states), hint="run `draftsmith capture`"
        )
    return {"previous": captured.digest}


def prepare_training(
    run: ResolvedRun,
    ranks: Ranks = ALONE,
    say: Callable[[str], None] = lambda message: None,
    *,
    overwrite: bool = False,
) -> Training:
    """Build everything from the prepared data and the captured states; trains nothing, writes nothing.

    Args:
        say: told what happens to a capture that goes on while this trains.
        overwrite: such a capture may remove states of another one that are in its place.

    Raises:
        DataError: there is no supervised row.
    """
    config = run.recipe.train
    device = training_device(config)
    compute_dtype = resolve_dtype(config.compute_dtype, device)
    data = open_prepared(run.folders.prepared)
    vocabulary = data.vocabulary()
    algorithm = build_algorithm(
        run,
        vocabulary,
        load_verifier_weights(run.verifier, trust_remote_code=run.recipe.trust_remote_code),
        device=device,
        compute_dtype=compute_dtype,
    )
    model = build_draft(algorithm, device, derived_seed(config.seed, "initialisation"))
    fresh: Sequence[str] = ()
    if config.warm_start is not None:
        fresh = begin_from(_warm_start(run), run.schema, model, algorithm.setup.vocabulary)
    objective = Objective(
        algorithm=algorithm,
        model=model,
        teacher=Teacher(
            algorithm.setup.weights, algorithm.setup.vocabulary, device=device, compute_dtype=compute_dtype
        ),
        loss=build_loss(run.registry.losses, run.loss.name, plain(run.loss_options)),
        reduction=_reduction(run),
        out_of_vocabulary=config.out_of_vocabulary,
        compute_dtype=compute_dtype,
    )
    source = _source(run, data, objective.teacher, ranks, say, overwrite=overwrite)
    rows = plan_rows(data.train, config.tokens_per_row, source.refused)
    check_plan(rows)
    return Training(
        objective=objective,
        optimizers=build_optimizers(model, config, {vocabulary.draft_size, vocabulary.target_size}),
        device=device,
        rows=rows,
        validation_rows=plan_rows(data.validation, config.tokens_per_row, source.refused),
        order=Order(bins=rows.bins, rows_per_step=config.rows_per_step, epochs=config.epochs, seed=config.seed),
        load=source.loader("train"),
        load_validation=source.loader("validation"),
        parameters=count_parameters(model),
        statistics=source.statistics,
        online=source.online,
        fresh=tuple(fresh),
        ranks=ranks,
    )


def _warm_start(run: ResolvedRun) -> Path:
    assert run.recipe.train.warm_start is not None
    return Path(run.recipe.train.warm_start).expanduser()


def _train(
    run: ResolvedRun,
    training: Training,
    stop: StopRequest,
    events: _Events,
    console: Console | None,
    say: Callable[[str], None],
) -> tuple[TrainingState, dict[str, Any]]:
    """The state at the end, and what the stage's summary tells beside it."""
    ranks = training.ranks
    _check_same_run(run, training)
    if ranks.world > 1:
        stop.share()
        torch.manual_seed(derived_seed(run.recipe.train.seed, "rank", ranks.rank))
    environment = _environment(training)
    state = TrainingState(step=0)
    found = _newest(run, training, say)
    if found is not None:
        state = _restore(training, found)
        say(f"going on after step {state.step} of {training.order.total_steps} ({found.path.name})")
        for line in _changes(state.environment, environment):
            say(f"note: {line}; the weights will not be bit-identical to those of an uninterrupted run")
    else:
        if run.recipe.train.warm_start is not None:
            fresh = f"; fresh are {', '.join(training.fresh)}" if training.fresh else ""
            say(f"training begins from the weights in {_warm_start(run)}{fresh}")
        if ranks.world > 1:  # another processor may have drawn other weights from the same seed
            load_weights_into(training.model, ranks.share_tensors(trained_tensors(training.model)))
    path, online = run.folders.training / METRICS_LOG, training.online
    with MetricsLog(path, keep=state.log_bytes) if ranks.first else NoLog() as log:
        job = Job(
            config=run.recipe.train,
            objective=training.objective,
            optimizers=training.optimizers,
            device=training.device,
            order=training.order,
            load=training.load,
            validation_bins=training.validation_rows.bins,
            load_validation=training.load_validation,
            folder=run.folders.training,
            log=log,
            events=events,
            stop=stop,
            environment=environment,
            console=console,
            warn=say,
            ranks=ranks,
        )
        if online is not None:
            online.begin()
            job = attrs.evolve(job, idle=lambda: online.idle(job.waits))
        events.step = state.step
        events.observers.run_started(
            api.RunStarted(
                output=run.folders.output,
                recipe=run.resolved_recipe(),
                total_steps=training.order.total_steps,
                first_step=state.step,
                trainable_parameters=training.parameters.trainable,
                frozen_parameters=training.parameters.frozen,
            )
        )
        training.model.train()
        state = train(job, state, saved=state.step if found is not None else -1)
        figures = ranks.share(finish(job, state) if ranks.first else {})
        summary: dict[str, Any] = {"finish": figures} if figures else {}
        if online is not None:
            summary["online"] = online.summary(job.waits)
            say(online.verdict(job.waits))
        return state, summary


def _check_same_run(run: ResolvedRun, training: Training) -> None:
    """Whether all ranks were started with the same recipe, data and versions: they would wait for each other forever.

    Raises:
        ConfigError: they were not; it says what differs.
    """
    recipe = run.resolved_recipe()
    mine = {
        "versions": {"draftsmith": __version__, "torch": torch.__version__},
        **{name: recipe[name] for name in ("verifier", "algorithm", "architecture", "loss", "mask", "train")},
        "rows": digest([training.rows.bins, training.validation_rows.bins]),
    }
    first, *others = training.ranks.exchange(json.loads(json.dumps(mine, default=str)))
    for rank, other in enumerate(others, start=1):
        lines = differences(first, other)
        if lines:
            hint = "start all of them with the same command, the same packages and the same prepared data"
            raise mark_shared(ConfigError([Problem(f"rank 0 → rank {rank}: {line}", hint=hint) for line in lines]))


def _newest(run: ResolvedRun, training: Training, say: Callable[[str], None]) -> TrainingCheckpoint | None:
    """The checkpoint to go on from: the newest whole one that the first rank finds, on every rank.

    Raises:
        CheckpointError: there are some, and all are damaged.
    """
    ranks = training.ranks
    found = read_newest(run.folders.training, say) if ranks.first else None
    if ranks.world == 1:
        return found
    about = ranks.share(None if found is None else (found.path, found.state))
    if about is None:
        return None
    path, state = about
    return TrainingCheckpoint(
        path=path,
        state=state,
        model=ranks.share_tensors(found.model if found else None),
        optimizer=ranks.share_tensors(found.optimizer if found else None),
    )


class _Events:
    """Passes events of the loop on to the observers, and remembers the last step for the end of the run."""

    def __init__(self, observers: Dispatcher) -> None:
        self.observers = observers
        self.step = 0

    def step_finished(self, event: api.StepFinished) -> None:
        self.step = event.step
        self.observers.step_finished(event)

    def checkpoint_saved(self, event: api.CheckpointSaved) -> None:
        self.observers.checkpoint_saved(event)


def _restore(training: Training, found: TrainingCheckpoint) -> TrainingState:
    load_weights_into(training.model, found.model)
    training.optimizers.load_state_tensors(found.optimizer)
    restore_random_states(found.state.random_states, training.ranks.rank)
    return found.state


@frozen(kw_only=True)
class _Source:
    """Where rows come from.

    Attributes:
        loader: ``train`` or ``validation`` → a loader of its own, since each reads in a thread of its own.
        refused: ids of rows that are known to have no states.
        statistics, online: as in :class:`Training`.
    """

    loader: Callable[[str], RowLoader]
    refused: Container[str] = ()
    statistics: bool = True
    online: OnlineCapture | None = None


def _source(
    run: ResolvedRun,
    data: PreparedData,
    teacher: Teacher,
    ranks: Ranks,
    say: Callable[[str], None],
    *,
    overwrite: bool,
) -> _Source:
    config, online = run.recipe.train, run.recipe.online
    settings: dict[str, Any] = {
        "capacity": config.tokens_per_row,
        "last_hidden": run.requirements.last_is_extra(run.verifier.num_layers),
        "bad_samples": config.bad_samples,
    }
    if run.recipe.captures_online:
        capture = open_capture(run, data, teacher.statistics, ranks, say, overwrite=overwrite)
        if online.missing != "regenerate":
            settings["bad_samples"] = online.missing

        def asking(name: str) -> RowLoader:
            tables = (getattr(each, name) for each in (data, open_prepared(run.folders.prepared)))
            return OnlineRowLoader(*tables, capture=capture, **settings)

        return _Source(loader=asking, online=capture)
    states = open_states(run)
    # A teacher of another dtype rounds otherwise: its argmax and log-sum-exp are not those of this one's logits.
    fits = states.teacher_dtype in (None, str(teacher.compute_dtype).removeprefix("torch."))
    return _Source(
        loader=lambda name: RowLoader(getattr(data, name), open_states(run), statistics=fits, **settings),
        refused=states.refused,
        statistics=fits,
    )


def _reduction(run: ResolvedRun) -> Literal["masked_mean", "weighted_mean", "local_mean"]:
    asked = run.recipe.train.reduction
    return run.algorithm.reduction if asked == "algorithm" else asked


def _describe(run: ResolvedRun, training: Training, say: Callable[[str], None]) -> None:
    rows, objective = training.rows, training.objective
    say(str(training.parameters))
    say(
        f"{len(rows.bins)} rows of {rows.capacity} tokens, {rows.fill:.1%} full; "
        f"{len(training.validation_rows.bins)} for validation; {training.order.total_steps} steps on "
        f"{training.device} in {str(objective.compute_dtype).removeprefix('torch.')}"
        + (f", by {training.ranks.world} processes" if training.ranks.world > 1 else "")
    )
    if not training.statistics:
        say(
            "the capture's statistics of the teacher were computed in another dtype: they are computed anew in every "
            "step, which takes longer; `draftsmith capture --overwrite` makes them in this one"
        )
    for name, plan in (("training", rows), ("validation", training.validation_rows)):
        if plan.truncated or plan.dropped:
            say(
                f"{name}: {plan.truncated} samples cut to {plan.capacity} tokens, "
                f"{plan.dropped} left out without a supervised token or without states"
            )


def _environment(training: Training) -> dict[str, str]:
    """What decides the last bits: kernels are chosen by device and version, sums are split by threads."""
    device = training.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "device": f"{device.type} {name}",
        "compute dtype": str(training.objective.compute_dtype),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "processes": str(training.ranks.world),
    }


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [f"{key} was {before[key]}, is {now[key]}" for key in now if before.get(key, now[key]) != now[key]]


def _summary(training: Training, state: TrainingState) -> dict[str, Any]:
    best = state.best
    return {
        "steps": state.step,
        "tokens": state.tokens,
        "rows": len(training.rows.bins),
        "fill": round(training.rows.fill, 4),
        "truncated": training.rows.truncated,
        "left_out": training.rows.dropped,
        "skipped": list(state.skipped),
        "trainable_parameters": training.parameters.trainable,
        "frozen_parameters": training.parameters.frozen,
        "validation": dict(state.validation),
        "best_step": best.step if best else state.step,
        "best": dict(best.metrics) if best else {},
    }
