"""The plugin author's guide has a complete plugin in it: taken from the page as it stands, it installs and works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "plugins.md"

Run = Callable[..., subprocess.CompletedProcess[str]]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The guide's package, installed into a folder of its own; runs Python with it."""
    project = tmp_path_factory.mktemp("project")
    package = project / "src" / "draftsmith_focal"
    package.mkdir(parents=True)
    plugin, losses, test = blocks("python")
    (project / "pyproject.toml").write_text(blocks("toml")[0], encoding="utf-8")
    (package / "plugin.py").write_text(plugin, encoding="utf-8")
    (package / "losses.py").write_text(losses, encoding="utf-8")
    (project / "test_focal.py").write_text(test, encoding="utf-8")
    site = tmp_path_factory.mktemp("site")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *arguments], cwd=project, env=environment, capture_output=True, text=True, check=False
        )

    command = ("-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site), ".")
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def test_it_is_found_and_shows_its_options(installed: Run) -> None:
    listed = installed("-m", "draftsmith", "plugins", "list")
    assert listed.returncode == 0, listed.stderr
    assert "focal  (draftsmith-focal 0.1.0)" in listed.stdout
    shown = installed("-m", "draftsmith", "plugins", "show", "focal")
    assert "gamma: number, default 2.0" in shown.stdout
    assert "how much easy positions count less" in shown.stdout


def test_its_plugin_module_imports_no_torch(installed: Run) -> None:
    done = installed("-c", "import draftsmith_focal.plugin, sys; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_it_passes_the_conformance_kit(installed: Run) -> None:
    done = installed("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_focal.py")
    assert done.returncode == 0, done.stdout
    assert re.search(r"[5-9] passed|\d\d passed", done.stdout)


def test_a_recipe_can_ask_for_it(installed: Run) -> None:
    (example,) = [block for block in blocks("yaml") if "focal" in block]
    code = (
        "import sys, yaml; from draftsmith.plugins import load_plugins, load_reference\n"
        f"loss = yaml.safe_load({example!r})['loss']\n"
        "item = load_plugins().losses.get(loss['name'])\n"
        "built = load_reference(item.implementation)(**loss['options'])\n"
        "sys.exit(built.gamma != 1.5)"
    )
    done = installed("-c", code)
    assert done.returncode == 0, done.stderr
