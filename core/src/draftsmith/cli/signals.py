"""How Ctrl-C and SIGTERM end a command: with one line, after every ``finally`` on the way."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from draftsmith.errors import Stopped

__all__ = ["clean_end"]


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception that no ``except Exception`` on the way swallows."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated


@contextmanager
def clean_end(hint: str | None = None) -> Iterator[None]:
    """Turn both signals into :class:`Stopped`. Training puts its own handlers in place while it runs.

    Args:
        hint: what becomes of the work that was done.

    Raises:
        Stopped: a signal came.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt as stop:
        number = signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT
        raise Stopped(
            f"by {number.name}",
            number=number,
            hint=hint,
        ) from stop
    finally:
        signal.signal(signal.SIGTERM, before)
