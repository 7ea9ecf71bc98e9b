"""Do the whole job: prepare, capture, train, export, verify.

A stage that is complete and whose inputs are the same is not run again; a killed one goes on where it stopped.
"""

from __future__ import annotations

import argparse

from draftsmith.cli import common
from draftsmith.stages import STAGES

__all__ = ["configure", "execute"]


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_run_options(parser)
    parser.add_argument("--until", choices=STAGES, metavar="STAGE", help=f"stop after this one of {', '.join(STAGES)}")
    parser.add_argument("--check", action="store_true", help="only resolve and check the recipe")


def execute(arguments: argparse.Namespace) -> None:
    if arguments.check and not arguments.explain:
        from draftsmith.pipeline import check_attention
        from draftsmith.plugins.blame import naming_plugins

        run = common.load_run(arguments.recipe, arguments.overrides, arguments.no_plugin)
        with naming_plugins():
            warning = check_attention(run)
        if warning is not None:
            print(warning)
        print(f"{arguments.recipe}: nothing wrong")
        return
    last = STAGES.index(arguments.until) if arguments.until else len(STAGES) - 1
    common.run_stages(STAGES[: last + 1], arguments)
