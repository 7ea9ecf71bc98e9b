"""The transport: opens writers and readers on a folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from draftsmith.interfaces import HiddenStateReader, HiddenStateTransport, HiddenStateWriter, StateLayout
from draftsmith_hs_file import wire
from draftsmith_hs_file.options import FileOptions
from draftsmith_hs_file.producer import FileWriter, compact
from draftsmith_hs_file.reader import FileReader
from draftsmith_hs_file.store import Store

__all__ = ["FileTransport"]

#: A sample's share of a shard's header, measured: two tensors of 100 bytes and a checksum of 60.
_INDEX_BYTES = 320
#: What the tensor of its scales adds.
_SCALE_INDEX_BYTES = 128
#: What a loose file holds beyond that: the layout, and the header's alignment.
_LOOSE_BYTES = 1024


class FileTransport(HiddenStateTransport):
    """Hidden states in a folder (see :mod:`draftsmith_hs_file.store` for what lies where)."""

    options: FileOptions

    @property
    def folder(self) -> Path:
        return Path(self.options.folder) if self.options.folder is not None else self.location

    def writer(self, layout: StateLayout) -> HiddenStateWriter:
        return FileWriter(Store(self.folder, layout), self.options)

    def reader(self, layout: StateLayout) -> HiddenStateReader:
        return FileReader(Store(self.folder, layout))

    def place_name(self) -> str:
        return str(self.folder.absolute())

    def compact(self, layout: StateLayout) -> None:
        compact(Store(self.folder, layout), self.options)

    def bytes_for(self, layout: StateLayout, tokens: int, samples: int) -> int:
        index = _INDEX_BYTES + (_SCALE_INDEX_BYTES if self.options.encoding == "fp8" else 0)
        return wire.sample_bytes(layout, tokens, self.options.encoding) + index * samples

    def peak_bytes_for(self, layout: StateLayout, tokens: int, samples: int, *, longest: int) -> int:
        """A shard is complete before the loose files of its samples are removed, so that one shard's are there twice.

        A shard is closed by the sample that reaches its size.
        """
        rest = self.bytes_for(layout, tokens, samples)
        shard = (self.options.shard_mebibytes << 20) + wire.sample_bytes(layout, longest, self.options.encoding)
        return rest + min(rest, shard) + _LOOSE_BYTES * min(samples, self.options.loose_samples)

    def free_bytes(self) -> int | None:
        folder = self.folder.absolute()
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def remove_all(self, sample_ids: Iterable[str] | None = None) -> None:
        store = Store(self.folder, StateLayout(fingerprint="", layer_ids=(), hidden_size=0, dtype="float32"))
        if sample_ids is None:
            store.remove_everything()
            return
        stored = store.stored_layout()
        if stored is None:
            return
        with FileReader(Store(self.folder, stored)) as reader:
            for sample_id in sample_ids:
                reader.delete(sample_id)
