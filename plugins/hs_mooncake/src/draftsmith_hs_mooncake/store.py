"""The store's client: one for each process and address, shared by readers and writers of all threads. Torch-free.

Only ``put_from`` and ``get_into`` are used: the other calls give the same empty answer for a missing object and for
any error. What they report is a code; :class:`Code` names those that matter.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

from attrs import frozen

from draftsmith.errors import TransportError
from draftsmith_hs_mooncake import admin, wire
from draftsmith_hs_mooncake.errors import StoreFull, StoreUnreachable
from draftsmith_hs_mooncake.installed import installed_build, store_module
from draftsmith_hs_mooncake.options import split_address
from draftsmith_hs_mooncake.trouble import Trouble

__all__ = ["Code", "Region", "StoreAddress", "StoreClient", "client_for", "pauses"]

#: A master that is not there when a process first asks for it is reported after this time; later, it is waited for.
_FIRST_SECONDS = 5.0
#: Longer than any timeout of the store: until then a transfer that failed may still write into its buffer.
_QUARANTINE_SECONDS = 120.0
#: The share of the store that one process fills with samples that are not committed yet.
_IN_FLIGHT = 0.8
#: A key that is never there.
_PROBE = "hs1"
#: A producer that is ahead of its readers finds a small store full all the time; for longer than this it stands still.
_FULL_SECONDS = 2.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25


class Code(IntEnum):
    """What the store's calls return instead of a size or 0."""

    FULL = -200
    BAD_ARGUMENT = -600
    NOT_READY = -703
    NOT_FOUND = -704
    LEASE_EXPIRED = -707
    TRANSFER = -800
    RPC = -900
    RPC_TIMEOUT = -901


_OUTAGE = (-1, Code.RPC, Code.RPC_TIMEOUT)


class Region(NamedTuple):
    """Memory to send from or to receive into. *keep* holds it alive."""

    address: int
    size: int
    keep: Any

    @classmethod
    def of_bytes(cls, data: bytes | bytearray) -> Region:
        """Of a bytearray it is the memory itself, of bytes a copy."""
        buffer = (ctypes.c_char * len(data)).from_buffer(data if isinstance(data, bytearray) else bytearray(data))
        return cls(ctypes.addressof(buffer), len(data), buffer)


@frozen(kw_only=True)
class StoreAddress:
    """Where a store is and how bytes travel: what two users of one client must agree on."""

    master: str
    admin: str
    protocol: str = "tcp"
    device: str = ""
    staging_bytes: int | None = None


def pauses(deadline: float) -> Iterator[int]:
    """Attempt 0, 1, … with a jittered, growing pause between them, until *deadline* (of ``time.monotonic``)."""
    pause, attempt = _SHORTEST_PAUSE, 0
    while True:
        yield attempt
        attempt += 1
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, pause * random.uniform(0.5, 1.5)))
        pause = min(_LONGEST_PAUSE, 2 * pause)


def _same_process(opened_in: int) -> None:
    if os.getpid() != opened_in:
        raise TransportError(
            f"this process ({os.getpid()}) was forked from process {opened_in}, which had opened the store: "
            "its client hangs in a child",
            where="hs_mooncake",
            hint="start workers with multiprocessing's `spawn`; readers and transports travel to them by pickle",
        )


