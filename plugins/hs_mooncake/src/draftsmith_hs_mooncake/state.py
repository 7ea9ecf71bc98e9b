"""The note of the store that runs on this host, in the user's runtime folder. Torch-free."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from draftsmith.errors import OutputError, UserError
from draftsmith_hs_mooncake.processes import is_gone

__all__ = ["FOLDER_VARIABLE", "RunningStore", "folder", "here", "read", "remove", "write"]

#: Names another folder for the note, so that one user can run several stores on a host.
FOLDER_VARIABLE = "DRAFTSMITH_STORE_FOLDER"


@frozen(kw_only=True)
class RunningStore:
    """A store that a supervisor keeps running here. The processes are :func:`processes.identity` values."""

    master: str
    admin: str
    protocol: str
    device: str
    size: int
    log: str
    supervisor: Mapping[str, Any]
    master_process: Mapping[str, Any]
    owner_process: Mapping[str, Any]

    def options(self) -> dict[str, str]:
        """The transport's options that name it from anywhere."""
        named = {"master": self.master, "admin": self.admin}
        if self.protocol != "tcp":
            named |= {"protocol": self.protocol, "device": self.device}
        return named


def folder() -> Path:
    """The folder of the note and the log, made where it is missing.

    Raises:
        OutputError: it belongs to somebody else.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if named:
        path = Path(named)
    elif runtime and Path(runtime).is_dir():
        path = Path(runtime) / "draftsmith-store"
    else:
        path = Path(tempfile.gettempdir()) / f"draftsmith-store-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise OutputError(
            "the folder that notes the running store belongs to another user",
            where=str(path),
            hint=f"name another with {FOLDER_VARIABLE}",
        )
    return path


def _note() -> Path:
    return folder() / "store.json"


def write(store: RunningStore) -> None:
    """Atomically."""
    path = _note()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(attrs.asdict(store), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def remove() -> None:
    _note().unlink(missing_ok=True)


def read() -> RunningStore | None:
    """The store noted here, whether or not it still runs; None: none is noted."""
    try:
        return RunningStore(**json.loads(_note().read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def here() -> RunningStore:
    """The store that runs on this host.

    Raises:
        UserError: none does.
    """
    store = read()
    if store is None or is_gone(store.supervisor) is not False:
        raise UserError(
            "no store is named, and none was started on this host"
            if store is None
            else f"the store that was started on this host has ended (its log: {store.log})",
            where="hs_mooncake, option `master`",
            hint="`draftsmith store up` starts one; the option `master` names one that runs elsewhere",
        )
    return store
