"""Progress of a stage: rate, time left, and a few figures; a live bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Bar", "stage_progress"]

#: Seconds between two lines where the output is no terminal.
LINE_EVERY = 10.0


class Bar(Protocol):
    """What :func:`stage_progress` yields."""

    def advance(self, n: float = 1, **info: object) -> None:
        """*n* more units are done; *info* is shown beside the bar (``loss=1.2``)."""


class _Silent:
    def advance(self, n: float = 1, **info: object) -> None:
        return


class _Live:
    """A bar of rich."""

    def __init__(self, progress: Any, task: Any, unit: str) -> None:
        self._progress, self._task, self._unit = progress, task, unit
        self._started, self._done = time.monotonic(), 0.0

    def advance(self, n: float = 1, **info: object) -> None:
        self._done += n
        rate = self._done / max(time.monotonic() - self._started, 1e-9)
        self._progress.update(
            self._task, advance=n, rate=f"{format_count(rate)} {self._unit}/s", info=_format_info(info)
        )


class _Lines:
    """A line every ten seconds, and one at the end."""

    def __init__(self, console: Console, description: str, total: float | None, unit: str) -> None:
        self._console, self._description, self._total, self._unit = console, description, total, unit
        self._started = self._printed = time.monotonic()
        self._done = 0.0
        self._info: dict[str, object] = {}

    def advance(self, n: float = 1, **info: object) -> None:
        self._done += n
        self._info = info or self._info
        if time.monotonic() - self._printed >= LINE_EVERY:
            self.line()

    def line(self) -> None:
        self._printed = now = time.monotonic()
        seconds = max(now - self._started, 1e-9)
        rate = self._done / seconds
        parts = [f"{format_count(self._done)}"]
        if self._total:
            parts[0] += f"/{format_count(self._total)}"
        parts = [f"{parts[0]} {self._unit}", f"{format_count(rate)} {self._unit}/s", format_seconds(seconds)]
        if self._total and 0 < self._done < self._total:
            parts.append(f"{format_seconds((self._total - self._done) / rate)} left")
        if self._info:
            parts.append(_format_info(self._info))
        self._console.print(f"{self._description}: {', '.join(parts)}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def stage_progress(console: Console | None, description: str, total: float | None, unit: str) -> Iterator[Bar]:
    """Show progress while the block runs.

    Args:
        console: None: silent.
        total: units in all, where known; the time left needs it.
        unit: what is counted, such as ``tokens`` or ``steps``.
    """
    if console is None:
        yield _Silent()
        return
    if not console.is_terminal:
        lines = _Lines(console, description, total, unit)
        try:
            yield lines
        finally:
            lines.line()
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[info]}", markup=False),  # a method's name, which may have brackets
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=total, rate="", info="")
        yield _Live(progress, task, unit)


def _format_info(info: dict[str, object]) -> str:
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in info.items()
    )


def format_count(value: float) -> str:
    """1234567 → ``1.23M``."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.3g}{suffix}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def format_seconds(seconds: float) -> str:
    """3725 → ``1:02:05``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
