"""Folders of safetensors files, copied and changed as bytes: whole or not at all, sharing what does not change.

Tensors pass through here as bytes between two offsets, so that every dtype does, known to torch or not, and memory
holds one chunk of a file at a time. Layout of a file: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from attrs import frozen

from draftsmith.errors import CheckpointError, DiskSpaceError, OutputError, VerifierError
from draftsmith.stages import sole_writer, write_error
from draftsmith.stored_tensors import StoredTensor

__all__ = [
    "Advance",
    "Replacement",
    "check_room",
    "copy_file",
    "file_size",
    "read_bytes",
    "refuse_existing",
    "reflink",
    "rewrite",
    "share",
    "stored_bytes",
    "validate",
    "whole_folder",
    "write_tensor_file",
]

_CHUNK = 8 << 20
#: Linux's ioctl that makes a file share another's blocks until one of them is written to (btrfs, XFS, bcachefs).
_FICLONE = 0x40049409

Advance = Callable[[float], None]
#: Bytes of a tensor, in pieces.
Pieces = Callable[[], Iterable[bytes | memoryview]]


# --- a folder, whole or not at all ------------------------------------------------------------------------------


def refuse_existing(target: Path) -> None:
    """Refuse early what :func:`whole_folder` would refuse in the end.

    Raises:
        OutputError: *target* exists, whatever it is.
    """
    if os.path.lexists(target):
        staging = _staging(target)
        if staging.is_dir():  # left by a kill right after the last rename
            with _held(staging):
                pass
        _refuse(target)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """An empty folder to write into. At the end it is synced and becomes *target*.

    After an error or a signal nothing is left of it, nor of the folders above it that were made for it; after a kill
    a hidden folder beside *target* is, which the next start with the same target removes. Two at a time do not work on
    one target.

    Raises:
        OutputError: *target* exists, cannot be written, or is being written by another command.
        DiskSpaceError: there is no room.
    """
    staging = _staging(target)
    above = [each for each in target.parents if not each.exists()]
    try:
        staging.mkdir(parents=True, exist_ok=True)
        with _held(staging):
            _refuse(target)
            folder = staging / "folder"
            shutil.rmtree(folder, ignore_errors=True)  # left by a kill
            folder.mkdir()
            yield folder
            # All at the end, so that reading does not wait for what is being written.
            for each in [*folder.rglob("*"), folder]:
                _sync(each)
            _refuse(target)
            os.rename(folder, target)
            _sync(target.parent)
    except BaseException as error:
        for each in above:  # the innermost first; one that somebody else uses by now stays
            with contextlib.suppress(OSError):
                each.rmdir()
        if isinstance(error, OSError):
            raise _told(error, target) from error
        raise


def _refuse(target: Path) -> None:
    if os.path.lexists(target):
        raise OutputError("the target exists already", where=str(target), hint="choose another name, or remove it")


def _staging(target: Path) -> Path:
    """The name does not change from start to start: what a kill leaves is found again."""
    return target.with_name(f".{target.name}.unfinished")


@contextlib.contextmanager
def _held(staging: Path) -> Iterator[None]:
    with sole_writer(staging):
        try:
            yield
        finally:
            try:
                shutil.rmtree(staging, ignore_errors=True)
            except KeyboardInterrupt:  # an impatient second one, or a first one that comes late
                shutil.rmtree(staging, ignore_errors=True)
                raise


def _told(error: OSError, target: Path) -> OutputError:
    known = write_error(error, target)
    if isinstance(known, DiskSpaceError):
        return DiskSpaceError(
            known.what,
            where=str(target),
            hint="make room and start the same command again; nothing half-written was kept",
        )
    return known


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of entries, is on disk: only then a rename is safe, see fsync(2)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not sync folders
            raise
    finally:
        os.close(descriptor)


def check_room(folder: Path, needed: int, target: Path) -> None:
    """Fail at once, and not after the first hundred gigabytes.

    Raises:
        DiskSpaceError: *needed* bytes do not fit where *folder* lies.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DiskSpaceError(
            f"{needed / 1e9:.2f} GB are to be written, and {free / 1e9:.2f} GB are free",
            where=str(target),
            hint="make room, or choose a target on the model's own file system, where files can be shared",
        )


# --- files ------------------------------------------------------------------------------------------------------


def share(source: Path, copy: Path) -> str | None:
    """Let *copy* be the same bytes as *source* without copying them: ``"reflink"``, ``"link"``, or None: not possible.

    A reflink is tried first: of a hard link, writing into one file changes the other.
    """
    if reflink(source, copy):
        return "reflink"
    try:
        # os.link does not follow the symbolic links that the hub's cache is made of.
        os.link(os.path.realpath(source), copy)
    except OSError:  # another file system, one without links, or a file of somebody else's
        return None
    return "link"


