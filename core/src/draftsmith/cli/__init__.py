"""The command line. :func:`main` is the script ``draftsmith``; each command has a file of its own here.

Nothing heavy is imported before a run is resolved and checked: ``--help`` and every configuration error answer at
once, and never load torch. For the same reason the core's commands parse with argparse; typer, which loads pydantic
to read a single flag, is kept for the commands that plugins add.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 for the user's mistakes, 128 + signal, 1 for anything else."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    collecting = gc.isenabled()
    # Imports make many objects and no garbage: looking for some costs a tenth of the time to an answer.
    # Commands switch collection on again before anything long begins.
    gc.disable()
    try:
        from draftsmith.cli.app import dispatch

        return dispatch(given)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:
        # Whoever read our output has gone (`… | head`). Keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (Exception, KeyboardInterrupt) as error:
        from draftsmith.cli.errors import report

        return report(error, debug="--debug" in given)
    finally:
        if arguments is None:
            gc.freeze()  # the process ends: spare it a last search through everything
        if collecting:
            gc.enable()
