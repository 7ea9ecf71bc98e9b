"""The file format: a safetensors file of one or many samples that can be read without this package.

A file holds, for every sample, ``<sample id>.token_ids`` (I64, [T]) and ``<sample id>.hidden_states``
([T, ids, H_t], the layout's dtype). The safetensors header is the index: it gives the offsets of every tensor, so a
sample is found in constant time. All token ids come first, so that every tensor is aligned to its element size.

A file of version 2 holds its samples in eight bits (:mod:`draftsmith.fp8`): ``hidden_states`` is F8_E4M3, and
``<sample id>.scales`` (F32, [T, ids]) is what its H_t are multiplied by; all scales come between the token ids and the
states. In version 1 the states are of the layout's dtype. Readers read both.

``__metadata__`` holds, as strings:

=================  ===========================================================================================
``format``         ``draftsmith.hidden_states``
``version``        ``1``, or ``2`` for states in eight bits
``layout``         JSON of the capture's :class:`~draftsmith.interfaces.StateLayout`
``checksums``      JSON, sample id → xxh3-64 (hex) over the bytes of token_ids, scales and hidden_states as stored
``header_xxh3``    xxh3-64 (hex) over the whole header (length prefix included) with this value set to zeros
=================  ===========================================================================================

Loose files and shards have the same format; a shard just holds more samples. Integers are little-endian.
"""

from __future__ import annotations

import json
import math
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

from draftsmith import fp8
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
    "sample_parts",
]

FORMAT = "draftsmith.hidden_states"
#: encoding → version of the format
VERSIONS = {"plain": "1", "fp8": "2"}
#: torch's name of a dtype → (safetensors' name, torch dtype, bytes of an element)
DTYPES: Mapping[str, tuple[str, torch.dtype, int]] = {
    "bfloat16": ("BF16", torch.bfloat16, 2),
    "float16": ("F16", torch.float16, 2),
    "float32": ("F32", torch.float32, 4),
}
#: The same, of states as they are stored.
_STORED = {**DTYPES, "float8_e4m3fn": ("F8_E4M3", fp8.VALUES, 1)}
_ALIGNMENT = 64
_LARGEST_HEADER = 1 << 30
_NO_CHECKSUM = "0" * 16
_SAMPLE_ID = re.compile(r"[0-9a-f]{32}")
_TOKENS, _SCALES, _STATES = ".token_ids", ".scales", ".hidden_states"

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


def checksum(*parts: memoryview) -> str:
    """xxh3-64 (16 hex digits) over the parts of a sample, in the order of the file."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return str(digest.hexdigest())


def sample_parts(token_ids: Tensor, hidden_states: Tensor, encoding: str) -> tuple[memoryview, ...]:
    """What is stored of a sample, in the order of the file: token ids, scales where there are some, states."""
    if encoding == "plain":
        return raw_bytes(token_ids), raw_bytes(hidden_states)
    values, scales = fp8.encode(hidden_states)
    return raw_bytes(token_ids), raw_bytes(scales), raw_bytes(values)


def sample_bytes(layout: StateLayout, tokens: int, encoding: str = "plain") -> int:
    """Bytes of one sample of *tokens* tokens, without its share of the header."""
    if encoding == "fp8":
        return 8 * tokens + fp8.stored_bytes(tokens, len(layout.layer_ids), layout.hidden_size)
    return tokens * (8 + len(layout.layer_ids) * layout.hidden_size * DTYPES[layout.dtype][2])


@frozen
class Entry:
    """Where a sample lies in a file.

    Attributes:
        tokens: T.
        token_offset, state_offset: in bytes from the beginning of the file.
        state_shape: [T, ids, H_t] as the header says.
        dtype: torch's name, of the states as they are stored.
        scale_offset: like the others; None where the states are not in eight bits.
        checksum: 16 hex digits.
    """

    sample_id: str
    tokens: int
    token_offset: int
    state_offset: int
    state_shape: tuple[int, ...]
    dtype: str
    checksum: str
    scale_offset: int | None = None

    @property
    def encoding(self) -> str:
        return "plain" if self.scale_offset is None else "fp8"

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Offset and bytes of each part, in the order of the file."""
        states = (self.state_offset, self.state_bytes)
        if self.scale_offset is None:
            return [(self.token_offset, self.token_bytes), states]
        tokens, ids, _ = self.state_shape
        return [(self.token_offset, self.token_bytes), (self.scale_offset, fp8.SCALE_BYTES * tokens * ids), states]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(size for _, size in self.spans)

    @property
    def token_bytes(self) -> int:
        return 8 * self.tokens

    @property
    def state_bytes(self) -> int:
        return _STORED[self.dtype][2] * math.prod(self.state_shape)

    @property
    def end(self) -> int:
        """The first byte after the sample's last."""
        return max(offset + size for offset, size in self.spans)


