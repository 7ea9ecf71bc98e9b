"""Look at what is installed, and say of each thing that will go wrong what to do; with a recipe, what it takes."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from draftsmith.cli import common

if TYPE_CHECKING:
    from draftsmith.doctor import Remark

__all__ = ["configure", "execute"]

_WORDS = {"fine": ("ok", "32"), "warning": ("warning", "33"), "error": ("ERROR", "31")}


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_recipe_options(parser, optional=True)


def execute(arguments: argparse.Namespace) -> int:
    from draftsmith.doctor import examine
    from draftsmith.errors import UserError

    if arguments.overrides and arguments.recipe is None:
        raise UserError("--set changes a recipe, and none is named", hint="draftsmith doctor RECIPE --set …")
    found: list[Remark] = []
    for remark in examine(common.open_registry(arguments.no_plugin, raise_conflicts=False)):
        found.append(remark)
        _print(remark)
    if arguments.recipe is not None:
        from draftsmith.needs import examine_run

        run = common.load_run(arguments.recipe, arguments.overrides, arguments.no_plugin)
        print(f"\n{arguments.recipe}:", flush=True)
        devices = tuple(each.memory for each in found if each.memory is not None)
        for remark in examine_run(run, devices):
            found.append(remark)
            _print(remark)
    return int(any(each.severity == "error" for each in found))


def _print(remark: Remark) -> None:
    word, code = _WORDS[remark.severity]
    padded = f"{word:<8}"
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        padded = f"\033[{code}m{padded}\033[0m"
    print(f"{padded}{remark.about + ':':<13}{remark.what}", flush=True)
    if remark.hint:
        print(f"{'':<21}→ {remark.hint}")
