"""Our own plugins under `draftsmith plugins check`, as anybody would put theirs to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.cli import main

pytestmark = pytest.mark.slow

PLUGINS = sorted(path.parent.name for path in (Path(__file__).parent.parent / "plugins").glob("*/pyproject.toml"))


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_of_this_repository_passes(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plugins", "check", plugin])
    out = capsys.readouterr().out
    assert code == 0, out
    assert f"plugin {plugin}  (draftsmith-" in out
    assert ", 0 failed, in " in out
    assert "skipped" not in out
