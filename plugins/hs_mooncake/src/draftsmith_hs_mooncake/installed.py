"""The installed build of the store: exactly one of three distributions that install the same package. Torch-free."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError

__all__ = ["BUILDS", "ENVIRONMENT", "installed_build", "master_program", "store_module"]

#: Extra → the distribution that it installs.
BUILDS = {
    "cpu": "mooncake-transfer-engine-non-cuda",
    "cuda12": "mooncake-transfer-engine",
    "cuda13": "mooncake-transfer-engine-cuda13",
}
#: Read by the store when it is loaded. Its own defaults wait half a minute where a master or an owner hangs, twenty
#: times ten seconds for a master that is not there, and write a page of log for every process.
ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "3",
}


def _commands() -> str:
    return "; ".join(f'`pip install "draftsmith-hs-mooncake[{extra}]"`' for extra in BUILDS)


def installed_build() -> tuple[str, str]:
    """(distribution, version) of the store.

    Raises:
        UserError: none is installed, or several, whose files have overwritten each other's.
    """
    found = {}
    for name in BUILDS.values():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not found:
        raise UserError(
            "the Mooncake store is not installed",
            where="draftsmith-hs-mooncake",
            hint=f"one of: {_commands()} (no GPU; CUDA 12; CUDA 13)",
        )
    if len(found) > 1:
        names = " ".join(found)
        raise UserError(
            f"several builds of the Mooncake store are installed, and have overwritten each other's files: {names}",
            where="draftsmith-hs-mooncake",
            hint=f"`pip uninstall {names}`, then one of: {_commands()}",
        )
    return next(iter(found.items()))


def store_module() -> Any:
    """``mooncake.store``, imported with settings under which it fails in seconds.

    Raises:
        UserError: it is not installed, or does not load.
    """
    name, version = installed_build()
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise UserError(
            f"{name} {version} does not load: {error}",
            where="draftsmith-hs-mooncake",
            hint="it needs libibverbs, libnuma and libcurl (Debian: apt-get install libibverbs1 libnuma1 libcurl4); "
            f"or another build: {_commands()}",
        ) from None


def master_program() -> Path:
    """The master's executable, which the store's package brings."""
    installed_build()
    found = importlib.util.find_spec("mooncake")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(next(iter(found.submodule_search_locations))) / "mooncake_master"
