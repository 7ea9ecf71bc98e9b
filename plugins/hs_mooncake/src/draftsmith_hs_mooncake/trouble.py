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
    """

    def __init__(self, where: str, begins: str, ends: str) -> None:
        self._where, self._begins, self._ends = where, begins, ends
        self._since: float | None = None
        self._lock = threading.Lock()

    def met(self, begun: float) -> None:
        """A call that was made at *begun* (of ``time.monotonic``) has failed."""
        with self._lock:
            if self._since is not None:
                return
            self._since = begun
        _log.warning("the store at %s %s", self._where, self._begins)

    def over(self, begun: float) -> None:
        """A call that was made at *begun* has succeeded. One that was made before the trouble says nothing of it."""
        with self._lock:
            since = self._since
            if since is None or begun <= since:
                return
            self._since = None
        _log.warning("the store at %s %s after %.0f s", self._where, self._ends, time.monotonic() - since)
