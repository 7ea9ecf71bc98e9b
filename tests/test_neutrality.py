"""The core knows no algorithm and no transport by name, and importing what is torch-free imports no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.testing.public import imported_modules

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core" / "src" / "draftsmith"
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))

#: Families as people write them, with or without a separator; the plugins' own names are added below.
KNOWN_NAMES = (
    r"p?eagle(?:[-_ ]?[123])?",
    r"p[-_ ]eagle",
    "dflash2?",
    "dspark",
    "mtp",
    "medusa",
    "mooncake",
    r"hs[-_ ]file",
)
#: vLLM's own configuration key, which names the layers to tap whatever the algorithm.
ALLOWED = ("eagle_aux_hidden_state_layer_ids",)


def entry_points(package: Path) -> dict[str, str]:
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project["entry-points"]["draftsmith.v1"])


def forbidden_pattern() -> re.Pattern[str]:
    own = [re.escape(name) for package in PLUGINS for name in entry_points(package)]
    return re.compile(rf"(?<![a-z])(?:{'|'.join([*KNOWN_NAMES, *own])})(?![a-z])", re.IGNORECASE)


def python_files(folder: Path) -> list[Path]:
    files = sorted(folder.rglob("*.py"))
    assert files, f"no source under {folder}"
    return files


def words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every identifier and every string of a module (docstrings and parts of f-strings too), with its line."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            yield line, node.value if isinstance(node.value, str) else node.value.decode("latin-1")
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield line, value
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield from ((line, name) for name in node.names)


def named_algorithms(source: str) -> list[tuple[int, str]]:
    """Line and text of each place in *source* that names an algorithm or transport."""
    pattern, found = forbidden_pattern(), []
    for line, text in words(ast.parse(source)):
        for allowed in ALLOWED:
            text = text.replace(allowed, "")
        # CamelCase hides word borders: DFlashModel is read as "DFlash Model", MTPStep as "MTP Step"
        for border in (r"(?<=[a-z0-9])(?=[A-Z])", r"(?<=[A-Z])(?=[A-Z][a-z])"):
            found += [(line, match.group()) for match in pattern.finditer(re.sub(border, " ", text))]
    return found


@pytest.mark.parametrize(
    "source",
    [
        'LOSS = "eagle3"',
        "class DFlashModel: ...",
        "def mtp_step(): ...",
        "class MTPStep: ...",
        "import draftsmith_hs_file",
        'f"{x} of P-EAGLE"',
        '"""For EAGLE-3 only."""',
        "use(mooncake=1)",
        "config.dspark = 2",
    ],
)
def test_the_check_itself_finds_names(source: str) -> None:
    assert named_algorithms(source)


@pytest.mark.parametrize(
    "source", ['KEY = "eagle_aux_hidden_state_layer_ids"', "attempts = 3", '"""prompt templates"""', "files = []"]
)
def test_the_check_itself_allows_other_words(source: str) -> None:
    assert not named_algorithms(source)


@pytest.mark.parametrize("path", python_files(CORE), ids=lambda path: str(path.relative_to(CORE)))
def test_core_names_no_algorithm_and_no_transport(path: Path) -> None:
    assert not forbidden_pattern().search(str(path.relative_to(CORE)))
    found = named_algorithms(path.read_text(encoding="utf-8"))
    assert not found, f"{path}: {found}"


@pytest.mark.parametrize("path", python_files(CORE), ids=lambda path: str(path.relative_to(CORE)))
def test_core_imports_no_plugin(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    plugins = [(line, module) for line, module, _ in imported_modules(tree) if module.startswith("draftsmith_")]
    assert not plugins, f"{path}: {plugins}"


LIGHT_MODULES = (
    "draftsmith",
    "draftsmith.api",
    "draftsmith.builtin",
    "draftsmith.cli",
    "draftsmith.config.load",
    "draftsmith.config.resolve",
    "draftsmith.config.schema",
    "draftsmith.errors",
    "draftsmith.hookspecs",
    "draftsmith.interfaces",
    "draftsmith.plugins",
    "draftsmith.recurrent",
    "draftsmith.speculators",
    "draftsmith.stages",
    "draftsmith.stored_tensors",
    "draftsmith.testing.public",
    "draftsmith.verifier",
    *(module for package in PLUGINS for module in entry_points(package).values()),
    *(
        f"{package_module.split('.')[0]}.options"
        for package in PLUGINS
        for package_module in entry_points(package).values()
    ),
)
HEAVY_MODULES = ("torch", "transformers", "datasets", "numpy", "vllm", "safetensors.torch", "tensorboard", "pyarrow")


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_it_imports_nothing_heavy(module: str, tmp_path: Path) -> None:
    code = (
        f"import sys, {module}\n"
        f"heavy = [name for name in {HEAVY_MODULES!r} if name in sys.modules]\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
