"""What plugins may import is written down: it changes only on purpose, and our own plugins use no more than that."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import public_api
import pytest
from attrs import field, frozen

from draftsmith.testing.public import PUBLIC_MODULES, private_imports

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(
    path.parent for folder in ("plugins", "examples") for path in (ROOT / folder).glob("*/pyproject.toml")
)


# --- the list ----------------------------------------------------------------------------------------------------


def test_the_public_names_and_signatures_are_those_of_the_list() -> None:
    listed = public_api.LIST.read_text(encoding="utf-8")
    assert listed == public_api.listing(), "is the change meant? `make api`, and say so in CHANGELOG.md"


@pytest.mark.parametrize(
    "module", [each for each in PUBLIC_MODULES if each not in ("draftsmith", "draftsmith.testing")]
)
def test_every_public_module_says_what_is_public(module: str) -> None:
    loaded = importlib.import_module(module)
    assert loaded.__all__
    assert len(set(loaded.__all__)) == len(loaded.__all__)
    assert not [name for name in loaded.__all__ if not hasattr(loaded, name) or name.startswith("_")]


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_module_is_documented(module: str) -> None:
    assert f"`{module}`" in (ROOT / "docs" / "plugins" / "public-api.md").read_text(encoding="utf-8")


def test_the_tool_shows_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = tmp_path / "public_api.txt"
    changed.write_text(public_api.listing().replace("last_hidden: bool = True", "last_hidden: bool = False"))
    monkeypatch.setattr(public_api, "LIST", changed)
    monkeypatch.setattr(sys, "argv", ["public_api.py"])
    assert public_api.main() == 1
    said = capsys.readouterr().out
    assert "-        last_hidden: bool = False" in said
    assert "+        last_hidden: bool = True" in said
    assert "make api" in said
    monkeypatch.setattr(sys, "argv", ["public_api.py", "--write"])
    assert public_api.main() == 0
    assert changed.read_text() == public_api.listing()


class Plain:
    kind: str = "plain"

    def __init__(self, size: int = 3) -> None:
        self.size = size

    def __call__(self, /, a: int, *rest: int, key: str = "k" * 70, other: object = len) -> str:
        return str((a, rest, key, other, self._hidden()))

    def _hidden(self) -> int:
        return self.size


@frozen(kw_only=True)
class Valued:
    name: str
    kept: dict[str, int] = field(factory=dict)


def test_a_class_is_listed_with_all_that_a_plugin_may_lean_on() -> None:
    assert list(public_api.describe("Plain", Plain, __name__)) == [
        "class Plain",
        "    def __init__(self, size: int = 3) -> None",
        "    def __call__(self, /, a: int, *rest: int, key: str = …, other: object = len) -> str",
        "    kind: str",
    ]
    assert list(public_api.describe("Valued", Valued, __name__)) == [
        "class Valued",
        "    name: str",
        "    kept: dict[str, int] = {}",
    ]


# --- who keeps to it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_our_plugins_import_nothing_private(package: Path) -> None:
    sources = package / "src"
    assert list(sources.rglob("*.py"))
    assert not private_imports(sources)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import draftsmith.train.step", "draftsmith.train.step"),
        ("from draftsmith.plugins import load_plugins", "draftsmith.plugins"),
        ("from draftsmith import plugins", "draftsmith.plugins"),
        ("from draftsmith.api import _NAME", "draftsmith.api._NAME"),
        ("from draftsmith.speculators import shares_head", "draftsmith.speculators.shares_head"),
        ("def late():\n    from draftsmith.train import loop", "draftsmith.train"),
    ],
)
def test_a_private_import_is_found(tmp_path: Path, line: str, found: str) -> None:
    (tmp_path / "module.py").write_text(f"from draftsmith.api import Loss\n{line}\n")
    number = 1 + line.count("\n") + 1
    assert private_imports(tmp_path) == [f"module.py:{number} {found}"]
    assert private_imports(tmp_path / "module.py") == private_imports(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "from draftsmith import api, __version__",
        "import draftsmith.losses.base",
        "from draftsmith.losses import base, BUILTIN_LOSSES",
        "import draftsmith_other.train",
        "from . import train",
        "import torch",
    ],
)
def test_what_is_public_may_be_imported(tmp_path: Path, line: str) -> None:
    (tmp_path / "module.py").write_text(f"{line}\n")
    assert private_imports(tmp_path) == []


def test_the_tool_counts(repository: Path) -> None:
    command = [sys.executable, str(repository / "tools" / "public_api.py"), "--count"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{public_api.count()} public names in {len(PUBLIC_MODULES)} modules\n"
    assert public_api.count() > 200
