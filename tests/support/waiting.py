"""Waiting for what another thread or process does: until it is so, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Return when *condition* holds; fail, naming *what* was waited for, when it does not for so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.005)
