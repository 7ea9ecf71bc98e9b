"""The core's own losses, masks and observer: a plugin like any other, registered through the same hooks."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith.losses import BUILTIN_LOSSES
from draftsmith.masks import BUILTIN_MASKS

__all__ = ["draftsmith_losses", "draftsmith_masks", "draftsmith_observers"]


@hookimpl
def draftsmith_losses() -> Sequence[api.Loss]:
    return BUILTIN_LOSSES


@hookimpl
def draftsmith_masks() -> Sequence[api.Mask]:
    return BUILTIN_MASKS


@hookimpl
def draftsmith_observers() -> Sequence[api.Observer]:
    return [
        api.Observer(
            name="tensorboard",
            summary="scalars for TensorBoard, in training/tensorboard",
            implementation="draftsmith.observers.tensorboard:TensorBoard",
        )
    ]
