"""A real store for tests: ``pytest_plugins = ["draftsmith_hs_mooncake.testing"]``, or import the fixture.

def test_mine(mooncake_store):
    transport = MooncakeTransport(mooncake_store.options(), tmp_path / "run")
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import frozen

from draftsmith_hs_mooncake import admin, state
from draftsmith_hs_mooncake.host import start, stop
from draftsmith_hs_mooncake.options import MooncakeOptions
from draftsmith_hs_mooncake.supervisor import Settings

__all__ = ["TestedStore", "mooncake_store", "running_store"]


@frozen(kw_only=True)
class TestedStore:
    """A store of this test run. Its processes may be killed: the supervisor starts them again."""

    __test__ = False

    folder: Path
    note: state.RunningStore

    @property
    def now(self) -> state.RunningStore:
        """With the processes that run at this moment."""
        with _noted_in(self.folder):
            running = state.read()
        assert running is not None
        return running

    def options(self, **changes: Any) -> MooncakeOptions:
        """Options that name it."""
        named = MooncakeOptions(master=self.note.master, admin=self.note.admin, patience=60.0)
        return attrs.evolve(named, **changes)

    def usage(self) -> admin.Usage:
        return admin.usage(self.note.admin)

    def all_keys(self) -> list[str]:
        return [each for each in admin.keys(self.note.admin) if each]

    def log(self) -> str:
        return (self.folder / "store.log").read_text(encoding="utf-8", errors="replace")


@contextmanager
def _noted_in(folder: Path) -> Iterator[None]:
    before = os.environ.get(state.FOLDER_VARIABLE)
    os.environ[state.FOLDER_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[state.FOLDER_VARIABLE]
        else:
            os.environ[state.FOLDER_VARIABLE] = before


@contextmanager
def running_store(
    folder: Path, size: int = 256 << 20, host: str = "127.0.0.1", **settings: Any
) -> Iterator[TestedStore]:
    """A store of *size* bytes that ends with the block. *folder* takes its note and its log."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = Settings(host=host, port=0, admin_port=0, size=size, protocol="tcp", device="", **settings)
    with _noted_in(folder):
        note = start(wanted)
    try:
        yield TestedStore(folder=folder, note=note)
    finally:
        with _noted_in(folder):
            stop()


@pytest.fixture(scope="module")
def mooncake_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestedStore]:
    """A store of 256 MiB for the tests of a module, which must leave no key in it."""
    # On a busy machine its owner may be silent for a while, and what lies in it is not lost by that.
    with running_store(tmp_path_factory.mktemp(f"store-{secrets.token_hex(2)}"), silent_seconds=60) as store:
        yield store
        assert store.all_keys() == []
