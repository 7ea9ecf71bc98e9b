"""The file format, version 1: a safetensors file of one or many samples that can be read without this package.

A file holds, for every sample, ``<sample id>.token_ids`` (I64, [T]) and ``<sample id>.hidden_states``
([T, ids, H_t], the layout's dtype). The safetensors header is the index: it gives the offsets of every tensor, so a
sample is found in constant time. All token ids come first, so that every tensor is aligned to its element size.
``__metadata__`` holds, as strings:

=================  ===========================================================================================
``format``         ``draftsmith.hidden_states``
``version``        ``1``
``layout``         JSON of the capture's :class:`~draftsmith.interfaces.StateLayout`
``checksums``      JSON, sample id → xxh3-64 (hex) over the bytes of token_ids followed by those of hidden_states
``header_xxh3``    xxh3-64 (hex) over the whole header (length prefix included) with this value set to zeros
=================  ===========================================================================================

Loose files and shards have the same format; a shard just holds more samples. Integers are little-endian.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import xxhash
from attrs import frozen
from torch import Tensor

from draftsmith.interfaces import StateLayout

__all__ = [
    "DTYPES",
    "Entry",
    "FormatError",
    "WireFile",
    "build_header",
    "checksum",
    "is_sample_id",
    "raw_bytes",
    "sample_bytes",
]

FORMAT = "draftsmith.hidden_states"
VERSION = 1
#: torch's name of a dtype → (safetensors' name, torch dtype, bytes of an element)
DTYPES: Mapping[str, tuple[str, torch.dtype, int]] = {
    "bfloat16": ("BF16", torch.bfloat16, 2),
    "float16": ("F16", torch.float16, 2),
    "float32": ("F32", torch.float32, 4),
}
_ALIGNMENT = 64
_LARGEST_HEADER = 1 << 30
_NO_CHECKSUM = "0" * 16
_SAMPLE_ID = re.compile(r"[0-9a-f]{32}")
_TOKENS, _STATES = ".token_ids", ".hidden_states"

if sys.byteorder != "little":  # pragma: no cover - no such machine runs torch today
    raise ImportError("the file format is little-endian, and so must the machine be")


class FormatError(Exception):
    """A file does not hold what the format promises. The caller knows which sample, and raises its typed error."""


def is_sample_id(text: str) -> bool:
    """Whether *text* is 32 lower-case hexadecimal digits: such a name cannot leave the folder it is put in."""
    return isinstance(text, str) and _SAMPLE_ID.fullmatch(text) is not None


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def checksum(token_ids: memoryview, hidden_states: memoryview) -> str:
    """xxh3-64 (16 hex digits) over the token bytes followed by the state bytes."""
    digest = xxhash.xxh3_64()
    digest.update(token_ids)
    digest.update(hidden_states)
    return str(digest.hexdigest())


def sample_bytes(layout: StateLayout, tokens: int) -> int:
    """Bytes of one sample of *tokens* tokens, without its share of the header."""
    return tokens * (8 + len(layout.layer_ids) * layout.hidden_size * DTYPES[layout.dtype][2])


@frozen
class Entry:
    """Where a sample lies in a file.

    Attributes:
        tokens: T.
        token_offset, state_offset: in bytes from the beginning of the file.
        state_shape: [T, ids, H_t] as the header says.
        dtype: torch's name.
        checksum: 16 hex digits.
    """

    sample_id: str
    tokens: int
    token_offset: int
    state_offset: int
    state_shape: tuple[int, ...]
    dtype: str
    checksum: str

    @property
    def token_bytes(self) -> int:
        return 8 * self.tokens

    @property
    def state_bytes(self) -> int:
        count = DTYPES[self.dtype][2]
        for size in self.state_shape:
            count *= size
        return count

    @property
    def end(self) -> int:
        """The first byte after the sample's last."""
        return max(self.token_offset + self.token_bytes, self.state_offset + self.state_bytes)


def build_header(layout: StateLayout, samples: Sequence[tuple[str, int, str]]) -> bytes:
    """The length prefix and header of a file of *samples*: (id, tokens, checksum), in the order of their data.

    The data that must follow: the token ids of all samples, then the hidden states of all samples.
    """
    name, _, width = DTYPES[layout.dtype]
    row = len(layout.layer_ids) * layout.hidden_size * width
    tensors: dict[str, Any] = {}
    offset = 0
    for sample_id, tokens, _sum in samples:
        tensors[sample_id + _TOKENS] = {
            "dtype": "I64",
            "shape": [tokens],
            "data_offsets": [offset, offset + 8 * tokens],
        }
        offset += 8 * tokens
    for sample_id, tokens, _sum in samples:
        tensors[sample_id + _STATES] = {
            "dtype": name,
            "shape": [tokens, len(layout.layer_ids), layout.hidden_size],
            "data_offsets": [offset, offset + row * tokens],
        }
        offset += row * tokens
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "layout": json.dumps(attrs.asdict(layout), sort_keys=True),
        "checksums": json.dumps({sample_id: each for sample_id, _tokens, each in samples}),
        "header_xxh3": _NO_CHECKSUM,
    }
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    unsigned = struct.pack("<Q", len(text)) + text
    signature = xxhash.xxh3_64_hexdigest(unsigned)
    return unsigned.replace(_signature_field(_NO_CHECKSUM), _signature_field(signature), 1)


