"""What lies in the store, version 1: keys, and the records that give them a meaning. Torch-free.

::

    hs1/<run>/layout/<slot>                  record: the layout of the run's samples
    hs1/<run>/claim/<slot>                   record: which training run works there
    hs1/<run>/s/<sample id>/w                whole: a small sample in one object, with its manifest
    hs1/<run>/s/<sample id>/m<slot>          record: the manifest, which commits a sample of chunks
    hs1/<run>/s/<sample id>/<attempt>/<n>    data: chunk 0 is the token ids (int64), the others the states, in order

The store cannot replace an object: a second put of a key is ignored, and reading a key that is removed and put anew
gives a mixture without an error. So data has a key of its own in every attempt, and is never read without a checksum.
A record must be found without knowing the attempt, so its key is one of :data:`SLOTS`; it carries a checksum and its
own name, so that a mixture is found out, and a slot whose writer died (the store blocks it for 30 s) is passed over.

A record is 16 hex digits, the xxh3-64 of what follows, then JSON. Of several valid ones in the slots of one name the
youngest counts.

A whole sample is the states, the token ids, its manifest as a record, and 8 hex digits: the record's length. It takes
one call to put and one to get, and is there entirely or not at all. Its key too is used again when a sample is put
again after it was removed; the checksums, of the manifest and in it of both parts, find a mixture out. One key is
enough, since a sample is put as chunks where anything of it is there already, or where its key gave trouble. So a
reader that looks for the whole sample first, and then for a manifest, misses none that is put again meanwhile.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import xxhash
from attrs import frozen

from draftsmith.interfaces import StateLayout

__all__ = [
    "END_BYTES",
    "RECORD_BYTES",
    "SLOTS",
    "FormatError",
    "Manifest",
    "chunk_sizes",
    "claim_name",
    "committed_sample",
    "decode",
    "encode",
    "end_of_whole",
    "is_chunk",
    "is_sample_id",
    "layout_from",
    "layout_name",
    "manifest_name",
    "manifest_of_whole",
    "run_of",
    "run_prefix",
    "run_regex",
    "slots_of",
    "state_bytes",
    "whole_key",
]

VERSION = 1
ENCODINGS = ("plain", "fp8")
SLOTS = 4
#: The longest record: a manifest of some thousand chunks.
RECORD_BYTES = 64 << 10
#: What a whole sample has beyond its states and its token ids, at most; measured, 1 KiB. A longer one goes in chunks.
END_BYTES = 4 << 10
_ROOT = "hs1/"
_SUM = 16
_LENGTH = 8
_SAMPLE_ID = re.compile(r"[0-9a-f]{32}")
_COMMIT = re.compile(r"s/([0-9a-f]{32})/(?:m[0-9]|w)")
_CHUNK = re.compile(r"hs1/[^/]+/s/[0-9a-f]{32}/[0-9a-f]{16}/[0-9]+")
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}


class FormatError(Exception):
    """What lies under a key is not what the format promises. The caller knows the sample, and raises a typed error."""


def is_sample_id(text: object) -> bool:
    """Whether *text* is 32 lower-case hexadecimal digits."""
    return isinstance(text, str) and _SAMPLE_ID.fullmatch(text) is not None


# --- keys --------------------------------------------------------------------------------------------------------


def run_prefix(run: str) -> str:
    return f"{_ROOT}{run}/"


def run_regex(run: str) -> str:
    """A pattern, in the grammar of C++, for every key of the run."""
    return "^" + run_prefix(run).replace(".", "[.]") + ".*"


def run_of(key: str) -> str | None:
    """The run that a key belongs to; None where it is not one of ours."""
    root, _, rest = key.partition("/")
    run, found, _ = rest.partition("/")
    return run if root + "/" == _ROOT and found and run else None


def layout_name(run: str) -> str:
    return run_prefix(run) + "layout/"


def claim_name(run: str) -> str:
    return run_prefix(run) + "claim/"


def _sample_prefix(run: str, sample_id: str) -> str:
    return f"{run_prefix(run)}s/{sample_id}/"


def manifest_name(run: str, sample_id: str) -> str:
    return _sample_prefix(run, sample_id) + "m"


def whole_key(run: str, sample_id: str) -> str:
    return _sample_prefix(run, sample_id) + "w"


def slots_of(name: str) -> list[str]:
    """The keys under which the record *name* may lie."""
    return [f"{name}{slot}" for slot in range(SLOTS)]


def committed_sample(run: str, key: str) -> str | None:
    """The sample that *key* may commit; None where it is another kind of key."""
    prefix = run_prefix(run)
    found = _COMMIT.fullmatch(key[len(prefix) :]) if key.startswith(prefix) else None
    return found.group(1) if found else None


def is_chunk(key: str) -> bool:
    """Whether *key* is one of data, which no other attempt ever has."""
    return _CHUNK.fullmatch(key) is not None


# --- records -----------------------------------------------------------------------------------------------------


def encode(name: str, values: Mapping[str, Any]) -> bytes:
    """The record *name*. Two calls never give the same bytes, so that a writer can tell its own."""
    body = {**values, "version": VERSION, "name": name, "time_ns": time.time_ns(), "token": secrets.token_hex(8)}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    if _SUM + len(text) > RECORD_BYTES:
        raise FormatError(f"the record needs {_SUM + len(text)} bytes, and {RECORD_BYTES} are allowed")
    return xxhash.xxh3_64_hexdigest(text).encode() + text


def decode(name: str, data: bytes) -> dict[str, Any]:
    """The values of a record.

    Raises:
        FormatError: no record, another version, another name, or other bytes than were written.
    """
    if xxhash.xxh3_64_hexdigest(data[_SUM:]).encode() != data[:_SUM]:
        raise FormatError("the record does not match its checksum")
    values: dict[str, Any] = json.loads(data[_SUM:])
    if values["version"] != VERSION:
        raise FormatError(f"the record's version is {values['version']}; this release reads version {VERSION}")
    if values["name"] != name:
        raise FormatError(f"the record is that of {values['name']!r}")
    return values


def end_of_whole(key: str, manifest: Manifest) -> bytes:
    """What follows the states and the token ids of the whole sample *key*."""
    record = encode(key, manifest.values())
    return record + f"{len(record):0{_LENGTH}x}".encode()


def manifest_of_whole(key: str, data: memoryview) -> Manifest:
    """The manifest in *data*, which was read as the whole sample *key*. The checksums in it are the caller's matter.

    Raises:
        FormatError: it is no whole sample, or a mixture of several.
    """
    try:
        start = len(data) - _LENGTH - int(bytes(data[-_LENGTH:]), 16)
    except ValueError:
        start = -1
    if start < 0:
        raise FormatError("it does not end in the length of its manifest")
    manifest = Manifest.of(decode(key, bytes(data[start:-_LENGTH])))
    if len(manifest.sizes) != 2 or sum(manifest.sizes) != start:
        raise FormatError(f"it has {start} bytes of data, and its manifest tells of {manifest.sizes}")
    return manifest


def layout_from(values: Mapping[str, Any]) -> StateLayout:
    return StateLayout(**{**values, "layer_ids": tuple(values["layer_ids"])})


@frozen(kw_only=True)
class Manifest:
    """What commits a sample.

    Attributes:
        attempt: names the chunks.
        tokens: T.
        sizes: bytes of each chunk; the first is the token ids.
        sums: xxh3-64 of each, 16 hex digits.
        encoding: ``plain``, or ``fp8``: the states are what :func:`draftsmith.fp8.pack` makes of them.
    """

    sample_id: str
    attempt: str
    layout: StateLayout
    tokens: int
    sizes: tuple[int, ...]
    sums: tuple[str, ...]
    encoding: str = "plain"

    def values(self) -> dict[str, Any]:
        return attrs.asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Manifest:
        """Raises: FormatError: the sizes are not those of the layout and the tokens."""
        names = [each.name for each in attrs.fields(cls)]
        read = {**{name: values[name] for name in names}, "layout": layout_from(values["layout"])}
        manifest = cls(**{**read, "sizes": tuple(read["sizes"]), "sums": tuple(read["sums"])})
        if manifest.encoding not in ENCODINGS:
            raise FormatError(f"its states are coded as {manifest.encoding!r}, which this release does not know")
        token_bytes, state_bytes = 8 * manifest.tokens, manifest.state_bytes
        if manifest.sizes[0] != token_bytes or sum(manifest.sizes[1:]) != state_bytes:
            raise FormatError(f"its chunks have {manifest.sizes} bytes, the sample {token_bytes} and {state_bytes}")
        return manifest

    @property
    def state_bytes(self) -> int:
        return state_bytes(self.layout, self.tokens, self.encoding)

    def keys(self, run: str) -> list[str]:
        """The keys of its chunks, in order."""
        prefix = _sample_prefix(run, self.sample_id)
        return [f"{prefix}{self.attempt}/{place:04d}" for place in range(len(self.sizes))]


def state_bytes(layout: StateLayout, tokens: int, encoding: str) -> int:
    """Bytes of the states of *tokens* tokens as they are stored."""
    if encoding == "fp8":
        from draftsmith import fp8  # which loads torch

        return fp8.stored_bytes(tokens, len(layout.layer_ids), layout.hidden_size)
    return tokens * len(layout.layer_ids) * layout.hidden_size * _WIDTHS[layout.dtype]


def chunk_sizes(token_bytes: int, state_bytes: int, chunk: int) -> tuple[int, ...]:
    """Bytes of each chunk: the token ids, then the states in pieces of *chunk* bytes and a rest."""
    whole, rest = divmod(state_bytes, chunk)
    return (token_bytes, *([chunk] * whole), *([rest] if rest else []))


def youngest(records: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return max(records, key=lambda each: int(each["time_ns"]), default=None)
