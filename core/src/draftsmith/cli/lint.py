"""Check a checkpoint against vLLM's loader, without starting it.

The exit code is 2 where vLLM would fail or draft nonsense.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from draftsmith.cli import common

__all__ = ["configure", "execute"]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder of the draft's checkpoint")
    parser.add_argument("--verifier", metavar="PATH", help="the verifier; default: the one that the checkpoint names")
    common.add_plugin_options(parser)


def execute(arguments: argparse.Namespace) -> int:
    from draftsmith.checkpoint.lint import lint_checkpoint

    registry = common.open_registry(arguments.no_plugin)
    if arguments.verifier is not None:
        from draftsmith.verifier import read_verifier

        read_verifier(arguments.verifier)  # one that was asked for must be there
    findings = lint_checkpoint(arguments.checkpoint, registry, verifier=arguments.verifier)
    for finding in findings:
        print(f"{finding.severity}: {finding.where}: {finding.what}")
        if finding.hint:
            print(f"  → {finding.hint}")
    errors = sum(finding.severity == "error" for finding in findings)
    print(f"{arguments.checkpoint}: {errors} errors, {len(findings) - errors} warnings")
    return 2 if errors else 0
