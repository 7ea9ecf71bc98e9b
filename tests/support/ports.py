"""Ports for what tests start."""

from __future__ import annotations

import itertools
import os
import socket

__all__ = ["free_port"]

#: Below those that the system gives to outgoing connections: no other process gets one between the choice and the
#: start, or while a server that is started again is down.
_FIRST, _LAST = 20000, 32000
_offsets = itertools.count(os.getpid() * 16)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of *host* where nothing listens; another one at every call."""
    for offset in itertools.islice(_offsets, _LAST - _FIRST):
        port = _FIRST + offset % (_LAST - _FIRST)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port of {host} is free")
