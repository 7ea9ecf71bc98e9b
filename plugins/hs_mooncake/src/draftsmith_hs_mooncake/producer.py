"""The producer's side: publishing samples.

Used in whatever process runs the verifier (vLLM's worker or the transformers engine); it imports neither.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence

import torch

from draftsmith import fp8
from draftsmith.errors import SampleCorrupt, TransportError
from draftsmith.interfaces import HiddenStateSample, HiddenStateWriter, StateLayout
from draftsmith_hs_mooncake import wire
from draftsmith_hs_mooncake.buffers import checksum, region_of, tensor_bytes
from draftsmith_hs_mooncake.errors import StoreFull
from draftsmith_hs_mooncake.place import Place
from draftsmith_hs_mooncake.store import Code, Region, pauses

__all__ = ["MooncakeWriter"]


class MooncakeWriter(HiddenStateWriter):
    """Publishes samples: small ones in one object, others as chunks under keys that no other attempt uses and then the
    manifest. Threads may share it."""

    def __init__(self, place: Place, layout: StateLayout, encoding: str = "plain") -> None:
        self._place = place
        self._encoding = encoding
        self._layout = layout
        place.set_layout(layout)
        self._outages = place.client.outages

    def put(self, sample: HiddenStateSample) -> None:
        """See :meth:`HiddenStateWriter.put`. Waits while the store is full or down, up to the option ``patience``.

        Raises:
            SampleCorrupt: the sample does not fit the layout, or holds values that are not finite.
            StoreFull: no room was made in time, or the sample is larger than the store.
            StoreUnreachable: the store was down for too long.
            TransportError: the id is not 32 hexadecimal digits, or transfers failed for too long.
        """
        if not wire.is_sample_id(sample.sample_id):
            raise TransportError(
                f"{sample.sample_id!r} is not a sample id", hint="an id is 32 lower-case hexadecimal digits"
            )
        problem = sample.problem(self._layout)
        if problem is not None:
            raise SampleCorrupt(problem, sample_id=sample.sample_id)
        deadline = time.monotonic() + self._place.patience
        regions = self._regions(sample)
        size = sum(each.size for each in regions)
        with self._place.client.room_for(size, f"sample {sample.sample_id}", deadline):
            self._publish(sample, regions, deadline)

    def close(self) -> None:
        with contextlib.suppress(TransportError):  # what could not be removed before; a store that is gone has none
            self._place.client.remove([], self._place.patience)

    def _regions(self, sample: HiddenStateSample) -> list[Region]:
        tokens = tensor_bytes(sample.token_ids.cpu().contiguous())
        plain = sample.hidden_states.detach().cpu().contiguous()
        states = fp8.pack(plain) if self._encoding == "fp8" else tensor_bytes(plain)
        _, *sizes = wire.chunk_sizes(len(tokens), len(states), self._place.chunk_bytes)
        return [region_of(tokens), *(region_of(each) for each in torch.split(states, sizes))]

    def _publish(self, sample: HiddenStateSample, regions: Sequence[Region], deadline: float) -> None:
        sums = tuple(checksum(each.keep) for each in regions)
        size = sum(each.size for each in regions)
        whole = size + wire.END_BYTES <= self._place.chunk_bytes
        codes: Sequence[int] = ()
        for _ in pauses(deadline):
            self._renew_layout()
            manifest = wire.Manifest(
                sample_id=sample.sample_id,
                attempt=secrets.token_hex(8),
                layout=self._layout,
                tokens=len(sample.token_ids),
                sizes=tuple(each.size for each in regions),
                sums=sums,
                encoding=self._encoding,
            )
            begun = time.monotonic()
            codes = self._put_whole(manifest, regions) if whole else self._put_chunks(manifest, regions)
            if not codes:
                self._place.client.full.over(begun)
                return
            self._place.client.is_outage(codes, begun)
            if Code.FULL in codes:
                self._place.client.full.met(begun)
            else:  # the key may be blocked now; those of chunks are new in every attempt
                whole = False
        self._raise(sample.sample_id, size, codes)

    def _put_whole(self, manifest: wire.Manifest, regions: Sequence[Region]) -> Sequence[int]:
        """Put a sample as one object where nothing of it is there, else as chunks; no codes: it is stored."""
        client, patience = self._place.client, self._place.patience
        key = wire.whole_key(self._place.run, manifest.sample_id)
        name = wire.manifest_name(self._place.run, manifest.sample_id)
        token_ids, states = regions
        end = wire.end_of_whole(key, manifest)
        if len(end) > wire.END_BYTES:
            return self._put_chunks(manifest, regions)
        if any(client.exist([key, *wire.slots_of(name)], patience)):
            return self._put_chunks(manifest, regions)
        code = client.put_joined(key, [states, token_ids, Region.of_bytes(end)])
        if code != 0:
            return [code]
        # 0 is also the answer where a writer that died blocks the key, and where an owner died with what it was given.
        if client.size(key, patience) < 0:
            return self._put_chunks(manifest, regions)
        return []

    def _put_chunks(self, manifest: wire.Manifest, regions: Sequence[Region]) -> Sequence[int]:
        """Put a sample as chunks; no codes: it is stored."""
        keys = manifest.keys(self._place.run)
        codes = self._place.client.put(keys, regions)
        if not any(codes) and self._commit(manifest, keys):
            return []
        # What of this attempt is stored holds room that another sample may be waiting for.
        self._place.client.remove(keys, self._place.patience)
        return codes

    def _renew_layout(self) -> None:
        """A master that was restarted has forgotten the layout with all the rest."""
        if self._outages != self._place.client.outages:
            self._outages = self._place.client.outages
            self._place.set_layout(self._layout)

    def _commit(self, manifest: wire.Manifest, keys: Sequence[str]) -> bool:
        """Write the manifest, and make sure that it and all chunks are there; then remove what it replaces."""
        client, patience = self._place.client, self._place.patience
        name = wire.manifest_name(self._place.run, manifest.sample_id)
        slots = wire.slots_of(name)
        whole = wire.whole_key(self._place.run, manifest.sample_id)
        was_whole, *taken = client.exist([whole, *slots], patience)
        replaced = [whole] if was_whole else []
        older = client.records(name, patience) if any(taken) else {}
        if all(taken):  # four writers of one sample were killed between writing and cleaning, or are at it now
            self._remove_older(name, older)
            return False
        data = wire.encode(name, manifest.values())
        for slot in (each for each in range(wire.SLOTS) if not taken[each]):
            if client.write_record(name, data, slot, patience):
                # A reader may have used and removed it by now, the manifest first: that is no failure.
                *chunks, committed = client.exist([*keys, slots[slot]], patience)
                if committed and not all(chunks):  # they died with a master or an owner
                    client.remove([slots[slot]], patience)
                    return False
                self._remove_older(name, older, replaced)
                return True
        return False

    def _remove_older(
        self, name: str, older: Mapping[int, Mapping[str, object] | int], whole: Sequence[str] = ()
    ) -> None:
        doomed = [*whole, *(wire.slots_of(name)[slot] for slot in older)]
        for values in older.values():
            if not isinstance(values, int):
                doomed += wire.Manifest.of(values).keys(self._place.run)
        self._place.client.remove(doomed, self._place.patience)

    def _raise(self, sample_id: str, size: int, codes: Sequence[int]) -> None:
        client, patience = self._place.client, self._place.patience
        if Code.FULL in codes:
            usage = self._place.usage()
            raise StoreFull(
                f"there was no room for sample {sample_id} ({size} bytes, in chunks of up to "
                f"{self._place.chunk_bytes}) for {patience:g} s: {usage.used} of {usage.capacity} bytes are used",
                where=client.address.master,
                hint="a larger store (`draftsmith store up --size`), fewer samples ahead (`online.ahead`), smaller "
                "chunks (the option `chunk_mebibytes`), or `draftsmith store gc` for what dead runs left",
            )
        if client.is_outage(codes, time.monotonic()):
            raise client.unreachable(patience)
        raise TransportError(
            f"sample {sample_id} could not be stored for {patience:g} s; the store's codes: {sorted(set(codes))}",
            where=client.address.master,
            hint="`draftsmith store status` on the store's host shows whether the segment's owner runs",
        )
