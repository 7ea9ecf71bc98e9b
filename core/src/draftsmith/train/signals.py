"""SIGTERM and SIGINT end training after the step in progress, with everything saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from draftsmith.errors import RanksLost
from draftsmith.stages import is_first_rank

__all__ = ["StopRequest"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Context manager that turns the first SIGTERM or SIGINT into a request; a second one acts as before.

    Where other ranks are gone, SIGTERM is ignored from the end on: this process has nothing left but to say so.

    Outside of the main thread Python cannot handle signals: there it does nothing, and nothing is ever requested.

    Of several ranks all must stop at the same step, whichever of them received a signal, and when. There (after
    :meth:`share`) a signal becomes a request only once all know of it.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._shared = False
        #: number of the signal that this process received, or None.
        self.received: int | None = None
        #: number of the signal to obey, or None.
        self.number: int | None = None

    def share(self) -> None:
        """From here on :meth:`agree` alone makes requests."""
        self._shared, self.number = True, None

    def agree(self, received: Iterable[int | None]) -> None:
        """Obey the first signal among those that the ranks *received*."""
        self.number = self.number or next(filter(None, received), None)

    def __bool__(self) -> bool:
        return self.number is not None

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name if self.number is not None else "no signal"

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        noted = bool(self._before)
        self._restore()
        if noted and isinstance(error, RanksLost):
            # When one rank is gone, torchrun sends SIGTERM to those that are left, perhaps before they have said why
            # they end.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if not self._shared:
            self.number = number
        self._restore()
        if not is_first_rank():  # the first one tells it for all
            return
        # Not print(): a handler may interrupt one, and buffered streams do not bear that.
        os.write(2, f"\n{signal.Signals(number).name}: saving after this step; a second one stops at once\n".encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