def build_header(layout: StateLayout, samples: Sequence[tuple[str, int, str]], encoding: str = "plain") -> bytes:
    """The length prefix and header of a file of *samples*: (id, tokens, checksum), in the order of their data.

    The data that must follow: the token ids of all samples, then, where there are some, all their scales, then the
    hidden states of all samples.
    """
    ids, hidden = len(layout.layer_ids), layout.hidden_size
    name, _, width = DTYPES[layout.dtype] if encoding == "plain" else _STORED["float8_e4m3fn"]
    # suffix, dtype, bytes of an element, shape beyond [T]
    parts: list[tuple[str, str, int, list[int]]] = [(_TOKENS, "I64", 8, [])]
    if encoding == "fp8":
        parts.append((_SCALES, "F32", fp8.SCALE_BYTES, [ids]))
    parts.append((_STATES, name, width, [ids, hidden]))
    tensors: dict[str, Any] = {}
    offset = 0
    for suffix, dtype, size, shape in parts:
        for sample_id, tokens, _sum in samples:
            end = offset + tokens * math.prod(shape) * size
            tensors[sample_id + suffix] = {"dtype": dtype, "shape": [tokens, *shape], "data_offsets": [offset, end]}
            offset = end
    metadata = {
        "format": FORMAT,
        "version": VERSIONS[encoding],
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
        if version not in VERSIONS.values():
            readable = " and ".join(VERSIONS.values())
            raise FormatError(f"the file's format version is {version}; this release reads versions {readable}")
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
        scales = fields.get(sample_id + _SCALES)
        names = {name: ours for ours, (name, _, _) in _STORED.items()}
        coded = states["dtype"] == _STORED["float8_e4m3fn"][0]
        known = states["dtype"] in names and tokens["dtype"] == "I64" and coded == (scales is not None)
        if not is_sample_id(sample_id) or not known:
            raise FormatError(f"the header describes {sample_id!r} in a way that the format does not allow")
        return Entry(
            sample_id=sample_id,
            tokens=int(tokens["shape"][0]),
            token_offset=self.data_start + int(tokens["data_offsets"][0]),
            state_offset=self.data_start + int(states["data_offsets"][0]),
            state_shape=tuple(int(size) for size in states["shape"]),
            dtype=names[states["dtype"]],
            checksum=signature,
            scale_offset=None if scales is None else self.data_start + int(scales["data_offsets"][0]),
        )

    def view(self, entry: Entry) -> tuple[memoryview, ...]:
        """The sample's bytes, part by part as :func:`sample_parts` has them, not checked.

        Raises:
            FormatError: the file ends before the sample does.
        """
        if entry.end > self.size:
            raise FormatError(f"the sample ends at byte {entry.end} and the file at {self.size}: cut off")
        whole = memoryview(self._map)
        return tuple(whole[offset : offset + size] for offset, size in entry.spans)

    def tensors(self, entry: Entry) -> tuple[Tensor, Tensor]:
        """(token_ids int64 [T], hidden_states [T, ids, H_t] in the layout's dtype).

        What is stored as it is, is a view of the mapping.

        Raises:
            FormatError: cut off, or another checksum.
        """
        parts = self.view(entry)
        if checksum(*parts) != entry.checksum:
            raise FormatError("the data does not match its checksum (bits changed on the disk or on the way)")
        token_ids = torch.frombuffer(parts[0], dtype=torch.int64)
        states = torch.frombuffer(parts[-1], dtype=_STORED[entry.dtype][1]).view(entry.state_shape)
        if entry.encoding == "fp8":
            scales = torch.frombuffer(parts[1], dtype=torch.float32).view(entry.state_shape[:2])
            states = fp8.decode(states, scales, DTYPES[self.layout.dtype][1])
        return token_ids, states

    def ids(self) -> Iterable[str]:
        return self.entries.keys()
