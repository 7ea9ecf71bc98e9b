"""The documentation says what the source says: every recipe key, hook, command and link."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import types
import typing
from pathlib import Path

import attrs
import pluggy
import pytest
import setup_environment
import torch
import write_reference as reference

from draftsmith import api, hookspecs
from draftsmith.cli import main
from draftsmith.cli.app import COMMANDS
from draftsmith.cli.common import plugin_commands
from draftsmith.config.load import load_recipe
from draftsmith.config.schema import NamedConfig, Recipe
from draftsmith.data.conversations import normalise
from draftsmith.evaluation.require import FIGURES
from draftsmith.evaluation.results import Evaluation, Method, PromptRecord, Repetition, RequestRecord, RoundRecord
from draftsmith.hookspecs import hookimpl
from draftsmith.interfaces import DraftSlots, ScoredSlots
from draftsmith.plugins import load_plugins
from draftsmith.train.metrics import divide, slot_metrics

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


def test_an_attribute_of_several_lines_is_one_item() -> None:
    (only,) = reference.attribute_list(
        "    native: config.json is that of a model, and the\n        tensors have, for now, its names.\n"
    )
    assert only == "* `native`: config.json is that of a model, and the tensors have, for now, its names."
    described = "    one, two: first\n        and more.\n    three: third.\n"
    assert reference.attribute_list(described) == ["* `one`, `two`: first and more.", "* `three`: third."]


@pytest.mark.parametrize("key", [key for key, _, section in reference.recipe_keys() if section is None])
def test_every_recipe_key_is_documented(key: str) -> None:
    rows = re.findall(
        rf"^\| `{re.escape(key)}` \|.*\| ([^|]+) \|$", (REFERENCE / "recipe.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 1
    assert rows[0].strip(), f"{key} has no help in config/schema.py"


def test_the_keys_are_all_of_the_schema() -> None:
    def fields(cls: type, prefix: str = "") -> set[str]:
        hints = typing.get_type_hints(cls)
        found = set()
        for attribute in attrs.fields(cls):
            nested = hints[attribute.name]
            inner = isinstance(nested, type) and attrs.has(nested) and nested is not NamedConfig
            found |= fields(nested, f"{prefix}{attribute.name}.") if inner else {f"{prefix}{attribute.name}"}
        return found

    keys = {key for key, _, section in reference.recipe_keys() if section is None}
    assert keys == fields(Recipe)
    assert {"verifier", "train.epochs", "data.generation.temperature"} <= keys


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_example_recipes_are_valid(path: Path) -> None:
    loaded = load_recipe(path)
    files = [*loaded.recipe.data.sources, *filter(None, [loaded.recipe.verify.prompts])]
    assert files
    for name in files:
        rows = [json.loads(line) for line in (loaded.folder / name).read_text(encoding="utf-8").splitlines()]
        assert rows
        for row in rows:
            normalise(row, allow_empty_answers=True)


def test_there_is_an_example_recipe() -> None:
    assert ROOT / "examples" / "smollm2-eagle3.yaml" in RECIPES


def test_every_metric_is_defined() -> None:
    slots = DraftSlots(
        terms=(), teacher_row=torch.arange(2), step=torch.arange(2), chain=torch.zeros(2, dtype=torch.int64),
        weight=torch.ones(2), total_positions=2, num_steps=2,
    )  # fmt: skip
    hit, one = torch.ones(2, dtype=torch.bool), torch.ones(2)
    scored = ScoredSlots(loss=one, correct=hit, acceptance=one, kept_mass=one, kept=hit, top_probability=one)
    names = {re.sub(r"_\d+", "_k", name) for name in divide(slot_metrics(slots, scored))}
    page = (DOCS / "training.md").read_text(encoding="utf-8")
    assert {"eal", "prefix_k", "coverage"} <= names
    assert not {name for name in names if f"| `{name}` |" not in page}


def test_every_figure_and_key_of_an_evaluation_is_documented() -> None:
    page = (DOCS / "evaluate.md").read_text(encoding="utf-8")
    classes = (Evaluation, Method, Repetition, RequestRecord, RoundRecord, PromptRecord)
    keys = {field.name for cls in classes for field in attrs.fields(cls)}
    assert {"complete", "losslessness", "rounds"} <= keys
    assert not {name for name in {*keys, *FIGURES} if f"`{name}`" not in page}


def test_every_prompt_set_is_documented() -> None:
    page = (DOCS / "evaluate.md").read_text(encoding="utf-8")
    names = load_plugins(only=[]).prompt_sets.names()
    assert "humaneval" in names
    assert not {name for name in names if f"`{name}`" not in page}


def test_every_reason_to_reject_a_row_is_explained() -> None:
    page = (DOCS / "data.md").read_text(encoding="utf-8")
    sources = sorted((ROOT / "core" / "src" / "draftsmith" / "data").glob("*.py"))
    reasons = {
        reason
        for path in sources
        for reason in re.findall(r'RowRejected\(\s*f?"([a-z_]+)', path.read_text(encoding="utf-8"))
    }
    assert {"malformed_json", "unknown_role", "too_long", "answer_does_not_follow_prompt"} <= reasons
    assert not {reason for reason in reasons if not re.search(rf"`{reason}[`:]", page)}


# --- hooks, commands, make ---------------------------------------------------------------------------------------


def test_every_hook_is_documented() -> None:
    page = (REFERENCE / "hooks.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^### `(draftsmith_\w+)`$", page, re.MULTILINE))
    assert documented == set(reference.hooks())
    assert len(documented) >= 12
    for hook in reference.hooks().values():
        assert reference.signature(hook) in page
        assert f"```python\n{reference.hook_example(hook)}\n```" in page


@attrs.frozen(kw_only=True)
class MyOptions:
    """What stands for a plugin's own options in the examples of hooks."""

    num_tokens: int = attrs.field(default=3, metadata={"help": "tokens drafted"})


