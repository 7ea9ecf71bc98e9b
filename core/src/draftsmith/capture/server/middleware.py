"""What turns vLLM's server into a capture endpoint: an ASGI middleware beside the connector. Torch-free to import.

``GET /draftsmith/capture`` says what the running engine captures, from its own configuration. A completion request
with our key in ``kv_transfer_params`` is answered when the connector has said what became of its states: vLLM is done
with it before they are stored. Everything else passes untouched.

The connector's reports come through a named pipe, whichever process it runs in; the loop is woken by them, and what
nobody waits for is forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from draftsmith.capture.engines.messages import REQUEST_KEY, is_sample_id
from draftsmith.plugins.blame import plugin_error

__all__ = ["FACTS_PATH", "PROTOCOL", "CaptureMiddleware", "facts_of"]

FACTS_PATH = "/draftsmith/capture"
#: Of the facts, the request and the reply. A server and a trainer of two protocols do not work together.
PROTOCOL = 1
_COMPLETIONS = "/v1/completions"
#: Seconds that a reply is held back, at most, after vLLM was done with the request.
_PATIENCE = 100.0
_LARGEST_BODY = 64 * 2**20

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class CaptureMiddleware:
    """See the module's text. Built by vLLM's ``--middleware``."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._reports = _Reports()
        self._facts: dict[str, Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == FACTS_PATH:
            await self._tell_facts(scope, send)
        elif scope["type"] == "http" and scope["method"] == "POST" and _may_be_capture(scope):
            await self._serve(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        extra = _connector_options(scope["app"].state.vllm_config)
        if "reports" in extra:
            self._reports.open(Path(extra["reports"]))
        try:
            await self._app(scope, receive, send)
        finally:
            self._reports.close()

    async def _tell_facts(self, scope: Scope, send: Send) -> None:
        state = scope["app"].state
        try:
            await state.engine_client.check_health()
            if self._facts is None:
                self._facts = await asyncio.to_thread(facts_of, state.vllm_config)
        except Exception as error:  # whatever it is, the client is to hear of it
            found = plugin_error(error)
            what = f"{type(error).__name__}: {error}" if found is None else found.what
            await _reply(send, 503, {"error": what})
            return
        await _reply(send, 200, self._facts)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, whole = await _body(receive)
        replayed = _Replay(body, whole, receive)
        # The key's own bytes spare reading rows that are none of ours.
        order = _loaded(body) if whole and f'"{REQUEST_KEY}"'.encode() in body else None
        wanted = _wanted(order)
        if wanted is None:
            await self._app(scope, replayed, send)
            return
        assert order is not None
        problem = _problem(scope["path"], order, wanted)
        if problem is not None:
            await _reply(send, 400, {"error": {"message": problem, "type": "draftsmith", "code": 400}})
            return
        held = _Held()
        with self._reports.expected(wanted["sample_id"]) as report:
            await self._app(scope, replayed, held)
            if held.status == 200 and not await _settled(report, receive):
                return
        await held.release(send, _outcome(report) if held.status == 200 else None, wanted["sample_id"])


def facts_of(config: Any) -> dict[str, Any]:
    """What the engine with vLLM's configuration *config* captures.

    Returns:
        ``protocol``, ``draftsmith``, ``vllm`` (versions), ``problem`` (why this vLLM cannot capture, or None),
        ``model`` (path), ``verifier`` (fingerprint), ``layer_ids``, ``layout``, ``transport`` (``implementation``,
        ``place``), ``prefix_caching``, ``dtype`` (of the computation), ``max_model_len``, ``max_num_seqs``.
    """
    import vllm

    from draftsmith import __version__
    from draftsmith.capture.address import TransportAddress
    from draftsmith.capture.engines import vllm_problem
    from draftsmith.verifier import read_verifier

    model, extra = config.model_config, _connector_options(config)
    address = TransportAddress.from_json(extra["transport"]) if "transport" in extra else None
    speculative = config.speculative_config
    taps = None
    if speculative is not None and speculative.method == "extract_hidden_states":
        hf_config = speculative.draft_model_config.hf_config
        taps = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
    return {
        "protocol": PROTOCOL,
        "draftsmith": __version__,
        "vllm": vllm.__version__,
        "problem": vllm_problem(),
        "model": str(model.model),
        "verifier": read_verifier(model.model).fingerprint,
        "layer_ids": None if taps is None else sorted(set(taps)),
        "layout": None if address is None else dict(address.layout),
        "transport": None
        if address is None
        else {"implementation": address.implementation, "place": address.open().place_name()},
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": int(model.max_model_len),
        "max_num_seqs": int(config.scheduler_config.max_num_seqs),
    }


def _connector_options(config: Any) -> Mapping[str, Any]:
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector_module_path != "draftsmith.capture.connector":
        return {}
    options: Mapping[str, Any] = transfer.kv_connector_extra_config
    return options


def _may_be_capture(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.startswith(("/v1/", "/inference/"))


def _loaded(body: bytes) -> Mapping[str, Any] | None:
    with contextlib.suppress(ValueError):
        order = json.loads(body)
        if isinstance(order, dict):
            return order
    return None


def _wanted(order: Mapping[str, Any] | None) -> Any:
    """What stands under our key, None without it."""
    parameters = (order or {}).get("kv_transfer_params")
    return parameters.get(REQUEST_KEY) if isinstance(parameters, dict) else None


def _problem(path: str, order: Mapping[str, Any], wanted: Any) -> str | None:
    """Why this is no request to capture one row, or None."""
    if path != _COMPLETIONS:
        return f"rows are captured by {_COMPLETIONS}, not by {path}"
    if not isinstance(wanted, dict) or not is_sample_id(wanted.get("sample_id")):
        return "a sample id has 32 hex digits"
    if not isinstance(wanted.get("digest"), str):
        return "the digest of the token ids is missing"
    prompt = order.get("prompt")
    if not isinstance(prompt, list) or not prompt or not all(type(each) is int for each in prompt):
        return "the prompt of a capture is a list of token ids"
    if order.get("stream"):
        return "a capture is not streamed: its reply comes when the states are stored"
    for key in ("n", "best_of", "max_tokens"):
        if order.get(key, 1) != 1 or (key == "max_tokens" and key not in order):
            return f"a capture runs its row once: {key} must be 1"
    for key in ("use_beam_search", "truncate_prompt_tokens", "echo"):
        if order.get(key):
            return f"{key} has no place in a capture"
    return None


class _Reports:
    """Follows the named pipe of the connector's reports."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor: int | None = None
        self._begun = b""
        self._waiting: dict[str, list[asyncio.Future[Mapping[str, Any]]]] = {}

    def open(self, path: Path) -> None:
        """Create the pipe, and have the running loop read it."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        if not stat.S_ISFIFO(path.stat().st_mode):
            raise RuntimeError(f"{path} is there already, and is no named pipe")
        self._path = path
        # For writing as well, so that it never ends when a writer closes it.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def close(self) -> None:
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
                self._path.parent.rmdir()

    @contextlib.contextmanager
    def expected(self, sample_id: str) -> Any:
        """A future of the report on *sample_id*, from before its request is begun until its reply is sent."""
        future: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sample_id, []).append(future)
        try:
            yield future
        finally:
            left = self._waiting[sample_id]
            left.remove(future)
            if not left:
                del self._waiting[sample_id]

    def _read(self) -> None:
        assert self._descriptor is not None
        with contextlib.suppress(BlockingIOError):
            self._begun += os.read(self._descriptor, 2**16)
        *lines, self._begun = self._begun.split(b"\n")
        for line in lines:
            report = json.loads(line)
            for future in self._waiting.get(report["sample_id"], ()):
                if not future.done():
                    future.set_result(report)


async def _settled(report: asyncio.Future[Mapping[str, Any]], receive: Receive) -> bool:
    """Wait for the report, or its deadline; False where the client has gone, and nobody waits for a reply."""
    gone = asyncio.ensure_future(_disconnected(receive))
    waiting: set[asyncio.Future[Any]] = {report, gone}
    try:
        await asyncio.wait(waiting, timeout=_PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        return report.done() or not gone.done()
    finally:
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _outcome(report: asyncio.Future[Mapping[str, Any]]) -> Mapping[str, Any]:
    if report.done():
        return report.result()
    return {"status": "failed", "why": f"its states were not stored within {_PATIENCE:.0f} s", "kind": ""}


class _Replay:
    """What was read of a request's body already (all of it, if *whole*), then whatever comes."""

    def __init__(self, body: bytes, whole: bool, receive: Receive) -> None:
        self._body: bytes | None = body
        self._whole = whole
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": not self._whole}


class _Held:
    """A reply that is kept until the report is there."""

    def __init__(self) -> None:
        self.status = 0
        self._start: Message = {}
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start, self.status = message, message["status"]
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")

    async def release(self, send: Send, outcome: Mapping[str, Any] | None, sample_id: str) -> None:
        """Send it, with what became of the sample where there is a sample."""
        if not self.status:  # the application left without an answer: the client has gone
            return
        body = bytes(self._body)
        if outcome is not None:
            keys = ("status", "why", "kind", "tokens", "digest")
            told = {"sample_id": sample_id, **{key: outcome.get(key) for key in keys}}
            body = json.dumps({**json.loads(body), REQUEST_KEY: told}).encode()
        headers = [each for each in self._start["headers"] if bytes(each[0]).lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({**self._start, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive) -> tuple[bytes, bool]:
    """The request's body, as far as it is read here, and whether that is all that will come of it."""
    parts = bytearray()
    while len(parts) <= _LARGEST_BODY:
        message = await receive()
        parts += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            return bytes(parts), True
    return bytes(parts), False


async def _reply(send: Send, status: int, value: Mapping[str, Any]) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
