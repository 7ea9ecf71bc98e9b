"""Options of the transport. Torch-free."""

from __future__ import annotations

import re
from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, in_, instance_of, matches_re, optional

__all__ = ["MooncakeOptions", "split_address"]

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def split_address(text: str) -> tuple[str, int]:
    """``host:port`` as its two parts; an IPv6 host stands in brackets.

    Raises:
        ValueError: it is no such address.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address: write host:port, such as 10.0.0.5:50051")
    return host, int(port)


def _is_address(instance: Any, attribute: Any, value: str) -> None:
    split_address(value)


@frozen(kw_only=True)
class MooncakeOptions:
    """Which store, and how samples are put into it."""

    master: str | None = field(
        default=None,
        validator=optional([instance_of(str), _is_address]),
        metadata={
            "help": "host:port of the store's master; default: the store that `draftsmith store up` started here"
        },
    )
    admin: str | None = field(
        default=None,
        validator=optional([instance_of(str), _is_address]),
        metadata={"help": "host:port of the master's admin (metrics) server; default: the master's host, port 9003"},
    )
    run: str | None = field(
        default=None,
        validator=optional([instance_of(str), matches_re(_RUN)]),
        metadata={"help": "name of this run's samples in the store; default: made from the capture's absolute path"},
    )
    protocol: str = field(
        default="tcp", validator=in_(("tcp", "rdma")), metadata={"help": "how bytes travel: tcp or rdma"}
    )
    device: str = field(
        default="", validator=instance_of(str), metadata={"help": "RDMA devices, comma-separated; empty with tcp"}
    )
    encoding: Literal["plain", "fp8"] = field(
        default="plain",
        validator=in_(("plain", "fp8")),
        metadata={"help": "fp8: states in eight bits, scaled by token and layer: half the bytes, and not exact"},
    )
    chunk_mebibytes: int = field(
        default=32,
        validator=ge(1),
        metadata={"help": "largest object in the store; each needs one free range of one segment"},
    )
    patience: float = field(
        default=60.0,
        validator=gt(0),
        metadata={"help": "seconds to wait for a store that is full, or down, before giving up"},
    )
    staging: bool = field(
        default=False,
        validator=instance_of(bool),
        metadata={"help": "copy through registered buffers with tcp too, as rdma always does"},
    )
