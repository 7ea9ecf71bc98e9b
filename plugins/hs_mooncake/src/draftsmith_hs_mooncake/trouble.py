"""What a client meets that passes, told in one line when it begins and in one when it is over. Torch-free."""

from __future__ import annotations

import logging
import threading
import time

__all__ = ["Trouble"]

_log = logging.getLogger(__name__)


class Trouble:
    """One kind of trouble of a client. Its threads all meet it; the first one tells of it.

    Args:
        where: the store's address.
        begins: what has happened, and what is done; follows "the store at ADDRESS".
        ends: what it does again.
        tell_after: seconds for which it is nothing to tell of.
    """

    def __init__(self, where: str, begins: str, ends: str, *, tell_after: float = 0.0) -> None:
        self._where, self._begins, self._ends, self._tell_after = where, begins, ends, tell_after
        self._since: float | None = None
        self._told = False
        self._lock = threading.Lock()

    def met(self, begun: float) -> None:
        """A call that was made at *begun* (of ``time.monotonic``) has failed."""
        with self._lock:
            if self._since is None:
                self._since = begun
            if self._told or time.monotonic() - self._since < self._tell_after:
                return
            self._told = True
        _log.warning("the store at %s %s", self._where, self._begins)

    def over(self, begun: float) -> None:
        """A call that was made at *begun* has succeeded. One that was made before the trouble says nothing of it."""
        with self._lock:
            since, told = self._since, self._told
            if since is None or begun <= since:
                return
            self._since, self._told = None, False
        if told:
            _log.warning("the store at %s %s after %.0f s", self._where, self._ends, time.monotonic() - since)