class StoreClient:
    """A client without a segment of its own. Threads may share it.

    Raises (all methods):
        TransportError: called in a forked child.
        StoreUnreachable: the master does not answer within *patience* seconds.
    """

    def __init__(self, address: StoreAddress) -> None:
        self.address = address
        self.outages = 0
        self._pid = os.getpid()
        self._store: Any = None
        self._settings: Any = None
        self._opening = threading.Lock()
        self._local = threading.local()
        self._budget = _Budget()
        self._undead: set[str] = set()
        self._quarantined: list[tuple[float, Any]] = []
        self._down = Trouble(address.master, "does not answer; it is waited for", "answers again")
        self.full = Trouble(
            address.master, "is full; samples wait for room", "has room again", tell_after=_FULL_SECONDS
        )

    # --- opening --------------------------------------------------------------------------------------------------

    def _open(self) -> Any:
        _same_process(self._pid)
        if self._store is None:
            with self._opening:
                if self._store is None:
                    self._store = self._connect()
        return self._store

    def _connect(self) -> Any:
        module = store_module()
        self._settings = module.ReplicateConfig()
        self._settings.with_hard_pin = True  # unpinned objects are evicted, silently, when the store is full
        self._settings.replica_num = 1
        host = self._reach_master()
        store = module.MooncakeDistributedStore()
        protocol, device = self.address.protocol, self.address.device
        code = store.setup(host, "P2PHANDSHAKE", 0, 0, protocol, device, self.address.master)
        # A master of another version lets the client set up and says that all is well: it then fails every other call.
        known = code == 0 and store.batch_is_exist([_PROBE])[0] >= 0
        if not known:
            other = code == 0 and store.health_check() == 0
            raise self._refused("a Mooncake master of another version" if other else "no Mooncake master, or it hangs")
        return store

    def _refused(self, what: str) -> StoreUnreachable:
        name, version = installed_build()
        return StoreUnreachable(
            f"what answers there refuses this client ({name} {version}, by {self.address.protocol}): it is {what}",
            where=self.address.master,
            hint="install one version of the store on all hosts; `mooncake_master --version` says which runs",
        )

    def _reach_master(self) -> str:
        """The address of this host as the master sees it; the store's own way to find no master takes much longer."""
        deadline = time.monotonic() + _FIRST_SECONDS
        for _ in pauses(deadline):
            try:
                with socket.create_connection(split_address(self.address.master), timeout=_FIRST_SECONDS) as probe:
                    return str(probe.getsockname()[0])
            except OSError as error:
                reason = error
        raise StoreUnreachable(
            f"the store's master cannot be reached: {reason}",
            where=self.address.master,
            hint="start a store with `draftsmith store up`, or name one with the transport's option `master`",
        )

    def connect(self) -> None:
        """Open now, rather than at the first call."""
        self._open()

    # --- objects --------------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[str], regions: Sequence[Region]) -> list[int]:
        """Store objects, hard-pinned; 0 or a code for each. Not retried: a second put of a key stores nothing."""
        store = self._open()
        codes = []
        for some, memory in self._batches(store, keys, regions):
            for region, copy in memory:
                if copy is not region:
                    ctypes.memmove(copy.address, region.address, region.size)
            addresses, sizes = [copy.address for _, copy in memory], [copy.size for _, copy in memory]
            codes += list(store.batch_put_from(some, addresses, sizes, self._settings))
        self._after_transfer(codes, regions)
        return codes

    def put_joined(self, key: str, parts: Sequence[Region]) -> int:
        """Store *parts*, one after the other, as one object, hard-pinned; 0 or a code. Not retried."""
        store = self._open()
        sizes = [each.size for each in parts]
        if self.address.staging_bytes is None:
            addresses = [each.address for each in parts]
            codes = list(store.batch_put_from_multi_buffers([key], [addresses], [sizes], self._settings))
        else:
            staging, used = self._staging(store), 0
            for part in parts:
                ctypes.memmove(staging.address + used, part.address, part.size)
                used += part.size
            codes = list(store.batch_put_from([key], [staging.address], [used], self._settings))
        self._after_transfer(codes, parts)
        return int(codes[0])

    def get(self, keys: Sequence[str], regions: Sequence[Region], patience: float) -> list[int]:
        """Read objects; the bytes read, or a code, for each. Waits while the master is down."""
        codes = self._outlast(lambda: self._get(keys, regions), patience)
        self._after_transfer(codes, regions)
        return codes

    def _get(self, keys: Sequence[str], regions: Sequence[Region]) -> list[int]:
        store = self._open()
        codes = []
        for some, memory in self._batches(store, keys, regions):
            addresses, sizes = [copy.address for _, copy in memory], [copy.size for _, copy in memory]
            found = list(store.batch_get_into(some, addresses, sizes))
            for (region, copy), size in zip(memory, found, strict=True):
                if copy is not region and size > 0:
                    ctypes.memmove(region.address, copy.address, size)
            codes += found
        return codes

    def _batches(
        self, store: Any, keys: Sequence[str], regions: Sequence[Region]
    ) -> Iterator[tuple[list[str], list[tuple[Region, Region]]]]:
        """What one call each takes: keys, and for each its memory and the memory that travels.

        The two are the same where the store takes any memory; else the second is a part of the registered buffer, and
        there are as many batches as it takes.
        """
        if self.address.staging_bytes is None:
            yield list(keys), [(each, each) for each in regions]
            return
        staging = self._staging(store)
        some: list[str] = []
        memory: list[tuple[Region, Region]] = []
        used = 0
        for key, region in zip(keys, regions, strict=True):
            if region.size > staging.size:
                raise TransportError(
                    f"{key} has {region.size} bytes, and the registered buffer {staging.size}",
                    where=self.address.master,
                    hint="give all that use this store the same `chunk_mebibytes`, or a larger one",
                )
            if used + region.size > staging.size:
                yield some, memory
                some, memory, used = [], [], 0
            some.append(key)
            memory.append((region, Region(staging.address + used, region.size, staging.keep)))
            used += region.size
        yield some, memory

    def _staging(self, store: Any) -> Region:
        """This thread's registered buffer, made anew after a transfer that may still be using the last one."""
        staging: Region | None = getattr(self._local, "staging", None)
        if staging is None:
            assert self.address.staging_bytes is not None
            staging = Region.of_bytes(bytearray(self.address.staging_bytes))
            code = store.register_buffer(staging.address, staging.size)
            if code != 0:
                raise TransportError(
                    f"a buffer of {staging.size} bytes cannot be registered (code {code})",
                    where=f"{self.address.protocol} {self.address.device}".strip(),
                    hint="is the memory that a process may lock (`ulimit -l`) large enough?",
                )
            self._local.staging = staging
        return staging

    def _after_transfer(self, codes: Sequence[int], regions: Sequence[Region]) -> None:
        """Keep the memory of failed transfers for a while: the store may still be reading or writing it."""
        now = time.monotonic()
        if self._quarantined:
            self._quarantined = [each for each in self._quarantined if now - each[0] < _QUARANTINE_SECONDS]
        if any(code in (Code.TRANSFER, Code.RPC_TIMEOUT) for code in codes):
            self._quarantined.append((now, (list(regions), getattr(self._local, "staging", None))))
            self._local.staging = None

    def exist(self, keys: Sequence[str], patience: float) -> list[bool]:
        """Whether each object is complete and readable."""
        codes = self._outlast(lambda: list(self._open().batch_is_exist(list(keys))), patience)
        return [code == 1 for code in codes]

    def size(self, key: str, patience: float) -> int:
        """Bytes of an object, or a code, which tells one that is being written from none."""
        return self._outlast(lambda: [int(self._open().get_size(key))], patience)[0]

    def remove(self, keys: Sequence[str], patience: float) -> None:
        """Remove objects, whoever reads them; harmless for those that are not there.

        The store refuses to remove an object whose put it does not know the end of, as after a time-out: chunks are
        tried again with what is removed next. Other keys may be another object's by then.
        """
        with self._opening:
            doomed = [*keys, *self._undead]
            self._undead.clear()
        if not doomed:
            return
        codes = self._outlast(lambda: list(self._open().batch_remove(doomed, True)), patience)
        kept = [key for key, code in zip(doomed, codes, strict=True) if code not in (0, Code.NOT_FOUND)]
        with self._opening:
            self._undead.update(filter(wire.is_chunk, kept))

    def remove_matching(self, pattern: str, patience: float) -> int:
        """Remove every object whose key matches; how many there were."""
        return self._outlast(lambda: [int(self._open().remove_by_regex(pattern, True))], patience)[0]

    def _outlast(self, call: Callable[[], list[int]], patience: float) -> list[int]:
        """The codes of *call*, made again while they say that the master is down."""
        for _ in pauses(time.monotonic() + patience):
            begun = time.monotonic()
            codes = call()
            if not self.is_outage(codes, begun):
                return codes
        raise self.unreachable(patience)

    def unreachable(self, patience: float) -> StoreUnreachable:
        return StoreUnreachable(
            f"the store's master has not answered for {patience:g} s",
            where=self.address.master,
            hint="`draftsmith store status` on its host shows whether it runs; the option `patience` waits longer",
        )

    def is_outage(self, codes: Sequence[int], begun: float) -> bool:
        """Whether *codes*, of a call that was made at *begun*, say that the master is down, which is noted."""
        if any(code in _OUTAGE for code in codes):
            self.outages += 1
            self._down.met(begun)
            return True
        self._down.over(begun)
        return False

    # --- records --------------------------------------------------------------------------------------------------

    def records(self, name: str, patience: float) -> dict[int, Mapping[str, Any] | int]:
        """What lies in the slots of the record *name*: its values, or the code of a slot that cannot be read.

        Empty slots are left out; one that is damaged or was changed while it was read is :attr:`Code.LEASE_EXPIRED`.
        """
        buffers = [bytearray(wire.RECORD_BYTES) for _ in range(wire.SLOTS)]
        codes = self.get(wire.slots_of(name), [Region.of_bytes(each) for each in buffers], patience)
        found: dict[int, Mapping[str, Any] | int] = {}
        for slot, (code, buffer) in enumerate(zip(codes, buffers, strict=True)):
            if code == Code.NOT_FOUND:
                continue
            try:
                found[slot] = code if code < 0 else wire.decode(name, bytes(buffer[:code]))
            except wire.FormatError:
                found[slot] = Code.LEASE_EXPIRED
        return found

    def write_record(self, name: str, data: bytes, slot: int, patience: float) -> bool:
        """Write a record into a slot that was empty; whether it was stored, and not another writer's.

        The store says that it was in any case. Another's record is found there then, or one that never ends; where
        nothing is found, ours has been removed already.
        """
        key = wire.slots_of(name)[slot]
        begun = time.monotonic()
        codes = self.put([key], [Region.of_bytes(data)])
        if self.is_outage(codes, begun) or codes != [0]:
            return False
        buffer = bytearray(len(data) + 1)
        (code,) = self.get([key], [Region.of_bytes(buffer)], patience)
        return code == Code.NOT_FOUND or (code == len(data) and buffer[:code] == data)

    # --- room -----------------------------------------------------------------------------------------------------

    @contextmanager
    def room_for(self, size: int, where: str, deadline: float) -> Iterator[None]:
        """Hold *size* bytes of this process's share of the store while a sample is on its way.

        Raises:
            StoreFull: the sample is larger than the store, or no room was made before *deadline*.
        """
        capacity = self._capacity(deadline)
        if size > capacity:
            raise StoreFull(
                f"{where} has {size} bytes, and the whole store {capacity}",
                where=self.address.master,
                hint="start the store with a larger `--size`, or train on shorter rows",
            )
        with self._budget.take(size, int(_IN_FLIGHT * capacity), deadline) as taken:
            if not taken:
                raise StoreFull(
                    f"{where} has {size} bytes, and samples of this process that wait for room fill the store",
                    where=self.address.master,
                )
            yield

    def _capacity(self, deadline: float) -> int:
        """Bytes of all segments; asked for once, and again while there is none (its owner is being restarted)."""
        if self._budget.capacity:
            return self._budget.capacity
        for _ in pauses(deadline):
            try:
                self._budget.capacity = admin.usage(self.address.admin).capacity
            except StoreUnreachable:
                if time.monotonic() >= deadline:
                    raise
            if self._budget.capacity:
                return self._budget.capacity
        raise StoreFull(
            "the store has no segment: no process lends it memory",
            where=self.address.master,
            hint="`draftsmith store status` on its host shows whether the segment's owner runs",
        )


class _Budget:
    """Bytes in flight of this process, so that its own half-written samples never fill the store."""

    def __init__(self) -> None:
        self.capacity = 0
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def take(self, size: int, limit: int, deadline: float) -> Iterator[bool]:
        """Yields whether there was room in time. One sample alone may exceed the limit."""
        with self._changed:
            taken = self._changed.wait_for(
                lambda: self._used == 0 or self._used + size <= limit, timeout=max(0.0, deadline - time.monotonic())
            )
            self._used += size * taken
        try:
            yield taken
        finally:
            with self._changed:
                self._used -= size * taken
                self._changed.notify_all()


_clients: dict[StoreAddress, StoreClient] = {}
_clients_of = os.getpid()
_lock = threading.Lock()


def client_for(address: StoreAddress) -> StoreClient:
    """This process's client of the store at *address*. It lives as long as the process: closing one takes a second.

    Raises:
        TransportError: the parent of this forked process had opened a store.
    """
    global _clients_of
    if _clients:
        _same_process(_clients_of)
    with _lock:
        _clients_of = os.getpid()
        if address not in _clients:
            _clients[address] = StoreClient(address)
        return _clients[address]
