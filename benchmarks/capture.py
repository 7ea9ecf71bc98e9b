"""Tokens captured per second against the engine's plain prefill: one JSON line a case.

    python benchmarks/capture.py --verifier models/SmolLM2-135M-Instruct [--engine vllm] [--rows 32] [--tokens 256]

`prefill` runs the same rows through the same engine without keeping any state; `capture` stores four layer ids through
the folder transport. Both are measured `--repeat` times after a first pass over a few rows; the median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.capture.address import TransportAddress, open_transport
from draftsmith.capture.engines import CaptureSetup, Request
from draftsmith.interfaces import StateLayout
from draftsmith.verifier import read_verifier
from draftsmith_hs_file.options import FileOptions
from draftsmith_hs_file.plugin import draftsmith_transports

PREFILL = """
import json, sys, time
from vllm import LLM, SamplingParams
order = json.loads(sys.stdin.readline())
llm = LLM(**order["engine"])
greedy = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
def run(rows):
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": row} for row in rows], greedy, use_tqdm=False)
    return time.perf_counter() - started
run(order["rows"][:4])
print("SECONDS " + json.dumps([run(order["rows"]) for _ in range(order["repeat"])]), flush=True)
"""


def rows(count: int, tokens: int, vocabulary: int) -> list[Request]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [
        Request(f"{number:032x}", torch.randint(5, vocabulary, (tokens,), generator=generator).tolist())
        for number in range(count)
    ]


def capture_seconds(engine: Any, requests: list[Request], repeat: int) -> list[float]:
    """Seconds of each of *repeat* captures of all rows, after a first one of a few."""

    def once(part: list[Request]) -> float:
        started = time.perf_counter()
        stored = sum(len(done.stored) for done in engine.capture(part))
        assert stored == len(part)
        return time.perf_counter() - started

    with engine:
        once(requests[:4])
        return [once(requests) for _ in range(repeat)]


def transformers_case(
    setup: CaptureSetup, location: Path, requests: list[Request], repeat: int
) -> dict[str, Callable[[], list[float]]]:
    import torch

    from draftsmith.capture.engines import batches_by_length
    from draftsmith.capture.engines.transformers import TransformersEngine, find_decoder, load_verifier

    transport = open_transport(draftsmith_transports()[0], FileOptions(), location)
    engine = TransformersEngine(setup, lambda: transport.writer(setup.layout))

    def prefill() -> list[float]:
        dtype = getattr(torch, engine.compute_dtype)
        model = load_verifier(setup.verifier.path, dtype=dtype, device=torch.device("cpu"))
        decoder = find_decoder(model).module

        def once(part: list[Request]) -> float:
            started = time.perf_counter()
            with torch.inference_mode():
                for batch in batches_by_length(part, setup.batch_tokens):
                    decoder(input_ids=torch.tensor([list(each.token_ids) for each in batch]), use_cache=False)
            return time.perf_counter() - started

        once(requests[:4])
        return [once(requests) for _ in range(repeat)]

    return {"prefill": prefill, "capture": lambda: capture_seconds(engine, requests, repeat)}


def vllm_case(
    setup: CaptureSetup, location: Path, requests: list[Request], repeat: int
) -> dict[str, Callable[[], list[float]]]:
    from draftsmith.capture.engines.vllm import VllmEngine, engine_arguments
    from draftsmith.serving.vllm_process import vllm_environment

    address = TransportAddress.of(draftsmith_transports()[0], FileOptions(), location, setup.layout)

    def prefill() -> list[float]:
        engine = engine_arguments(setup, address, Path(os.devnull))
        engine.pop("kv_transfer_config")
        engine.pop("speculative_config")
        order = {"engine": engine, "rows": [list(each.token_ids) for each in requests], "repeat": repeat}
        told = subprocess.run(
            [sys.executable, "-c", PREFILL],
            input=json.dumps(order) + "\n",
            env=vllm_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
        line = next(line for line in told.stdout.splitlines() if line.startswith("SECONDS "))
        seconds: list[float] = json.loads(line.removeprefix("SECONDS "))
        return seconds

    return {
        "prefill": prefill,
        "capture": lambda: capture_seconds(VllmEngine(setup, address), requests, repeat),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--engine", nargs="*", default=["transformers", "vllm"], choices=["transformers", "vllm"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()

    import torch

    from draftsmith.capture.engines.transformers import own_dtype, verifier_dtype
    from draftsmith.device import resolve_device

    facts = read_verifier(arguments.verifier)
    n = facts.num_layers
    layer_ids = (2, n // 2, n - 3, n)
    dtype = verifier_dtype(arguments.dtype, own_dtype(facts), resolve_device("auto"))
    requests = rows(arguments.rows, arguments.tokens, facts.vocab_size)
    folder = Path(tempfile.mkdtemp(prefix="capture-"))
    try:
        for name in arguments.engine:
            setup = CaptureSetup(
                verifier=facts,
                layout=StateLayout(
                    fingerprint="0" * 32, layer_ids=layer_ids, hidden_size=facts.hidden_size, dtype="bfloat16"
                ),
                dtype=str(dtype).removeprefix("torch."),
                batch_tokens=arguments.batch_tokens,
                longest=arguments.tokens,
                work_folder=folder / "work",
            )
            make = vllm_case if name == "vllm" else transformers_case
            total = arguments.rows * arguments.tokens
            for case, run in make(setup, folder / name, requests, arguments.repeat).items():
                seconds = statistics.median(run())
                row = {
                    "engine": name,
                    "case": case,
                    "tokens": total,
                    "dtype": setup.dtype,
                    "threads": torch.get_num_threads(),
                    "tokens_per_s": round(total / seconds, 1),
                }
                print(json.dumps(row), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
