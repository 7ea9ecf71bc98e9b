"""The trainer's side: what is whole, or a manifest and its chunks, straight into the tensors that are returned."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftsmith import fp8
from draftsmith.errors import SampleCorrupt, SampleError, SampleIncomplete, SampleMissing
from draftsmith.interfaces import HiddenStateReader, HiddenStateSample, StateLayout
from draftsmith_hs_mooncake import admin, wire
from draftsmith_hs_mooncake.buffers import checksum, empty, region_of, tensor_bytes
from draftsmith_hs_mooncake.place import Place
from draftsmith_hs_mooncake.store import Code, pauses

__all__ = ["MooncakeReader"]

#: A manifest, and what it tells of: the token ids and the bytes of the states, uint8.
_Arrived = tuple[wire.Manifest, Tensor, Tensor]

#: A read that failed is made again so often: an object may have been removed, or put anew, while it was read.
_READS = 3
#: A manifest is written in milliseconds; one that takes longer had a writer that died.
_RECORD_SECONDS = 0.5
_KEYS_AT_ONCE = 1024
_AGAIN = "capture it again: online training does (`online.missing: regenerate`)"


class MooncakeReader(HiddenStateReader):
    """Reads samples. It opens the store at its first use, and again in a process that it was sent to."""

    def __init__(self, find_place: Callable[[], Place], layout: StateLayout) -> None:
        self._find_place = find_place
        self._layout = layout
        self._found: Place | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_found": None}

    @property
    def _place(self) -> Place:
        if self._found is None:
            self._found = self._find_place()
        return self._found

    def open(self) -> None:
        """Reach the store now. Raises: FingerprintMismatch: it holds samples of another layout."""
        self._place.check_layout(self._layout)

    def get(self, sample_id: str, *, expected_tokens: int | None = None) -> HiddenStateSample:
        """See :meth:`HiddenStateReader.get`. One call for what is whole; else one for the manifest and one for the
        data. Waits while the master is down, up to the option ``patience``.

        Raises:
            SampleMissing, SampleIncomplete, SampleCorrupt: each names the sample and where it lies.
            FingerprintMismatch: the sample was captured otherwise.
            StoreUnreachable: the master was down for too long.
        """
        if not wire.is_sample_id(sample_id):
            raise SampleMissing(
                "this is not a sample id",
                sample_id=repr(sample_id),
                where=self._place.where,
                hint="an id is 32 lower-case hexadecimal digits",
            )
        deadline = time.monotonic() + _RECORD_SECONDS
        for attempt in pauses(deadline):
            try:
                return self._read(sample_id, expected_tokens)
            except _Unreadable as error:
                failure = error.failure
            if attempt + 1 >= _READS and not isinstance(failure, SampleIncomplete):
                break
        raise failure

    def _read(self, sample_id: str, expected_tokens: int | None) -> HiddenStateSample:
        manifest, token_ids, data = self._receive_either(sample_id, expected_tokens)
        shape = (manifest.tokens, len(self._layout.layer_ids), self._layout.hidden_size)
        dtype = getattr(torch, self._layout.dtype)
        states = fp8.unpack(data, shape, dtype) if manifest.encoding == "fp8" else data.view(dtype).view(shape)
        sample = HiddenStateSample(sample_id=sample_id, token_ids=token_ids, hidden_states=states)
        problem = sample.problem(self._layout)
        if problem is not None:
            self._corrupt(sample_id, problem)
        return sample

    def _receive_either(self, sample_id: str, expected_tokens: int | None) -> _Arrived:
        try:
            whole = self._receive_whole(sample_id, expected_tokens)
        except _Unreadable as unreadable:  # its writer may have given up, and put it as chunks
            try:
                return self._receive_chunks(sample_id, expected_tokens)
            except SampleMissing:
                raise unreadable from None
        return whole or self._receive_chunks(sample_id, expected_tokens)

    def _check(self, manifest: wire.Manifest, expected_tokens: int | None) -> None:
        self._place.compare_layout(manifest.layout, self._layout)
        if expected_tokens is not None and manifest.tokens != expected_tokens:
            what = f"the states cover {manifest.tokens} tokens and the row has {expected_tokens}"
            self._corrupt(manifest.sample_id, what)

    def _receive_whole(self, sample_id: str, expected_tokens: int | None) -> _Arrived | None:
        """The sample, if it lies there in one object."""
        client, patience = self._place.client, self._place.patience
        key = wire.whole_key(self._place.run, sample_id)
        room = self._room_for_whole(expected_tokens)
        code = int(Code.BAD_ARGUMENT)
        if room is not None:
            data = empty((room,), torch.uint8)
            (code,) = client.get([key], [region_of(data)], patience)
        if code == Code.BAD_ARGUMENT:  # its length is not known here, or another than expected
            code = client.size(key, patience)
            if code >= 0:
                data = empty((code,), torch.uint8)
                (code,) = client.get([key], [region_of(data)], patience)
        if code == Code.NOT_FOUND:
            return None
        if code == Code.NOT_READY:
            raise _Unreadable(self._incomplete(sample_id))
        if code < 0:
            what = f"it cannot be read (code {code}): the memory that held it is gone"
            raise _Unreadable(self._lost(sample_id, what))
        stored: Any = data.numpy()
        try:
            manifest = wire.manifest_of_whole(key, memoryview(stored)[:code])
        except wire.FormatError as error:
            raise _Unreadable(self._damaged(sample_id, str(error))) from error
        self._check(manifest, expected_tokens)
        token_bytes, state_bytes = manifest.sizes
        states, token_ids = data[:state_bytes], data[state_bytes : state_bytes + token_bytes]
        self._compare_sums(manifest, [token_ids, states])
        # The ids may be kept for longer than the states, whose memory this is.
        return manifest, token_ids.clone().view(torch.int64), states

    def _room_for_whole(self, expected_tokens: int | None) -> int | None:
        """Bytes that a sample in one object may take; None: any number, or it will not be one object."""
        if expected_tokens is None:
            return None
        room = 8 * expected_tokens + wire.state_bytes(self._layout, expected_tokens, "plain") + wire.END_BYTES
        return room if room <= self._place.chunk_bytes else None

    def _receive_chunks(self, sample_id: str, expected_tokens: int | None) -> _Arrived:
        manifest = self._manifest(sample_id)
        self._check(manifest, expected_tokens)
        token_ids = empty((manifest.tokens,), torch.int64)
        states = empty((manifest.state_bytes,), torch.uint8)
        self._receive(manifest, [tensor_bytes(token_ids), *torch.split(states, list(manifest.sizes[1:]))])
        return manifest, token_ids, states

    def _manifest(self, sample_id: str) -> wire.Manifest:
        name = wire.manifest_name(self._place.run, sample_id)
        found = self._place.client.records(name, self._place.patience)
        record = wire.youngest(each for each in found.values() if not isinstance(each, int))
        if record is not None:
            return wire.Manifest.of(record)
        if Code.NOT_READY in found.values():
            raise _Unreadable(self._incomplete(sample_id))
        if found:
            raise _Unreadable(
                self._lost(sample_id, f"its manifest cannot be read (code {next(iter(found.values()))})")
            )
        raise SampleMissing(
            "no hidden states are stored for it", sample_id=sample_id, where=self._place.where, hint=_AGAIN
        )

    def _receive(self, manifest: wire.Manifest, pieces: list[Tensor]) -> None:
        """Fill *pieces*, uint8, with the chunks."""
        regions = [region_of(each) for each in pieces]
        codes = self._place.client.get(manifest.keys(self._place.run), regions, self._place.patience)
        for number, (code, size) in enumerate(zip(codes, manifest.sizes, strict=True)):
            if code < 0:
                what = f"chunk {number} of {len(codes)} cannot be read (code {code}): the memory that held it is gone"
                raise _Unreadable(self._lost(manifest.sample_id, what))
            if code != size:
                what = f"chunk {number} of {len(codes)} has {code} bytes instead of {size}"
                raise _Unreadable(self._damaged(manifest.sample_id, what))
        self._compare_sums(manifest, pieces)

    def _compare_sums(self, manifest: wire.Manifest, pieces: list[Tensor]) -> None:
        for number, (piece, wanted) in enumerate(zip(pieces, manifest.sums, strict=True)):
            if checksum(piece) != wanted:
                what = f"chunk {number} of {len(pieces)} does not match its checksum"
                raise _Unreadable(self._damaged(manifest.sample_id, what))

    def _incomplete(self, sample_id: str) -> SampleError:
        return SampleIncomplete(
            "its writing was begun and not finished: a producer is still at it, or was killed",
            sample_id=sample_id,
            where=self._place.where,
            hint=_AGAIN,
        )

    def _lost(self, sample_id: str, what: str) -> SampleError:
        return SampleMissing(what, sample_id=sample_id, where=self._place.where, hint=_AGAIN)

    def _damaged(self, sample_id: str, what: str) -> SampleError:
        return SampleCorrupt(what, sample_id=sample_id, where=self._place.where, hint=_AGAIN)

    def _corrupt(self, sample_id: str, what: str) -> None:
        raise self._damaged(sample_id, what)

    def complete_ids(self) -> frozenset[str]:
        """Ids of all committed samples. The master lists its keys by the admin server."""
        place = self._place
        self.open()
        commits = {key: found for key in self._keys() if (found := wire.committed_sample(place.run, key)) is not None}
        keys = list(commits)
        complete: set[str] = set()
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[start : start + _KEYS_AT_ONCE]
            there = place.client.exist(some, place.patience)
            complete.update(commits[key] for key, exists in zip(some, there, strict=True) if exists)
        return frozenset(complete)

    def _keys(self) -> list[str]:
        return admin.keys(self._place.client.address.admin)

    def delete(self, sample_id: str) -> None:
        if wire.is_sample_id(sample_id):
            self._place.remove_sample(sample_id)


class _Unreadable(Exception):
    """A read failed in a way that another one may not."""

    def __init__(self, failure: SampleError) -> None:
        super().__init__(str(failure))
        self.failure = failure
