"""What ``draftsmith plugins check`` cannot know from the name: the transport needs a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest

from draftsmith.interfaces import HiddenStateTransport
from draftsmith.testing.check import TransportCheck
from draftsmith_hs_mooncake.testing import TestedStore, running_store
from draftsmith_hs_mooncake.transport import MooncakeTransport

__all__ = ["MooncakeCheck"]


class MooncakeCheck(TransportCheck):
    """On a store of its own, started for the first check and stopped after the last."""

    _store: ClassVar[TestedStore | None] = None

    @pytest.fixture
    def transport(
        self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
    ) -> Iterator[HiddenStateTransport]:
        store = type(self)._store
        if store is None:
            running = ExitStack()
            store = type(self)._store = running.enter_context(running_store(tmp_path_factory.mktemp("store")))
            request.session.addfinalizer(running.close)
        transport = MooncakeTransport(store.options(), tmp_path / "run")
        yield transport
        for each in (transport, self.beside(transport)):
            each.remove_all()
        assert store.all_keys() == []
