"""The transport: opens writers and readers on a run's place in a store."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable

from draftsmith.interfaces import HiddenStateReader, HiddenStateTransport, HiddenStateWriter, StateLayout
from draftsmith_hs_mooncake import admin, wire
from draftsmith_hs_mooncake.options import MooncakeOptions, split_address
from draftsmith_hs_mooncake.place import Place
from draftsmith_hs_mooncake.producer import MooncakeWriter
from draftsmith_hs_mooncake.reader import MooncakeReader
from draftsmith_hs_mooncake.state import here
from draftsmith_hs_mooncake.store import StoreAddress, client_for

__all__ = ["MooncakeTransport"]

#: The master's own default.
_ADMIN_PORT = 9003
#: A manifest without its chunks, and what each chunk adds to it, measured.
_MANIFEST_BYTES, _CHUNK_ENTRY_BYTES = 768, 32


class MooncakeTransport(HiddenStateTransport):
    """Hidden states in a Mooncake store (see :mod:`draftsmith_hs_mooncake.wire` for what lies there)."""

    options: MooncakeOptions
    _address: StoreAddress | None = None

    @property
    def run(self) -> str:
        """The name of the run's samples. Wherever the capture has the same absolute path, it is the same."""
        if self.options.run is not None:
            return self.options.run
        path = self.location.absolute()
        # The last part is the same in every run; those before it have the name of the run's output.
        readable = re.sub(r"[^A-Za-z0-9-]+", "-", "-".join(path.parts[-3:-1])).strip("-")[:40] or "run"
        return f"{readable}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"

    def address(self) -> StoreAddress:
        """The same at every call: a store that is stopped is away, and not another one.

        Raises:
            UserError: no store is named, and none was started on this host.
        """
        if self._address is None:
            self._address = self._find_address()
        return self._address

    def _find_address(self) -> StoreAddress:
        chunk = self.options.chunk_mebibytes << 20
        staged = self.options.staging or self.options.protocol == "rdma"
        master, admin_address = self.options.master, self.options.admin
        if master is None:
            started = here()
            master, admin_address = started.master, admin_address or started.admin
        elif admin_address is None:
            host = split_address(master)[0]
            admin_address = f"[{host}]:{_ADMIN_PORT}" if ":" in host else f"{host}:{_ADMIN_PORT}"
        return StoreAddress(
            master=master,
            admin=admin_address,
            protocol=self.options.protocol,
            device=self.options.device,
            staging_bytes=chunk if staged else None,
        )

    def place_name(self) -> str:
        return f"run {self.run!r} in the store at {self.address().master}"

    def place(self) -> Place:
        return Place(
            client=client_for(self.address()),
            run=self.run,
            patience=self.options.patience,
            chunk_bytes=self.options.chunk_mebibytes << 20,
        )

    def writer(self, layout: StateLayout) -> HiddenStateWriter:
        return MooncakeWriter(self.place(), layout, self.options.encoding)

    def reader(self, layout: StateLayout) -> HiddenStateReader:
        reader = MooncakeReader(functools.partial(_place_of, self), layout)
        reader.open()
        return reader

    def claim(self, layout: StateLayout, owner: str) -> None:
        place = self.place()
        place.claim(owner)
        place.check_layout(layout)

    def bytes_for(self, layout: StateLayout, tokens: int, samples: int) -> int:
        data = 8 * tokens + wire.state_bytes(layout, tokens, self.options.encoding)
        chunks = 2 * samples + data // (self.options.chunk_mebibytes << 20)
        return data + _MANIFEST_BYTES * samples + _CHUNK_ENTRY_BYTES * chunks

    def free_bytes(self) -> int | None:
        usage = admin.usage(self.address().admin)
        return max(0, usage.capacity - usage.used)

    def remove_all(self, sample_ids: Iterable[str] | None = None) -> None:
        place = self.place()
        if sample_ids is None:
            place.remove_everything()
            return
        for sample_id in sample_ids:
            if wire.is_sample_id(sample_id):
                place.remove_sample(sample_id)


def _place_of(transport: MooncakeTransport) -> Place:
    return transport.place()
