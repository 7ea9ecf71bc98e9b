"""Serve a checkpoint with vLLM, after checking it; what follows `--` goes to vLLM's server (`-- --port 8001`).

The command becomes the server: its output, its signals and its exit code are vLLM's.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from draftsmith.cli import common

__all__ = ["configure", "execute"]


def configure(parser: common.Parser) -> None:
    parser.rest = "further"
    parser.usage = "draftsmith serve CHECKPOINT [options] [-- argument of vLLM's server …]"
    count = common.at_least(1)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder of the draft's checkpoint")
    parser.add_argument(
        "--verifier", metavar="PATH", help="another one than the checkpoint names, such as a quantised"
    )
    parser.add_argument("--speculative-tokens", metavar="K", type=count, help="default: what the checkpoint says")
    parser.add_argument("--plan", metavar="FILE", type=Path, help="tokens by batch size, as JSON")
    parser.add_argument(
        "--disable-by-batch-size", metavar="N", type=count, help="draft nothing for batches of more than N requests"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command, and stop")
    common.add_plugin_options(parser)


def execute(arguments: argparse.Namespace) -> None:
    from draftsmith.serving.serve import serve_command

    found = serve_command(
        arguments.checkpoint,
        common.open_registry(arguments.no_plugin),
        verifier=arguments.verifier,
        num_speculative_tokens=arguments.speculative_tokens,
        plan=arguments.plan,
        disable_by_batch_size=arguments.disable_by_batch_size,
        further=arguments.further,
    )
    for finding in found.findings:
        common.note(f"{finding.where}: {finding.what}")
    for text in found.notes:
        common.note(text)
    if arguments.dry_run:
        print(found)
        return
    environment = found.process_environment()
    os.execvpe(found.command[0], list(found.command), environment)
