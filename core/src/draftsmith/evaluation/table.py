"""An evaluation on the terminal: the table of all methods, by category, and the answers that gained least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from draftsmith.evaluation.metrics import Spread, largest_relative_gap
from draftsmith.evaluation.picture import pictured, pieces, request_length, worst_requests
from draftsmith.evaluation.results import (
    BASELINE,
    SIMULATED,
    UNAVAILABLE,
    Evaluation,
    Method,
    counters_of,
    figures,
)
from draftsmith.tables import print_whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["COLUMNS", "method_cells", "method_tables", "print_evaluation", "print_worst", "remarks"]

#: Heading, and what it is of.
COLUMNS = (
    "method",
    "K",
    "acceptance length",
    "accepted by position, %",
    "of drafted, %",
    "tokens/s",
    "× none",
    "first token, ms",
    "per token, ms",
    "identical",
    "drafting, % of time",
    "verifying, % of time",
    "round costs steps",
)
#: Places in :data:`COLUMNS` of the tables that a terminal has room for.
_ACCEPTANCE, _SPEED, _TIME = (0, 1, 2, 3, 4, 9), (0, 5, 6, 7, 8), (0, 10, 11, 12)
#: Positions accepted more seldom than this are not compared: their counts are too few.
RARE = 0.05
#: How far two counts of one position may be apart, relatively.
CLOSE = 0.03
_STYLES = {"accepted": "green", "rejected": "red strike", "bonus": "bold blue"}
#: Around tokens where there are no colours, as in a file.
_MARKS = {"accepted": "[{}]", "rejected": "~{}~", "bonus": "{}"}


def _spread(value: Spread | None, factor: float = 1.0, digits: int = 1) -> str:
    if value is None:
        return ""
    median, low, high = (f"{each * factor:.{digits}f}" for each in (value.median, value.low, value.high))
    return median if low == high else f"{median} ({low}–{high})"


def method_cells(method: Method, baseline: Method | None) -> list[str]:
    """One row under :data:`COLUMNS`; empty where nothing was measured."""
    if not method.repetitions:
        return [method.name, "", "not measured", *[""] * (len(COLUMNS) - 3)]
    found = figures(method, baseline)
    length, rate, shares = (
        found[name] for name in ("acceptance_length", "draft_acceptance_rate", "acceptance_per_position")
    )
    identical = "" if method.losslessness is None else f"{method.losslessness.identical}/{method.losslessness.prompts}"
    return [
        method.name,
        str(method.num_speculative_tokens or ""),
        "" if length is None else f"{length:.3f}",
        " ".join(f"{100 * share:.0f}" for share in shares or () if share is not None),
        "" if rate is None else f"{100 * rate:.1f}",
        _spread(found["tokens_per_second"]),
        _spread(found["speed_up"], digits=2),
        _spread(found["time_to_first_token"], 1000, 0),
        _spread(found["inter_token_latency"], 1000, 1),
        identical,
        _spread(found["drafting_share"], 100),
        _spread(found["verifying_share"], 100),
        _spread(found["round_cost"], digits=2),
    ]


def method_tables(evaluation: Evaluation) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, headings and rows of each table that a page or a terminal has room for."""
    baseline = evaluation.method(BASELINE)
    rows = [method_cells(each, baseline) for each in evaluation.methods]
    over = "median (lowest–highest) of the repetitions"
    titles = (_title(evaluation), f"Speed: {over}", f"Where the time goes: {over}")
    for title, places in zip(titles, (_ACCEPTANCE, _SPEED, _TIME), strict=True):
        # All methods have a line in the first one, those with nothing to tell in no other.
        shown = [row for row in rows if places is _ACCEPTANCE or any(row[place] for place in places[1:])]
        if shown:
            yield title, [COLUMNS[place] for place in places], [[row[place] for place in places] for row in shown]


