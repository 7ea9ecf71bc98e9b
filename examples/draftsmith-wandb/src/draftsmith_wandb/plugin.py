"""What the package registers. Draftsmith imports this module for every command, so it must not import the tracker."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith import api
from draftsmith.hookspecs import hookimpl


@hookimpl
def draftsmith_observers() -> Sequence[api.Observer]:
    return [
        api.Observer(
            name="wandb",
            summary="metrics and the recipe of a run in Weights & Biases",
            implementation="draftsmith_wandb.tracker:WeightsAndBiases",
        )
    ]
