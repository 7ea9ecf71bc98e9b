"""Tokens drafted at each load: vLLM's ``num_speculative_tokens_per_batch_size``, checked before it starts.

A schedule is a list of steps (first, last, K): with that many requests in a batch, K tokens a round. Batch sizes
between two steps, and those beyond the last one, keep the K before them. vLLM 0.32 checks a schedule when the engine
starts, after the weights are loaded, and cuts a K that is above ``num_speculative_tokens`` without a word; and it has
no flag any more that disables speculation by batch size: :func:`disabled_above` is what that comes to.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.errors import ConfigError, DataError, Problem

__all__ = ["KEY", "PLAN_SCHEMA", "Step", "as_plan", "check_schedule", "disabled_above", "read_plan"]

#: vLLM's key.
KEY = "num_speculative_tokens_per_batch_size"
#: The earliest vLLM whose documentation has it.
SINCE = "0.25"
PLAN_SCHEMA, PLAN_VERSION = "draftsmith.plan", 1
#: Stands for "and all above" in the last step. No engine has batches of this size.
NO_END = 1 << 20


class Step(NamedTuple):
    """Batches of *first* to *last* requests draft *tokens* a round; 0: none."""

    first: int
    last: int
    tokens: int


def as_plan(steps: Sequence[Step]) -> dict[str, Any]:
    """The content of a plan's file."""
    return {"schema": PLAN_SCHEMA, "version": PLAN_VERSION, KEY: [list(step) for step in steps]}


def read_plan(path: Path, most: int) -> list[Step]:
    """The schedule in a plan's file: what :func:`as_plan` writes, or the bare list of steps.

    Raises:
        DataError: it cannot be read. ConfigError: the schedule makes no sense, with all that is wrong.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError("there is no such plan", where=str(path), hint="name a JSON file of steps") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read as JSON: {error}", where=str(path)) from error
    if isinstance(value, Mapping):
        if value.get("schema") == PLAN_SCHEMA and value.get("version") != PLAN_VERSION:
            raise DataError(
                f"its layout has version {value.get('version')!r}, this draftsmith reads {PLAN_VERSION}",
                where=str(path),
            )
        value = value.get(KEY)
    return check_schedule(value, most, where=str(path))


def check_schedule(value: Any, most: int, *, where: str) -> list[Step]:
    """Steps, sorted, from plain values.

    Args:
        most: number of tokens that the draft may be asked for.

    Raises:
        ConfigError: with everything that is wrong.
    """
    hint = f"[[1, 4, {most}], [5, 16, 1], [17, 64, 0]]: first and last batch size, and tokens a round"
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError([Problem("holds no steps", where=where, hint=f"write {KEY}, such as {hint}")])
    problems: list[Problem] = []
    steps: list[Step] = []
    for entry in value:
        whole = isinstance(entry, Sequence) and len(entry) == 3 and all(type(each) is int for each in entry)
        if not whole:
            problems.append(Problem(f"{entry!r} is not a step of three whole numbers", where=where, hint=hint))
            continue
        step = Step(*entry)
        steps.append(step)
        if not 1 <= step.first <= step.last:
            problems.append(Problem(f"{list(step)} covers no batch size: sizes count from 1", where=where, hint=hint))
        if step.tokens < 0:
            problems.append(Problem(f"{list(step)} asks for less than no token", where=where, hint="write 0 for none"))
        elif step.tokens > most:
            problems.append(
                Problem(
                    f"{list(step)} asks for {step.tokens} tokens a round, the draft is served with {most}",
                    where=where,
                    hint=f"vLLM would draft {most} without a word: write at most that",
                )
            )
    steps.sort()
    problems += [
        Problem(f"{list(one)} and {list(two)} overlap", where=where, hint="let each batch size stand in one step")
        for one, two in itertools.pairwise(steps)
        if two.first <= one.last
    ]
    if steps and steps[0].first != 1:
        problems.append(
            Problem(f"begins at {steps[0].first} requests", where=where, hint="let the first step begin at 1")
        )
    if problems:
        raise ConfigError(problems)
    return steps


def disabled_above(steps: Sequence[Step], size: int) -> list[Step]:
    """The schedule *steps* up to batches of *size* requests, and no drafts above.

    Args:
        steps: checked; a schedule of one K for all sizes is ``[Step(1, size, K)]``.
    """
    kept = [Step(step.first, min(step.last, size), step.tokens) for step in steps if step.first <= size]
    return [*kept, Step(size + 1, NO_END, 0)]
