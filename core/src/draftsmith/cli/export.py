"""Write the checkpoint: config.json, model.safetensors and a model card, as vLLM loads them."""

from __future__ import annotations

import argparse

from draftsmith.cli import common

__all__ = ["configure", "execute"]


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_run_options(parser)


def execute(arguments: argparse.Namespace) -> None:
    common.run_stage("export", arguments)
