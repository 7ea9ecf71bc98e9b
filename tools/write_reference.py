#!/usr/bin/env python3
"""Write docs/reference/ from the source: every key of a recipe, every hook and what it returns, every option.

``--check`` writes nothing and fails where a page is not what the source says; a test does the same.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from draftsmith import api, hookspecs, interfaces
from draftsmith.cli.plugins import describe_options
from draftsmith.config.schema import NamedConfig, Recipe
from draftsmith.config.structure import field_types

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
NOTICE = "<!-- Written by `make docs` from the source: change the text there. -->\n"


# --- options and the recipe --------------------------------------------------------------------------------------


def cell(text: str) -> str:
    """Text inside a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def option_row(name: str, option: Mapping[str, Any]) -> str:
    """One line of a table of options, from what `draftsmith plugins show` would say of it."""
    default = "**required**" if option["required"] else f"`{option['default']}`"
    return f"| `{name}` | {cell(option['type'])} | {cell(default)} | {cell(option['help'])} |"


def recipe_keys(cls: type = Recipe, prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any], type | None]]:
    """Every key of a recipe, dotted as ``--set`` takes it: (key, option, its class where it is a section)."""
    kinds = field_types(cls)
    for option in describe_options(cls):
        kind = kinds[option["name"]]
        section = kind if isinstance(kind, type) and attrs.has(kind) and kind is not NamedConfig else None
        yield f"{prefix}{option['name']}", option, section
        if section is not None:
            yield from recipe_keys(section, f"{prefix}{option['name']}.")


def recipe_page() -> str:
    """docs/reference/recipe.md."""
    rows: dict[str, list[str]] = {}
    classes: dict[str, type] = {"": Recipe}
    for key, option, section in recipe_keys():
        if section is None:
            rows.setdefault(key.rpartition(".")[0], []).append(option_row(key, option))
        else:
            classes[key] = section
    lines = [
        NOTICE,
        "# Recipe keys",
        "",
        "A recipe is a YAML file; each key below can also be given as `--set KEY=VALUE`, which wins over the file.",
        "`draftsmith run RECIPE --explain` prints the value of every key and where it came from. An unknown key is an",
        "error that names the nearest one.",
        "",
        "Options of an algorithm, loss or transport stand under its `options` and are the plugin's own:",
        "`draftsmith plugins show NAME` lists them, and so does [plugins.md](plugins.md).",
    ]
    for section_name, section_rows in rows.items():
        title = f"`{section_name}`" if section_name else "The run"
        lines += ["", f"## {title}", "", inspect.getdoc(classes[section_name]) or "", ""]
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *section_rows]
    return "\n".join(lines) + "\n"


# --- the hooks ---------------------------------------------------------------------------------------------------


def hooks() -> dict[str, Callable[..., Any]]:
    """Every hook specification by name, in the order of the source."""
    mark = f"{api.PROJECT_NAME}_spec"
    found = {name: value for name, value in vars(hookspecs).items() if hasattr(value, mark)}
    return dict(sorted(found.items(), key=lambda pair: pair[1].__code__.co_firstlineno))


def is_observer(hook: Callable[..., Any]) -> bool:
    """Observer hooks take an event and return nothing; registration hooks take nothing and return values."""
    return bool(inspect.signature(hook).parameters)


def signature(hook: Callable[..., Any]) -> str:
    return f"{hook.__name__}{inspect.signature(hook)}".replace("'", "")


