"""metrics.jsonl: one line per optimiser step and per validation, cut back to the checkpoint on resume.

The lines hold nothing that depends on time, so the log of a run that was killed and resumed equals, byte by byte,
that of one that was not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from draftsmith.errors import OutputError
from draftsmith.stages import write_error

__all__ = ["MetricsLog", "NoLog"]


class MetricsLog:
    """Append-only log that starts at byte *keep* of what is there.

    Raises:
        OutputError: the file cannot be opened or written, or is shorter than *keep*.
    """

    def __init__(self, path: Path, *, keep: int = 0) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 — closed by close()
            size = os.fstat(self._file.fileno()).st_size
            if size < keep:
                raise OutputError(f"the log has {size} bytes, the checkpoint knows {keep}", where=str(path))
            self._file.truncate(keep)
        except OSError as error:
            raise write_error(error, path) from error

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one line; handed to the operating system at once, so that it can be followed.

        Raises:
            DiskSpaceError, OutputError: part of the line may be there; a resume cuts it off.
        """
        line = memoryview(json.dumps(values, separators=(",", ":")).encode() + b"\n")
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise write_error(error, self._path) from error

    def sync(self) -> int:
        """Make everything written survive a crash of the machine; returns the size in bytes."""
        try:
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise write_error(error, self._path) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class NoLog(MetricsLog):
    """The log of a rank that does not write."""

    def __init__(self) -> None:
        pass

    def write(self, values: Mapping[str, Any]) -> None:
        pass

    def sync(self) -> int:
        return 0

    def close(self) -> None:
        pass
