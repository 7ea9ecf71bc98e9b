"""The documentation says what the source says: every recipe key, hook, command and link."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import attrs
import pytest
import setup_environment
import typer.main
import write_reference as reference

from draftsmith.config.load import load_recipe

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
RECIPES = sorted((ROOT / "examples").glob("*.yaml"))


def tracked_pages() -> list[Path]:
    """Every Markdown file under version control, or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


# --- the recipe --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted(reference.PAGES))
def test_reference_is_what_the_source_says(page: str) -> None:
    assert (REFERENCE / page).read_text(encoding="utf-8") == reference.PAGES[page](), "run `make docs`"


@pytest.mark.parametrize("key", [name for name, _ in reference.recipe_keys()])
def test_every_recipe_key_is_documented(key: str) -> None:
    assert f"`{key}`" in (REFERENCE / "recipe.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("key", "attribute"),
    [pair for pair in reference.recipe_keys() if reference.nested_class(pair[1].type) is None],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_plain_recipe_key_has_a_meaning(key: str, attribute: attrs.Attribute[object]) -> None:
    assert attribute.metadata.get("help", "").strip(), f"{key} has no help in config/schema.py"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_example_recipes_are_valid(path: Path) -> None:
    loaded = load_recipe(path)
    for source in loaded.recipe.data.sources:
        assert (loaded.folder / source).exists(), source


def test_there_is_an_example_recipe() -> None:
    assert ROOT / "examples" / "smollm2-eagle3.yaml" in RECIPES


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "data").glob("*.jsonl")), ids=lambda path: path.name)
def test_example_data_is_json_lines(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows
    for row in rows:
        messages = row.get("messages") or row.get("conversations")
        assert isinstance(messages, list)
        assert messages


# --- hooks, commands, make ---------------------------------------------------------------------------------------


def test_every_hook_is_documented() -> None:
    page = (REFERENCE / "hooks.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^### `(draftsmith_\w+)`$", page, re.MULTILINE))
    assert documented == set(reference.hooks())
    assert len(documented) >= 12
    for hook in reference.hooks().values():
        assert reference.signature(hook) in page


def test_hook_docstrings_are_not_empty() -> None:
    for name, hook in reference.hooks().items():
        assert (hook.__doc__ or "").strip(), name


def commands() -> list[str]:
    """Every command as typed, `plugins list` among them."""
    from draftsmith.cli import app

    def walk(command: object, prefix: str) -> list[str]:
        children = getattr(command, "commands", None)
        if not children:
            return [prefix]
        return [each for name, child in children.items() for each in walk(child, f"{prefix} {name}".strip())]

    return walk(typer.main.get_command(app), "")


def test_every_command_is_documented() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    missing = [command for command in commands() if f"`draftsmith {command}" not in page]
    assert not missing


def test_documented_commands_exist() -> None:
    known = commands()
    for path in tracked_pages():
        for line in re.findall(r"^    (?:\$ )?draftsmith ([a-z].*)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert any(line == command or line.startswith(f"{command} ") for command in known), f"{path}: {line}"


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in tracked_pages():
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"`make ([a-z-]+)", text) + re.findall(r"^    make ([a-z-]+)", text, re.MULTILINE)
        assert set(named) <= targets, f"{path}: {set(named) - targets}"


def test_readme_names_the_torch_index_variable() -> None:
    assert setup_environment.TORCH_INDEX in (ROOT / "README.md").read_text(encoding="utf-8")


# --- links -------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", tracked_pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{path}: {target}"
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), f"{path}: {target}"


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_every_page_is_reachable_from_the_index(path: Path) -> None:
    if path != DOCS / "README.md":
        assert f"({path.relative_to(DOCS).as_posix()})" in (DOCS / "README.md").read_text(encoding="utf-8")
