"""Training steps, ours and the peer's, in turn on the same rows. One JSON line a case and side.

    python benchmarks/train_step.py --peer-python /path/to/peer/bin/python
    python benchmarks/train_step.py --algorithm dflash --block-size 8 16 --peer-python …
    python benchmarks/train_step.py --algorithm peagle --depths 8 --anchors 512 --peer-python …
    python benchmarks/train_step.py --algorithm mtp --peer-python …
    python benchmarks/train_step.py --tokens 1024 --draft-vocabulary 8192            # ours alone
    python benchmarks/train_step.py --algorithm dflash --anchors 64 256 1024         # memory against anchors

Each measurement runs in a process of its own, so that its peak memory is its own. Times are of whole optimiser steps:
forward over all steps or blocks, loss, metrics, backward, clipping, AdamW. Ours runs in the dtype that
`compute_dtype: auto` chooses; the peer in its default (bf16 autocast) and in float32, which is the faster one on CPUs
without bf16 matrix instructions. After each case a line compares ours with the peer's *faster* dtype.

Blocks hang on `--anchors` anchors of the row: ours have a budget per document, here the one that comes closest
(`anchors` says how many there are); the peer draws so many from the row. Depths continue `--anchors` tokens of the row
on both sides, which sample by the same rule.

Native heads (mtp) draft all tokens, and belong to a model: ours is of MiMo's layout (tools/make_mimo.py), the peer's
of Qwen's with an ordinary qwen3 layer, which it knows, both of the same sizes and with random heads.

The share of the matmul peak is (floating-point operations of the step's matrix products and attention, as torch's
counter sees them) / (step time x rate of a 1024 x 576 x 8192 product measured beside it).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


class Kind(NamedTuple):
    """How an algorithm is measured.

    Attributes:
        lost: tokens of a document that are no draft position.
        drafts: step by step from every row, blocks at anchors, or all depths from every row in one pass.
        anchors, layers: what is measured unless the command line says otherwise.
        native: whether it is the verifier's own head, so that the verifier must have one.
    """

    lost: int
    drafts: Literal["steps", "blocks", "depths"]
    anchors: int = 128
    layers: int = 3
    native: bool = False


KINDS = {
    "eagle3": Kind(1, "steps"),
    "dflash": Kind(0, "blocks"),
    "dspark": Kind(0, "blocks"),
    "mtp": Kind(0, "steps", native=True),
    "peagle": Kind(1, "depths", anchors=512, layers=1),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=KINDS, default="eagle3")
    parser.add_argument("--verifier", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument(
        "--conversations", type=Path, default=ROOT / "examples" / "data" / "smollm2_conversations.jsonl"
    )
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "draftsmith-benchmark")
    parser.add_argument("--peer-python", type=Path, default=None)
    parser.add_argument("--peer-dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1024, 2048])
    parser.add_argument("--draft-vocabulary", type=int, nargs="*", default=None, help="mtp: all; else 8192 and 49152")
    parser.add_argument("--ttt-steps", type=int, default=3, help="eagle3, mtp")
    parser.add_argument("--block-size", type=int, nargs="*", default=[8, 16], help="dflash, dspark")
    parser.add_argument("--depths", type=int, default=8, help="peagle")
    parser.add_argument(
        "--anchors", type=int, nargs="*", help="in the whole row: dflash, dspark (128 by default), peagle (512)"
    )
    parser.add_argument("--layers", type=int, help="dflash, dspark (3 by default), peagle (1, as the peer)")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    kind = KINDS[arguments.algorithm]
    if arguments.draft_vocabulary is None:
        arguments.draft_vocabulary = [49152] if kind.native else [8192, 49152]
    arguments.anchors = arguments.anchors or [kind.anchors]
    arguments.layers = arguments.layers or kind.layers
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    from bench_data import ensure_data

    ensure_data(arguments.data, arguments.verifier, arguments.conversations, max(arguments.tokens))
    for vocabulary, tokens in itertools.product(arguments.draft_vocabulary, arguments.tokens):
        for what in variants(arguments):
            case(arguments, {"tokens": tokens, "draft-vocabulary": vocabulary, **what})


def variants(arguments: argparse.Namespace) -> Iterator[dict[str, int]]:
    """The flags, beside tokens and vocabulary, of each case."""
    drafts = KINDS[arguments.algorithm].drafts
    if drafts == "steps":
        yield {"ttt-steps": arguments.ttt_steps}
    elif drafts == "depths":
        for anchors in arguments.anchors:
            yield {"depths": arguments.depths, "anchors": anchors, "layers": arguments.layers}
    else:
        yield from blocks(arguments)


def blocks(arguments: argparse.Namespace) -> Iterator[dict[str, int]]:
    for block_size, anchors in itertools.product(arguments.block_size, arguments.anchors):
        yield {"block-size": block_size, "anchors": anchors, "layers": arguments.layers}


def case(arguments: argparse.Namespace, what: dict[str, int]) -> None:
    flags = [word for name, value in what.items() for word in (f"--{name}", str(value))]
    shared = [
        *("--algorithm", arguments.algorithm, "--data", str(arguments.data), "--verifier", str(arguments.verifier)),
        *("--warmup", str(arguments.warmup), "--steps", str(arguments.steps), *flags),
    ]
    ours = run([sys.executable, str(HERE / "train_step.py"), "--one", *shared])
    if arguments.peer_python is None:
        return
    peers = [
        run([str(arguments.peer_python), str(HERE / "peer_step.py"), "--dtype", dtype, *shared])
        for dtype in arguments.peer_dtypes
    ]
    peers = [each for each in peers if "error" not in each]
    if "error" in ours or not peers:
        return
    best = min(peers, key=lambda each: each["step_s"])
    comparison = {
        "case": f"{arguments.algorithm}: " + ", ".join(f"{name} {value}" for name, value in what.items()),
        "peer_dtype": best["dtype"],
        "times_tokens_per_s": round(ours["tokens_per_s"] / best["tokens_per_s"], 2),
        "times_cpu": round(best["cpu_s"] / ours["cpu_s"], 2),
        "share_of_added_memory": round(ours["added_mib"] / best["added_mib"], 2),
    }
    print(json.dumps(comparison), flush=True)


def run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result = json.loads(lines[-1]) if lines else {"error": done.stderr.strip()[-400:], "command": command}
    print(json.dumps(result), flush=True)
    return dict(result)


# --- our side ---------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from draftsmith.config.schema import TrainConfig
    from draftsmith.train.optimizers import build_optimizers
    from draftsmith.train.setup import count_parameters
    from draftsmith.train.step import train_step

    vocabulary = arguments.draft_vocabulary[0]
    objective, row, counts = build(arguments)
    optimizers = build_optimizers(objective.model, TrainConfig(), {vocabulary})

    def step() -> float:
        generator = torch.Generator().manual_seed(0)
        result = train_step(objective, optimizers, [row], [generator], clip_norm=1.0)
        total, count = result.pairs["loss"].tolist()
        return float(total / count)

    rates = [matmul_rate(objective.compute_dtype)]
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of building
    before = memory("VmRSS")
    seconds, cpu, losses = [], [], []
    for _ in range(arguments.warmup + arguments.steps):
        started, cpu_started = time.perf_counter(), time.process_time()
        losses.append(step())
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
    added = memory("VmHWM") - before
    rates.append(matmul_rate(objective.compute_dtype))
    with FlopCounterMode(display=False) as counter:
        step()
    median = statistics.median(seconds[arguments.warmup :])
    lost = KINDS[arguments.algorithm].lost  # as the peer counts
    tokens = row.input_ids.shape[0] - lost * len(row.sample_ids)
    rate = statistics.mean(rates)
    return {
        "side": "draftsmith",
        "algorithm": arguments.algorithm,
        "dtype": str(objective.compute_dtype).removeprefix("torch."),
        "tokens": tokens,
        "documents": len(row.sample_ids),
        "supervised": int(row.loss_mask.sum()),
        "draft_vocabulary": vocabulary,
        **counts,
        "step_s": round(median, 3),
        "step_min_s": round(min(seconds[arguments.warmup :]), 3),
        "cpu_s": round(statistics.median(cpu[arguments.warmup :]), 3),
        "tokens_per_s": round(tokens / median, 1),
        "added_mib": round(added),
        "gflop": round(counter.get_total_flops() / 1e9, 1),
        "matmul_gflop_per_s": round(rate / 1e9, 1),
        "share_of_matmul_peak": round(counter.get_total_flops() / median / rate, 3),
        "trainable_m": round(count_parameters(objective.model).trainable / 1e6, 2),
        "loss": [round(each, 4) for each in losses],
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
    }


def build(arguments: argparse.Namespace) -> tuple[Any, Any, dict[str, int]]:
    """(objective, packed row with the teacher's statistics, what a step counts), from the installed plugin by name."""
    import attrs
    import torch
    from bench_data import pack_documents, read_counts

    from draftsmith.data.vocabulary import build_vocabulary
    from draftsmith.device import resolve_dtype
    from draftsmith.interfaces import AlgorithmSetup, DraftAlgorithm, DraftArchitecture, MaskRule
    from draftsmith.plugins import load_plugins, load_reference
    from draftsmith.train.scoring import Teacher
    from draftsmith.train.setup import build_draft, build_loss
    from draftsmith.train.step import Objective
    from draftsmith.verifier import read_verifier
    from draftsmith.verifier_weights import load_verifier_weights

    device = torch.device("cpu")
    dtype = resolve_dtype("auto", device)
    registry = load_plugins()
    item = registry.algorithms.get(arguments.algorithm)
    facts = read_verifier(with_native_head(arguments) if KINDS[arguments.algorithm].native else arguments.verifier)
    weights = load_verifier_weights(facts)
    (size,), (tokens,) = arguments.draft_vocabulary, arguments.tokens
    vocabulary = build_vocabulary(read_counts(arguments.data), None if size >= facts.vocab_size else size)
    row = pack_documents(arguments.data, tokens, lost=KINDS[arguments.algorithm].lost)
    if KINDS[arguments.algorithm].native:
        row = attrs.evolve(row, taps=row.last_hidden)
    options = item.options(**chosen_options(arguments, facts, row))
    setup = AlgorithmSetup(
        options=options,
        verifier=facts,
        weights=weights,
        vocabulary=vocabulary,
        capture=item.requirements(options, facts),
        mask=load_reference(registry.masks.get(item.mask).implementation, expected=MaskRule)(window=None),
        architecture=load_reference(
            registry.architectures.get(item.architecture).implementation, expected=DraftArchitecture
        ),
        attention="auto",
        compute_dtype=dtype,
    )
    algorithm = load_reference(item.implementation, expected=DraftAlgorithm)(setup)
    model = build_draft(algorithm, device, seed=0)
    model.train()
    loss = build_loss(registry.losses, item.loss, item.loss_options)
    teacher = Teacher(weights, vocabulary, device=device, compute_dtype=dtype)
    # Computed at capture, once for all epochs: no part of a step.
    token, logsumexp = teacher.statistics(row.last_hidden)
    row = attrs.evolve(row, teacher_token=token, teacher_logsumexp=logsumexp)
    batch = algorithm.make_batch(row, torch.Generator().manual_seed(0))
    with torch.no_grad():
        counts = {"slots": algorithm.forward(model, batch).teacher_row.shape[0]}
    drafts = KINDS[arguments.algorithm].drafts
    if drafts == "blocks":
        counts |= {"anchors": len(batch.blocks), "block_size": options.block_size, "layers": options.num_layers}
    elif drafts == "depths":
        counts |= {"anchors": options.max_anchors, "depths": options.num_depths, "layers": options.num_layers}
    else:
        counts |= {"ttt_steps": arguments.ttt_steps}
    objective = Objective(
        algorithm=algorithm,
        model=model,
        teacher=teacher,
        loss=loss,
        reduction=item.reduction,
        out_of_vocabulary="renormalise",
        compute_dtype=dtype,
    )
    return objective, row, counts


def chosen_options(arguments: argparse.Namespace, facts: Any, row: Any) -> dict[str, Any]:
    """The algorithm's options: as the peer's defaults where the command line does not say."""
    drafts, (anchors,) = KINDS[arguments.algorithm].drafts, arguments.anchors
    if KINDS[arguments.algorithm].native:
        return {"num_steps": arguments.ttt_steps}
    if drafts == "steps":
        return {"ttt_steps": arguments.ttt_steps}
    if drafts == "depths":
        return {"num_depths": arguments.depths, "max_anchors": anchors, "num_layers": arguments.layers}
    n, (block_size,) = facts.num_layers, arguments.block_size
    return {
        "block_size": block_size,
        "num_layers": arguments.layers,
        "layer_ids": (2, n // 2, n - 3),
        "max_anchors": budget_per_document(row, anchors),
    }


def with_native_head(arguments: argparse.Namespace) -> Path:
    """The verifier with a random native head, made beside the data once."""
    sys.path.insert(0, str(ROOT / "tools"))
    from make_mimo import make

    folder = arguments.data / f"{arguments.verifier.name}-mimo"
    make(arguments.verifier.absolute(), folder, seed=0)
    return folder


def budget_per_document(row: Any, anchors: int) -> int:
    """The number of anchors a document with which the row comes closest to *anchors*."""
    from draftsmith.rows import supervised_run

    eligible = (supervised_run(row.loss_mask, row.document_ids) >= 2) & (row.position_ids > 0)
    each = [int(eligible[row.document_ids == document].sum()) for document in range(len(row.sample_ids))]
    totals = [sum(min(count, budget) for count in each) for budget in range(1, max(each) + 1)]
    return 1 + min(range(len(totals)), key=lambda place: abs(totals[place] - anchors))


def matmul_rate(dtype: Any) -> float:
    """FLOP/s of a 1024 x 576 by 576 x 8192 product, the best of five."""
    import torch

    x, weight = torch.randn(1024, 576, dtype=dtype), torch.randn(8192, 576, dtype=dtype)
    out = torch.empty(1024, 8192, dtype=dtype)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        torch.mm(x, weight.t(), out=out)
        times.append(time.perf_counter() - started)
    return 2 * 1024 * 576 * 8192 / min(times)


def memory(field: str) -> float:
    """MiB of VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return float("nan")


if __name__ == "__main__":
    main()
