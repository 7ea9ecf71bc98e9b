"""All hooks on one page.

A plugin is a module (or object) named by an entry point in the group :data:`draftsmith.api.ENTRY_POINT_GROUP`,
with functions of these names decorated by :data:`hookimpl`. Registration hooks take no argument, are called once,
and return a list of frozen values of :mod:`draftsmith.api`. Observer hooks receive one event record and return
nothing; they never touch numerics.

    from draftsmith import api
    from draftsmith.hookspecs import hookimpl

    @hookimpl
    def draftsmith_losses():
        return [api.Loss(name="focal", summary="…", implementation="mypackage.losses:Focal")]

Importing a plugin module must not import torch: values refer to their implementations by ``"module:name"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

from draftsmith.api import PROJECT_NAME

if TYPE_CHECKING:
    from draftsmith import api

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@hookspec
def draftsmith_draft_architectures() -> Sequence[api.DraftArchitecture]:  # type: ignore[empty-body]
    """Register draft networks: configuration, decoder layers, shared and frozen weights.

    ``implementation``: a subclass of ``interfaces.DraftArchitecture`` and ``torch.nn.Module``.

    Example:

        @hookimpl
        def draftsmith_draft_architectures():
            return [api.DraftArchitecture(name="mine", summary="one layer", implementation="mypackage.model:Mine")]
    """


@hookspec
def draftsmith_losses() -> Sequence[api.Loss]:  # type: ignore[empty-body]
    """Register losses per position on (draft logits, teacher logits); the core masks, weights, reduces and fuses.

    ``implementation``: a subclass of ``interfaces.PositionLoss``, built with the options as keywords.

    Example:

        @hookimpl
        def draftsmith_losses():
            return [api.Loss(name="mine", summary="a cross-entropy", implementation="mypackage.losses:Mine")]
    """


@hookspec
def draftsmith_masks() -> Sequence[api.Mask]:  # type: ignore[empty-body]
    """Register rules over (query, key) slots, from which the core derives every attention form.

    ``implementation``: a subclass of ``interfaces.MaskRule``, built with ``window=``.

    Example:

        @hookimpl
        def draftsmith_masks():
            return [api.Mask(name="mine", summary="every second one", implementation="mypackage.mask:Mine")]
    """


@hookspec
def draftsmith_checkpoint_schemas() -> Sequence[api.CheckpointSchema]:  # type: ignore[empty-body]
    """Register exported formats: config keys, tensors and shapes, reading, writing, linting, conversion.

    ``implementation``: a subclass of ``interfaces.CheckpointFormat``. A checkpoint is read by the schema that
    claims its ``speculators_model_type``.

    Example:

        @hookimpl
        def draftsmith_checkpoint_schemas():
            return [
                api.CheckpointSchema(
                    name="mine",
                    summary="one layer, and who drafts for whom",
                    implementation="mypackage.checkpoint:MyFormat",
                    speculators_types=("mine",),
                )
            ]
    """


@hookspec
def draftsmith_transports() -> Sequence[api.Transport]:  # type: ignore[empty-body]
    """Register hidden-state transports: reader, writer, guarantees.

    ``implementation``: a subclass of ``interfaces.HiddenStateTransport``. ``options``: your attrs class.

    Example:

        @hookimpl
        def draftsmith_transports():
            return [
                api.Transport(
                    name="mine",
                    summary="samples in a bucket",
                    implementation="mypackage.transport:Bucket",
                    options=MyOptions,
                    guarantees=api.TransportGuarantees(persistent=True, random_access=True, concurrent_writers=True),
                )
            ]
    """


@hookspec
def draftsmith_algorithms() -> Sequence[api.Algorithm]:  # type: ignore[empty-body]
    """Register algorithms: the bundle of facets, options and contracts that makes "by name" work.

    ``implementation``: a subclass of ``interfaces.DraftAlgorithm``. ``options``: your attrs class.

    Example:

        @hookimpl
        def draftsmith_algorithms():
            return [
                api.Algorithm(
                    name="mine",
                    summary="a token a step, from the last hidden state",
                    implementation="mypackage.step:Mine",
                    options=MyOptions,
                    architecture="mine",
                    loss="ce",
                    mask="causal",
                    schema="mine",
                    requirements=lambda options, verifier: api.CaptureRequirements(layer_ids=(verifier.num_layers,)),
                    max_speculative_tokens=lambda options: options.num_tokens,
                )
            ]
    """


@hookspec
def draftsmith_observers() -> Sequence[api.Observer]:  # type: ignore[empty-body]
    """Register trackers that a run can switch on by name (``observers: [tensorboard]``).

    ``implementation``: a class, built with the run's output folder; those of its methods that are named as the
    observing hooks are called. One that raises is logged once and switched off.

    Example:

        @hookimpl
        def draftsmith_observers():
            return [api.Observer(name="mine", summary="a line a step", implementation="mypackage.tracker:Lines")]
    """


@hookspec
def draftsmith_prompt_sets() -> Sequence[api.PromptSet]:  # type: ignore[empty-body]
    """Register sets of prompts that an evaluation can be asked for by name.

    ``implementation``: a function without arguments that returns rows, such as ``{"question": "…"}``.

    Example:

        @hookimpl
        def draftsmith_prompt_sets():
            return [api.PromptSet(name="mine", summary="ten questions", implementation="mypackage.prompts:rows")]
    """


@hookspec
def draftsmith_commands() -> Sequence[api.Command]:  # type: ignore[empty-body]
    """Register further commands of ``draftsmith``.

    ``implementation``: a function that typer can wrap, or a ``typer.Typer``: ``draftsmith mine …``.

    Example:

        @hookimpl
        def draftsmith_commands():
            return [api.Command(name="mine", summary="count what was captured", implementation="mypackage.cli:count")]
    """


@hookspec
def draftsmith_run_started(event: api.RunStarted) -> None:
    """Called once, after everything is resolved and before the first optimiser step.

    Example:

        @hookimpl
        def draftsmith_run_started(event):
            print(event.output, event.total_steps)
    """


@hookspec
def draftsmith_step_finished(event: api.StepFinished) -> None:
    """Called after every optimiser step; after a validation with ``phase="validation"``, after the algorithm's last
    hand on the trained draft with ``phase="finish"``.

    Example:

        @hookimpl
        def draftsmith_step_finished(event):
            if event.phase == "validation":
                print(event.step, event.metrics)
    """


@hookspec
def draftsmith_checkpoint_saved(event: api.CheckpointSaved) -> None:
    """Called after a training checkpoint is complete on disk.

    Example:

        @hookimpl
        def draftsmith_checkpoint_saved(event):
            if event.best:
                print(event.path)
    """


@hookspec
def draftsmith_run_finished(event: api.RunFinished) -> None:
    """Called once at the end of training, also after a failure or a signal (see ``event.outcome``).

    Example:

        @hookimpl
        def draftsmith_run_finished(event):
            print(event.outcome, event.step)
    """
