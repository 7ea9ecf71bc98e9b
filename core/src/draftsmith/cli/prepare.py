"""Turn conversations into token ids, loss mask and vocabulary map."""

from __future__ import annotations

import argparse

from draftsmith.cli import common

__all__ = ["configure", "execute"]


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_run_options(parser)
    parser.add_argument(
        "--responses",
        choices=["keep", "regenerate"],
        help="the answers of the sources, or answers that the verifier writes (data.responses)",
    )


def execute(arguments: argparse.Namespace) -> None:
    if arguments.responses:
        arguments.overrides.append(f"data.responses={arguments.responses}")
    common.run_stage("prepare", arguments)
