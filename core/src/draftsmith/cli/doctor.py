"""Look at what is installed, and say of each thing that will go wrong what to do."""

from __future__ import annotations

import argparse
import os
import sys

from draftsmith.cli import common

__all__ = ["configure", "execute"]

_WORDS = {"fine": ("ok", "32"), "warning": ("warning", "33"), "error": ("ERROR", "31")}


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_plugin_options(parser)


def execute(arguments: argparse.Namespace) -> int:
    from draftsmith.doctor import examine

    worst = 0
    for remark in examine(common.open_registry(arguments.no_plugin, raise_conflicts=False)):
        word, code = _WORDS[remark.severity]
        padded = f"{word:<8}"
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            padded = f"\033[{code}m{padded}\033[0m"
        print(f"{padded}{remark.about + ':':<13}{remark.what}", flush=True)
        if remark.hint:
            print(f"{'':<21}→ {remark.hint}")
        worst = max(worst, int(remark.severity == "error"))
    return worst
