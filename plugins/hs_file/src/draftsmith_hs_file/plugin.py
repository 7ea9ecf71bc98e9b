"""Registers the transport. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith_hs_file.options import FileOptions

__all__ = ["draftsmith_transports"]


@hookimpl
def draftsmith_transports() -> Sequence[api.Transport]:
    return [
        api.Transport(
            name="hs_file",
            summary="hidden states in a folder: atomic files, compacted into checksummed shards",
            implementation="draftsmith_hs_file.transport:FileTransport",
            options=FileOptions,
            guarantees=api.TransportGuarantees(persistent=True, random_access=True, concurrent_writers=True),
            lossy=("encoding",),
        )
    ]