def plain(text: str) -> str:
    """A docstring as Markdown: double backticks become single ones, roles lose their markup."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def value_section(cls: type) -> list[str]:
    """Heading, docstring and fields of one class of `draftsmith.api`."""
    document = plain(inspect.getdoc(cls) or "")
    text, _, described = document.partition("\nAttributes:\n")
    lines = [f"### `api.{cls.__name__}`", "", text.strip(), ""]
    lines += ["| field | type | default |", "| --- | --- | --- |"]
    for attribute in attrs.fields(cls):
        kind = attribute.type if isinstance(attribute.type, str) else getattr(attribute.type, "__name__", "")
        if attribute.default is attrs.NOTHING:
            default = "**required**"
        elif isinstance(attribute.default, attrs.Factory):  # type: ignore[arg-type]
            default = "empty"
        elif callable(attribute.default):
            default = "see below"
        else:
            default = f"`{attribute.default!r}`"
        lines.append(f"| `{attribute.name}` | `{cell(kind)}` | {cell(default)} |")
    if described:
        lines += ["", *attribute_list(described)]
    return [*lines, ""]


def attribute_list(described: str) -> list[str]:
    """The ``Attributes:`` part of a docstring as a Markdown list."""
    lines: list[str] = []
    # Not cleandoc: its first line does not count, and of a single attribute the others are continuations.
    for line in textwrap.dedent(described).splitlines():
        if line.startswith((" ", "\t")):
            lines[-1] += " " + line.strip()
        elif line.strip():
            name, _, meaning = line.partition(": ")
            names = ", ".join(f"`{each.strip(' `')}`" for each in name.split(","))
            lines.append(f"* {names}: {meaning}")
    return lines


def returned_values() -> list[type]:
    """The classes of `draftsmith.api` that plugins make or receive, in the order of the source."""
    classes = [value for value in vars(api).values() if isinstance(value, type) and attrs.has(value)]
    return [cls for cls in classes if cls.__module__ == api.__name__ and cls.__name__ in api.__all__]


def hook_example(hook: Callable[..., Any]) -> str:
    """The code that its docstring shows."""
    return inspect.cleandoc((inspect.getdoc(hook) or "").partition("\nExample:\n")[2])


def hook_section(hook: Callable[..., Any]) -> list[str]:
    """Heading, signature, what it takes or returns, when it is called, and an example."""
    (value,) = re.findall(r"api\.\w+", signature(hook))
    link = f"[`{value}`](#{value.replace('.', '').lower()})"
    when = f"Takes one {link}; returns nothing." if is_observer(hook) else f"Returns a list of {link}."
    text = plain((inspect.getdoc(hook) or "").partition("\nExample:\n")[0]).strip()
    lines = [f"### `{hook.__name__}`", "", f"    {signature(hook)}", "", text, "", when, ""]
    return [*lines, "```python", hook_example(hook), "```", ""]


def hooks_page() -> str:
    """docs/reference/hooks.md."""
    lines = [
        NOTICE,
        "# Hooks",
        "",
        f"A plugin is a module named by an entry point in the group `{api.ENTRY_POINT_GROUP}`, with functions of the",
        "names below, decorated with `draftsmith.hookspecs.hookimpl`. How to write one: [plugins.md](../plugins.md).",
        "",
        "## Registration",
        "",
        "Each is called once, without arguments, when a command or vLLM loads the plugins, whether or not the run",
        "asks for what it registers: it must not import torch. What it returns is checked: another type, or a name",
        "that is taken, is an error that says whose it is. `MyOptions` below stands for an attrs class of yours.",
        "",
    ]
    registration = [hook for hook in hooks().values() if not is_observer(hook)]
    observing = [hook for hook in hooks().values() if is_observer(hook)]
    for hook in registration:
        lines += hook_section(hook)
    lines += [
        "## Observation",
        "",
        "Each receives one event and returns nothing; an observer never touches numerics.",
        "",
    ]
    for hook in observing:
        lines += hook_section(hook)
    lines += ["## Values", "", "All keyword-only and frozen; importing `draftsmith.api` imports no torch.", ""]
    for cls in returned_values():
        lines += value_section(cls)
    return "\n".join(lines).rstrip() + "\n"


# --- the interfaces ----------------------------------------------------------------------------------------------


def interface_classes() -> list[type]:
    """The classes of `draftsmith.interfaces`, in the order of the source."""
    found = [getattr(interfaces, name) for name in interfaces.__all__]
    return sorted(found, key=lambda cls: inspect.getsourcelines(cls)[1])


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """(name, function or property) of what a class defines itself and plugins may call or write."""
    for name, value in vars(cls).items():
        wrapped = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not isinstance(wrapped, property) and not inspect.isfunction(wrapped):
            continue
        generated = getattr(wrapped, "__module__", interfaces.__name__) != interfaces.__name__
        if (not name.startswith("_") or (name in ("__init__", "__call__") and not attrs.has(cls))) and not generated:
            yield name, wrapped


def member_line(name: str, member: Any) -> str:
    """As in the source: `name(arguments) -> type`, or `name: type` of a property."""
    if isinstance(member, property):
        return f"{name}: {inspect.signature(member.fget).return_annotation}"  # type: ignore[arg-type]
    return f"{name}{inspect.signature(member)}".replace("'", "")


def interface_section(cls: type) -> list[str]:
    """Heading, docstring, fields and methods of one class."""
    text, _, described = plain(inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    lines = [f"## `{cls.__name__}`", "", text.strip(), ""]
    if described:
        lines += [*attribute_list(described), ""]
    for name, member in members(cls):
        is_abstract = getattr(member, "__isabstractmethod__", False)
        lines += [f"### `{cls.__name__}.{name}`" + (" (to be written)" if is_abstract else ""), ""]
        lines += [f"    {member_line(name, member)}", ""]
        documented = plain(inspect.cleandoc(member.__doc__ or ""))
        for heading in ("Args", "Returns", "Raises"):
            documented = documented.replace(f"{heading}:\n", f"\n{heading}:\n\n")
        lines += [documented.replace("\n\n\n", "\n\n"), ""] if documented else []
    return lines


def facets() -> dict[str, list[type]]:
    """Part of `draftsmith.interfaces`, as its source is divided → the classes of that part."""
    starts = re.finditer(r"^# --- ([\w ]+) -+$", inspect.getsource(interfaces), re.MULTILINE)
    source = inspect.getsource(interfaces)
    begins = {match[1]: source[: match.start()].count("\n") + 1 for match in starts}
    found: dict[str, list[type]] = {name: [] for name in begins}
    for cls in interface_classes():
        line = inspect.getsourcelines(cls)[1]
        found[max((name for name in begins if begins[name] <= line), key=begins.__getitem__)].append(cls)
    return found


def facet_file(facet: str) -> str:
    return f"interfaces/{facet.replace(' ', '-')}.md"


def facet_page(facet: str) -> str:
    """docs/reference/interfaces/FACET.md."""
    lines = [
        NOTICE,
        f"# Interfaces: {facet}",
        "",
        "*To be written*: without it the class cannot be made; everything else has a default. How they go together:",
        "[Writing a plugin](../../plugins.md). All pages: [interfaces](../interfaces.md).",
        "",
        *("> " + line if line else ">" for line in plain(inspect.getdoc(interfaces) or "").splitlines()[2:4]),
        "",
    ]
    for cls in facets()[facet]:
        lines += interface_section(cls)
    return "\n".join(lines).rstrip() + "\n"


def interfaces_page() -> str:
    """docs/reference/interfaces.md: which page has what."""
    lines = [
        NOTICE,
        "# Interfaces",
        "",
        "What an implementation must offer, class by class of `draftsmith.interfaces`, a page for each facet. How",
        "they go together: [Writing a plugin](../plugins.md).",
        "",
        "| page | class | |",
        "| --- | --- | --- |",
    ]
    for facet, classes in facets().items():
        for cls in classes:
            first = plain(inspect.getdoc(cls) or "").splitlines()[0]
            link = f"[`{cls.__name__}`]({facet_file(facet)}#{cls.__name__.lower()})"
            lines.append(f"| [{facet}]({facet_file(facet)}) | {link} | {cell(first)} |")
    return "\n".join(lines) + "\n"


# --- what our own plugins register -------------------------------------------------------------------------------


def plugin_modules() -> dict[str, list[str]]:
    """Distribution → the plugin modules of its entry points, for the packages of this repository."""
    found = {}
    for path in [ROOT / "core" / "pyproject.toml", *sorted((ROOT / "plugins").glob("*/pyproject.toml"))]:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        found[project["name"]] = list(project["entry-points"][api.ENTRY_POINT_GROUP].values())
    return found


def registered_items(module: str) -> Iterator[api.Item]:
    """Everything that the registration hooks of a plugin module return, hook by hook."""
    plugin = importlib.import_module(module)
    for name, hook in hooks().items():
        implementation = getattr(plugin, name, None)
        if implementation is not None and not is_observer(hook):
            yield from implementation()


def item_section(item: api.Item) -> list[str]:
    """Heading, summary and options of one item."""
    kind = re.sub(r"(?<!^)(?=[A-Z])", " ", type(item).__name__).lower()
    lines = [f"### {kind} `{item.name}`", "", f"{item.summary}.", ""]
    options = getattr(item, "options", None)
    if options is not None:
        lines += ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [*(option_row(option["name"], option) for option in describe_options(options)), ""]
    return lines


def plugins_page() -> str:
    """docs/reference/plugins.md."""
    lines = [
        NOTICE,
        "# What comes with draftsmith",
        "",
        "What the core and the plugins of this repository register, and the options of each. Where you are,",
        "`draftsmith plugins list` shows what is installed, and `draftsmith plugins show NAME` one item's options.",
        "",
    ]
    for distribution, modules in plugin_modules().items():
        lines += [f"## {distribution}", ""]
        for module in modules:
            for item in registered_items(module):
                lines += item_section(item)
    return "\n".join(lines).rstrip() + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "recipe.md": recipe_page,
    "hooks.md": hooks_page,
    "interfaces.md": interfaces_page,
    **{facet_file(facet): partial(facet_page, facet) for facet in facets()},
    "plugins.md": plugins_page,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where a page is out of date; write nothing")
    check = parser.parse_args().check
    stale = []
    for name, render in PAGES.items():
        path, text = REFERENCE / name, render()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"docs: wrote {path.relative_to(ROOT)}")
    if check and stale:
        print(f"docs: out of date: {', '.join(stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
