"""Answers from vLLM, streamed: run by :mod:`draftsmith.data.generators` as a child process of its own.

Protocol, one JSON object a line. The first line read gives the engine's arguments; the answer is ``{"ready": true}``.
Then, again and again: any number of requests ``{"key", "prompt_ids", "sampling"}``, an empty line, and as many answers
``{"key", "token_ids", "finish_reason"}``, each as soon as it is finished: a kill loses only what was in flight.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import IO, Any


def main() -> int:
    # vLLM and its libraries print to standard output; the protocol keeps the real one for itself.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from vllm import LLM

    llm = LLM(**json.loads(sys.stdin.readline()))
    _tell(out, {"ready": True})
    while requests := _read_requests(sys.stdin):
        for answer in _generate(llm.llm_engine, requests):
            _tell(out, answer)
    return 0


def _tell(out: IO[str], value: dict[str, Any]) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()


def _read_requests(stream: IO[str]) -> list[dict[str, Any]]:
    """All requests up to the empty line; none at the end of input."""
    requests = []
    for line in stream:
        if not line.strip():
            break
        requests.append(json.loads(line))
    return requests


def _generate(engine: Any, requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    from vllm import SamplingParams

    for number, request in enumerate(requests):
        engine.add_request(
            str(number),
            {"prompt_token_ids": request["prompt_ids"]},
            SamplingParams(**request["sampling"], detokenize=False),
        )
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answer = output.outputs[0]
                # vLLM may add to a request's id; its own number stands before.
                yield {
                    "key": requests[int(output.request_id.split("-")[0])]["key"],
                    "token_ids": list(answer.token_ids),
                    "finish_reason": answer.finish_reason,
                }


if __name__ == "__main__":
    sys.exit(main())
