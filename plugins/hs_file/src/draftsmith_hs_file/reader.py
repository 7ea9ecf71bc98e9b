"""The trainer's side: memory-mapped, checked, in constant time."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

from draftsmith.errors import SampleCorrupt, SampleError, SampleIncomplete, SampleMissing
from draftsmith.interfaces import HiddenStateReader, HiddenStateSample
from draftsmith_hs_file.store import Place, Store, raise_other_layout
from draftsmith_hs_file.wire import Entry, FormatError, WireFile, is_sample_id

__all__ = ["FileReader"]

#: Shards kept open. Each mapping holds a file descriptor, of which a process has a few hundred.
_OPEN_SHARDS = 64
_AGAIN = "run `draftsmith capture`: it captures anew what is bad; or leave it out (train.bad_samples: skip)"


class FileReader(HiddenStateReader):
    """Reads samples, however each is stored. States stored as they are, are views of the mapped file, private to the
    process.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: OrderedDict[str, WireFile] = OrderedDict()
        store.refresh()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self._store.folder, "layout": self._store.layout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(Store(state["folder"], state["layout"]))  # type: ignore[misc]

    def get(self, sample_id: str, *, expected_tokens: int | None = None) -> HiddenStateSample:
        if not is_sample_id(sample_id):
            raise SampleMissing(
                "this is not a sample id",
                sample_id=repr(sample_id),
                where=str(self._store.folder),
                hint="an id is 32 lower-case hexadecimal digits",
            )
        for attempt in range(3):  # a compaction or a deletion may move the sample between finding and opening it
            place = self._store.find(sample_id)
            if place is None:
                self._raise_absent(sample_id)
            try:
                return self._read(sample_id, place, expected_tokens)
            except FileNotFoundError:
                self._store.refresh()
                if attempt == 2:
                    self._raise_absent(sample_id)
        raise AssertionError("unreachable")

    def _read(self, sample_id: str, place: Place, expected_tokens: int | None) -> HiddenStateSample:
        path = self._store.loose_path(sample_id) if place.shard is None else self._store.shards / place.shard
        try:
            file = self._file(sample_id, place)
            entry = file.entries.get(sample_id)
            if entry is None:
                raise FormatError("the file does not hold the sample that it is named after")
            if file.layout != self._store.layout:
                raise_other_layout(file.layout, self._store.layout, str(path))
            self._check(entry, expected_tokens)
            token_ids, states = file.tensors(entry)
            sample = HiddenStateSample(sample_id=sample_id, token_ids=token_ids, hidden_states=states)
            problem = sample.problem(self._store.layout)
            if problem is not None:
                raise FormatError(problem)
        except FormatError as error:
            raise SampleCorrupt(str(error), sample_id=sample_id, where=str(path), hint=_AGAIN) from None
        return sample

    def _file(self, sample_id: str, place: Place) -> WireFile:
        if place.shard is None:
            return WireFile(self._store.loose_path(sample_id))
        file = self._open.get(place.shard)
        if file is None:
            file = WireFile(self._store.shards / place.shard)
            self._open[place.shard] = file
        self._open.move_to_end(place.shard)
        while len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)
        return file

    def _check(self, entry: Entry, expected_tokens: int | None) -> None:
        layout = self._store.layout
        wanted = (entry.tokens, len(layout.layer_ids), layout.hidden_size)
        if entry.state_shape != wanted or (entry.encoding == "plain" and entry.dtype != layout.dtype):
            raise FormatError(
                f"the states are {entry.dtype} {entry.state_shape}, the layout asks for {layout.dtype} {wanted}"
            )
        if expected_tokens is not None and entry.tokens != expected_tokens:
            raise FormatError(f"the states cover {entry.tokens} tokens and the row has {expected_tokens}")

    def _raise_absent(self, sample_id: str) -> NoReturn:
        where = str(self._store.folder)
        if self._store.begun(sample_id):
            raise SampleIncomplete(
                "its writing was begun and not finished: a producer is still at it, or was killed",
                sample_id=sample_id,
                where=where,
                hint="run `draftsmith capture` again: it goes on where it stopped",
            )
        error: SampleError
        if self._store.damaged:
            name, reason = next(iter(self._store.damaged.items()))
            error = SampleCorrupt(
                f"it is nowhere else, and a shard that may hold it cannot be read: {reason}",
                sample_id=sample_id,
                where=str(self._store.shards / name),
                hint=_AGAIN,
            )
        else:
            error = SampleMissing(
                "no hidden states are stored for it",
                sample_id=sample_id,
                where=where,
                hint="run `draftsmith capture`: it captures what is missing",
            )
        raise error

    def complete_ids(self) -> frozenset[str]:
        return self._store.complete_ids()

    def delete(self, sample_id: str) -> None:
        if is_sample_id(sample_id):
            self._store.delete(sample_id)

    def close(self) -> None:
        self._open.clear()
