"""SIGTERM and SIGINT end training after the step in progress, with everything saved."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["StopRequest"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Context manager that turns the first SIGTERM or SIGINT into a request; a second one acts as before.

    Outside of the main thread Python cannot handle signals: there it does nothing, and nothing is ever requested.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        #: number of the signal received, or None.
        self.number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name if self.number is not None else "no signal"

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()
        # Not print(): a handler may interrupt one, and buffered streams do not bear that.
        os.write(2, f"\n{self.name}: saving after this step; a second one stops at once\n".encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