def _signature_field(value: str) -> bytes:
    return f'"header_xxh3":"{value}"'.encode()


class WireFile:
    """An open, memory-mapped file. The mapping is private (copy on write), so tensors may be written to safely.

    Raises:
        FormatError: no such format, an unknown version, or a damaged header.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self.status = os.fstat(descriptor)
            self.size = self.status.st_size
            if self.size < 8:
                raise FormatError(f"the file has {self.size} bytes, too few for a header")
            self._map = mmap.mmap(descriptor, self.size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        (length,) = struct.unpack_from("<Q", self._map, 0)
        if length > _LARGEST_HEADER or 8 + length > self.size:
            raise FormatError(f"the file has {self.size} bytes and its header claims {length}: cut off, or damaged")
        self.data_start = 8 + length
        self.layout, self.entries = self._parse(self._map[: self.data_start])

    def _parse(self, header: bytes) -> tuple[StateLayout, dict[str, Entry]]:
        try:
            fields = json.loads(header[8:])
            metadata = fields.pop("__metadata__")
            kind, version = metadata["format"], metadata["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"the header is damaged ({type(error).__name__})") from None
        if kind != FORMAT:
            raise FormatError(f"the file's format is {kind!r}, not {FORMAT!r}")
        if version != str(VERSION):
            raise FormatError(f"the file's format version is {version}; this release reads version {VERSION}")
        try:
            signature = metadata["header_xxh3"]
            unsigned = header.replace(_signature_field(signature), _signature_field(_NO_CHECKSUM), 1)
            if xxhash.xxh3_64_hexdigest(unsigned) != signature:
                raise FormatError("the header does not match its checksum")
            stored = json.loads(metadata["layout"])
            layout = StateLayout(**{**stored, "layer_ids": tuple(stored["layer_ids"])})
            sums = json.loads(metadata["checksums"])
            return layout, {each: self._entry(each, fields, sums[each]) for each in sums}
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"the header is damaged ({type(error).__name__})") from None

    def _entry(self, sample_id: str, fields: Mapping[str, Any], signature: str) -> Entry:
        tokens, states = fields[sample_id + _TOKENS], fields[sample_id + _STATES]
        names = {name: ours for ours, (name, _, _) in DTYPES.items()}
        if not is_sample_id(sample_id) or states["dtype"] not in names or tokens["dtype"] != "I64":
            raise FormatError(f"the header describes {sample_id!r} in a way that the format does not allow")
        return Entry(
            sample_id=sample_id,
            tokens=int(tokens["shape"][0]),
            token_offset=self.data_start + int(tokens["data_offsets"][0]),
            state_offset=self.data_start + int(states["data_offsets"][0]),
            state_shape=tuple(int(size) for size in states["shape"]),
            dtype=names[states["dtype"]],
            checksum=signature,
        )

    def view(self, entry: Entry) -> tuple[memoryview, memoryview]:
        """The sample's bytes (token ids, hidden states), not checked.

        Raises:
            FormatError: the file ends before the sample does.
        """
        if entry.end > self.size:
            raise FormatError(f"the sample ends at byte {entry.end} and the file at {self.size}: cut off")
        whole = memoryview(self._map)
        return (
            whole[entry.token_offset : entry.token_offset + entry.token_bytes],
            whole[entry.state_offset : entry.state_offset + entry.state_bytes],
        )

    def tensors(self, entry: Entry) -> tuple[Tensor, Tensor]:
        """(token_ids int64 [T], hidden_states [T, ids, H_t]), as views of the mapping.

        Raises:
            FormatError: cut off, or another checksum.
        """
        token_view, state_view = self.view(entry)
        if checksum(token_view, state_view) != entry.checksum:
            raise FormatError("the data does not match its checksum (bits changed on the disk or on the way)")
        token_ids = torch.frombuffer(token_view, dtype=torch.int64)
        states = torch.frombuffer(state_view, dtype=DTYPES[entry.dtype][1]).view(entry.state_shape)
        return token_ids, states

    def ids(self) -> Iterable[str]:
        return self.entries.keys()
