#!/usr/bin/env python3
"""Compare what plugins can import of draftsmith with the checked-in list, docs/plugins/public_api.txt.

Without arguments it says what differs, and fails; ``--write`` (`make api`) writes the list anew. `make docs` leaves it
alone, so that a change of the API is always a decision. ``--count`` counts the names.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from draftsmith import api
from draftsmith.testing.public import PUBLIC_MODULES

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "docs" / "plugins" / "public_api.txt"
NOTICE = (
    "# The public API: `python tools/public_api.py` compares this list with the source, `make api` writes it anew.\n"
)


def public_names(module: str) -> list[str]:
    """What a public module offers: its ``__all__``, and the hooks; of a package that lists none, its version."""
    loaded = importlib.import_module(module)
    hooks = [name for name, value in vars(loaded).items() if hasattr(value, f"{api.PROJECT_NAME}_spec")]
    default = [name for name in ("__version__",) if hasattr(loaded, name)]
    return sorted([*getattr(loaded, "__all__", default), *hooks])


def listing() -> str:
    """Every public name with its signature, a line each; of classes the public members too."""
    lines = [NOTICE]
    for module in sorted(PUBLIC_MODULES):
        lines.append(module)
        for name in public_names(module):
            value = getattr(importlib.import_module(module), name)
            lines += [f"    {line}" for line in describe(name, value, module)]
        lines.append("")
    return "\n".join(lines)


def describe(name: str, value: Any, module: str) -> Iterator[str]:
    """Lines for one public name."""
    home = getattr(value, "__module__", module)
    if inspect.isclass(value) or inspect.isfunction(value):
        if home != module:
            yield f"{name} = {home}.{value.__qualname__}"
            return
        yield from describe_class(name, value) if inspect.isclass(value) else [f"def {name}{signature(value)}"]
    elif inspect.ismodule(value):
        yield f"module {value.__name__}"
    else:
        yield f"{name}: {type(value).__name__}"


def describe_class(name: str, cls: type) -> Iterator[str]:
    """The class with its bases, its fields or the arguments that make one, and its public members."""
    bases = ", ".join(base.__qualname__ for base in cls.__bases__ if base is not object)
    yield f"class {name}({bases})" if bases else f"class {name}"
    fields = attrs.fields(cls) if attrs.has(cls) else ()
    for each in fields:
        if not each.name.startswith("_"):
            yield f"    {each.name}: {spelled(each.type)}{default_of(each)}"
    if "__init__" in vars(cls) and not fields:
        yield f"    def __init__{signature(vars(cls)['__init__'])}"
    known = {each.name for each in fields}
    named_tuple = getattr(cls, "_fields", ())
    for member, value in sorted(vars(cls).items()):
        if (member.startswith("_") and member != "__call__") or member in known:
            continue
        if member in named_tuple:
            yield f"    {member}: {spelled(cls.__annotations__[member])}"
        else:
            yield from (f"    {line}" for line in describe_member(cls, member, value))


def describe_member(cls: type, member: str, value: Any) -> Iterator[str]:
    abstract = "abstract " if getattr(value, "__isabstractmethod__", False) else ""
    if isinstance(value, classmethod | staticmethod):
        yield f"{abstract}{type(value).__name__} {member}{signature(value.__func__)}"
    elif isinstance(value, property):
        returned = inspect.signature(value.fget).return_annotation if value.fget else ""
        yield f"{abstract}property {member}: {spelled(returned)}"
    elif inspect.isfunction(value):
        yield f"{abstract}def {member}{signature(value)}"
    elif getattr(value, "_pytestfixturefunction", None) or type(value).__name__ == "FixtureFunctionDefinition":
        yield f"fixture {member}"
    elif not inspect.ismemberdescriptor(value):
        kind = cls.__annotations__.get(member, type(value).__name__)
        yield f"{member}: {spelled(kind)}"


def signature(function: Callable[..., Any]) -> str:
    """As the source has it; long defaults, and those that are functions, by their name or an ellipsis."""
    given = inspect.signature(function)
    parts = []
    positional_only = keyword_only = False
    for each in given.parameters.values():
        if positional_only and each.kind is not each.POSITIONAL_ONLY:
            parts.append("/")
        positional_only = each.kind is each.POSITIONAL_ONLY
        if each.kind is each.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
        keyword_only = keyword_only or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        star = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        typed = "" if each.annotation is each.empty else f": {spelled(each.annotation)}"
        default = "" if each.default is each.empty else f" = {value_of(each.default)}"
        parts.append(f"{star}{each.name}{typed}{default}")
    returned = "" if given.return_annotation is given.empty else f" -> {spelled(given.return_annotation)}"
    return f"({', '.join(parts)}){returned}"


def value_of(default: Any) -> str:
    """A default: no address of a function, and no text of several lines."""
    text = getattr(default, "__name__", None) or repr(default)
    return text if len(text) <= 60 else "…"


def default_of(attribute: Any) -> str:
    default = attribute.default
    if default is attrs.NOTHING:
        return ""
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return " = computed" if default.takes_self else f" = {value_of(default.factory())}"
    return f" = {value_of(default)}"


def spelled(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__name__", None) or str(annotation)


def count() -> int:
    """Public names, members of classes left out."""
    return sum(len(public_names(module)) for module in PUBLIC_MODULES)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the list anew")
    parser.add_argument("--count", action="store_true", help="print how many names are public")
    arguments = parser.parse_args()
    if arguments.count:
        print(f"{count()} public names in {len(PUBLIC_MODULES)} modules")
        return 0
    old, new = LIST.read_text(encoding="utf-8") if LIST.exists() else "", listing()
    if arguments.write:
        LIST.parent.mkdir(parents=True, exist_ok=True)
        LIST.write_text(new, encoding="utf-8")
        return 0
    difference = list(difflib.unified_diff(old.splitlines(), new.splitlines(), "listed", "source", lineterm="", n=1))
    print("\n".join(difference))
    if difference:
        print("the public API differs from its list: if that is meant, `make api`, and say so in CHANGELOG.md")
    return bool(difference)


if __name__ == "__main__":
    sys.exit(main())
