"""Stitching a head into a large model: seconds and bytes written, one JSON line a case.

    python benchmarks/stitch.py [--folder /a/disk] [--gigabytes 2.5] [--shards 5]

The model is random bytes in MiMo's layout, its head in the last file, among other tensors. `plain copy` copies the
folder and syncs it, and is what there is to beat; `copied` stitches without sharing, `shared` with. The model's pages
are dropped from the cache before each; the median of `--repeat` counts, the cases by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draftsmith_mtp.stitch import Stitched, stitch, unstitch

HIDDEN, INNER = 2048, 6144
Shapes = dict[str, tuple[int, ...]]


def layer(prefix: str) -> Shapes:
    """A decoder layer's tensors."""
    return {
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        **{f"{prefix}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
        **{f"{prefix}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")},
        f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
    }


def head() -> Shapes:
    prefix = "model.mtp_layers.0."
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    return {
        **{f"{prefix}{name}.weight": (HIDDEN,) for name in norms},
        f"{prefix}input_proj.weight": (HIDDEN, 2 * HIDDEN),
        **layer(prefix),
    }


def size_of(shapes: Shapes) -> int:
    total = 0
    for shape in shapes.values():
        count = 2  # bytes of a BF16 element
        for each in shape:
            count *= each
        total += count
    return total


def write_file(path: Path, shapes: Shapes) -> None:
    """A safetensors file of random bytes, a chunk at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + size_of({name: shape})
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while offset:
            offset -= file.write(os.urandom(min(offset, 1 << 24)))


def make_model(folder: Path, size: int, shards: int) -> Path:
    """A model of at least *size* bytes in *shards* files."""
    vocabulary = 32768
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, HIDDEN), "lm_head.weight": (vocabulary, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    layers = 0
    while size_of(shapes) + size_of(head()) < size:
        shapes |= layer(f"model.layers.{layers}.")
        layers += 1
    shapes |= head()
    parts: list[Shapes] = [{} for _ in range(shards)]
    done = 0
    for name, shape in shapes.items():
        parts[min(done * shards // size_of(shapes), shards - 1)][name] = shape
        done += size_of({name: shape})
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        write_file(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": size_of(shapes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "vocab_size": vocabulary,
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def drop_pages(folder: Path) -> None:
    """Ask the kernel to forget the cached pages of all files of *folder*."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain_copy(model: Path, target: Path) -> Mapping[str, Any]:
    shutil.copytree(model, target)
    for path in target.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return {"bytes_written": sum(path.stat().st_size for path in target.iterdir())}


def figures(done: Stitched) -> Mapping[str, Any]:
    return {
        "bytes_written": done.bytes_written,
        "rewritten": done.rewritten,
        "reflinked": done.reflinked,
        "hard_linked": done.linked,
        "copied": done.copied,
        "tensors": done.tensors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work; default: the system's temporary folder")
    parser.add_argument("--gigabytes", type=float, default=2.5)
    parser.add_argument("--shards", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="stitch-", dir=arguments.folder))
    try:
        (work / "model").mkdir()
        model = make_model(work / "model", int(arguments.gigabytes * 1e9), arguments.shards)
        unstitch(model, work / "head")
        target = work / "target"
        cases: dict[str, Callable[[], Mapping[str, Any]]] = {
            "plain copy": lambda: plain_copy(model, target),
            "copied": lambda: figures(stitch(model, work / "head", target, copy=True)),
            "shared": lambda: figures(stitch(model, work / "head", target)),
        }
        size = sum(path.stat().st_size for path in model.iterdir())
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        found: dict[str, Mapping[str, Any]] = {}
        for name in [*cases] * arguments.repeat:
            drop_pages(model)
            started = time.perf_counter()
            found[name] = cases[name]()
            seconds[name].append(time.perf_counter() - started)
            shutil.rmtree(target)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        for name, each in seconds.items():
            row = {
                "case": name,
                "model_bytes": size,
                "shards": arguments.shards,
                "seconds": round(statistics.median(each), 2),
                "seconds_all": [round(value, 2) for value in each],
                **found[name],
                "peak_rss_mb": round(peak),
            }
            print(json.dumps(row), flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
