"""Every error that draftsmith raises on purpose.

One hierarchy, rooted at :class:`DraftsmithError`. Each error says *what* is wrong, *where* (a file, a line, a
configuration key, a sample), and what to do next (*hint*). The command line prints these three and exits with
:attr:`DraftsmithError.exit_code`: 2 where the user can mend it, 1 where the run itself failed.

This module imports nothing but the standard library.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TypeVar

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DiskSpaceError",
    "DraftsmithError",
    "EndpointFailed",
    "EndpointMismatch",
    "FingerprintMismatch",
    "NumericsError",
    "OutputError",
    "PluginConflictError",
    "PluginError",
    "Problem",
    "RanksLost",
    "SampleCorrupt",
    "SampleError",
    "SampleIncomplete",
    "SampleMissing",
    "SampleRefused",
    "ServingError",
    "Stopped",
    "TransportError",
    "UnknownNameError",
    "UserError",
    "VerifierError",
    "did_you_mean",
    "is_shared",
    "mark_shared",
]

Raised = TypeVar("Raised", bound=BaseException)


class Problem:
    """One thing that is wrong: *what*, *where*, and a *hint* at what to do. Several make a :class:`ConfigError`."""

    __slots__ = ("hint", "what", "where")

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.hint:
            lines.append(f"  → {self.hint}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Problem({self.what!r}, where={self.where!r}, hint={self.hint!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Problem):
            return NotImplemented
        return (self.what, self.where, self.hint) == (other.what, other.where, other.hint)

    def __hash__(self) -> int:
        return hash((self.what, self.where, self.hint))


class DraftsmithError(Exception):
    """Root of all errors raised on purpose.

    Args:
        what: one sentence that says what is wrong.
        where: the file, line, key or sample concerned.
        hint: what to do next.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.problems: tuple[Problem, ...] = (Problem(what, where=where, hint=hint),)
        super().__init__(str(self.problems[0]))

    @property
    def what(self) -> str:
        return self.problems[0].what

    @property
    def where(self) -> str | None:
        return self.problems[0].where

    @property
    def hint(self) -> str | None:
        return self.problems[0].hint

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (data workers, capture workers); keyword-only arguments defeat the
        # default reduction of exceptions, so the state is carried explicitly.
        return (_rebuild, (type(self), self.__dict__.copy(), self.args))


def _rebuild(cls: type[DraftsmithError], state: dict[str, object], args: tuple[object, ...]) -> DraftsmithError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class UserError(DraftsmithError):
    """Something that the user can mend: exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """A recipe, flag or option that cannot work. Carries *all* problems found, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        found = tuple(problems)
        if not found:
            raise ValueError("a ConfigError needs at least one problem")
        super().__init__(found[0].what, where=found[0].where, hint=found[0].hint)
        self.problems = found
        self.args = ("\n".join(str(problem) for problem in found),)


class UnknownNameError(UserError):
    """A name (of an algorithm, loss, transport, …) that nothing provides. Suggests the nearest known ones."""

    def __init__(
        self,
        kind: str,
        name: str,
        known: Sequence[str],
        *,
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.known = tuple(known)
        near = did_you_mean(name, known)
        parts = [part for part in (near, hint) if part]
        if not near:
            several = f"{kind}es" if kind.endswith("s") else f"{kind}s"
            parts.insert(0, f"known {several}: {', '.join(sorted(known))}" if known else f"no {kind} is installed")
        super().__init__(f"unknown {kind} {name!r}", where=where, hint="; ".join(parts))


class PluginError(DraftsmithError):
    """A plugin is broken: it does not import, returns the wrong type, or raises in a hook."""


class PluginConflictError(PluginError):
    """Two distributions claim one name. Names both; nothing wins silently."""

    exit_code = 2


class DataError(UserError):
    """Conversations or prepared data that cannot be used."""


class VerifierError(UserError):
    """The verifier is missing, is not a model, or lacks something that the run needs."""


class FingerprintMismatch(UserError):
    """A stage's stored output was made from other inputs than those of this run."""


class OutputError(UserError):
    """An output folder that is not empty, not writable, or belongs to something else."""


class DiskSpaceError(OutputError):
    """The disk will not hold, or no longer holds, what is being written."""


class CheckpointError(UserError):
    """A training or exported checkpoint that cannot be read or would not be served correctly."""


class NumericsError(DraftsmithError):
    """A value that is not finite where training cannot go on with it."""


class Stopped(DraftsmithError):
    """A signal ended the run after its state was saved; the same command goes on from there.

    Args:
        number: the signal's number; the exit code is 128 + number, as shells have it (143 SIGTERM, 130 SIGINT).
    """

    def __init__(self, what: str, *, number: int, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what, where=where, hint=hint)
        self.exit_code = 128 + number


class RanksLost(DraftsmithError):
    """Of several processes that train together one has ended without a word, or does not answer."""


class ServingError(DraftsmithError):
    """vLLM is not installed, cannot serve this checkpoint, or answered what it should not."""


class EndpointFailed(ServingError):
    """A capture endpoint could not be reached, died, or did not answer in time: another one, or a later try, may do.

    Args:
        endpoint: its name.
    """

    def __init__(self, what: str, *, endpoint: str, hint: str | None = None) -> None:
        self.endpoint = endpoint
        super().__init__(what, where=endpoint, hint=hint)


class EndpointMismatch(UserError):
    """A capture endpoint works, and would capture something else than this run needs; says what differs."""


class TransportError(DraftsmithError):
    """A hidden-state transport cannot be reached or written to."""


class SampleError(TransportError):
    """Something is wrong with one hidden-state sample; :attr:`sample_id` says which."""

    def __init__(self, what: str, *, sample_id: str, where: str | None = None, hint: str | None = None) -> None:
        self.sample_id = sample_id
        super().__init__(f"sample {sample_id}: {what}", where=where, hint=hint)


class SampleMissing(SampleError):
    """The transport holds nothing under this id."""


class SampleIncomplete(SampleError):
    """The sample was begun, and not committed: a producer was killed, or is still writing."""


class SampleCorrupt(SampleError):
    """The sample is complete and wrong: length, shape, dtype, checksum, or values that are not finite."""


class SampleRefused(SampleError):
    """The verifier's states of this row are not finite, so that there are none: the row is left out of training."""


def did_you_mean(name: str, known: Iterable[str], *, limit: int = 3) -> str | None:
    """Return ``did you mean 'a' or 'b'?`` for the names of *known* nearest to *name*, or None."""
    near = difflib.get_close_matches(name, sorted(known), n=limit, cutoff=0.6)
    if not near:
        return None
    return f"did you mean {' or '.join(repr(each) for each in near)}?"


def mark_shared(error: Raised) -> Raised:
    """*error*, marked as raised by every process of a run: the first of them tells the user, the others keep quiet."""
    error.__dict__["shared"] = True
    return error


def is_shared(error: BaseException) -> bool:
    """Whether every process of the run raises *error*."""
    return bool(error.__dict__.get("shared"))
