"""The folder: what lies where, and how it is changed so that a kill at any moment leaves it whole.

    layout.json          the capture's layout; compared on every open
    loose/<id>.hs        one sample each, written under another name, synced, then renamed
    shards/<n>-<uuid>.hs many samples each; never changed once named
    removed/<uuid>.txt   "<shard> <sample id>" lines: samples of a shard that were deleted; and
                         "<inode>-<time of writing> <sample id>" lines: loose files that were deleted

Only three operations are relied on: creating a file, renaming it within its folder, removing it. All three are
atomic on local and network file systems; no locks are taken.

Why the order of steps is what it is. Compaction names the shard first and removes the loose files after, so that a
sample is always in one of both; a reader that finds neither looks at the shards again, which settles the race. A
deletion notes which loose file it is about to remove, removes it, and marks the shards after. A compaction that finds
a loose file gone when it wants to remove it looks for such a note: with one, the sample was deleted, and it marks its
own copy; without, another compaction was faster, and two copies do no harm.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

import attrs
from attrs import frozen

from draftsmith.errors import DiskSpaceError, FingerprintMismatch, TransportError
from draftsmith.interfaces import StateLayout
from draftsmith.stages import differences
from draftsmith_hs_file.wire import Entry, FormatError, WireFile, is_sample_id

__all__ = ["Place", "Store", "file_identity", "sync_folder", "write_atomically"]

SUFFIX = ".hs"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_STALE_SECONDS = 24 * 3600.0
#: No compaction of one shard takes longer; notes about loose files are kept as long.
_COMPACTION_SECONDS = 3600.0


def file_identity(status: os.stat_result) -> str:
    """Tells this file from another that is later put in its place."""
    return f"{status.st_ino}-{status.st_mtime_ns}"


def sync_folder(folder: Path) -> None:
    """Make renames in *folder* survive a power cut, where the file system can promise that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _owner() -> str:
    return f"{socket.gethostname().replace('.', '_')}.{os.getpid()}"


