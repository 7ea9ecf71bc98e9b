"""The producer's side: publishing samples one by one, and compacting them into shards.

Used in whatever process runs the verifier (vLLM's worker or the transformers engine); it imports neither.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import BinaryIO

import torch

from draftsmith.errors import SampleCorrupt, TransportError
from draftsmith.interfaces import HiddenStateSample, HiddenStateWriter, StateLayout
from draftsmith_hs_file import wire
from draftsmith_hs_file.options import FileOptions
from draftsmith_hs_file.store import Store, file_identity, sync_folder, write_atomically

__all__ = ["FileWriter", "compact", "compact_samples"]


class FileWriter(HiddenStateWriter):
    """Publishes samples as loose files, and compacts its own into shards when there are many. Threads may share it."""

    def __init__(self, store: Store, options: FileOptions) -> None:
        store.create()
        self._store = store
        self._options = options
        self._loose: dict[str, int] = {}
        self._lock = threading.Lock()

    def put(self, sample: HiddenStateSample) -> None:
        """See :meth:`HiddenStateWriter.put`.

        Raises:
            SampleCorrupt: the sample does not fit the layout, or holds values that are not finite.
            TransportError: the id is not 32 hexadecimal digits, or the folder cannot be written to.
            DiskSpaceError: there is no room. Nothing of the sample is visible then.
        """
        layout = self._store.layout
        token_ids, states = checked(sample, layout)
        encoding = self._options.encoding
        parts = wire.sample_parts(token_ids, states, encoding)
        header = wire.build_header(layout, [(sample.sample_id, len(token_ids), wire.checksum(*parts))], encoding)

        def write(file: BinaryIO) -> None:
            file.write(header)
            for part in parts:
                file.write(part)

        write_atomically(self._store.loose_path(sample.sample_id), write, fsync=self._options.fsync)
        ready = self._note(sample.sample_id, len(header) + sum(map(len, parts)))
        if ready:
            compact_samples(self._store, ready, self._options)

    def _note(self, sample_id: str, size: int) -> list[str]:
        """Remember a loose file; the ids to compact when there are enough of them."""
        with self._lock:
            self._loose[sample_id] = size
            enough = len(self._loose) >= self._options.loose_samples
            if not enough and sum(self._loose.values()) < self._options.shard_mebibytes << 20:
                return []
            ready = sorted(self._loose)
            self._loose.clear()
            return ready

    def flush(self) -> None:
        if self._options.fsync:
            sync_folder(self._store.loose)

    def close(self) -> None:
        self.flush()


def checked(sample: HiddenStateSample, layout: StateLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """The sample's tensors, contiguous on the CPU, after checking that they may be published."""
    if not wire.is_sample_id(sample.sample_id):
        raise TransportError(
            f"{sample.sample_id!r} is not a sample id", hint="an id is 32 lower-case hexadecimal digits"
        )
    problem = sample.problem(layout)
    if problem is not None:
        raise SampleCorrupt(problem, sample_id=sample.sample_id)
    return sample.token_ids.cpu().contiguous(), sample.hidden_states.detach().cpu().contiguous()


def compact_samples(store: Store, sample_ids: Iterable[str], options: FileOptions) -> None:
    """Move these loose samples into new shards, as they are stored; those of a shard are stored alike.

    Samples that are gone or damaged are left as they are.
    """
    groups: dict[str, list[tuple[wire.WireFile, wire.Entry]]] = {}
    for sample_id in sample_ids:
        found = _open_loose(store, sample_id)
        if found is None:
            continue
        group = groups.setdefault(found[1].encoding, [])
        group.append(found)
        if sum(entry.size for _, entry in group) >= options.shard_mebibytes << 20:
            _publish_shard(store, group, options)
            group.clear()
    for group in filter(None, groups.values()):
        _publish_shard(store, group, options)


def _open_loose(store: Store, sample_id: str) -> tuple[wire.WireFile, wire.Entry] | None:
    """An intact loose sample of this store's layout, or None. What is damaged stays where a reader will report it."""
    try:
        file = wire.WireFile(store.loose_path(sample_id))
        entry = file.entries[sample_id]
        if file.layout != store.layout or wire.checksum(*file.view(entry)) != entry.checksum:
            return None
    except (FileNotFoundError, KeyError, wire.FormatError):
        return None
    return file, entry


def _publish_shard(store: Store, group: list[tuple[wire.WireFile, wire.Entry]], options: FileOptions) -> None:
    name = store.new_shard_name()
    _write_shard(store, name, group, options)
    deleted = []
    for file, entry in group:
        try:
            store.loose_path(entry.sample_id).unlink()
        except FileNotFoundError:
            if store.was_deleted(entry.sample_id, file_identity(file.status)):
                deleted.append(entry.sample_id)  # meanwhile, and not ours to bring back
    if deleted:
        store.mark_removed(name, deleted)


def _write_shard(store: Store, name: str, group: list[tuple[wire.WireFile, wire.Entry]], options: FileOptions) -> None:
    samples = [(entry.sample_id, entry.tokens, entry.checksum) for _, entry in group]
    header = wire.build_header(store.layout, samples, group[0][1].encoding)

    def write(file: BinaryIO) -> None:
        file.write(header)
        for part in range(len(group[0][1].spans)):  # all token ids, all scales, all states
            for source, entry in group:
                file.write(source.view(entry)[part])

    write_atomically(store.shards / name, write, fsync=options.fsync)
    if options.fsync:
        sync_folder(store.shards)


def compact(store: Store, options: FileOptions) -> None:
    """Bring the whole folder into its resting form: no loose files, no shards that are mostly deleted samples.

    Safe to kill at any moment and to repeat; several processes may do it at once.
    """
    store.create()
    store.clean()
    store.refresh()
    loose = sorted(store.loose_ids())
    compact_samples(store, [each for each in loose if not _settled(store, each)], options)
    store.refresh()
    _rewrite_sparse_shards(store, options)
    store.clean()


def _settled(store: Store, sample_id: str) -> bool:
    """Whether a loose sample needs no compaction, because a shard has it: then its loose file is removed.

    That is what a compaction leaves that was killed after it had named the shard, and what putting a sample again
    leaves. Where the shard's copy is damaged, the loose one replaces it.
    """
    place = store.find(sample_id)
    if place is None or place.shard is None or place.entry is None:
        return False
    found = _open_loose(store, sample_id)
    if found is None:
        return False
    try:
        shard = wire.WireFile(store.shards / place.shard)
        same = wire.checksum(*shard.view(place.entry)) == found[1].checksum
    except (FileNotFoundError, wire.FormatError):
        same = False
    if not same:
        store.mark_removed(place.shard, [sample_id])
        return False
    with contextlib.suppress(FileNotFoundError):
        store.loose_path(sample_id).unlink()
    return True


def _rewrite_sparse_shards(store: Store, options: FileOptions) -> None:
    for name, living in store.shard_contents().items():
        with contextlib.suppress(FileNotFoundError, wire.FormatError):
            shard = wire.WireFile(store.shards / name)
            if 2 * len(living) >= len(shard.entries):
                continue
            intact = [(shard, shard.entries[each]) for each in sorted(living) if shard.entries[each].end <= shard.size]
            if len(intact) < len(living):
                continue
            if intact:
                _write_shard(store, store.new_shard_name(source=name), intact, options)
            store.drop_shard(name)
