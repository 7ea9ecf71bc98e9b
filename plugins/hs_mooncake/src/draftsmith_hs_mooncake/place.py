"""A run's place in the store: its layout, its claim, and what removes its samples. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from attrs import frozen

from draftsmith.errors import FingerprintMismatch, OutputError, TransportError
from draftsmith.interfaces import StateLayout
from draftsmith.stages import differences
from draftsmith_hs_mooncake import admin, wire
from draftsmith_hs_mooncake.processes import identity, is_gone
from draftsmith_hs_mooncake.store import Code, StoreClient, pauses

__all__ = ["Place", "claims", "describe_claim"]

#: A record is written in milliseconds. A slot that stays unreadable for longer had a writer that died.
_RECORD_SECONDS = 3.0


@frozen(kw_only=True)
class Place:
    """The part of a store that belongs to one run.

    Attributes:
        patience: seconds to wait for a store that is full or down.
        chunk_bytes: largest object.
    """

    client: StoreClient
    run: str
    patience: float
    chunk_bytes: int

    @property
    def where(self) -> str:
        return f"run {self.run!r} in the store at {self.client.address.master}"

    def usage(self) -> admin.Usage:
        return admin.usage(self.client.address.admin)

    # --- layout ---------------------------------------------------------------------------------------------------

    def check_layout(self, layout: StateLayout) -> None:
        """Raises: FingerprintMismatch: the run's samples, if there are any, have another layout."""
        found = self._settled(wire.layout_name(self.run))
        record = wire.youngest(found.values())
        if record is not None:
            self.compare_layout(wire.layout_from(record["layout"]), layout)

    def compare_layout(self, found: StateLayout, wanted: StateLayout) -> None:
        """Raises: FingerprintMismatch: with what differs."""
        if found != wanted:
            listed = "\n    ".join(differences(attrs.asdict(found), attrs.asdict(wanted)))
            raise FingerprintMismatch(
                f"the hidden states stored there were captured otherwise (stored → wanted):\n    {listed}",
                where=self.where,
                hint="name this run otherwise (the transport's option `run`), or remove what is there: "
                f"`draftsmith store gc --run {self.run}`",
            )

    def set_layout(self, layout: StateLayout) -> None:
        """Note the layout where none is noted.

        Raises:
            FingerprintMismatch: the run's samples have another one.
        """
        name = wire.layout_name(self.run)
        data = wire.encode(name, {"layout": attrs.asdict(layout)})
        for _ in pauses(time.monotonic() + self.patience):
            found = self._settled(name)
            record = wire.youngest(found.values())
            if record is not None:
                self.compare_layout(wire.layout_from(record["layout"]), layout)
                return
            if self._write(name, data):
                return
        raise TransportError(
            f"the layout of the run's samples could not be stored for {self.patience:g} s",
            where=self.where,
            hint="`draftsmith store status` on the store's host shows whether it has room, and its processes run",
        )

    # --- claim ----------------------------------------------------------------------------------------------------

    def claim(self, owner: str) -> None:
        """See :meth:`HiddenStateTransport.claim`. The store gives a key to the first of two that put it."""
        name = wire.claim_name(self.run)
        values = {"owner": owner, "process": identity(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        for _ in pauses(time.monotonic() + self.patience):
            found = self._settled(name)
            self._refuse_others(found.values(), owner)
            if any(each["process"] == values["process"] for each in found.values()):
                return
            if not self._write(name, wire.encode(name, values)):
                continue
            settled = self._settled(name)
            if not settled:  # removed at once, by a `remove_all` or a restart of the master
                continue
            first = settled[min(settled)]
            if first["owner"] != owner:  # it came a moment earlier
                self._remove_own(name, settled, owner)
                self._refuse_others([first], owner)
            # The same run in an earlier process: the new claim says which process to look for.
            self.client.remove([wire.slots_of(name)[slot] for slot in found], self.patience)
            return
        raise TransportError(
            f"the run's name could not be claimed for {self.patience:g} s",
            where=self.where,
            hint="`draftsmith store status` on the store's host shows whether it has room, and its processes run",
        )

    def _refuse_others(self, found: Iterable[Mapping[str, Any]], owner: str) -> None:
        for each in found:
            if each["owner"] != owner:
                raise OutputError(
                    f"another run works there: {describe_claim(each)}",
                    where=self.where,
                    hint="wait for it, or name this run otherwise (the transport's option `run`); what a dead run "
                    f"left goes with `draftsmith store gc --run {self.run}`",
                )

    def _remove_own(self, name: str, settled: Mapping[int, Mapping[str, Any]], owner: str) -> None:
        own = [wire.slots_of(name)[slot] for slot, each in settled.items() if each["owner"] == owner]
        self.client.remove(own, self.patience)

    # --- records --------------------------------------------------------------------------------------------------

    def _settled(self, name: str) -> dict[int, Mapping[str, Any]]:
        """The readable records of *name* by slot; waits a moment for one that is being written."""
        found: Mapping[int, Mapping[str, Any] | int] = {}
        for _ in pauses(time.monotonic() + _RECORD_SECONDS):
            found = self.client.records(name, self.patience)
            if not any(isinstance(each, int) for each in found.values()):
                break
        return {slot: each for slot, each in found.items() if not isinstance(each, int)}

    def _write(self, name: str, data: bytes) -> bool:
        """Write a record into the first slot that takes it: others may be blocked by a writer that died."""
        taken = self.client.exist(wire.slots_of(name), self.patience)
        for slot in (each for each in range(wire.SLOTS) if not taken[each]):
            if self.client.write_record(name, data, slot, self.patience):
                return True
            if self.client.records(name, self.patience).get(slot) != Code.NOT_READY:
                return False  # somebody else was faster, or the store is full or down: look again
        return False

    # --- removing -------------------------------------------------------------------------------------------------

    def remove_sample(self, sample_id: str) -> None:
        """Remove a sample: first what commits it, then its chunks. Harmless where there is none."""
        name = wire.manifest_name(self.run, sample_id)
        found = self.client.records(name, self.patience)
        doomed = [wire.whole_key(self.run, sample_id), *(wire.slots_of(name)[slot] for slot in found)]
        for each in found.values():
            if not isinstance(each, int):
                doomed += wire.Manifest.of(each).keys(self.run)
        self.client.remove(doomed, self.patience)

    def remove_everything(self) -> int:
        """Remove all keys of the run, also those of attempts that were never committed; how many there were."""
        return self.client.remove_matching(wire.run_regex(self.run), self.patience)


def claims(client: StoreClient, run: str, patience: float) -> list[Mapping[str, Any]]:
    """The claims on a run's name; empty: nobody has claimed it."""
    found = client.records(wire.claim_name(run), patience)
    return [each for each in found.values() if not isinstance(each, int)]


def describe_claim(claim: Mapping[str, Any]) -> str:
    """Who has it, where, since when, and whether that process still runs, as far as this host can tell."""
    process = claim["process"]
    state = {True: ", which has ended", False: "", None: ""}[is_gone(process)]
    return f"{claim['owner']} (process {process['pid']} on {process['host']}{state}, since {claim['since']})"
