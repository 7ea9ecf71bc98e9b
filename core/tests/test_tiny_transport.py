"""The transport that the tests of the core use is held to what all transports promise."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from draftsmith.interfaces import HiddenStateTransport
from draftsmith.testing.transport import TransportTests

TINY = Path(__file__).parent / "tiny"


class TestTinyTransport(TransportTests):
    @pytest.fixture
    def transport(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HiddenStateTransport:
        monkeypatch.syspath_prepend(str(TINY))
        monkeypatch.setenv("PYTHONPATH", f"{TINY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")  # killed writers
        tiny = importlib.import_module("draftsmith_tiny.transport")
        return tiny.Files(None, tmp_path / "run")
