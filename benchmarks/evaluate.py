"""What `draftsmith evaluate` adds to the bare engine: one JSON line a repeat, and one for all.

    python benchmarks/evaluate.py CHECKPOINT [--prompts humaneval] [--max-prompts 20] [--repeat 3]

In turn, each in a process of its own: an evaluation of the checkpoint alone (one repetition), and a bare `LLM` with
the very arguments, prompts and warm-up that the evaluation gave its engine, without rounds, clocks and progress.
`generate` are the seconds from the first prompt to the last answer; `load` those until the engine was ready; `whole`
is the wall clock of the evaluation. `added` is evaluate's `generate` over the bare one's, less 1: what measuring costs
what is measured. `beside` is what of `whole` is neither `load` nor `generate`: starting Python, reading prompts,
writing files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.evaluation.run import Settings, evaluate
from draftsmith.plugins import load_plugins
from draftsmith.serving.vllm_process import vllm_environment


def bare(order: Path) -> None:
    """In the child: what the evaluation asked of its engine, and nothing else."""
    from vllm import LLM, SamplingParams

    (job,) = json.loads(order.read_text())["engines"]
    started = time.monotonic()
    llm = LLM(**job["engine"])
    load = time.monotonic() - started
    sampling = SamplingParams(**job["sampling"])
    for name in ("warm_up", "prompts"):
        started = time.monotonic()
        answers = llm.generate([{"prompt_token_ids": ids} for ids in job[name]], sampling, use_tqdm=False)
        seconds = time.monotonic() - started
    outputs = [list(each.outputs[0].token_ids) for each in answers]
    _result(order).write_text(json.dumps({"load": load, "generate": seconds, "outputs": outputs}))


def _result(order: Path) -> Path:
    """Not on the standard output, where vLLM writes its log."""
    return order.with_name("bare.json")


def run_bare(order: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--bare", str(order)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=vllm_environment())
    found: dict[str, Any] = json.loads(_result(order).read_text())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--prompts", default="humaneval")
    parser.add_argument("--max-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args(arguments)
    if given.bare is not None:
        bare(given.bare)
        return 0
    if given.checkpoint is None:
        parser.error("name a checkpoint")
    added = []
    for repeat in range(given.repeat):
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(
                checkpoint=given.checkpoint,
                prompts=tuple(given.prompts.split(",")),
                against=(),
                max_prompts=given.max_prompts,
                max_tokens=given.max_tokens,
                concurrency=given.concurrency,
                repetitions=1,
            )
            started = time.monotonic()
            (method,) = evaluate(settings, load_plugins(), Path(folder)).methods
            whole = time.monotonic() - started
            if not method.repetitions:
                sys.exit(f"{method.name}: {method.reason}")
            (made,) = method.repetitions
            alone = run_bare(Path(folder) / "vllm" / "request.json")
        assert made.seconds is not None and made.load_seconds is not None  # noqa: PT018
        added.append(made.seconds / alone["generate"] - 1)
        line = {
            "repeat": repeat,
            "tokens": made.tokens,
            "identical": [list(each.output) for each in made.requests] == alone["outputs"],
            "evaluate": {"whole": whole, "load": made.load_seconds, "generate": made.seconds},
            "bare": {"load": alone["load"], "generate": alone["generate"]},
            "added": added[-1],
            "beside": whole - made.load_seconds - made.seconds,
        }
        print(json.dumps(line), flush=True)
    print(json.dumps({"added": statistics.median(added), "lowest": min(added), "highest": max(added)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
