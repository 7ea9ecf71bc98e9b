"""A repetition against a running vLLM server: prompts as token ids over its OpenAI API, counters from ``/metrics``.

Times are the client's: from sending a request to the arrival of its first and of its last token. The counters are the
server's own, of everything it does; a repetition in which it answered others is refused.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

from draftsmith.errors import ServingError, UserError
from draftsmith.evaluation.metrics import RequestTimes, difference
from draftsmith.evaluation.results import Repetition, RequestRecord, RoundRecord
from draftsmith.serving.counters import Reading, metrics_address, read_metrics
from draftsmith.serving.vllm_process import DraftCounters

__all__ = ["check_server", "run_on_server", "served_model"]

#: Seconds without a token until a server is given up.
PATIENCE = 300.0


def check_server(url: str, *, drafts: bool) -> int:
    """Make sure that *url* is a vLLM server that drafts, or that does not; returns its number of tokens a round.

    Raises:
        ServingError: it cannot be reached, is no vLLM, or drafts nothing although it should.
        UserError: it drafts although it should not.
    """
    reading = read_metrics(url, drafting=drafts)
    if not drafts and reading.counters.accepted_per_position:
        raise UserError("the baseline's server drafts", where=url, hint="start one without a draft for `none`")
    return len(reading.counters.accepted_per_position)


def served_model(url: str) -> str:
    """Name of the model that the server answers with.

    Raises:
        ServingError: it does not tell.
    """
    try:
        with urllib.request.urlopen(_address(url, "models"), timeout=30) as reply:
            return str(json.load(reply)["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        raise ServingError(
            f"does not tell its models: {error}", where=url, hint="name the address of a vLLM server"
        ) from error


def _address(url: str, what: str) -> str:
    return f"{metrics_address(url).removesuffix('/metrics')}/v1/{what}"


def run_on_server(
    url: str,
    prompts: Sequence[Sequence[int]],
    sampling: Mapping[str, Any],
    *,
    concurrency: int,
    warm_up: Sequence[Sequence[int]] = (),
    drafts: bool = True,
    progress: Callable[[int], None] | None = None,
) -> tuple[Repetition, str | None]:
    """Answer all prompts, at most *concurrency* at once.

    Returns:
        The repetition; and why it is not whole, where the server failed meanwhile: it then has the answers that were
        complete, and no counters.

    Raises:
        ServingError: not even the first reading or the warm-up came through.
    """
    model = served_model(url)
    for prompt in warm_up:
        _answer(url, model, 0, prompt, sampling, threading.Event())
    before = read_metrics(url, drafting=drafts)
    started = time.monotonic()
    requests, trouble = _answer_all(url, model, prompts, sampling, concurrency, progress)
    seconds = time.monotonic() - started
    counters = None
    if trouble is None:
        try:
            counters = _between(
                before, read_metrics(url, drafting=drafts), sum(each.times.tokens for each in requests)
            )
        except ServingError as error:
            trouble = error.what
    repetition = Repetition(
        counters=counters if drafts else None,
        requests=tuple(sorted(requests, key=lambda each: each.prompt)),
        seconds=seconds,
        complete=trouble is None,
    )
    return repetition, trouble


def _between(before: Reading, after: Reading, ours: int) -> DraftCounters:
    others = after.generated - before.generated - ours
    if others > 0:
        raise ServingError(
            f"the server generated {others:.0f} tokens for others meanwhile, which its counters hold as well"
        )
    try:
        return difference(before.counters, after.counters)
    except ValueError as error:
        raise ServingError("the server was started anew meanwhile") from error


def _answer_all(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    sampling: Mapping[str, Any],
    concurrency: int,
    progress: Callable[[int], None] | None,
) -> tuple[list[RequestRecord], str | None]:
    """Complete answers, in the order of their ends, and the first failure."""
    pending: SimpleQueue[tuple[int, Sequence[int]]] = SimpleQueue()
    for item in enumerate(prompts):
        pending.put(item)
    done: list[RequestRecord] = []
    failures: list[ServingError] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                index, prompt = pending.get_nowait()
                done.append(_answer(url, model, index, prompt, sampling, stop))
            except Empty:
                return
            except ServingError as error:
                failures.append(error)
                stop.set()
            if progress is not None:
                progress(len(done))

    with ThreadPoolExecutor(concurrency) as pool:
        try:
            for worker in [pool.submit(work) for _ in range(min(concurrency, len(prompts)))]:
                worker.result()
        finally:
            stop.set()
    return done, failures[0].what if failures else None


def _answer(
    url: str, model: str, index: int, prompt: Sequence[int], sampling: Mapping[str, Any], stop: threading.Event
) -> RequestRecord:
    """One answer, streamed, with its token ids.

    Raises:
        ServingError: the server refused it, or went away; *stop* was set.
    """
    body = {"model": model, "prompt": list(prompt), "stream": True, "return_token_ids": True, **sampling}
    # vLLM tells a request's rounds beside its usage, where it is started to record them.
    body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(
        _address(url, "completions"), json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    output: list[int] = []
    rounds: tuple[RoundRecord, ...] = ()
    first: float | None = None
    started = time.monotonic()
    last = started
    finished = False
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            for line in reply:
                if stop.is_set():
                    raise ServingError("stopped", where=url)
                data = line.decode("utf-8").strip().removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                choice = _choice(chunk, url)
                rounds = _rounds(chunk) or rounds
                if choice.get("token_ids"):
                    last = time.monotonic()
                    first = last if first is None else first
                    output += choice["token_ids"]
                finished |= choice.get("finish_reason") is not None
    except urllib.error.HTTPError as error:
        said = error.read().decode("utf-8", "replace")[:500]
        raise ServingError(f"the server refused prompt {index}: {error.code} {said}", where=url) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServingError(f"the server went away: {error}", where=url) from error
    if not finished:
        raise ServingError("the server went away: an answer has no end", where=url)
    if first is None:
        raise ServingError(
            "the server tells no token ids", where=url, hint="vLLM 0.32 does, on return_token_ids: is it one?"
        )
    times = RequestTimes(tokens=len(output), first_token=first - started, last_token=last - started)
    return RequestRecord(prompt=index, times=times, output=tuple(output), rounds=rounds)


def _rounds(chunk: Mapping[str, Any]) -> tuple[RoundRecord, ...]:
    """Of a request, from the last chunk of its stream; none where the server does not record them one by one."""
    told = (chunk.get("metrics") or {}).get("speculative_decoding") or {}
    counts = (told.get(f"per_step_{name}") or () for name in ("drafted", "accepted"))
    return tuple(RoundRecord(drafted=drafted, accepted=accepted) for drafted, accepted in zip(*counts, strict=True))


def _choice(value: Mapping[str, Any], url: str) -> Mapping[str, Any]:
    if "error" in value:
        raise ServingError(f"the server failed: {value['error']}", where=url)
    choices = value.get("choices") or [{}]
    choice: Mapping[str, Any] = choices[0]
    return choice
