"""Stages of a run, their folders, and the fingerprints that decide what is reused.

Each stage owns one folder below the run's output. When it begins it writes ``stage.json`` with the fingerprint of
everything it depends on and ``"complete": false``; when it ends it rewrites the file with ``"complete": true``. A
complete stage with the same fingerprint is not run again; an incomplete one with the same fingerprint goes on where
it stopped; any other fingerprint is an error that names what differs. Nothing is reused silently.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

from draftsmith import __version__
from draftsmith.errors import DiskSpaceError, FingerprintMismatch, OutputError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "STAGES",
    "RunFolders",
    "Stage",
    "StageRecord",
    "atomically",
    "differences",
    "digest",
    "is_first_rank",
    "process_count",
    "sole_writer",
    "write_error",
    "write_json_atomically",
    "write_tensors",
    "write_tensors_atomically",
    "write_text_atomically",
]

FILE = "stage.json"
LOCK = ".lock"
#: All stages, in order. :mod:`draftsmith.pipeline` knows the function of each.
STAGES = ("prepare", "capture", "train", "export", "verify")


def digest(value: Any) -> str:
    """32 hex digits over the canonical JSON of *value* (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]


def write_json_atomically(path: Path, value: Any) -> None:
    """Write JSON as :func:`write_text_atomically` writes text."""
    write_text_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def write_text_atomically(path: Path, text: str) -> None:
    """Write *text* as :func:`atomically` does, with its errors.

    Half of a surrogate pair, as JSON may hold, is no Unicode: it is written as its escape, which JSON reads back.
    """
    with atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def write_tensors_atomically(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file as :func:`atomically` does, with its errors. The tensors share no memory.

    Args:
        metadata: as of :func:`write_tensors`.
    """
    with atomically(path) as temporary:
        write_tensors(temporary, tensors, metadata)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file that is as readable as others, into a folder that becomes whole as a whole.

    Args:
        metadata: of the file's header; None: ``{"format": "pt"}``, as transformers and vLLM write it.

    Raises:
        OSError, safetensors.SafetensorError: it cannot be written.
    """
    from safetensors.torch import save_file

    # safetensors makes files that their owner alone can read: a server that runs as somebody else could not.
    path.unlink(missing_ok=True)
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, metadata=dict(metadata or {"format": "pt"}))
    path.chmod(mode)


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A name beside *path* to write a file under. At the end it is synced and renamed to *path*.

    A reader, or a kill at any moment, sees the old file or the new one; after an error there is the old one alone.

    Raises:
        OutputError: the folder cannot be written to. DiskSpaceError: it has no room.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # of the first error's kind, and not what there is to say
            temporary.unlink()
        if isinstance(error, OSError) or _system_code(error) is not None:
            raise write_error(error, path) from error
        raise


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_error(error: BaseException, path: Path) -> OutputError:
    """*error* of writing *path*, as the error to raise: a full disk, or anything else."""
    code = _system_code(error)
    reason = str(error) if code is None else os.strerror(code)
    if code in _FULL:
        return DiskSpaceError(
            f"the disk is full: {reason}",
            where=str(path),
            hint="make room and start the same command again: it goes on where it stopped",
        )
    return OutputError(f"cannot write: {reason}", where=str(path), hint="choose an output folder you can write to")


def _system_code(error: BaseException) -> int | None:
    """The operating system's number of an error; safetensors tells it only in the text of its own."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found.group(1)) if found else None


def is_first_rank() -> bool:
    """Whether this process is alone, or the first of several that work on one run (torch.distributed, torchrun)."""
    distributed = sys.modules.get("torch.distributed")  # whoever uses it has imported it
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()) == 0
    return os.environ.get("RANK", "0") == "0"


def process_count() -> int:
    """Processes that work on one run, as the launcher (torchrun) says; 1 without one."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() and int(text) > 0 else 1


