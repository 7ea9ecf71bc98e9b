"""The master's admin server, over HTTP: what the store's client cannot tell. Torch-free."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request

from attrs import frozen

from draftsmith_hs_mooncake.errors import StoreUnreachable

__all__ = ["Usage", "keys", "ready", "usage"]

_SECONDS = 5.0
#: Never by way of a proxy: the addresses are those of a private network.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@frozen
class Usage:
    """Bytes and counts that the master reports.

    Attributes:
        capacity, used: of all segments together.
        clients: processes that own a segment or are known to the master.
    """

    capacity: int
    used: int
    keys: int
    clients: int
    evicted: int


def _get(address: str, path: str) -> str:
    try:
        with _OPENER.open(f"http://{address}{path}", timeout=_SECONDS) as reply:
            text: str = reply.read().decode()
            return text
    except (OSError, ValueError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        reason = getattr(error, "reason", error)
        raise StoreUnreachable(
            f"the admin server of the store's master does not answer: {reason}",
            where=f"http://{address}{path}",
            hint="is the option `admin` right? `draftsmith store status` shows the store of this host",
        ) from None


def ready(address: str) -> bool:
    """Whether a master answers there and says that it serves."""
    try:
        return bool(json.loads(_get(address, "/health")).get("service_ready"))
    except (StoreUnreachable, ValueError):
        return False


def usage(address: str) -> Usage:
    """Raises: StoreUnreachable: nothing answers there, or something that is no master."""
    values = dict(line.rsplit(" ", 1) for line in _get(address, "/metrics").splitlines() if line.startswith("master_"))
    names = ("total_capacity_bytes", "allocated_bytes", "key_count", "active_clients", "evicted_key_count")
    try:
        return Usage(*(int(float(values[f"master_{name}"])) for name in names))
    except KeyError as error:
        raise StoreUnreachable(
            f"what answers there reports no {error.args[0]}: it is no Mooncake master, or one of another version",
            where=f"http://{address}/metrics",
            hint="the option `admin` is the master's metrics port",
        ) from None


def keys(address: str) -> list[str]:
    """All keys in the store, also of samples that are not committed."""
    return _get(address, "/get_all_keys").split("\n")
