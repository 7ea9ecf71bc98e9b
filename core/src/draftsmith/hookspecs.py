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
    """Register draft networks: configuration, decoder layers, shared and frozen weights."""


@hookspec
def draftsmith_losses() -> Sequence[api.Loss]:  # type: ignore[empty-body]
    """Register losses per position on (draft logits, teacher logits); the core masks, weights, reduces and fuses."""


@hookspec
def draftsmith_masks() -> Sequence[api.Mask]:  # type: ignore[empty-body]
    """Register rules over (query, key) slots, from which the core derives every attention form."""


@hookspec
def draftsmith_checkpoint_schemas() -> Sequence[api.CheckpointSchema]:  # type: ignore[empty-body]
    """Register exported formats: config keys, tensors and shapes, reading, writing, linting, conversion."""


@hookspec
def draftsmith_transports() -> Sequence[api.Transport]:  # type: ignore[empty-body]
    """Register hidden-state transports: reader, writer, guarantees."""


@hookspec
def draftsmith_algorithms() -> Sequence[api.Algorithm]:  # type: ignore[empty-body]
    """Register algorithms: the bundle of facets, options and contracts that makes "by name" work."""


@hookspec
def draftsmith_observers() -> Sequence[api.Observer]:  # type: ignore[empty-body]
    """Register trackers that a run can switch on by name (``observers: [tensorboard]``)."""


@hookspec
def draftsmith_prompt_sets() -> Sequence[api.PromptSet]:  # type: ignore[empty-body]
    """Register sets of prompts that an evaluation can be asked for by name."""


@hookspec
def draftsmith_commands() -> Sequence[api.Command]:  # type: ignore[empty-body]
    """Register further commands of ``draftsmith``."""


@hookspec
def draftsmith_run_started(event: api.RunStarted) -> None:
    """Called once, after everything is resolved and before the first optimiser step."""


@hookspec
def draftsmith_step_finished(event: api.StepFinished) -> None:
    """Called after every optimiser step; after a validation with ``phase="validation"``, after the algorithm's last
    hand on the trained draft with ``phase="finish"``."""


@hookspec
def draftsmith_checkpoint_saved(event: api.CheckpointSaved) -> None:
    """Called after a training checkpoint is complete on disk."""


@hookspec
def draftsmith_run_finished(event: api.RunFinished) -> None:
    """Called once at the end of training, also after a failure or a signal (see ``event.outcome``)."""
