"""Which process is meant, and whether it still runs: a number alone is given to another one after a while."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["identity", "is_gone", "start_of"]


def start_of(pid: int) -> str | None:
    """When a process of this host began, in the kernel's count since the boot; None: there is none, or a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def identity(pid: int | None = None) -> dict[str, Any]:
    """Plain values that name a process of this host (by default this one) for good."""
    pid = os.getpid() if pid is None else pid
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "start": start_of(pid)}


def is_gone(process: Mapping[str, Any]) -> bool | None:
    """Whether that process has ended; None: it is, or was, on another host."""
    if process["host"] != socket.gethostname():
        return None
    return process["boot"] != _boot() or process["start"] is None or start_of(process["pid"]) != process["start"]
