"""The train stage: what is trained on what, from where it stopped, and what came of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import frozen
from torch import nn

from draftsmith import __version__, api
from draftsmith.capture.states import CapturedStates, open_states, suspect_capture
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
from draftsmith.data.dataset import open_prepared
from draftsmith.device import deterministic_algorithms, resolve_dtype, training_device
from draftsmith.errors import ConfigError, OutputError, Problem, SampleError, Stopped, mark_shared
from draftsmith.observers import Dispatcher, open_observers
from draftsmith.stages import Stage, StageRecord, differences, digest
from draftsmith.train.distributed import ALONE, Ranks, join
from draftsmith.train.log import MetricsLog, NoLog
from draftsmith.train.loop import Job, finish, train
from draftsmith.train.optimizers import Optimizers, build_optimizers
from draftsmith.train.rows import Order, RowLoader, RowPlan, Table, check_plan, derived_seed, plan_rows
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
        SampleError, NumericsError, DiskSpaceError: training cannot go on; checkpoints are as they were.
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
            training = prepare_training(run, ranks)
            _describe(run, training, say)
            if found == "fresh" and ranks.first:  # not before: a run that cannot be built takes the place of no other
                stage.claim()
            state, figures = _train(run, training, stop, events, console, say)
        if ranks.first:
            record = stage.finish(_summary(training, state) | ({"finish": figures} if figures else {}))
        outcome = "completed"
    except Stopped:
        outcome = "stopped"
        raise
    except (SampleError, StatisticsDamaged):
        suspect_capture(run)
        say("the next `draftsmith capture` (or run) reads all states, and captures anew what is bad")
        raise
    finally:
        seconds = time.monotonic() - started
        events.observers.run_finished(api.RunFinished(step=events.step, outcome=outcome, seconds=seconds))
    return record


def train_fingerprint(run: ResolvedRun) -> dict[str, Any]:
    """What the trained weights depend on, beside the captured states.

    Raises:
        OutputError: the states are not complete.
    """
    captured = Stage("capture", run.folders.states).record()
    if captured is None or not captured.complete:
        raise OutputError(
            "the hidden states are not captured yet", where=str(run.folders.states), hint="run `draftsmith capture`"
        )
    recipe = run.resolved_recipe()
    settings = {name: value for name, value in recipe["train"].items() if name not in _HARMLESS}
    if settings.pop("warm_start") is not None:  # what is in the folder counts, not where it lies
        settings["warm_start"] = checkpoint_digest(_warm_start(run))
    facets = {name: recipe[name] for name in ("algorithm", "architecture", "loss", "mask")}
    parts = {part.where: part.options for part in run.loss_parts if part.options}
    if parts:  # the recipe names them, and leaves their defaults out
        facets["loss"] = {**facets["loss"], "parts": parts}
    return {"previous": captured.digest, **facets, "train": settings, "reduction": _reduction(run)}


def prepare_training(run: ResolvedRun, ranks: Ranks = ALONE) -> Training:
    """Build everything from the prepared data and the captured states; trains nothing, writes nothing.

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
    # Each loader reads in a thread of its own, so each has a reader of its own.
    states, validation_states = open_states(run), open_states(run)
    rows = plan_rows(data.train, config.tokens_per_row, states.refused)
    check_plan(rows)
    # A teacher of another dtype rounds otherwise: its argmax and log-sum-exp are not those of this one's logits.
    statistics = states.teacher_dtype in (None, str(compute_dtype).removeprefix("torch."))
    return Training(
        objective=objective,
        optimizers=build_optimizers(model, config, {vocabulary.draft_size, vocabulary.target_size}),
        device=device,
        rows=rows,
        validation_rows=plan_rows(data.validation, config.tokens_per_row, states.refused),
        order=Order(bins=rows.bins, rows_per_step=config.rows_per_step, epochs=config.epochs, seed=config.seed),
        load=_loader(run, data.train, states, statistics),
        load_validation=_loader(run, data.validation, validation_states, statistics),
        parameters=count_parameters(model),
        statistics=statistics,
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
) -> tuple[TrainingState, dict[str, float]]:
    """The state at the end, and the algorithm's figures of its last hand on the draft."""
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
    path = run.folders.training / METRICS_LOG
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
        return state, ranks.share(finish(job, state) if ranks.first else {})


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


def _loader(run: ResolvedRun, table: Table, states: CapturedStates, statistics: bool) -> RowLoader:
    config = run.recipe.train
    return RowLoader(
        table,
        states,
        capacity=config.tokens_per_row,
        last_hidden=run.requirements.last_is_extra(run.verifier.num_layers),
        bad_samples=config.bad_samples,
        statistics=statistics,
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
