"""Serve the checkpoint in vLLM; compare with the verifier alone, and with the simulator."""

from __future__ import annotations

import argparse

from draftsmith.cli import common

__all__ = ["configure", "execute"]


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_run_options(parser)


def execute(arguments: argparse.Namespace) -> None:
    common.run_stage("verify", arguments)
