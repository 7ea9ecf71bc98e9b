"""The sections of a report, from what :mod:`draftsmith.report.sources` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from draftsmith import __version__
from draftsmith.evaluation.picture import pictured, pieces, request_length, worst_requests
from draftsmith.evaluation.results import BASELINE, Evaluation, Method, counters_of, figures
from draftsmith.evaluation.sweep import Sweep, plan_lines
from draftsmith.evaluation.table import method_tables, remarks
from draftsmith.progress import format_seconds
from draftsmith.report.charts import Bar, Series, bars, lines
from draftsmith.report.html import el, page, section, table
from draftsmith.report.sources import Run, read_source

__all__ = ["build_report"]

_POSITION = re.compile(r"position_(\d+)_acc")


def build_report(paths: Sequence[Path], *, worst: int = 5) -> str:
    """The HTML of a report on all *paths*, in their order.

    Args:
        worst: answers shown token by token, of each evaluation.

    Raises:
        DataError: one of them is neither a run nor an evaluation.
    """
    found = [read_source(path) for path in paths]
    names = _distinct([name for name, _ in found], paths)
    runs = {name: each for name, (_, each) in zip(names, found, strict=True) if isinstance(each, Run)}
    evaluations = {name: each for name, (_, each) in zip(names, found, strict=True) if isinstance(each, Evaluation)}
    parts: list[Element] = []
    for name, evaluation in evaluations.items():
        parts += _evaluation(name, evaluation, worst)
    parts += [_sweep(name, each) for name, (_, each) in zip(names, found, strict=True) if isinstance(each, Sweep)]
    if runs:
        parts += _training(runs)
        parts += [_what_was_run(name, run) for name, run in runs.items()]
    parts.append(el("p", f"Made by draftsmith {__version__}.", class_="note"))
    return page(", ".join(names), *parts)


def _distinct(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Folders' names, or their whole paths where names would be the same."""
    return [str(path) if names.count(name) > 1 else name for name, path in zip(names, paths, strict=True)]


# --- an evaluation ----------------------------------------------------------------------------------------------


def _evaluation(name: str, evaluation: Evaluation, worst: int) -> Iterator[Element]:
    baseline = evaluation.method(BASELINE)
    yield section(
        f"Evaluation: {name}",
        el(
            "p",
            f"Prompts of {', '.join(dict.fromkeys(each.set for each in evaluation.prompts))}.",
            class_="note",
        ),
        *(
            part
            for title, headings, rows in method_tables(evaluation)
            for part in (el("p", title, class_="note"), table(headings, rows))
        ),
        el("ul", *(el("li", each) for each in remarks(evaluation)), class_="soft"),
    )
    drafting = [each for each in evaluation.methods if counters_of(each) is not None]
    if drafting:
        yield section("Acceptance by position", *_acceptance(drafting))
    speeds = [bar for each in evaluation.methods if (bar := _speed(each, baseline)) is not None]
    if speeds:
        yield section(
            "Speed",
            bars(speeds, title="Tokens/s in all, of tokens/s without a draft (the line)", unit="×", mark=1.0)
            if baseline is not None and baseline.repetitions
            else bars(speeds, title="Tokens/s in all"),
        )
    if len(evaluation.categories) > 1 and drafting:
        yield section("By category", _categories(evaluation, drafting))
    picture = _worst(evaluation, worst)
    if picture is not None:
        yield picture
    yield section(
        "What was evaluated",
        _details("Settings", evaluation.settings),
        _details("Where and with what", evaluation.provenance),
    )


def _acceptance(drafting: Sequence[Method]) -> Iterator[Element]:
    for key, title in (
        ("acceptance_per_position", "Rounds in which all tokens up to this position were accepted"),
        ("conditional_acceptance", "Accepted here, of the rounds that came to this position"),
    ):
        series = [
            Series(
                name=each.name,
                points=[
                    (place, 100 * share)
                    for place, share in enumerate(figures(each, None)[key], 1)
                    if share is not None
                ],
            )
            for each in drafting
        ]
        yield lines(series, x="position", y="%", title=title, points=True)


def _speed(method: Method, baseline: Method | None) -> Bar | None:
    compared = baseline is not None and bool(baseline.repetitions)
    found = figures(method, baseline)["speed_up" if compared else "tokens_per_second"]
    return None if found is None else Bar(name=method.name, value=found.median, low=found.low, high=found.high)


def _categories(evaluation: Evaluation, drafting: Sequence[Method]) -> Element:
    rows = []
    for category in evaluation.categories:
        prompts = evaluation.of_category(category)
        lengths = [figures(each, None, prompts)["acceptance_length"] for each in drafting]
        rows.append([category, str(len(prompts)), *("" if each is None else f"{each:.3f}" for each in lengths)])
    return el(
        "div",
        el("p", "Acceptance length by category of the prompts.", class_="note"),
        table(["category", "prompts", *(each.name for each in drafting)], rows),
    )


