"""What a capture endpoint is: something that turns token ids into stored hidden states, one request at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod

from attrs import frozen

from draftsmith.capture.engines import Request

__all__ = ["Answer", "Endpoint"]


@frozen
class Answer:
    """What became of one request.

    Attributes:
        sample_id: the request's.
        refused: why there are no states (values that are not finite), or None: they are committed in the transport.
        seconds: from asking to knowing.
    """

    sample_id: str
    refused: str | None
    seconds: float


class Endpoint(ABC):
    """A verifier that captures. Opened before it is used, and again after it failed; closed once.

    Attributes:
        name: for log lines and errors.
        slots: requests that it takes at once, at most.
    """

    name: str
    slots: int

    @abstractmethod
    def open(self) -> None:
        """Find out whether it works, and start what it needs. Called again after :class:`EndpointFailed`.

        Raises:
            EndpointFailed: it cannot be reached, or does not answer in time; it may later.
            DraftsmithError: it will not do for this run; says what differs and what to do.
        """

    @abstractmethod
    def capture(self, request: Request) -> Answer:
        """Capture one row; returns when its states are committed in the transport, or refused. Thread-safe, bounded.

        Raises:
            EndpointFailed: another endpoint, or this one later, may do better.
            DraftsmithError: none would.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. Requests under way fail soon. Idempotent; never waits for an endpoint that hangs."""
