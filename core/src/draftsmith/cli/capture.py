"""Obtain the verifier's hidden states, through a transport. A killed capture goes on where it stopped."""

from __future__ import annotations

import argparse

from draftsmith.cli import common

__all__ = ["configure", "execute"]


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_run_options(parser)
    parser.add_argument(
        "--ignore-disk-space",
        action="store_true",
        help="start although the disk seems too small (capture.ignore_disk_space)",
    )


def execute(arguments: argparse.Namespace) -> None:
    if arguments.ignore_disk_space:
        arguments.overrides.append("capture.ignore_disk_space=true")
    common.run_stage("capture", arguments)