def write_atomically(path: Path, write: Callable[[BinaryIO], None], *, fsync: bool = True) -> None:
    """Write a file under a temporary name in the same folder, then rename it to *path*.

    Raises:
        DiskSpaceError: there is no room. TransportError: it cannot be written. Either way *path* is as it was, and the
            temporary file is gone.
    """
    temporary = path.with_name(f".{path.stem}.{_owner()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            _raise_write_error(error, path)
        raise


def _raise_write_error(error: OSError, path: Path) -> NoReturn:
    if error.errno in _NO_SPACE:
        raise DiskSpaceError(
            f"no room to write: {error.strerror}",
            where=str(path.parent),
            hint="nothing of it is visible; make room, then run the same command again: it goes on where it stopped",
        ) from error
    raise TransportError(f"cannot write: {error.strerror}", where=str(path)) from error


@frozen
class Place:
    """Where a sample lies: its shard's name and entry; both None for a loose file."""

    shard: str | None = None
    entry: Entry | None = None


class Store:
    """The folder of one capture, and an index of its shards that is brought up to date on demand."""

    def __init__(self, folder: Path, layout: StateLayout) -> None:
        self.folder = folder
        self.layout = layout
        self.loose = folder / "loose"
        self.shards = folder / "shards"
        self.removed = folder / "removed"
        self._index: dict[str, tuple[str, Entry]] = {}
        #: shards of the few samples that are in several: the greatest name counts (see :meth:`new_shard_name`)
        self._copies: dict[str, dict[str, Entry]] = {}
        self._seen: set[str] = set()
        self._dead: set[tuple[str, str]] = set()
        #: notes of deleted samples → (inode, bytes that were read)
        self._read_notes: dict[str, tuple[int, int]] = {}
        #: shards whose header cannot be read, with the reason: samples that are nowhere else may be in them
        self.damaged: dict[str, str] = {}
        self._layout_checked = False
        self._notes = f"{secrets.token_hex(16)}.txt"

    # --- opening ------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Make the folder a store of this layout.

        Raises:
            FingerprintMismatch: it holds another layout. TransportError, DiskSpaceError: it cannot be written to.
        """
        try:
            for folder in (self.loose, self.shards, self.removed):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TransportError(
                f"cannot make the folder of the hidden states: {error.strerror}",
                where=str(self.folder),
                hint="choose a folder that you can write to",
            ) from error
        if not self.check_layout():
            text = json.dumps(attrs.asdict(self.layout), indent=2).encode()
            write_atomically(self.folder / "layout.json", lambda file: _write(file, text))
            self.check_layout()

    def check_layout(self) -> bool:
        """Compare with the stored layout; False where none is stored yet."""
        if self._layout_checked:
            return True
        found = self.stored_layout()
        if found is None:
            return False
        if found != self.layout:
            raise_other_layout(found, self.layout, str(self.folder))
        self._layout_checked = True
        return True

    def stored_layout(self) -> StateLayout | None:
        """The layout that the folder was made for.

        Raises:
            TransportError: ``layout.json`` is there and cannot be read.
        """
        path = self.folder / "layout.json"
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            return StateLayout(**{**stored, "layer_ids": tuple(stored["layer_ids"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TransportError(
                f"the layout of the hidden states cannot be read: {error}",
                where=str(path),
                hint="remove that file: every shard says the same of itself",
            ) from error

    # --- finding ------------------------------------------------------------------------------------------------

    def loose_path(self, sample_id: str) -> Path:
        """The only place where an id becomes a path; ids are checked to be hexadecimal before."""
        assert is_sample_id(sample_id)
        return self.loose / (sample_id + SUFFIX)

    def find(self, sample_id: str) -> Place | None:
        """Where a sample lies now: constant time, with one more look at the folder when it is not where it was."""
        for attempt in range(2):
            if attempt:
                self.refresh()
            known = self._index.get(sample_id)
            if known is not None:
                return Place(*known)
            if self.loose_path(sample_id).exists():
                return Place()
        return None

    def refresh(self) -> None:
        """Read the headers of shards that are new, forget shards and samples that are gone."""
        self.check_layout()
        self._read_removed()
        present = {name for name in _names(self.shards) if name.endswith(SUFFIX)}
        gone = self._seen - present
        if gone:
            for sample_id in [each for each, place in self._index.items() if place[0] in gone] + list(self._copies):
                self._drop(sample_id, gone)
            self._seen -= gone
            for name in gone:
                self.damaged.pop(name, None)
        for name in sorted(present - self._seen):
            self._read_shard(name)

    def _read_shard(self, name: str) -> None:
        try:
            shard = WireFile(self.shards / name)
        except FileNotFoundError:
            return
        except FormatError as error:
            self.damaged[name] = str(error)
        else:
            if shard.layout != self.layout:
                raise_other_layout(shard.layout, self.layout, str(shard.path))
            for sample_id, entry in shard.entries.items():
                if (name, sample_id) not in self._dead:
                    self._add(sample_id, name, entry)
        self._seen.add(name)

    def _add(self, sample_id: str, name: str, entry: Entry) -> None:
        known = self._index.get(sample_id)
        if known is None:
            self._index[sample_id] = (name, entry)
        elif known[0] != name:
            copies = self._copies.setdefault(sample_id, {known[0]: known[1]})
            copies[name] = entry
            best = max(copies)
            self._index[sample_id] = (best, copies[best])

    def _drop(self, sample_id: str, shards: set[str]) -> None:
        """Forget that these shards hold a sample."""
        known = self._index.get(sample_id)
        if known is None:
            return
        copies = {
            name: entry for name, entry in self._copies.pop(sample_id, dict([known])).items() if name not in shards
        }
        if len(copies) > 1:
            self._copies[sample_id] = copies
        if copies:
            best = max(copies)
            self._index[sample_id] = (best, copies[best])
        else:
            del self._index[sample_id]

    def new_shard_name(self, source: str | None = None) -> str:
        """A name for a shard that is new, or rewritten from the shard *source*.

        Names are ordered by generation, and a rewritten shard's is one higher than its source's. So where several
        compactions see several copies of a sample, all agree which one counts, and none removes the last.
        """
        generation = 0 if source is None else int(source.partition("-")[0]) + 1
        return f"{generation:06d}-{secrets.token_hex(12)}{SUFFIX}"

    def _read_removed(self) -> None:
        """Read what was added to the notes since the last time: who deletes one by one would else read all anew."""
        for name in _names(self.removed):
            with contextlib.suppress(FileNotFoundError), open(self.removed / name, "rb") as file:
                status = os.fstat(file.fileno())
                known, read = self._read_notes.get(name, (status.st_ino, 0))
                if known != status.st_ino or read > status.st_size:  # removed, and begun again
                    read = 0
                file.seek(read)
                whole, newline, _ = file.read().rpartition(b"\n")  # of a line being written the rest comes later
                self._read_notes[name] = status.st_ino, read + len(whole + newline)
                for line in whole.decode("ascii").splitlines():
                    shard, _, sample_id = line.partition(" ")
                    if is_sample_id(sample_id):
                        self._forget(shard, sample_id)

    def _forget(self, shard: str, sample_id: str) -> None:
        self._dead.add((shard, sample_id))
        self._drop(sample_id, {shard})

    def shard_contents(self) -> dict[str, list[str]]:
        """Shard → the living samples that are found in it."""
        contents: dict[str, list[str]] = {name: [] for name in self._seen if name not in self.damaged}
        for sample_id, (name, _entry) in self._index.items():
            contents[name].append(sample_id)
        return contents

    def loose_ids(self) -> Iterator[str]:
        for name in _names(self.loose):
            if name.endswith(SUFFIX) and is_sample_id(name[: -len(SUFFIX)]):
                yield name[: -len(SUFFIX)]

    def begun(self, sample_id: str) -> bool:
        """Whether somebody is writing this sample, or was killed while writing it."""
        return any(name.startswith(f".{sample_id}.") for name in _names(self.loose))

    def complete_ids(self) -> frozenset[str]:
        loose = list(self.loose_ids())  # before the shards: what is compacted meanwhile is then found there
        self.refresh()
        return frozenset(self._index).union(loose)

    # --- removing -----------------------------------------------------------------------------------------------

    def delete(self, sample_id: str) -> None:
        path = self.loose_path(sample_id)
        with contextlib.suppress(FileNotFoundError):
            self._note([f"{file_identity(path.stat())} {sample_id}"], fsync=False)
            path.unlink()
        self.refresh()
        while (known := self._index.get(sample_id)) is not None:  # in several shards, after a killed compaction
            self.mark_removed(known[0], [sample_id])

    def mark_removed(self, shard: str, sample_ids: list[str]) -> None:
        """Note that samples of a shard are deleted; the note is complete when this returns."""
        self._note([f"{shard} {sample_id}" for sample_id in sample_ids], fsync=True)
        for sample_id in sample_ids:
            self._forget(shard, sample_id)

    def was_deleted(self, sample_id: str, identity: str) -> bool:
        """Whether somebody deleted this very loose file."""
        self._read_removed()
        return (identity, sample_id) in self._dead

    def _note(self, lines: list[str], *, fsync: bool) -> None:
        self.removed.mkdir(parents=True, exist_ok=True)
        path = self.removed / self._notes  # its own file: no two writers append to one
        try:
            with open(path, "a", encoding="ascii") as file:
                file.write("".join(line + "\n" for line in lines))
                file.flush()
                if fsync:
                    os.fsync(file.fileno())
        except OSError as error:
            _raise_write_error(error, path)

    def drop_shard(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.shards / name).unlink()

    def clean(self) -> None:
        """Remove temporary files of writers that are dead, and notes about shards that are gone."""
        for folder in (self.loose, self.shards, self.folder):
            for name in _names(folder):
                if name.startswith(".") and name.endswith(".tmp") and _is_abandoned(folder / name):
                    with contextlib.suppress(FileNotFoundError):
                        (folder / name).unlink()
        present = set(_names(self.shards))
        for name in _names(self.removed):
            path = self.removed / name
            with contextlib.suppress(FileNotFoundError):
                about = {line.partition(" ")[0] for line in path.read_text(encoding="ascii").splitlines()}
                recent = time.time() - path.stat().st_mtime < _COMPACTION_SECONDS
                if not about & present and not (recent and any(not each.endswith(SUFFIX) for each in about)):
                    path.unlink()

    def remove_everything(self) -> None:
        for folder in (self.loose, self.shards, self.removed):
            shutil.rmtree(folder, ignore_errors=True)
        (self.folder / "layout.json").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def raise_other_layout(found: StateLayout, wanted: StateLayout, where: str) -> NoReturn:
    """Raise the error that lists what differs between two layouts."""
    lines = differences(attrs.asdict(found), attrs.asdict(wanted))
    listed = "\n    ".join(lines)
    raise FingerprintMismatch(
        f"the hidden states stored there were captured otherwise (stored → wanted):\n    {listed}",
        where=where,
        hint="capture again with --overwrite, or use another output folder",
    )


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _is_abandoned(path: Path) -> bool:
    """Whether the process that was writing *path* is surely gone (on this host), or silent for a day (elsewhere)."""
    host, pid = path.name.split(".")[-4:-2]
    if host == socket.gethostname().replace(".", "_"):
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except (PermissionError, ValueError):
            return False
        return False
    try:
        return time.time() - path.stat().st_mtime > _STALE_SECONDS
    except FileNotFoundError:
        return False
