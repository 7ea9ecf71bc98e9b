"""Run by :mod:`draftsmith.capture.engines.vllm`: loads vLLM, runs rows through it, says what became of them.

``python -m draftsmith.capture.engines.vllm_child ANSWER_FD PARENT_PID``; jobs are lines of JSON on standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from draftsmith.capture.engines.messages import capture_parameters
from draftsmith.plugins.blame import plugin_error

_PR_SET_PDEATHSIG = 1
#: Seconds without any news of a state that the engine says it computed.
_PATIENCE = 120.0


class _Failed(Exception):
    """A state was not stored; carries the name of the error class that said so in the worker."""

    def __init__(self, what: str, kind: str) -> None:
        self.kind = kind
        super().__init__(what)


class _Reports:
    """Follows the file to which the connector appends one line a sample."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0
        self._known: dict[str, Mapping[str, str]] = {}

    def read(self) -> bool:
        """Take in what is new; whether there was anything."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                report = json.loads(line)
                self._known[report["sample_id"]] = report
            return bool(whole)
        return False

    def collect(self, sample_ids: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Wait until all of *sample_ids* are accounted for: (stored, refused with reasons)."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            if self.read():
                deadline = time.monotonic() + _PATIENCE
            self.raise_failure()
            missing = [each for each in sample_ids if each not in self._known]
            if not missing:
                break
            if time.monotonic() > deadline:
                raise _Failed(f"the states of {len(missing)} rows never arrived, {missing[0]} among them", "")
            time.sleep(0.005)
        reports = {each: self._known.pop(each) for each in sample_ids}
        refused = {each: report["why"] for each, report in reports.items() if report["status"] == "refused"}
        return [each for each in sample_ids if each not in refused], refused

    def raise_failure(self) -> None:
        for sample_id, report in self._known.items():
            if report["status"] == "failed":
                raise _Failed(f"sample {sample_id}: {report['why']}", report["kind"])


def _die_with_parent(parent: int) -> None:
    """A capture that is killed must not leave an engine behind that goes on writing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _load(arguments: Mapping[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(**{**arguments, "kv_transfer_config": KVTransferConfig(**arguments["kv_transfer_config"])})


def _run(llm: Any, samples: Sequence[tuple[str, str, list[int]]]) -> None:
    from vllm import SamplingParams

    llm.generate(
        [{"prompt_token_ids": token_ids} for _, _, token_ids in samples],
        [
            SamplingParams(
                max_tokens=1,
                temperature=0.0,
                detokenize=False,
                extra_args={"kv_transfer_params": capture_parameters(sample_id, digest)},
            )
            for sample_id, digest, _ in samples
        ],
        use_tqdm=False,
    )


def _serve(jobs: IO[str], answers: IO[str]) -> None:
    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    order = json.loads(jobs.readline())
    reports = _Reports(order["reports"])
    try:
        llm = _load(order["engine"])
        say(event="ready", dtype=str(llm.llm_engine.model_config.dtype).removeprefix("torch."))
        for line in jobs:
            samples = json.loads(line)["samples"]
            started = time.monotonic()
            _run(llm, samples)
            stored, refused = reports.collect([sample_id for sample_id, _, _ in samples])
            say(event="done", stored=stored, refused=refused, seconds=time.monotonic() - started)
    except Exception as error:
        cause: Exception = error
        try:
            reports.read()
            reports.raise_failure()  # what the worker said is nearer to the cause than the engine's "died"
        except _Failed as failed:
            cause = failed
        found = plugin_error(cause)
        text = str(cause).strip() or type(cause).__name__
        if found is not None:
            text = found.what
        elif not isinstance(cause, _Failed):
            text = f"{type(cause).__name__}: {text}"
        kind = getattr(cause, "kind", "" if found is None else type(found).__name__)
        say(event="failed", error=text[:2000], kind=kind)
        raise


def main(arguments: Sequence[str]) -> int:
    _die_with_parent(int(arguments[1]))
    os.set_inheritable(int(arguments[0]), False)
    with os.fdopen(int(arguments[0]), "w", encoding="utf-8") as answers:
        _serve(sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
