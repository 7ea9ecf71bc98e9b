"""The transport that the tests of the core use is held to what all transports promise."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from draftsmith.interfaces import HiddenStateTransport
from draftsmith.testing.transport import TransportTests

TOY = Path(__file__).parent / "toy"


class TestToyTransport(TransportTests):
    @pytest.fixture
    def transport(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HiddenStateTransport:
        monkeypatch.syspath_prepend(str(TOY))
        monkeypatch.setenv("PYTHONPATH", f"{TOY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")  # killed writers
        toy = importlib.import_module("draftsmith_toy.transport")
        return toy.Files(None, tmp_path / "run")
