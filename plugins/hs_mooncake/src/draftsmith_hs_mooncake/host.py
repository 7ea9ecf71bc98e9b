"""Starting and stopping the store of this host. Torch-free."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.errors import ConfigError, OutputError, Problem, TransportError
from draftsmith_hs_mooncake import state
from draftsmith_hs_mooncake.installed import store_module
from draftsmith_hs_mooncake.processes import is_gone
from draftsmith_hs_mooncake.supervisor import Settings

__all__ = ["start", "stop", "to_bytes"]

_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
#: The store's own unit of memory.
_STEP = 16 << 20


def to_bytes(text: str) -> int:
    """``256M``, ``4GiB``, ``1.5G``: bytes, in powers of 1024, rounded up to 16 MiB.

    Raises:
        ConfigError: no size, or none above zero.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = 0
    if found:
        size = int(float(found.group(1)) * (1 << _SHIFTS[found.group(2).upper()]))
    if size <= 0:
        raise ConfigError([Problem(f"{text!r} is not a size", where="--size", hint="such as 256M, 4GiB or 1.5T")])
    return -(-size // _STEP) * _STEP


def start(settings: Settings) -> state.RunningStore:
    """Start a store in the background and wait until it is ready.

    Raises:
        OutputError: one runs already.
        TransportError: it did not start; the log says why.
        UserError: the store is not installed, or does not load.
    """
    running = state.read()
    if running is not None and is_gone(running.supervisor) is False:
        raise OutputError(
            f"a store runs here already: master {running.master}",
            where=str(state.folder()),
            hint=f"`draftsmith store down` stops it; {state.FOLDER_VARIABLE} names a place for a second one",
        )
    store_module()  # what does not load here would not load there, and says so better here
    state.remove()
    log = state.folder() / "store.log"
    with open(log, "ab") as file:
        begun = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "draftsmith_hs_mooncake.supervisor", settings.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        running = state.read()
        if running is not None:
            return running
        if process.poll() is not None:
            break
        time.sleep(0.05)
    if process.poll() is None:
        process.terminate()
    raise TransportError(
        f"the store did not start:\n{_end_of(log, begun)}",
        where=str(log),
        hint="another port (`--port`, `--admin-port`), or a smaller `--size`",
    )


def _end_of(log: Path, begun: int) -> str:
    with open(log, "rb") as file:
        file.seek(begun)
        return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-5:])


def stop() -> state.RunningStore | None:
    """Stop the store of this host, also what is left of one whose supervisor was killed. None: there is none."""
    running = state.read()
    if running is None:
        return None
    # The supervisor ends the others; alone, they would be left over.
    for process in (running.supervisor, running.owner_process, running.master_process):
        _end(process)
    state.remove()
    return running


def _end(process: Mapping[str, Any]) -> None:
    """Ask a process to end, and make it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if is_gone(process) is not False:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process["pid"], number)
        deadline = time.monotonic() + _STOP_SECONDS
        while is_gone(process) is False and time.monotonic() < deadline:
            time.sleep(0.05)
