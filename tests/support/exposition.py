"""Servers that count as vLLM does: its counters' names and text, on a port of this machine."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

#: Tokens of each round.
K = 3


class Exposition:
    """Counters under vLLM's names, of as many engines as asked for, written as vLLM's server writes them."""

    def __init__(self, engines: int = 1, *, drafts: bool = True) -> None:
        self.registry = CollectorRegistry()
        self.engines = [{"model_name": "m", "engine": str(number)} for number in range(engines)]
        self.metrics = {
            "generation_tokens": Counter(
                "vllm:generation_tokens", "…", ["model_name", "engine"], registry=self.registry
            ),
            "running": Gauge("vllm:num_requests_running", "…", ["model_name", "engine"], registry=self.registry),
            "waiting": Gauge("vllm:num_requests_waiting", "…", ["model_name", "engine"], registry=self.registry),
            "first": Histogram(
                "vllm:time_to_first_token_seconds", "…", ["model_name", "engine"], registry=self.registry
            ),
        }
        for labels in self.engines:
            self.metrics["running"].labels(**labels).set(0)
        self.drafts = {}
        if drafts:
            for name in ("drafts", "draft_tokens", "accepted_tokens"):
                self.drafts[name] = Counter(
                    f"vllm:spec_decode_num_{name}", "…", ["model_name", "engine"], registry=self.registry
                )
            self.per_position = Counter(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "…",
                ["model_name", "engine", "position"],
                registry=self.registry,
            )

            for labels in self.engines:
                for counter in self.drafts.values():
                    counter.labels(**labels)
                for position in range(K):
                    self.per_position.labels(**labels, position=str(position))

    def count(self, accepted: list[int], *, running: int = 2, generated: int | None = None) -> None:
        """A round of K tokens each, of which so many were accepted, on every engine; and the tokens of their answers,
        those that were accepted and the verifier's own where *generated* does not say."""
        for labels in self.engines:
            self.metrics["running"].labels(**labels).set(running)
            self.metrics["waiting"].labels(**labels).set(1)
            tokens = sum(each + 1 for each in accepted) if generated is None else generated
            self.metrics["generation_tokens"].labels(**labels).inc(tokens)
            for each in accepted:
                self.drafts["drafts"].labels(**labels).inc()
                self.drafts["draft_tokens"].labels(**labels).inc(K)
                self.drafts["accepted_tokens"].labels(**labels).inc(each)
                for position in range(K):
                    self.per_position.labels(**labels, position=str(position)).inc(position < each)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


class AnsweringServer:
    """Answers each prompt with its own tokens backwards, one round of which two tokens are accepted.

    Attributes:
        dies_at: number of the answer that breaks off, and after which nothing is answered.
        others: tokens that it generates for somebody else with each answer.
        rounds: it tells the rounds of each request, as with ``--per-request-spec-decode-metrics detailed``.
    """

    def __init__(
        self,
        *,
        drafts: bool = True,
        dies_at: int | None = None,
        others: int = 0,
        token_ids: bool = True,
        rounds: bool = False,
    ):
        self.exposition = Exposition(drafts=drafts)
        self.drafts, self.dies_at, self.others, self.token_ids = drafts, dies_at, others, token_ids
        self.rounds = rounds
        self.bodies: list[dict[str, Any]] = []
        self.most, self.now = 0, 0
        self.lock = threading.Lock()

    @property
    def dead(self) -> bool:
        return self.dies_at is not None and len(self.bodies) > self.dies_at

    def metrics(self) -> tuple[int, str]:
        return (503, "") if self.dead else (200, self.exposition.text())

    def post(self, handler: Any) -> None:
        if handler.path == "/v1/models":
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(b'{"data": [{"id": "the-model"}]}')
            return
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.bodies.append(body)
            broken = self.dead
            self.now += 1
            self.most = max(self.most, self.now)
        if 99 in body["prompt"]:
            handler.send_response(400)
            handler.end_headers()
            handler.wfile.write(b'{"error": "too long"}')
            return
        handler.send_response(200)
        handler.end_headers()
        output = body["prompt"][::-1]
        for place, token in enumerate(output):
            ids = [token] if self.token_ids else None
            reason = "length" if place == len(output) - 1 and not broken else None
            chunk = {"choices": [{"text": "", "token_ids": ids, "finish_reason": reason}]}
            handler.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            if broken:
                return
        with self.lock:
            self.exposition.count([2] if self.drafts else [], generated=self.others + len(output))
            self.now -= 1
        if body.get("stream_options", {}).get("include_usage"):
            told = {"per_step_drafted": [K], "per_step_accepted": [2]} if self.rounds else {}
            usage = {"choices": [], "usage": {}, "metrics": {"speculative_decoding": told} if told else None}
            handler.wfile.write(f"data: {json.dumps(usage)}\n\n".encode())
        handler.wfile.write(b"data: [DONE]\n\n")


@contextlib.contextmanager
def served(
    answer: Callable[[], tuple[int, str]], post: Callable[[http.server.BaseHTTPRequestHandler], None] | None = None
) -> Iterator[str]:
    """Serve ``/metrics`` with what *answer* returns, and give *post* all else; yields the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/metrics" and post is not None:
                post(self)
                return
            status, text = answer() if self.path == "/metrics" else (404, "")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            assert post is not None
            post(self)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