def reflink(source: Path, copy: Path) -> bool:
    """Make *copy* share the blocks of *source* until one is written to; False: the file system cannot."""
    try:
        with open(source, "rb") as read, open(copy, "xb") as written:
            fcntl.ioctl(written.fileno(), _FICLONE, read.fileno())
    except OSError:
        copy.unlink(missing_ok=True)
        return False
    return True


@frozen
class Replacement:
    """Bytes [begin, end) of a file, and what comes there instead."""

    begin: int
    end: int
    pieces: Pieces


def rewrite(source: Path, copy: Path, replacements: Sequence[Replacement], advance: Advance, *, cloned: bool) -> int:
    """Copy *source* with some of its bytes replaced; returns how many bytes were written.

    Args:
        cloned: *copy* is there and shares its blocks with *source*: only what is replaced is written.

    Raises:
        VerifierError: *source* cannot be read. CheckpointError: a replacement has another length.
        OSError: *copy* cannot be written.
    """
    written = position = 0
    with open(copy, "r+b" if cloned else "xb") as file:
        for each in sorted(replacements, key=lambda replacement: replacement.begin):
            if cloned:
                file.seek(each.begin)
            else:
                written += _copy_range(source, position, each.begin, file, advance)
            count = _put(file, each.pieces(), advance)
            if count != each.end - each.begin:
                raise CheckpointError(f"a tensor has {count} bytes for {each.end - each.begin}", where=str(source))
            written, position = written + count, each.end
        if not cloned:
            written += _copy_range(source, position, file_size(source), file, advance)
    return written


def copy_file(source: Path, copy: Path, advance: Advance) -> int:
    """Copy the bytes of *source*; returns how many. Errors as of :func:`rewrite`."""
    return rewrite(source, copy, (), advance, cloned=False)


def _copy_range(source: Path, begin: int, end: int, file: BinaryIO, advance: Advance) -> int:
    """Append bytes [begin, end) of *source* to *file*, inside the kernel where it can; returns how many."""
    position = begin
    file.flush()
    try:
        with open(source, "rb", buffering=0) as read:
            while position < end:
                count = os.sendfile(file.fileno(), read.fileno(), position, min(_CHUNK, end - position))
                if not count:
                    break
                position += count
                advance(count)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
    # What the kernel cannot do, or not go on with: now it shows which of the two files is the reason.
    file.seek(0, os.SEEK_END)
    return position - begin + _put(file, read_bytes(source, position, end), advance)


def _put(file: BinaryIO, pieces: Iterable[bytes | memoryview], advance: Advance) -> int:
    count = 0
    for piece in pieces:
        file.write(piece)
        count += len(piece)
        advance(len(piece))
    return count


def file_size(path: Path) -> int:
    """Raises:
    VerifierError: it is not there, or cannot be read.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error.strerror) from error


def read_bytes(path: Path, begin: int, end: int) -> Iterator[memoryview]:
    """Bytes [begin, end) of a file in chunks; each is good until the next is asked for.

    Raises:
        VerifierError: they cannot be read, or the file ends before.
    """
    buffer = memoryview(bytearray(min(_CHUNK, max(end - begin, 0))))
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(begin)
            while begin < end:
                count = file.readinto(buffer[: min(len(buffer), end - begin)])
                if not count:
                    raise _unreadable(path, "it ends too early")
                yield buffer[:count]
                begin += count
    except OSError as error:
        raise _unreadable(path, error.strerror) from error


def _unreadable(path: Path, reason: str | None) -> VerifierError:
    return VerifierError(
        f"cannot be read: {reason}", where=str(path), hint="is the file whole, and the disk in order?"
    )


# --- tensors ----------------------------------------------------------------------------------------------------


def validate(path: Path) -> None:
    """Let the format's own library look at a file's header: offsets that overlap or leave holes, unknown dtypes.

    Raises:
        CheckpointError: it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the weights are damaged: {error}", where=str(path), hint="copy or download the file again"
        ) from error


def stored_bytes(tensor: StoredTensor) -> Iterator[memoryview]:
    """A tensor's bytes as they are stored."""
    return read_bytes(tensor.file, tensor.begin, tensor.end)


def write_tensor_file(path: Path, tensors: Mapping[str, StoredTensor], advance: Advance) -> int:
    """Write *tensors*, which lie in other files, into one file; returns its size.

    The library's own writer wants all tensors in memory.
    """
    # Wide elements first, as the library orders them: each tensor then begins at a multiple of its element.
    order = sorted(tensors, key=lambda name: (-_element_bits(tensors[name]), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.end - tensor.begin
        header[name] = {
            "dtype": tensor.spec.dtype,
            "shape": list(tensor.spec.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            tensor = tensors[name]
            _copy_range(tensor.file, tensor.begin, tensor.end, file, advance)
    return 8 + len(text) + offset


def _element_bits(tensor: StoredTensor) -> int:
    count = 1
    for size in tensor.spec.shape:
        count *= size
    return 8 * (tensor.end - tensor.begin) // count if count else 0
