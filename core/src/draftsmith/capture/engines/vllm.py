"""The verifier in vLLM, in a child process.

vLLM wants its environment (on a CPU a preloaded OpenMP library) before Python starts, keeps global state, and may be
killed for memory: a process of its own gives each a boundary. Rows go to it as lines of JSON on its standard input;
what became of them comes back on a pipe; the states themselves go through the transport, from wherever vLLM's worker
runs. This module imports neither torch nor vLLM; the child is :mod:`draftsmith.capture.engines.vllm_child`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from draftsmith.capture.address import TransportAddress
from draftsmith.capture.engines import CaptureEngine, CaptureSetup, Done, Request
from draftsmith.capture.engines.messages import token_digest
from draftsmith.errors import DiskSpaceError, DraftsmithError, FingerprintMismatch, PluginError, TransportError
from draftsmith.serving.vllm_process import error_from_log, vllm_environment

__all__ = ["VllmEngine", "engine_arguments", "engine_environment"]

_SEQUENCES = 64
#: Forward passes' worth of tokens that are sent to the child at a time.
_PASSES = 4
#: Jobs under way at once, so that the child never waits for the next.
_IN_FLIGHT = 2
_TYPED: Mapping[str, type[DraftsmithError]] = {
    "DiskSpaceError": DiskSpaceError,
    "FingerprintMismatch": FingerprintMismatch,
    "PluginError": PluginError,
    "TransportError": TransportError,
}


def engine_arguments(
    setup: CaptureSetup, address: TransportAddress, reports: Path, *, on_error: str = "stop"
) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``. Plain values; the child turns the transfer configuration into its class.

    Prefix caching is off: a cached prefix is not computed, and so leaves no states. Two tokens beyond the longest row
    are allowed for: the one that vLLM generates, and the one that the extraction "drafts".

    Args:
        reports: file, or named pipe, to which the connector appends what became of each sample.
        on_error: a sample that cannot be stored ends the engine (``stop``), or fails alone (``report``).
    """
    return {
        "model": str(setup.verifier.path),
        "dtype": setup.dtype,
        "max_model_len": setup.longest + 2,
        "max_num_seqs": _SEQUENCES,
        "max_num_batched_tokens": max(setup.batch_tokens, 2 * _SEQUENCES),
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "trust_remote_code": setup.trust_remote_code,
        "seed": 0,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": list(setup.layout.layer_ids)},
            },
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStateConnector",
            "kv_connector_module_path": "draftsmith.capture.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "transport": address.to_json(),
                "reports": str(reports),
                "on_error": on_error,
            },
        },
    }


def engine_environment(setup: CaptureSetup) -> dict[str, str]:
    """The environment of a process that runs the engine, as a copy of this process's."""
    environment = vllm_environment()
    if "VLLM_CPU_KVCACHE_SPACE" in environment and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(_cache_gibibytes(setup))
    if setup.longest + 2 > setup.verifier.max_position_embeddings:
        # Only positions of the row itself are ever computed; the two extra ones are bookkeeping.
        environment["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    return environment


def _cache_gibibytes(setup: CaptureSetup) -> int:
    """Room for the longest row and two passes beside it, at four bytes a value, and as much again for slack."""
    facts, layout = setup.verifier, setup.layout
    values = 2 * facts.num_layers * facts.num_key_value_heads * facts.head_dim
    values += len(layout.layer_ids) * layout.hidden_size
    tokens = setup.longest + 2 * setup.batch_tokens
    return max(1, math.ceil(2 * 4 * values * tokens / 2**30))


class VllmEngine(CaptureEngine):
    """Starts the child when entered, ends it when left."""

    def __init__(self, setup: CaptureSetup, address: TransportAddress) -> None:
        self._setup = setup
        self._address = address
        self._child: subprocess.Popen[str] | None = None
        self._answers: IO[str] | None = None
        self._log = setup.work_folder / "vllm.log"
        self._reports = setup.work_folder / f"reports-{os.getpid()}.jsonl"
        self._dtype = setup.dtype

    @property
    def compute_dtype(self) -> str:
        return self._dtype

    def __enter__(self) -> VllmEngine:
        self._setup.work_folder.mkdir(parents=True, exist_ok=True)
        self._reports.unlink(missing_ok=True)
        read_end, write_end = os.pipe()
        command = [sys.executable, "-m", "draftsmith.capture.engines.vllm_child", str(write_end), str(os.getpid())]
        with open(self._log, "wb") as log:
            try:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=engine_environment(self._setup),
                    pass_fds=(write_end,),
                    text=True,
                    start_new_session=True,
                )
            finally:
                os.close(write_end)
        self._answers = os.fdopen(read_end, encoding="utf-8")
        try:
            self._send(
                {"engine": engine_arguments(self._setup, self._address, self._reports), "reports": str(self._reports)}
            )
            self._dtype = self._receive()["dtype"]
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        child, self._child = self._child, None
        if child is not None:
            if error is None:
                with contextlib.suppress(OSError):
                    assert child.stdin is not None
                    child.stdin.close()  # its end of input is the child's sign to leave
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(30)
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if self._answers is not None:
            self._answers.close()
            self._answers = None
        self._reports.unlink(missing_ok=True)

    def capture(self, requests: Iterable[Request]) -> Iterator[Done]:
        jobs = iter(self._jobs(requests))
        under_way: list[int] = []
        for job in jobs:
            self._send(
                {"samples": [[each.sample_id, token_digest(each.token_ids), list(each.token_ids)] for each in job]}
            )
            under_way.append(sum(len(each.token_ids) for each in job))
            if len(under_way) >= _IN_FLIGHT:
                yield self._finished(under_way.pop(0))
        while under_way:
            yield self._finished(under_way.pop(0))

    def _jobs(self, requests: Iterable[Request]) -> list[list[Request]]:
        """Longest rows first, some forward passes' worth of tokens in each."""
        jobs: list[list[Request]] = []
        room = 0
        for request in sorted(requests, key=lambda each: (-len(each.token_ids), each.sample_id)):
            if not jobs or room < len(request.token_ids) or len(jobs[-1]) >= 4 * _SEQUENCES:
                jobs.append([])
                room = _PASSES * self._setup.batch_tokens
            jobs[-1].append(request)
            room -= len(request.token_ids)
        return jobs

    def _finished(self, tokens: int) -> Done:
        answer = self._receive()
        return Done(
            stored=tuple(answer["stored"]), refused=answer["refused"], tokens=tokens, seconds=answer["seconds"]
        )

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            self._receive()  # it said why it left
            raise

    def _receive(self) -> dict[str, Any]:
        """The child's next answer.

        Raises:
            DiskSpaceError, TransportError, FingerprintMismatch: what the transport raised there.
            ServingError: vLLM failed, or the child ended; with its own words and the end of its log.
        """
        assert self._child is not None
        assert self._answers is not None
        line = self._answers.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"event": "failed", "kind": "", "error": ""}
        if answer["event"] != "failed":
            return answer
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(30)
        typed = _TYPED.get(answer["kind"])
        if typed is not None:
            raise typed(answer["error"], where=self._address.location, hint="see the log: " + str(self._log))
        raise error_from_log("vLLM failed during capture", self._log, self._child.poll(), answer["error"])
