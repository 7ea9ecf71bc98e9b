"""The store's own errors, beside those of :mod:`draftsmith.errors`. They cross process borders."""

from __future__ import annotations

from draftsmith.errors import TransportError

__all__ = ["StoreFull", "StoreUnreachable"]


class StoreFull(TransportError):
    """There was no room for a sample, and none was made in time."""


class StoreUnreachable(TransportError):
    """The master did not answer in time, or is not one that this client understands."""
