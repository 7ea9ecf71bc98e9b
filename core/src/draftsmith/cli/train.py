"""Train the draft. Killed at any moment, the same command goes on where it stopped."""

from __future__ import annotations

import argparse

from draftsmith.cli import common

__all__ = ["configure", "execute"]


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_run_options(parser)


def execute(arguments: argparse.Namespace) -> None:
    common.run_stage("train", arguments)
