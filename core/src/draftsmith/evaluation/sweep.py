"""The best number of tokens for each load: one evaluation a concurrency, with several K side by side.

Within an evaluation all K and the baseline are measured in turn, so that their ratios hold. Out of these comes the
plan that ``draftsmith serve --plan`` takes: for each load the least K that is as fast as the fastest, as far as the
repetitions can tell, and none where even that is no faster than no draft.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from draftsmith.errors import DataError, UserError
from draftsmith.evaluation.methods import swept_name
from draftsmith.evaluation.metrics import Spread
from draftsmith.evaluation.results import BASELINE, Evaluation, figures
from draftsmith.evaluation.run import Settings, evaluate
from draftsmith.serving.schedule import NO_END, Step, as_plan
from draftsmith.stages import write_json_atomically
from draftsmith.tables import print_whole

if TYPE_CHECKING:
    from rich.console import Console

    from draftsmith.plugins import PluginRegistry

__all__ = [
    "PLAN",
    "SWEEP",
    "Point",
    "Sweep",
    "parse_sweep",
    "plan_lines",
    "plan_of",
    "print_sweep",
    "read_sweep",
    "run_sweep",
]

SWEEP, PLAN = "sweep.json", "plan.json"
SCHEMA, VERSION = "draftsmith.sweep", 1
#: What can be swept.
AXES = ("tokens", "concurrency")
#: Largest number of an axis: what is above is a slip, and would be counted through.
MOST = 65536
#: A speed-up below this is none.
GAIN = 1.0


@frozen(kw_only=True)
class Point:
    """One K at one load.

    Attributes:
        speed_up: over no draft at that load; None where it was not measured, and *reason* says why.
    """

    tokens: int
    concurrency: int
    acceptance_length: float | None
    tokens_per_second: Spread | None
    speed_up: Spread | None
    reason: str | None = None


@frozen(kw_only=True)
class Sweep:
    """All points, by load and K, and the plan that they lead to (empty where nothing was measured)."""

    checkpoint: str
    points: tuple[Point, ...]
    plan: tuple[Step, ...]
    complete: bool


def parse_sweep(given: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """``tokens=1..8`` and ``concurrency=1,4,16``: ascending numbers of each axis.

    Raises:
        UserError: it reads otherwise.
    """
    found: dict[str, tuple[int, ...]] = {}
    for text in given:
        axis, equals, values = text.partition("=")
        hint = "write --sweep tokens=1..8 or --sweep concurrency=1,4,16,64"
        if not equals or axis not in AXES:
            raise UserError(f"cannot sweep {text!r}", where="--sweep", hint=hint)
        if axis in found:
            raise UserError(f"{axis} is swept twice", where="--sweep", hint="name all values in one")
        numbers: set[int] = set()
        for part in values.split(","):
            first, dots, last = part.partition("..")
            try:
                low, high = int(first), int(last if dots else first)
            except ValueError:
                raise UserError(f"{part!r} is no number or range", where=f"--sweep {text}", hint=hint) from None
            if not 1 <= low <= high <= MOST:
                raise UserError(f"{part!r} is no range within 1 to {MOST}", where=f"--sweep {text}", hint=hint)
            numbers.update(range(low, high + 1))
        found[axis] = tuple(sorted(numbers))
    return found


def run_sweep(
    settings: Settings,
    axes: Mapping[str, tuple[int, ...]],
    registry: PluginRegistry,
    folder: Path,
    console: Console | None = None,
    *,
    command: Sequence[str] = (),
    overwrite: bool = False,
) -> Sweep:
    """Evaluate at each concurrency; leaves an evaluation for each in *folder*, ``sweep.json`` and ``plan.json``.

    Raises:
        As :func:`draftsmith.evaluation.run.evaluate`; what was measured is kept, and the same command goes on.
    """
    if settings.simulate:
        raise UserError("a sweep is about speed, which no simulator has", where="--simulate", hint="leave it out")
    counts = axes.get("tokens", ())
    loads = axes.get("concurrency", (settings.concurrency,))
    evaluations: dict[int, Evaluation] = {}
    for load in loads:
        chosen = evolve(settings, concurrency=load, token_counts=counts, against=(BASELINE,))
        evaluations[load] = evaluate(
            chosen, registry, folder / f"concurrency-{load}", console, command=command, overwrite=overwrite
        )
        sweep = _sweep(settings.checkpoint, evaluations, complete=load == loads[-1])
        write_json_atomically(folder / SWEEP, _as_json(sweep))
    if sweep.plan and sweep.complete:
        write_json_atomically(folder / PLAN, as_plan(sweep.plan))
    return sweep


def _sweep(checkpoint: str, evaluations: Mapping[int, Evaluation], *, complete: bool) -> Sweep:
    points = [
        point for load, evaluation in sorted(evaluations.items()) for point in _points(checkpoint, load, evaluation)
    ]
    return Sweep(
        checkpoint=checkpoint,
        points=tuple(points),
        plan=tuple(plan_of(points)),
        complete=complete and all(each.complete for each in evaluations.values()),
    )


def _points(checkpoint: str, load: int, evaluation: Evaluation) -> list[Point]:
    baseline = evaluation.method(BASELINE)
    found = []
    for method in evaluation.methods:
        if method.name not in (checkpoint, swept_name(checkpoint, method.num_speculative_tokens)):
            continue
        values = figures(method, baseline)
        found.append(
            Point(
                tokens=method.num_speculative_tokens,
                concurrency=load,
                acceptance_length=values["acceptance_length"],
                tokens_per_second=values["tokens_per_second"],
                speed_up=values["speed_up"],
                reason=method.reason,
            )
        )
    return found


def plan_of(points: Sequence[Point]) -> list[Step]:
    """Tokens by batch size: up to each load that was measured what is best there, and beyond the last the same."""
    best: dict[int, int] = {}
    for load in sorted({point.concurrency for point in points}):
        gained = {each.tokens: each.speed_up for each in points if each.concurrency == load and each.speed_up}
        if gained:
            best[load] = _best(gained)
    steps: list[Step] = []
    for load, tokens in best.items():
        first = steps[-1].last + 1 if steps else 1
        if steps and steps[-1].tokens == tokens:
            steps[-1] = steps[-1]._replace(last=load)
        else:
            steps.append(Step(first, load, tokens))
    return [*steps[:-1], steps[-1]._replace(last=NO_END)] if steps else []


def _best(gained: Mapping[int, Spread]) -> int:
    """The least K whose median lies in the spread of the fastest; 0 where the fastest gains nothing."""
    fastest = max(gained.values(), key=lambda each: each.median)
    if fastest.median <= GAIN:
        return 0
    return min(tokens for tokens, each in gained.items() if each.median >= fastest.low)


# --- files and the terminal -------------------------------------------------------------------------------------


def _as_json(sweep: Sweep) -> dict[str, Any]:
    import cattrs

    plain = {**cattrs.unstructure(sweep), "plan": [list(step) for step in sweep.plan]}
    return {"schema": SCHEMA, "version": VERSION, **plain}


def read_sweep(path: Path) -> Sweep:
    """From ``sweep.json``.

    Raises:
        DataError: it is missing, or not a sweep that this version reads.
    """
    import cattrs

    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if (value["schema"], value["version"]) != (SCHEMA, VERSION):
            raise ValueError(f"it is {value['schema']} {value['version']}, not {SCHEMA} {VERSION}")
        points = cattrs.structure(value["points"], tuple[Point, ...])
        return Sweep(
            checkpoint=value["checkpoint"], points=points, plan=tuple(plan_of(points)), complete=value["complete"]
        )
    except Exception as error:  # cattrs raises groups of whatever the constructors raise
        raise DataError(f"cannot be read as a sweep: {error}", where=str(path), hint="evaluate again") from error


def print_sweep(console: Console, sweep: Sweep) -> None:
    """Speed-up by K and load, and the plan."""
    from rich import box
    from rich.table import Table

    loads = sorted({point.concurrency for point in sweep.points})
    table = Table(
        title="Speed-up over no draft, by requests at once: median (lowest–highest)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("K", justify="right")
    table.add_column("acceptance length", justify="right")
    for load in loads:
        table.add_column(str(load), justify="right")
    for tokens in sorted({point.tokens for point in sweep.points}):
        row = {point.concurrency: point for point in sweep.points if point.tokens == tokens}
        lengths = [point.acceptance_length for point in row.values() if point.acceptance_length is not None]
        cells = [_cell(row[load].speed_up) if load in row else "" for load in loads]
        table.add_row(str(tokens), f"{lengths[0]:.3f}" if lengths else "", *cells)
    print_whole(console, table)
    for reason in dict.fromkeys(f"K={each.tokens}: {each.reason}" for each in sweep.points if each.reason):
        console.print(reason, markup=False, highlight=False, soft_wrap=True)
    for line in plan_lines(sweep):
        console.print(line, markup=False, highlight=False)


def plan_lines(sweep: Sweep) -> list[str]:
    """The plan in words, a step a line."""
    lines = []
    for step in sweep.plan:
        last = "more" if step.last >= NO_END else str(step.last)
        what = f"{step.tokens} tokens a round" if step.tokens else "no draft"
        lines.append(f"{step.first} to {last} requests: {what}")
    return lines


def _cell(value: Spread | None) -> str:
    return "" if value is None else f"{value.median:.2f} ({value.low:.2f}–{value.high:.2f})"
