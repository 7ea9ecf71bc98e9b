"""The peer's side of `train_step.py`: optimiser steps of speculators 0.9.0 on one packed row.

Run with the Python of an environment that has speculators (and not draftsmith). It builds the model through the
peer's own command-line configuration, reads and collates with its own dataset and shift, and repeats what its trainer
does for a batch: forward under autocast, zero_grad, backward, clipping, optimiser step. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import statistics
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


def memory(field: str) -> float:
    """MiB of VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return float("nan")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", choices=["eagle3", "dflash", "dspark", "peagle", "mtp"], default="eagle3")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--draft-vocabulary", type=int, required=True)
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--depths", type=int, default=8)
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def with_native_head(verifier: Path, data: Path) -> Path:
    """A folder of the verifier's sizes in the one native layout with an ordinary layer that the peer knows: qwen3,
    with a random head. Of the rest, embedding and norm are all that it reads."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder = data / f"{verifier.name}-qwen3"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((verifier / "config.json").read_text())
    with safe_open(verifier / "model.safetensors", framework="pt") as file:
        kept = [name for name in file.keys() if name.startswith(("model.embed_tokens", "model.norm", "lm_head"))]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in kept}
        first = {
            name.removeprefix("model.layers.0."): file.get_tensor(name).shape
            for name in file.keys()  # noqa: SIM118
            if name.startswith("model.layers.0.")
        }
    width, head_dim = config["hidden_size"], config["head_dim"]
    shapes = {f"mtp.layers.0.{name}": shape for name, shape in first.items()}
    shapes |= {f"mtp.layers.0.self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    shapes |= {f"mtp.{name}.weight": (width,) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    shapes["mtp.fc.weight"] = (width, 2 * width)
    dtype = tensors["model.norm.weight"].dtype
    for name, shape in shapes.items():
        tensors[name] = (torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape)).to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "mtp_num_hidden_layers": 1}
    for extra in verifier.iterdir():
        if extra.suffix in (".json", ".jinja", ".txt") and not extra.name.startswith(("config", "model")):
            (folder / extra.name).write_bytes(extra.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    ours = parse()
    import torch
    from loguru import logger
    from safetensors.torch import load_file

    logger.remove()
    from speculators.model import SpeculatorModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.models.mtp.data import shift_batch_mtp
    from speculators.models.utils import get_verifier_config
    from speculators.train.cli import create_transformer_layer_config, resolve_mask_token_id
    from speculators.train.config import TrainConfig
    from speculators.train.data import ArrowDataset, CollateFn
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    if not SpeculatorModel.registry:
        SpeculatorModel.auto_populate_registry()
    torch.manual_seed(0)
    dtype = getattr(torch, ours.dtype)
    dataset = str(ours.data / "dataset")
    shifts, native = ours.algorithm in ("eagle3", "peagle"), ours.algorithm == "mtp"
    layers = 1 if ours.algorithm == "eagle3" or native else ours.layers
    if native:
        own = {}
        counts = {"ttt_steps": ours.ttt_steps}
        ours.verifier = str(with_native_head(Path(ours.verifier), ours.data))
    elif ours.algorithm == "eagle3":
        own = {"--ttt-steps": str(ours.ttt_steps)}
        counts = {"ttt_steps": ours.ttt_steps}
    elif ours.algorithm == "peagle":
        own = {"--num-depths": str(ours.depths), "--max-anchors": str(ours.anchors)}
        counts = {"anchors": ours.anchors, "depths": ours.depths, "layers": layers}
    else:
        own = {"--block-size": str(ours.block_size), "--max-anchors": str(ours.anchors)}
        counts = {"anchors": ours.anchors, "block_size": ours.block_size, "layers": layers}
    flags = {
        "--verifier-name-or-path": ours.verifier,
        "--speculator-type": ours.algorithm,
        "--data-path": dataset,
        "--total-seq-len": str(ours.tokens),
        **({} if native else {"--num-layers": str(layers), "--draft-attn-impl": "sdpa"}),
        **own,
        # what runs on a CPU: flex attention has no backward there, and its fused losses need Triton
        "--loss-implementation": "eager",
        "--hidden-states-dtype": ours.dtype,
        "--optimizer": "adamw",
    }
    settings = argparse.Namespace(**TrainConfig.resolve([word for pair in flags.items() for word in pair]).flatten())
    config = get_verifier_config(ours.verifier)
    d2t = t2d = None
    if ours.draft_vocabulary < config.vocab_size:
        seen = load_file(ours.data / "counts.safetensors")["counts"]
        frequencies = {token: int(seen[token]) for token in seen.nonzero().flatten().tolist()}
        d2t, t2d = build_vocab_mappings_from_distribution(frequencies, ours.draft_vocabulary, config.vocab_size)
    settings.draft_vocab_size = min(ours.draft_vocabulary, config.vocab_size)
    if native:
        layer = config
        settings.num_speculative_steps = ours.ttt_steps
    else:
        layer = create_transformer_layer_config(
            ours.verifier,
            layers,
            settings.draft_arch,
            settings.draft_hidden_act,
            settings.sliding_window,
            settings.full_attention_indices,
        )
    if ours.algorithm != "eagle3" and not native:
        settings.mask_token_id = resolve_mask_token_id(ours.verifier, config.vocab_size, None)
    kind = SpeculatorModel.registry[ours.algorithm]
    model = kind.from_training_args(verifier_config=layer, t2d=t2d, d2t=d2t, **vars(settings))
    model.train()

    rows, filled = [], 0
    source = ArrowDataset(ours.tokens, dataset, on_missing="raise", hidden_states_dtype=dtype)
    while filled < ours.tokens and len(rows) < len(source):
        rows.append(source[len(rows)])
        filled += rows[-1]["input_ids"].shape[0] - shifts
    collate = CollateFn(
        ours.tokens,
        config.hidden_size,
        num_target_layers=len(model.target_layer_ids),
        dtype=dtype,
        preprocess=shift_batch if shifts else shift_batch_mtp if native else None,
    )
    batch = {k: v for k, v in collate(rows).items() if k not in ("error_records", "__recovery__")}
    call, _ = kind.get_trainer_kwargs(**vars(settings))
    optimizers = build_optimizers(
        model, TrainerConfig(lr=settings.lr, num_epochs=1, save_path="", optimizer="adamw", muon_lr=settings.lr)
    )

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of building
    before = memory("VmRSS")
    seconds, cpu, losses = [], [], []
    for _ in range(ours.warmup + ours.steps):
        started, cpu_started = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            _, loss, _ = model(**batch, **call)
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in optimizers:
            each.step()
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
        losses.append(float(loss))
    step = statistics.median(seconds[ours.warmup :])
    tokens = int((batch["document_ids"] != -1).sum())
    print(
        json.dumps(
            {
                "side": "speculators-0.9.0",
                "algorithm": ours.algorithm,
                "dtype": ours.dtype,
                "tokens": tokens,
                "documents": len(rows),
                "supervised": int(batch["loss_mask"].sum()),
                "draft_vocabulary": settings.draft_vocab_size,
                **counts,
                "step_s": round(step, 3),
                "step_min_s": round(min(seconds[ours.warmup :]), 3),
                "cpu_s": round(statistics.median(cpu[ours.warmup :]), 3),
                "tokens_per_s": round(tokens / step, 1),
                "added_mib": round(memory("VmHWM") - before),
                "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
                "trainable_m": round(sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6, 2),
                "loss": [round(each, 4) for each in losses],
                "threads": torch.get_num_threads(),
                "load": round(os.getloadavg()[0], 1),
            }
        )
    )


if __name__ == "__main__":
    sys.exit(main())
