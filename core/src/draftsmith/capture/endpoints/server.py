"""A vLLM server on some host, started by ``draftsmith capture serve``, as an endpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
from attrs import frozen

from draftsmith.capture.endpoints.base import Answer, Endpoint
from draftsmith.capture.engines import Request
from draftsmith.capture.engines.messages import REQUEST_KEY, capture_parameters, token_digest
from draftsmith.capture.server.middleware import FACTS_PATH, PROTOCOL
from draftsmith.errors import (
    DiskSpaceError,
    DraftsmithError,
    EndpointFailed,
    EndpointMismatch,
    FingerprintMismatch,
    ServingError,
)
from draftsmith.interfaces import HiddenStateTransport, StateLayout

__all__ = ["Expected", "ServerEndpoint"]

#: Seconds to connect, and for the server to say what it captures.
_CONNECT, _PROBE = 5.0, 10.0
#: What another server would fail at as well.
_HOPELESS: Mapping[str, type[DraftsmithError]] = {
    "DiskSpaceError": DiskSpaceError,
    "FingerprintMismatch": FingerprintMismatch,
}
_SERVE = "start it with `draftsmith capture serve RECIPE`, with the recipe that trains"


@frozen(kw_only=True)
class Expected:
    """What a run needs of the servers that capture for it.

    Attributes:
        model: the verifier's path here, for messages.
        verifier: its fingerprint.
        layout: of the states.
        implementation, place: of the transport.
        longest: tokens of the longest row.
    """

    model: str
    verifier: str
    layout: StateLayout
    implementation: str
    place: str
    longest: int

    @classmethod
    def of(
        cls, *, model: str, verifier: str, transport: HiddenStateTransport, layout: StateLayout, longest: int
    ) -> Expected:
        kind = type(transport)
        return cls(
            model=model,
            verifier=verifier,
            layout=layout,
            implementation=f"{kind.__module__}:{kind.__qualname__}",
            place=transport.place_name(),
            longest=longest,
        )

    def differences(self, facts: Mapping[str, Any]) -> Iterator[str]:
        """What a server with *facts* would do otherwise, one sentence each."""
        if facts["problem"]:
            yield f"it cannot capture: {facts['problem']} (vLLM {facts['vllm']})"
            return
        if facts["layer_ids"] is None or facts["layout"] is None or facts["transport"] is None:
            yield "it taps no layers, or does not store what it taps"
            return
        if facts["verifier"] != self.verifier:
            yield (
                f"it serves another model: {facts['model']} has the fingerprint {facts['verifier']}, "
                f"{self.model} here has {self.verifier}"
            )
        if sorted(facts["layer_ids"]) != sorted(self.layout.layer_ids):
            yield f"it taps layers {facts['layer_ids']}, this run needs {list(self.layout.layer_ids)}"
        yield from self._layout_differences(facts["layout"])
        theirs = facts["transport"]
        if theirs["implementation"] != self.implementation:
            yield f"it stores by another transport: {theirs['implementation']}, this run reads {self.implementation}"
        elif theirs["place"] != self.place:
            yield f"it stores in another place: {theirs['place']}, this run reads {self.place}"
        if facts["prefix_caching"]:
            yield "its prefix caching is on: what is found in the cache is not computed, and leaves no states"
        if facts["max_model_len"] < self.longest + 2:
            yield f"its rows have {facts['max_model_len'] - 2} tokens at most, the longest of this run {self.longest}"

    def _layout_differences(self, theirs: Mapping[str, Any]) -> Iterator[str]:
        ours = self.layout
        found = False
        for key, wanted in (("dtype", ours.dtype), ("hidden_size", ours.hidden_size)):
            if theirs[key] != wanted:
                found = True
                yield f"its states' {key} is {theirs[key]}, this run's {wanted}"
        if tuple(theirs["layer_ids"]) != ours.layer_ids:
            found = True
            yield f"its samples hold layers {theirs['layer_ids']}, this run's {list(ours.layer_ids)}"
        if theirs["fingerprint"] != ours.fingerprint and not found:
            yield (
                f"its states are of another run (fingerprint {theirs['fingerprint']}, here {ours.fingerprint}): "
                "verifier, capture.dtype and online.keep must be the same"
            )


class ServerEndpoint(Endpoint):
    """HTTP to one server. Kept-alive connections, as many as there are requests at once.

    Args:
        url: such as ``http://host:8000``.
        expected: what the run needs of it.
        timeout: seconds for one capture, from sending the row to the reply; a server that hangs is noticed by it.
        slots: requests at once.
    """

    def __init__(self, url: str, expected: Expected, *, timeout: float = 120.0, slots: int = 256) -> None:
        self.name = url.rstrip("/")
        self.slots = slots
        self._expected = expected
        self._timeout = timeout
        self._client = httpx.Client(
            base_url=self.name,
            timeout=httpx.Timeout(timeout, connect=_CONNECT),
            # The server closes what was idle for 5 s, and may do so just when the next request comes.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=slots, keepalive_expiry=2.0),
            trust_env=False,  # a proxy for the world outside is in the way here
        )

    def open(self) -> None:
        """Ask the server what it captures, and compare.

        Raises:
            EndpointFailed: it cannot be reached, or its engine is dead.
            EndpointMismatch: it is no capture server, or captures something else.
        """
        facts = self._facts()
        if facts.get("protocol") != PROTOCOL:
            raise EndpointMismatch(
                f"it is of draftsmith {facts.get('draftsmith')}, whose capture speaks another protocol",
                where=self.name,
                hint="install the same version of draftsmith there",
            )
        try:
            differences = list(self._expected.differences(facts))
        except (KeyError, TypeError) as error:
            raise EndpointMismatch(
                f"what it says of itself cannot be read: {error!r}", where=self.name, hint=_SERVE
            ) from error
        if differences:
            raise EndpointMismatch("; ".join(differences), where=self.name, hint=_SERVE)

    def capture(self, request: Request) -> Answer:
        started = time.monotonic()
        order = {
            "prompt": list(request.token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "kv_transfer_params": capture_parameters(request.sample_id, token_digest(request.token_ids)),
        }
        reply = self._ask("POST", "/v1/completions", json=order)
        if reply.status_code >= 500 or reply.status_code in (404, 429):
            raise self._failed(f"it answers with status {reply.status_code}: {_words(reply)}")
        if reply.status_code != 200:
            raise ServingError(
                f"it refuses sample {request.sample_id} ({len(request.token_ids)} tokens): {_words(reply)}",
                where=self.name,
                hint="its log says more",
            )
        refused = self._outcome(request, _json(reply).get(REQUEST_KEY))
        return Answer(request.sample_id, refused, time.monotonic() - started)

    def _outcome(self, request: Request, told: Any) -> str | None:
        """Why the states are refused; None: they are stored."""
        if not isinstance(told, Mapping):
            raise self._failed("its reply says nothing of the states: it is no capture server any more")
        status, why = told.get("status"), str(told.get("why") or "")
        ran = (told.get("sample_id"), told.get("tokens"), told.get("digest"))
        sent = (request.sample_id, len(request.token_ids), token_digest(request.token_ids))
        if ran[1] is not None and ran != sent:  # None: there is no report
            raise ServingError(
                f"it ran other tokens than were sent: {sent[1]} tokens of sample {sent[0]} (digest {sent[2]}) became "
                f"{ran[1]} of {ran[0]} (digest {ran[2]})",
                where=self.name,
                hint="does something between here and there change requests?",
            )
        if status == "stored" and ran == sent:
            return None
        if status == "refused":
            return why or "the server refused the states"
        hopeless = _HOPELESS.get(str(told.get("kind")))
        if hopeless is not None:
            raise hopeless(why, where=self.name, hint="the server that captures met this, not this process")
        raise self._failed(f"sample {request.sample_id} was not stored: {why}")

    def close(self) -> None:
        self._client.close()

    def _facts(self) -> Mapping[str, Any]:
        reply = self._ask("GET", FACTS_PATH, timeout=httpx.Timeout(_PROBE, connect=_CONNECT))
        facts = _json(reply)
        if reply.status_code >= 500:
            raise self._failed(f"it does not work: {facts.get('error') or f'status {reply.status_code}'}")
        if reply.status_code != 200 or "protocol" not in facts:
            version = self._vllm_version()
            what = f"vLLM {version}" if version else "something"
            raise EndpointMismatch(
                f"{what} answers there that was not started by `draftsmith capture serve`, and captures nothing",
                where=self.name,
                hint=_SERVE,
            )
        return facts

    def _vllm_version(self) -> str | None:
        reply = self._ask("GET", "/version", timeout=httpx.Timeout(_PROBE, connect=_CONNECT))
        version = _json(reply).get("version")
        return str(version) if version else None

    def _ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            return self._client.request(method, path, **arguments)
        except httpx.ConnectTimeout as error:
            raise self._failed(f"no connection within {_CONNECT:g} s") from error
        except httpx.TimeoutException as error:
            seconds = _PROBE if method == "GET" else self._timeout
            raise self._failed(f"no answer within {seconds:g} s") from error
        except httpx.ConnectError as error:
            raise self._failed(f"cannot be reached: {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict) as error:
            raise self._failed(f"the connection broke: {type(error).__name__}: {error}") from error
        except RuntimeError as error:  # the client was closed meanwhile
            raise self._failed(f"it is closed: {error}") from error

    def _failed(self, what: str) -> EndpointFailed:
        return EndpointFailed(what, endpoint=self.name, hint="is the server up, and may this host reach it?")


def _json(reply: httpx.Response) -> Mapping[str, Any]:
    try:
        value = reply.json()
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _words(reply: httpx.Response) -> str:
    """The server's own words on what is wrong."""
    value = _json(reply)
    error = value.get("error")
    text = error.get("message") if isinstance(error, Mapping) else error or value.get("message") or reply.text
    return str(text).strip()[:500]
