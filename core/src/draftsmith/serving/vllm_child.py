"""Run by :mod:`draftsmith.serving.vllm_process` as ``python -m draftsmith.serving.vllm_child REQUEST.json``.

The only file of the serving package that imports vLLM, and it does so in its own process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.plugins.blame import plugin_error
from draftsmith.serving.vllm_timing import EXTENSION
from draftsmith.stages import write_json_atomically

PREFIX = "vllm:spec_decode_num_"


def main(arguments: Sequence[str]) -> int:
    """Load each requested engine, generate, and write its result. Stops at the first failure, and says what it is."""
    order = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    for job in order["engines"]:
        try:
            write_json_atomically(Path(job["result"]), _run(job, Path(order["progress"])))
        except Exception as error:
            found = plugin_error(error)
            text = f"{type(error).__name__}: {error}" if found is None else found.what
            write_json_atomically(Path(order["failure"]), {"engine": job["name"], "error": text.strip()[:2000]})
            raise
    return 0


def _run(job: Mapping[str, Any], ticks: Path) -> dict[str, Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    started = time.monotonic()
    # vLLM's own counters know no prompts.
    detail = "detailed" if job["rounds"] else "summary" if job["groups"] else None
    counted = {"per_request_spec_decode_metrics": detail} if detail else {}
    # Whoever mixes something of his own into the workers goes without the clocks.
    timed = job["clocks"] and "worker_extension_cls" not in job["engine"]
    clocks = {"worker_extension_cls": EXTENSION} if timed else {}
    llm = LLM(**job["engine"], **counted, **clocks)
    loaded = time.monotonic()
    try:
        generated = _generate(llm, job, ticks, timed=timed)
        generated["eos_token_ids"] = _eos_token_ids(llm)
        generated["load_seconds"] = round(loaded - started, 2)
        return generated
    finally:
        with contextlib.suppress(Exception):
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _generate(llm: Any, job: Mapping[str, Any], ticks: Path, *, timed: bool) -> dict[str, Any]:
    """Answer all prompts at once. vLLM's counters only grow, so this engine's are a difference of two readings."""
    from vllm import SamplingParams

    sampling = SamplingParams(**job["sampling"])
    if job["warm_up"]:
        llm.generate([{"prompt_token_ids": prompt} for prompt in job["warm_up"]], sampling, use_tqdm=False)
    if timed:
        llm.collective_rpc("draftsmith_start_clocks")
    before = _read_counters(llm)
    started = time.monotonic()
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in job["prompts"]],
        sampling,
        use_tqdm=_progress(ticks, job["name"]),
    )
    seconds = time.monotonic() - started
    completions = [answer.outputs[0] for answer in answers]
    members: dict[str, list[Any]] = {}
    for name, each in zip(job["groups"] or [], completions, strict=False):
        members.setdefault(name, []).append(each.spec_decode_metrics)
    return {
        "outputs": [list(each.token_ids) for each in completions],
        "finish_reasons": [each.finish_reason for each in completions],
        "counters": _difference(before, _read_counters(llm)),
        "counters_by_group": {name: _summed(metrics) for name, metrics in sorted(members.items())},
        "rounds": [_rounds(each.spec_decode_metrics) for each in completions] if job["rounds"] else [],
        "times": [_times(answer.metrics) for answer in answers],
        "generate_seconds": round(seconds, 4),
        "clocks": _read_clocks(llm) if timed else None,
    }


def _read_clocks(llm: Any) -> dict[str, float | None]:
    """Of the worker that drafts, where there are several; they step together."""
    found: list[dict[str, float | None]] = llm.collective_rpc("draftsmith_read_clocks")
    return max(found, key=lambda each: each["drafting"] or 0.0)


def _rounds(metrics: Any) -> list[tuple[int, int]]:
    """(drafted, accepted) of each of a request's rounds."""
    return [] if metrics is None else list(zip(metrics.per_step_drafted, metrics.per_step_accepted, strict=True))


def _times(metrics: Any) -> tuple[float, float] | None:
    """Seconds from when the engine began with a request until its first and its last token."""
    if metrics is None or not metrics.scheduled_ts:
        return None
    return metrics.first_token_ts - metrics.scheduled_ts, metrics.last_token_ts - metrics.scheduled_ts


def _read_counters(llm: Any) -> dict[str, Any] | None:
    """vLLM's counters so far; None where the engine drafts nothing."""
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith(PREFIX)}
    if f"{PREFIX}drafts" not in found:
        return None
    return {
        "drafts": found[f"{PREFIX}drafts"].value,
        "drafted": found[f"{PREFIX}draft_tokens"].value,
        "accepted": found[f"{PREFIX}accepted_tokens"].value,
        "accepted_per_position": list(found[f"{PREFIX}accepted_tokens_per_pos"].values),
    }


def _difference(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if after is None:
        return None
    if before is None:
        return dict(after)
    counts = {key: after[key] - before[key] for key in ("drafts", "drafted", "accepted")}
    pairs = zip(after["accepted_per_position"], before["accepted_per_position"], strict=True)
    return {**counts, "accepted_per_position": [new - old for new, old in pairs]}


def _summed(requests: Sequence[Any]) -> dict[str, Any]:
    """Some requests' rounds in the form of the counters; vLLM says in how many rounds n tokens were accepted."""
    rounds = [sum(counts) for counts in zip(*(each.histogram for each in requests), strict=True)]
    return {
        "drafts": sum(rounds),
        "drafted": sum(each.num_draft_tokens for each in requests),
        "accepted": sum(accepted * count for accepted, count in enumerate(rounds)),
        "accepted_per_position": [sum(rounds[position + 1 :]) for position in range(len(rounds) - 1)],
    }


def _eos_token_ids(llm: Any) -> list[int]:
    """What vLLM ends an answer at: the tokenizer's end token, and those of the generation config."""
    ids: set[int] = set()
    config = llm.llm_engine.model_config.try_get_generation_config() or {}
    for value in (llm.get_tokenizer().eos_token_id, config.get("eos_token_id")):
        ids |= set(value) if isinstance(value, list) else set() if value is None else {value}
    return sorted(ids)


def _progress(ticks: Path, name: str) -> Callable[..., Any]:
    """A progress bar for vLLM that writes the number of finished prompts to a file instead of drawing."""
    import os

    from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

    class ToFile(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            # Kept open as long as the bar: vLLM may never close it.
            super().__init__(*arguments, **{**keywords, "file": open(os.devnull, "w", encoding="utf-8")})  # noqa: SIM115

        def update(self, n: float | None = 1) -> bool | None:
            told = super().update(n)
            temporary = ticks.with_suffix(".tmp")
            temporary.write_text(f"{name} {int(self.n)}", encoding="utf-8")
            os.replace(temporary, ticks)
            return told  # type: ignore[no-any-return,unused-ignore]

    return ToFile


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
