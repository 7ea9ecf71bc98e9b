"""Print and start the vLLM server that captures for a run which trains elsewhere (`online.endpoints` of its recipe).

Both take the same recipe. Neither this server nor the store asks who is there: keep both in a network of their own.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from draftsmith.cli import common
from draftsmith.errors import UserError

__all__ = ["configure", "execute"]


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_recipe_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the command, and stop")
    parser.add_argument(
        "--vllm",
        metavar="OPTIONS",
        default="",
        help="further options of vLLM's server, as one word: --vllm='--tensor-parallel-size 2'",
    )


def execute(arguments: argparse.Namespace) -> None:
    run = common.load_run(arguments.recipe, arguments.overrides, arguments.no_plugin, ())
    from draftsmith.capture.server.command import capture_server, check_port, check_transport

    command = capture_server(run, host=arguments.host, port=arguments.port, extra=_words(arguments.vllm))
    if not arguments.dry_run:
        check_port(arguments.host, arguments.port)
        check_transport(run)
    print(command.text())
    if arguments.dry_run:
        return
    sys.stdout.flush()
    os.execve(command.arguments[0], [*command.arguments], {**command.environment})


def _words(options: str) -> list[str]:
    try:
        return shlex.split(options)
    except ValueError as error:
        raise UserError(
            f"{options!r} cannot be read as a shell reads it: {error}",
            where="--vllm",
            hint="quote it as a whole, and what has blanks in it: --vllm='--uvicorn-log-level error'",
        ) from error