@pytest.mark.parametrize("name", reference.hooks())
def test_the_example_of_every_hook_is_taken_as_a_plugin(name: str) -> None:
    plugin = types.ModuleType("mypackage")
    vars(plugin).update(api=api, hookimpl=hookimpl, MyOptions=MyOptions)
    exec(reference.hook_example(reference.hooks()[name]), vars(plugin))
    manager = pluggy.PluginManager(api.PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    if reference.is_observer(reference.hooks()[name]):
        return
    (kind,) = re.findall(r"api\.(\w+)", reference.signature(reference.hooks()[name]))
    (items,) = getattr(manager.hook, name)()
    assert [type(item) for item in items] == [getattr(api, kind)]


def test_every_interface_and_each_of_its_methods_is_documented() -> None:
    index = (REFERENCE / "interfaces.md").read_text(encoding="utf-8")
    pages = {path.name: path.read_text(encoding="utf-8") for path in (REFERENCE / "interfaces").glob("*.md")}
    assert set(pages) == {reference.facet_file(facet).rpartition("/")[2] for facet in reference.facets()}
    assert {"losses.md", "masks.md", "algorithms.md", "exported-checkpoints.md", "transports.md"} <= set(pages)
    assert not [name for name in pages if f"(interfaces/{name})" not in index]
    page = "\n".join(pages.values())
    assert [cls.__name__ for cls in reference.interface_classes()][:2] == ["VocabularyMap", "PackedRow"]
    documented = set(re.findall(r"^### `(\w+\.\w+)`", page, re.MULTILINE))
    known = {f"{cls.__name__}.{name}" for cls in reference.interface_classes() for name, _ in reference.members(cls)}
    assert documented == known
    assert {"DraftAlgorithm.forward", "Drafter.propose", "MaskRule.__call__", "VocabularyMap.draft_size"} <= known
    assert "### `DraftAlgorithm.forward` (to be written)\n\n    forward(self, model: nn.Module, batch: Any)" in page
    assert set(re.findall(r"^## `(\w+)`$", page, re.MULTILINE)) == set(reference.interfaces.__all__)


def test_hook_docstrings_are_not_empty() -> None:
    for name, hook in reference.hooks().items():
        assert (hook.__doc__ or "").strip(), name


def help_of(*command: str) -> str:
    """What `draftsmith COMMAND --help` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*command, "--help"]) == 0
    return printed.getvalue()


def commands() -> list[str]:
    """Every command as typed, `plugins list` and those of our own plugins among them."""
    found = []
    for name in COMMANDS:
        nested = re.search(r"^  ([a-z-]+(?: \| [a-z-]+)+)$", help_of(name), re.MULTILINE)
        found += [f"{name} {each}" for each in nested[1].split(" | ")] if nested else [name]
    for each in plugin_commands():
        listed = help_of(each.name).partition("\nCommands:\n")[2]
        nested = re.findall(r"^  ([a-z-]+)  ", listed, re.MULTILINE)
        found += [f"{each.name} {name}" for name in nested] or [each.name]
    return found


def test_every_command_is_documented() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert {"run", "lint", "plugins list", "plugins show", "stitch", "store up", "store gc"} <= set(commands())
    missing = [command for command in commands() if f"`draftsmith {command}" not in page]
    assert not missing


def test_every_option_of_every_command_is_documented() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    texts = [help_of(), *(help_of(*command.split()) for command in commands())]
    options = {option for text in texts for option in re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)}
    assert {"--set", "--no-plugin", "--overwrite", "--version", "--size", "--master"} <= options
    missing = sorted(option for option in options - {"--help"} if f"`{option}" not in page)
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
    if path.parent == REFERENCE / "interfaces":
        assert f"(interfaces/{path.name})" in (REFERENCE / "interfaces.md").read_text(encoding="utf-8")
    elif path != DOCS / "README.md":
        assert f"({path.relative_to(DOCS).as_posix()})" in (DOCS / "README.md").read_text(encoding="utf-8")
