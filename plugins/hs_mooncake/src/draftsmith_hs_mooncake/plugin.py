"""Registers the transport and the command. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith_hs_mooncake.options import MooncakeOptions

__all__ = ["draftsmith_commands", "draftsmith_transports"]


@hookimpl
def draftsmith_transports() -> Sequence[api.Transport]:
    return [
        api.Transport(
            name="hs_mooncake",
            summary="hidden states in the memory of a Mooncake store, on one host or many; no disk",
            implementation="draftsmith_hs_mooncake.transport:MooncakeTransport",
            options=MooncakeOptions,
            lossy=("encoding",),
            conformance="draftsmith_hs_mooncake.conformance:MooncakeCheck",
            guarantees=api.TransportGuarantees(persistent=False, random_access=True, concurrent_writers=True),
        )
    ]


@hookimpl
def draftsmith_commands() -> Sequence[api.Command]:
    return [
        api.Command(
            name="store",
            summary="start, stop, show and clean a Mooncake store on this host",
            implementation="draftsmith_hs_mooncake.commands:app",
        )
    ]