def _worst(evaluation: Evaluation, count: int) -> Element | None:
    method = pictured(evaluation)
    chosen = worst_requests(method, count) if method is not None else []
    if method is None or not chosen:
        return None
    legend = el("p", class_="soft")
    meanings = {
        "accepted": "drafted and accepted",
        "rejected": "drafted and rejected",
        "bonus": "the verifier's own",
    }
    for kind, meaning in meanings.items():
        legend.append(el("span", meaning, class_=kind))
        legend[-1].tail = " "
    shown = [legend]
    for request in chosen:
        prompt = evaluation.prompts[request.prompt]
        title = f"Prompt {request.prompt}, {prompt.label}: acceptance length {request_length(request):.2f}"
        tokens = [
            el("span", evaluation.texts.get(piece.token, "?"), class_=piece.kind, title=f"{piece.kind}")
            for piece in pieces(request)
        ]
        shown += [el("h3", title), el("div", *tokens, class_="answer")]
    return section(f"Answers that gained least: {method.name}", *shown)


def _details(title: str, value: Mapping[str, Any]) -> Element:
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return el("details", el("summary", title), el("pre", text))


def _sweep(name: str, sweep: Sweep) -> Element:
    """Speed against the load, a line for each K, and the plan."""
    series = [
        Series(
            name=f"{tokens} tokens a round",
            points=[
                (float(each.concurrency), each.speed_up.median)
                for each in sweep.points
                if each.tokens == tokens and each.speed_up is not None
            ],
        )
        for tokens in sorted({each.tokens for each in sweep.points})
    ]
    return section(
        f"Sweep: {name}",
        lines(
            [each for each in series if each.points],
            x="requests at once",
            y="× none",
            title=f"Speed-up of {sweep.checkpoint} against the load",
            points=True,
        ),
        el("ul", *(el("li", each) for each in plan_lines(sweep)), class_="soft"),
    )


# --- runs -------------------------------------------------------------------------------------------------------


def _training(runs: Mapping[str, Run]) -> Iterator[Element]:
    trained = {name: run for name, run in runs.items() if run.metrics}
    if trained:
        curves = [
            Series(name=f"{name}, {phase}", points=_points(run, phase, "loss"))
            for name, run in trained.items()
            for phase in ("train", "validation")
        ]
        lengths = [Series(name=name, points=_points(run, "validation", "eal")) for name, run in trained.items()]
        yield section(
            "Training",
            lines([each for each in curves if each.points], x="tokens", y="loss", title="Loss", from_zero=False),
            lines(
                [each for each in lengths if each.points],
                x="tokens",
                y="tokens a round",
                title="Expected acceptance length on the validation rows",
                from_zero=False,
                points=True,
            ),
            *(_positions(name, run) for name, run in trained.items()),
        )
    verified = [each for name, run in runs.items() for each in _verified(name, run)]
    if verified:
        yield section(
            "Verification",
            lines(
                verified,
                x="position",
                y="%",
                title="Rounds in which all tokens up to this position were accepted",
                points=True,
            ),
        )
    spent = [(stage.stage, name, stage.seconds, stage.complete) for name, run in runs.items() for stage in run.stages]
    if spent:
        several = len(runs) > 1
        yield section(
            "Time by stage",
            bars(
                [
                    Bar(name=f"{stage}{f', {name}' if several else ''}{'' if done else ' (not complete)'}", value=secs)
                    for stage, name, secs, done in spent
                ],
                title="Seconds, over all starts",
                unit="s",
            ),
            el("p", f"In all {format_seconds(sum(seconds for _, _, seconds, _ in spent))}.", class_="note"),
        )


def _verified(name: str, run: Run) -> Iterator[Series]:
    """Acceptance by position as the closing stage counted it, in vLLM and in the simulator."""
    summary = next((stage.summary for stage in run.stages if stage.stage == "verify" and stage.complete), {})
    for key, who in (("served", "vLLM"), ("simulated", "simulator")):
        shares = summary.get(key, {}).get("all", {}).get("acceptance_per_position", [])
        if shares:
            points = [(float(place), 100 * share) for place, share in enumerate(shares, 1)]
            yield Series(name=f"{name}, {who}", points=points)


def _points(run: Run, phase: str, key: str) -> list[tuple[float, float]]:
    return [
        (float(line["tokens"]), float(line[key]))
        for line in run.metrics
        if line.get("phase") == phase and all(isinstance(line.get(each), int | float) for each in (key, "tokens"))
    ]


def _positions(name: str, run: Run) -> Element:
    """Accuracy at each position over tokens: on the validation rows, or in training where there are none."""
    phase = "validation" if any(line.get("phase") == "validation" for line in run.metrics) else "train"
    places = sorted({int(found[1]) for line in run.metrics for key in line if (found := _POSITION.fullmatch(key))})
    series = [
        Series(
            name=f"position {place + 1}",
            points=[(x, 100 * y) for x, y in _points(run, phase, f"position_{place}_acc")],
        )
        for place in places
    ]
    return lines(series, x="tokens", y="%", title=f"{name}: right at each position, {phase} rows", points=True)


def _what_was_run(name: str, run: Run) -> Element:
    return section(
        f"What was run: {name}",
        _details("Recipe, as it was resolved", run.record.get("recipe", {})),
        _details("Versions", {key: run.record.get(key) for key in ("draftsmith", "verifier", "plugins")}),
        _details("Stages", {stage.stage: dict(stage.summary) for stage in run.stages}),
    )
