"""The command line. :func:`main` is the script ``draftsmith``; each command has a file of its own here.

Nothing heavy is imported before a run is resolved and checked: ``--help`` and every configuration error answer at
once, and never load torch. For the same reason the core's commands parse with argparse; typer, which loads pydantic
to read a single flag, is kept for the commands that plugins add.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 for the user's mistakes, 128 + signal, 1 for anything else.

    As the script (without *arguments*) it ends the process instead.
    """
    if arguments is None:
        _leave(_main(sys.argv[1:]))
    return _main(arguments)


def _leave(code: int) -> NoReturn:
    """End the process once all is closed, without taking the interpreter apart.

    That is where native libraries report on stderr what Python still holds of theirs, which is no user's concern.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            code = code or 141
        except (OSError, ValueError):  # such as a full disk behind a redirection
            code = code or 1
    os._exit(code)


def _main(arguments: Sequence[str]) -> int:
    given = list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as on stderr: what cannot be shown stops no command
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
        if collecting:
            gc.enable()