def remarks(evaluation: Evaluation) -> Iterator[str]:
    """What the table does not say by itself, a sentence each."""
    for method in evaluation.methods:
        if method.reason is not None:
            what = "not measured" if method.status == UNAVAILABLE else method.status
            yield f"{method.name}: {what}: {method.reason}"
        found = method.losslessness
        if found is not None and found.ties:
            yield f"{method.name}: {found.ties} answers part where two logits tie within rounding"
        if found is not None and found.differing:
            yield f"warning: {method.name}: {found.differing} answers differ from the verifier's, and not by a tie"
    yield from _against_simulator(evaluation)
    if not evaluation.complete:
        yield "incomplete: the same command goes on where this stopped"


def _against_simulator(evaluation: Evaluation) -> Iterator[str]:
    """How far the simulator is from the engine, where both counted."""
    for simulated in (each for each in evaluation.methods if each.status == SIMULATED):
        served = evaluation.method(str(evaluation.settings.get("checkpoint")))
        ours, theirs = counters_of(simulated), counters_of(served) if served else None
        if ours is None or theirs is None:
            continue
        gap = largest_relative_gap(ours, theirs, at_least=RARE)
        word = "" if gap <= CLOSE else "warning: "
        yield f"{word}the simulator and vLLM differ by {100 * gap:.1f} % at most, relatively, at a position"


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    """Acceptance and speed of all methods, acceptance by category where there are several, then the remarks."""
    for title, headings, rows in method_tables(evaluation):
        _print_table(console, title, headings, rows)
    drafting = [each for each in evaluation.methods if counters_of(each) is not None]
    if len(evaluation.categories) > 1 and drafting:
        by_category = _table("Acceptance length by category")
        by_category.add_column("category")
        by_category.add_column("prompts", justify="right", no_wrap=True)
        for method in drafting:
            by_category.add_column(method.name, justify="right", overflow="fold")
        for category in evaluation.categories:
            prompts = evaluation.of_category(category)
            lengths = [figures(method, None, prompts)["acceptance_length"] for method in drafting]
            cells = ["" if length is None else f"{length:.3f}" for length in lengths]
            by_category.add_row(category, str(len(prompts)), *cells)
        print_whole(console, by_category)
    for remark in remarks(evaluation):
        console.print(remark, markup=False, highlight=False, soft_wrap=True)


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _print_table(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Figures are never broken, methods' names are."""
    table = _table(title)
    for place, heading in enumerate(headings):
        if place == 0:
            table.add_column(heading, overflow="fold", min_width=12)
        else:
            width = max(map(len, [*heading.split(), *(row[place] for row in rows)]))
            table.add_column(heading, justify="right", min_width=width)
    for row in rows:
        table.add_row(*row)
    print_whole(console, table)


def _title(evaluation: Evaluation) -> str:
    settings: Mapping[str, Any] = evaluation.settings
    temperature = settings.get("temperature", 0)
    how = "greedy" if not temperature else f"temperature {temperature}"
    return (
        f"{len(evaluation.prompts)} prompts, {how}, at most {settings.get('max_tokens')} tokens, "
        f"{settings.get('repetitions')} repetitions"
    )


def print_worst(console: Console, evaluation: Evaluation, count: int) -> None:
    """The answers that gained least from the draft, token by token: accepted, rejected, the verifier's own (*bonus*);
    in colours, or with marks around them where there are none."""
    from rich.text import Text

    method = pictured(evaluation)
    if method is None:
        console.print("no answer's rounds are known", markup=False)
        return
    legend = Text(f"\n{method.name}: the answers that gained least; ")
    marks = _MARKS if console.color_system is None else dict.fromkeys(_STYLES, "{}")
    for kind, style in _STYLES.items():
        legend.append(marks[kind].format(kind), style=style).append(" ")
    console.print(legend, soft_wrap=True)
    for request in worst_requests(method, count):
        prompt = evaluation.prompts[request.prompt]
        line = Text(f"\nprompt {request.prompt} ({prompt.label}), acceptance length {request_length(request):.2f}\n")
        for kind, alike in groupby(pieces(request), key=lambda piece: piece.kind):
            text = "".join(evaluation.texts.get(piece.token, "?") for piece in alike)
            line.append(marks[kind].format(text), style=_STYLES[kind])
        console.print(line, soft_wrap=True)
