"""How errors look on the terminal: what, where, what to do; a traceback only with ``--debug``."""

from __future__ import annotations

import errno
import os
import sys
import traceback

from draftsmith.errors import DiskSpaceError, DraftsmithError, Problem, Stopped, UserError, is_shared
from draftsmith.stages import is_first_rank

__all__ = ["report"]

#: What the system refuses is for the user to mend, wherever it is met.
_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
#: So is a path that cannot be there: a part of it too long, a file where a folder should be, links in a circle.
_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


def report(error: BaseException, *, debug: bool) -> int:
    """Print *error* to stderr; returns the exit code."""
    if debug:
        traceback.print_exception(error)
    known = _as_known(error)
    if is_shared(error) and not is_first_rank():  # the first process of the run tells it for all
        return 1 if known is None else known.exit_code
    if known is None:
        _print(_paint("error: ", "31"), f"{type(error).__name__}: {error}")
        _print("  → this should not happen, in draftsmith or in a plugin; --debug shows where, for a bug report")
        return 1
    word = "stopped: " if isinstance(known, Stopped) else "error: "
    problems = known.problems
    if len(problems) > 1:
        _print(_paint(word, "31"), f"{len(problems)} problems; nothing was started")
    for problem in problems:
        _print(_paint(word, "31") if len(problems) == 1 else "\n", _text(problem))
    return known.exit_code


def _as_known(error: BaseException) -> DraftsmithError | None:
    if isinstance(error, DraftsmithError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Stopped("by SIGINT", number=2)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskSpaceError(
            "the disk is full",
            where=error.filename,
            hint="make room and start the same command again: it goes on where it stopped",
        )
    if isinstance(error, OSError) and error.errno in _ACCESS and error.filename is not None:
        return UserError(
            f"cannot be read or written: {error.strerror}",
            where=str(error.filename),
            hint="check who owns it, and whether that disk is mounted for writing",
        )
    if isinstance(error, OSError) and error.errno in _PATH and error.filename is not None:
        return UserError(
            f"cannot be read or written: {error.strerror}",
            where=str(error.filename),
            hint="name another path, or mend what lies there",
        )
    from draftsmith.plugins.blame import plugin_error
    from draftsmith.plugins.manager import missing_extra

    if isinstance(error, ModuleNotFoundError) and (hint := missing_extra(error)):
        return UserError(f"{error.name} is not installed", hint=hint)
    return plugin_error(error)


def _text(problem: Problem) -> str:
    where = f"{_paint(problem.where, '1')}: " if problem.where else ""
    hint = f"\n  → {problem.hint}" if problem.hint else ""
    return f"{where}{problem.what}{hint}"


def _paint(text: str, code: str) -> str:
    if os.environ.get("NO_COLOR") or not sys.stderr.isatty():
        return text
    return f"\033[{code}m{text}\033[0m"


def _print(*parts: str) -> None:
    print("".join(parts), file=sys.stderr)
