#!/usr/bin/env python3
"""Write docs/reference/ from the source: every key of a recipe, every hook, every value that a hook returns.

``--check`` writes nothing and fails where a page is not what the source says; a test does the same.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from draftsmith import api, hookspecs
from draftsmith.config.schema import Recipe

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
NOTICE = "<!-- Written by `make docs` from the source: change the text there. -->\n"


# --- the recipe --------------------------------------------------------------------------------------------------


def nested_class(annotation: Any) -> type | None:
    """The attrs class that a key holds: of ``X`` or ``X | None``; None for plain values."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and attrs.has(each):
            return each
    return None


def recipe_keys(cls: type = Recipe, prefix: str = "") -> Iterator[tuple[str, attrs.Attribute[Any]]]:
    """Every key of a recipe, dotted as ``--set`` takes it, sections before what is in them."""
    attrs.resolve_types(cls)
    for attribute in attrs.fields(cls):
        name = f"{prefix}{attribute.name}"
        yield name, attribute
        inner = nested_class(attribute.type)
        if inner is not None and inner.__name__ != "NamedConfig":
            yield from recipe_keys(inner, f"{name}.")


def type_name(annotation: Any) -> str:
    """A type as a user would say it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Literal:
        return ", ".join(str(value) for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(type_name(each) for each in inner)
    if origin in (list, tuple):
        return f"list of {' or '.join(dict.fromkeys(type_name(each) for each in inner))}"
    if origin is dict:
        return "mapping"
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}
    name = getattr(annotation, "__name__", str(annotation))
    return "name, or {name, options}" if name == "NamedConfig" else names.get(name, name)


def default_text(attribute: attrs.Attribute[Any]) -> str:
    default: Any = attribute.default
    if default is attrs.NOTHING:
        return "**required**"
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        default = default.factory()
    if isinstance(default, bool) or default is None:
        return f"`{str(default).lower() if default is not None else 'null'}`"
    if isinstance(default, (list, tuple)):
        return f"`[{', '.join(str(each) for each in default)}]`"
    return f"`{default}`"


def cell(text: str) -> str:
    """Text inside a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def recipe_page() -> str:
    """docs/reference/recipe.md."""
    sections: dict[str, list[str]] = {}
    introductions: dict[str, str] = {"": inspect.getdoc(Recipe) or ""}
    for name, attribute in recipe_keys():
        inner = nested_class(attribute.type)
        if inner is not None and inner.__name__ != "NamedConfig":
            introductions[name] = inspect.getdoc(inner) or ""
            continue
        section = name.rpartition(".")[0]
        sections.setdefault(section, []).append(
            f"| `{name}` | {cell(type_name(attribute.type))} | {cell(default_text(attribute))} "
            f"| {cell(attribute.metadata.get('help', ''))} |"
        )
    lines = [
        NOTICE,
        "# Recipe keys",
        "",
        "A recipe is a YAML file; each key below can also be given as `--set KEY=VALUE`, which wins over the file.",
        "`draftsmith run RECIPE --explain` prints the value of every key and where it came from. An unknown key is an",
        "error that names the nearest one.",
        "",
        "Options of an algorithm, loss or transport stand under its `options` and are the plugin's own:",
        "`draftsmith plugins show NAME` lists them.",
    ]
    for section, rows in sections.items():
        lines += ["", f"## `{section}`" if section else "## The run", "", introductions[section], ""]
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows]
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
            default = "none found"
        else:
            default = f"`{attribute.default!r}`"
        lines.append(f"| `{attribute.name}` | `{cell(kind)}` | {cell(default)} |")
    if described:
        lines += ["", *attribute_list(described)]
    return [*lines, ""]


def attribute_list(described: str) -> list[str]:
    """The ``Attributes:`` part of a docstring as a Markdown list."""
    lines: list[str] = []
    for line in inspect.cleandoc(described).splitlines():
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
        "Called once, without arguments; each returns a list of frozen values (below). They must not import torch.",
        "",
    ]
    registration = [hook for hook in hooks().values() if not is_observer(hook)]
    observing = [hook for hook in hooks().values() if is_observer(hook)]
    for hook in registration:
        lines += [f"### `{hook.__name__}`", "", f"    {signature(hook)}", "", plain(inspect.getdoc(hook) or ""), ""]
    lines += [
        "## Observation",
        "",
        "Each receives one event and returns nothing; an observer never touches numerics.",
        "",
    ]
    for hook in observing:
        lines += [f"### `{hook.__name__}`", "", f"    {signature(hook)}", "", plain(inspect.getdoc(hook) or ""), ""]
    lines += ["## Values", "", "All keyword-only and frozen; importing `draftsmith.api` imports no torch.", ""]
    for cls in returned_values():
        lines += value_section(cls)
    return "\n".join(lines).rstrip() + "\n"


PAGES: dict[str, Callable[[], str]] = {"recipe.md": recipe_page, "hooks.md": hooks_page}


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
