"""The conformance suite, on a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.interfaces import HiddenStateTransport
from draftsmith.testing.transport import Fp8TransportTests, TransportTests
from draftsmith_hs_file.options import FileOptions
from draftsmith_hs_file.transport import FileTransport


class TestFileTransport(TransportTests):
    @pytest.fixture
    def transport(self, tmp_path: Path) -> HiddenStateTransport:
        return FileTransport(FileOptions(), tmp_path / "run")


class TestTinyShards(TransportTests):
    """The same with a compaction after every second sample."""

    @pytest.fixture
    def transport(self, tmp_path: Path) -> HiddenStateTransport:
        return FileTransport(FileOptions(loose_samples=2, shard_mebibytes=1, fsync=False), tmp_path / "run")


class TestEightBits(Fp8TransportTests):
    @pytest.fixture
    def transport(self, tmp_path: Path) -> HiddenStateTransport:
        return FileTransport(FileOptions(encoding="fp8"), tmp_path / "run")


class TestEightBitsInTinyShards(Fp8TransportTests):
    @pytest.fixture
    def transport(self, tmp_path: Path) -> HiddenStateTransport:
        options = FileOptions(encoding="fp8", loose_samples=2, shard_mebibytes=1, fsync=False)
        return FileTransport(options, tmp_path / "run")