@contextlib.contextmanager
def sole_writer(output: Path) -> Iterator[None]:
    """Hold a run's output folder: two commands at work there would remove each other's files.

    Of several processes of one run the first holds it for all. The system lets go of it however the process ends, so
    that a killed run leaves nothing to clear up. Where the file system knows no locks, nothing is held.

    Raises:
        OutputError: another command is at work there, or the folder cannot be written to.
    """
    if not is_first_rank():
        yield
        return
    try:
        file = open(output / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise OutputError(
            f"cannot write: {error.strerror}", where=str(output), hint="choose an output folder you can write to"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise OutputError(
                f"another draftsmith command is at work in this output ({file.read().strip() or 'unknown'})",
                where=str(output),
                hint="wait until it is done, or choose another output",
            ) from error
        except OSError:
            pass
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Readable ``key: old → new`` lines for two nested values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines: list[str] = []
        for key in sorted({*old, *new}):
            name = f"{prefix}.{key}" if prefix else str(key)
            lines += differences(old.get(key), new.get(key), name)
        return lines
    return [] if old == new else [f"{prefix}: {old!r} → {new!r}"]


@frozen(kw_only=True)
class StageRecord:
    """What ``stage.json`` holds.

    Attributes:
        summary: figures of a complete stage, for the reports and for the stages that follow.
        seconds: time spent, over all starts.
    """

    stage: str
    fingerprint: Mapping[str, Any]
    complete: bool
    summary: Mapping[str, Any] = field(factory=dict)
    seconds: float = 0.0
    version: str = __version__

    @property
    def digest(self) -> str:
        return digest(self.fingerprint)


class Stage:
    """One stage's folder. Use :meth:`begin` (or its two halves), then :meth:`finish`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self._started = time.monotonic()
        self._earlier = 0.0
        self._fingerprint: Mapping[str, Any] = {}

    def record(self) -> StageRecord | None:
        """The stored record, or None where the stage never began.

        Raises:
            OutputError: ``stage.json`` is there and cannot be read.
        """
        path = self.folder / FILE
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            return StageRecord(
                stage=stored["stage"],
                fingerprint=stored["fingerprint"],
                complete=stored["complete"],
                summary=stored["summary"],
                seconds=stored["seconds"],
                version=stored["version"],
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OutputError(
                f"the record of the {self.name} stage cannot be read: {error}",
                where=str(path),
                hint=f"remove the folder {self.folder} and run again: the stage is made anew",
            ) from error

    def begin(
        self, fingerprint: Mapping[str, Any], *, overwrite: bool = False
    ) -> Literal["complete", "resume", "fresh"]:
        """:meth:`compare`, and :meth:`claim` a folder that is not this stage's yet, or not of these inputs.

        Raises:
            FingerprintMismatch, OutputError: as they do.
        """
        found = self.compare(fingerprint, overwrite=overwrite)
        if found == "fresh":
            self.claim()
        return found

    def compare(
        self, fingerprint: Mapping[str, Any], *, overwrite: bool = False
    ) -> Literal["complete", "resume", "fresh"]:
        """Compare with what is stored; changes nothing there.

        Raises:
            FingerprintMismatch: the folder holds this stage's output of other inputs (lists the differences).
            OutputError: the folder holds something else, or cannot be read.
        """
        self._fingerprint = plain = json.loads(json.dumps(fingerprint, default=str))
        self._started = time.monotonic()
        record = self.record()
        if record is not None and record.stage != self.name:
            # Whatever is overwritten, it is never what another stage made: --output may name a checkpoint by mistake.
            raise OutputError(
                f"the folder holds the output of the {record.stage} stage, not of {self.name}",
                where=str(self.folder),
                hint="choose another output",
            )
        if record is not None and record.fingerprint == plain:
            self._earlier = record.seconds
            if record.complete:
                return "complete"
            return "resume"
        if record is not None and not overwrite:
            lines = differences(record.fingerprint, plain)
            shown = "\n    ".join(lines[:12] + ([f"… and {len(lines) - 12} more"] if len(lines) > 12 else []))
            raise FingerprintMismatch(
                f"the {self.name} stage stored there was made from other inputs:\n    {shown}",
                where=str(self.folder),
                hint="choose another output, or run with --overwrite to make this stage and those after it anew",
            )
        if record is None and self._holds_something():
            raise OutputError(
                f"the folder of the {self.name} stage is not empty and was not written by draftsmith",
                where=str(self.folder),
                hint="choose another output, or move what is there away",
            )
        return "fresh"

    def claim(self) -> None:
        """Remove the output of other inputs, if there is one, and begin; after :meth:`compare` found ``fresh``.

        Raises:
            OutputError: the folder cannot be written to.
        """
        self._remove((self.folder / FILE).exists())
        self._write(complete=False, summary={})

    def _holds_something(self) -> bool:
        """Whether the folder holds what is not ours; hidden files are what a kill left of a record."""
        try:
            return any(not each.name.startswith(".") for each in self.folder.iterdir())
        except FileNotFoundError:
            return False
        except OSError as error:
            raise OutputError(
                f"the folder of the {self.name} stage cannot be read: {error.strerror}",
                where=str(self.folder),
                hint="choose another output, or move what is there away",
            ) from error

    def _remove(self, present: bool) -> None:
        """Remove the folder. It loses its name first: a kill must not leave half of it where all was."""
        doomed = self.folder.with_name(f".{self.folder.name}.old")
        try:
            if doomed.exists():
                shutil.rmtree(doomed)
            if present:
                self.folder.rename(doomed)
                shutil.rmtree(doomed)
        except OSError as error:
            raise OutputError(
                f"the earlier output of the {self.name} stage cannot be removed: {error.strerror}",
                where=error.filename or str(self.folder),
                hint="choose another output, or remove it yourself",
            ) from error

    def reopen(self) -> None:
        """Mark a complete stage as incomplete, so that its next start looks for what is missing."""
        record = self.record()
        if record is not None and record.complete:
            self._fingerprint, self._started, self._earlier = record.fingerprint, time.monotonic(), record.seconds
            self._write(complete=False, summary={})

    def finish(self, summary: Mapping[str, Any]) -> StageRecord:
        """Mark complete. *summary* holds plain values only."""
        return self._write(complete=True, summary=summary)

    def _write(self, *, complete: bool, summary: Mapping[str, Any]) -> StageRecord:
        record = StageRecord(
            stage=self.name,
            fingerprint=self._fingerprint,
            complete=complete,
            summary=dict(summary),
            seconds=round(self._earlier + time.monotonic() - self._started, 3),
        )
        write_json_atomically(
            self.folder / FILE,
            {
                "stage": record.stage,
                "complete": record.complete,
                "fingerprint": record.fingerprint,
                "summary": record.summary,
                "seconds": record.seconds,
                "version": record.version,
            },
        )
        return record


@frozen
class RunFolders:
    """Where a run keeps what."""

    output: Path

    @property
    def prepared(self) -> Path:
        """Token rows (Arrow), vocabulary.safetensors, rejected.jsonl."""
        return self.output / "prepared"

    @property
    def answers(self) -> Path:
        """Answers that the verifier wrote, by content hash: kept when the prepared rows are made anew."""
        return self.output / "answers"

    @property
    def states(self) -> Path:
        """The transport's folder and the teacher's statistics."""
        return self.output / "states"

    @property
    def training(self) -> Path:
        """Training checkpoints, metrics.jsonl, tensorboard/."""
        return self.output / "training"

    @property
    def checkpoint(self) -> Path:
        """The served checkpoint: config.json, model.safetensors, README.md."""
        return self.output / "checkpoint"

    @property
    def verification(self) -> Path:
        """What vLLM and the simulator measured."""
        return self.output / "verification"
