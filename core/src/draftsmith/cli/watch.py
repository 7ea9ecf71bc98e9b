"""Watch running vLLM servers: acceptance over a window, and alarms where the draft no longer pays.

The exit code of --once is 1 where there is an alarm, or a server cannot be read.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.cli import common
from draftsmith.errors import DataError, ServingError, UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from draftsmith.serving.watch import Alarm, Expectation, Sample

__all__ = ["configure", "execute"]


def configure(parser: argparse.ArgumentParser) -> None:
    seconds = common.number(float, 0.1, 86400.0)
    parser.add_argument("servers", metavar="URL", nargs="+", help="such as http://127.0.0.1:8000")
    parser.add_argument("--every", metavar="S", type=seconds, default=5.0, help="seconds between readings; default: 5")
    parser.add_argument("--window", metavar="S", type=seconds, default=60.0, help="figures are of these; default: 60")
    parser.add_argument(
        "--evaluation",
        metavar="FOLDER",
        action="append",
        default=[],
        type=Path,
        help="what to hold it against (repeatable, one for each concurrency)",
    )
    parser.add_argument(
        "--below", metavar="SHARE", type=common.number(float, 0.0, 1.0), default=0.1, help="alarm below; default: 0.1"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--once", action="store_true", help="two readings, --every seconds apart, and stop")
    common.add_plugin_options(parser)


class _Server:
    """One server, its window, and how its last reading went."""

    def __init__(self, url: str, window: float) -> None:
        from draftsmith.serving.watch import Window

        self.url = url
        self.window = Window(window)
        self.trouble: str | None = None
        self.restarted = False

    def read(self) -> None:
        from draftsmith.serving.counters import read_metrics

        try:
            self.restarted = not self.window.add(read_metrics(self.url))
            self.trouble = None
        except ServingError as error:
            self.trouble = error.what

    def state(self, expectations: Sequence[Expectation], below: float) -> dict[str, Any]:
        """What is told of it: its figures, alarms, and what else there is to say."""
        from draftsmith.serving.watch import alarms

        sample = None if self.trouble else self.window.sample()
        found = list(alarms(sample, expectations, below)) if sample else []
        return {"server": self.url, "trouble": self.trouble, "restarted": self.restarted, "sample": sample,
                "alarms": found}  # fmt: skip


def execute(arguments: argparse.Namespace) -> int:
    from draftsmith.serving.counters import metrics_address, read_metrics

    expectations = _expectations(arguments.evaluation)
    for url in arguments.servers:
        metrics_address(url)
    servers = [_Server(url, arguments.window) for url in arguments.servers]
    gc.enable()
    if not arguments.once:
        for url in arguments.servers:
            read_metrics(url)  # what is no such server now will not become one
    for server in servers:
        server.read()
    with _teller(as_json=arguments.json, once=arguments.once) as tell:
        while True:
            time.sleep(arguments.every)
            for server in servers:
                server.read()
            states = [server.state(expectations, arguments.below) for server in servers]
            tell(states)
            if arguments.once:
                return int(any(state["alarms"] or state["trouble"] for state in states))


def _expectations(folders: Sequence[Path]) -> list[Expectation]:
    from draftsmith.evaluation.results import read_evaluation
    from draftsmith.serving.watch import expectation

    found = []
    for folder in folders:
        evaluation = read_evaluation(folder)
        expected = expectation(evaluation)
        if expected is None:
            raise DataError(
                "vLLM's acceptance of the checkpoint was not measured", where=str(folder), hint="evaluate it in vLLM"
            )
        if expected.concurrency is None:
            common.note(
                f"{folder}: requests at once were not limited: what is accepted is held against it, "
                "not what rounds cost"
            )
        found.append(expected)
    if len({each.concurrency for each in found}) < len(found):
        raise UserError("two evaluations of one concurrency", where="--evaluation", hint="name one for each")
    return found


@contextlib.contextmanager
def _teller(*, as_json: bool, once: bool) -> Iterator[Callable[[Sequence[dict[str, Any]]], None]]:
    """How the servers' states are told: objects, a table that is drawn anew on a terminal, lines else."""
    from rich.console import Console

    console = Console(markup=False)  # an address may have brackets: http://[fe80::1]:8000
    if as_json or once or not console.is_terminal:
        yield _tell_json if as_json else _tell_lines
        return
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        yield lambda states: live.update(_table(states), refresh=True)


def _tell_json(states: Sequence[dict[str, Any]]) -> None:
    from attrs import asdict

    for state in states:
        plain = {
            **state,
            "time": time.time(),
            "sample": state["sample"].plain() if state["sample"] else None,
            "alarms": [asdict(each) for each in state["alarms"]],
        }
        print(json.dumps(plain), flush=True)


def _table(states: Sequence[dict[str, Any]]) -> RenderableType:
    """A line for each server, and its alarms below."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=time.strftime("%H:%M:%S"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("server", overflow="fold")
    for heading in ("acceptance length", "by position, %", "drafted/s", "accepted/s", "tokens/s", "running", "waiting",
                    "rounds"):  # fmt: skip
        table.add_column(heading, justify="right")
    below = []
    for state in states:
        sample: Sample | None = state["sample"]
        if sample is None or sample.acceptance_length is None:
            table.add_row(state["server"])
            below.append(Text(f"{state['server']}: {_line(state)}"))
        else:
            table.add_row(
                state["server"],
                f"{sample.acceptance_length:.2f}",
                _shares(sample),
                f"{sample.drafted_per_second:.0f}",
                f"{sample.accepted_per_second:.0f}",
                f"{sample.tokens_per_second:.0f}",
                str(sample.running),
                str(sample.waiting),
                str(sample.rounds),
            )
            if state["restarted"]:
                below.append(Text(f"{state['server']}: started anew"))
        for alarm in state["alarms"]:
            below.append(Text(f"{state['server']}: alarm: {alarm.what}", style="bold red"))
            below.append(Text(f"  → {alarm.hint}"))
    return Group(table, *below)


def _tell_lines(states: Sequence[dict[str, Any]]) -> None:
    for state in states:
        print(f"{time.strftime('%H:%M:%S')} {state['server']}: {_line(state)}", flush=True)
        for alarm in state["alarms"]:
            _alarm(alarm)


def _line(state: dict[str, Any]) -> str:
    sample: Sample | None = state["sample"]
    if state["trouble"]:
        return str(state["trouble"])
    again = "started anew; " if state["restarted"] else ""
    if sample is None or sample.acceptance_length is None:
        return f"{again}nothing was drafted"
    parts = [
        f"acceptance length {sample.acceptance_length:.2f} ({_shares(sample)} % by position)",
        f"{sample.drafted_per_second:.0f} drafted/s, {sample.accepted_per_second:.0f} accepted/s",
        f"{sample.tokens_per_second:.0f} tokens/s",
        f"{sample.running} running, {sample.waiting} waiting",
        f"{sample.rounds} rounds in {sample.seconds:.0f} s",
    ]
    return again + "; ".join(parts)


def _shares(sample: Sample) -> str:
    return " ".join("–" if share is None else f"{100 * share:.0f}" for share in sample.acceptance_per_position)


def _alarm(alarm: Alarm) -> None:
    print(f"  alarm: {alarm.what}\n  → {alarm.hint}", flush=True)
