"""The conformance suite, on a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.interfaces import HiddenStateTransport
from draftsmith.testing.transport import Fp8TransportTests, TransportTests
from draftsmith_hs_mooncake.testing import TestedStore, mooncake_store
from draftsmith_hs_mooncake.transport import MooncakeTransport

__all__ = ["mooncake_store"]


class TestMooncakeTransport(TransportTests):
    @pytest.fixture
    def transport(self, mooncake_store: TestedStore, tmp_path: Path) -> Iterator[HiddenStateTransport]:
        transport = MooncakeTransport(mooncake_store.options(), tmp_path / "run")
        yield transport
        for each in (transport, self.beside(transport)):
            each.remove_all()
        assert mooncake_store.all_keys() == []


class TestStagedInSmallChunks(TransportTests):
    """The same through registered buffers, as RDMA needs them, and with samples of several chunks."""

    @pytest.fixture
    def transport(self, mooncake_store: TestedStore, tmp_path: Path) -> Iterator[HiddenStateTransport]:
        transport = MooncakeTransport(mooncake_store.options(staging=True, chunk_mebibytes=1), tmp_path / "run")
        yield transport
        for each in (transport, self.beside(transport)):
            each.remove_all()
        assert mooncake_store.all_keys() == []


class TestEightBits(Fp8TransportTests):
    """In several chunks, whose bounds are those of nothing in them."""

    @pytest.fixture
    def transport(self, mooncake_store: TestedStore, tmp_path: Path) -> Iterator[HiddenStateTransport]:
        transport = MooncakeTransport(mooncake_store.options(encoding="fp8", chunk_mebibytes=1), tmp_path / "run")
        yield transport
        for each in (transport, self.beside(transport)):
            each.remove_all()
        assert mooncake_store.all_keys() == []
