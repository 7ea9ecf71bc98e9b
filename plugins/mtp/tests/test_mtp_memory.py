"""What a whole train stage takes of a model, in memory and from disk: whatever its layers weigh."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from native_heads import LAYERS, add_native_head, configuration
from tiny_runs import write_recipe

from draftsmith.cli import main
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.verifier import tensor_specs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads what a process took from /proc"),
]

#: A train stage as the command runs it, in a process of its own; it tells its peak (KiB), the bytes that it read by
#: system calls, and the tensors fetched from safetensors files in the folder of the model. What it maps into memory
#: instead of reading it counts in the peak.
TRAIN = """
import json, sys, safetensors
from pathlib import Path

recipe, model = sys.argv[1:]
fetched, opened = set(), safetensors.safe_open

class Watched:
    def __init__(self, filename, *arguments, **options):
        self.file, self.own = opened(filename, *arguments, **options), Path(filename).parent == Path(model)
    def __enter__(self):
        self.file.__enter__()
        return self
    def __exit__(self, *exc):
        self.file.__exit__(*exc)
    def __getattr__(self, name):
        return getattr(self.file, name)
    def get_tensor(self, name):
        if self.own:
            fetched.add(name)
        return self.file.get_tensor(name)

safetensors.safe_open = Watched
from draftsmith.cli import main

status = main(["train", recipe])
fields = dict(line.split(":", 1) for file in ("status", "io") for line in open(f"/proc/self/{file}"))
told = {"peak": int(fields["VmHWM"].split()[0]), "read": int(fields["rchar"]), "fetched": sorted(fetched)}
Path(recipe).with_suffix(".told").write_text(json.dumps(told))
sys.exit(status)
"""
MIB = 2**20


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, dict[str, Any]]]:
    """A function of how wide the feed-forward of the model's layers is: (model, what its train stage told).

    The model is of GLM's layout. Its layers are dense, and its head's layer one of experts, whose width is another, so
    that heads are alike.
    """

    def train(width: int) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"width-{width}")
        sizes = {"intermediate_size": width, "first_k_dense_replace": LAYERS}
        model = make_tiny_verifier(folder / "verifier", configuration("glm4_moe"), num_layers=LAYERS, **sizes)
        add_native_head(model)
        question = {"role": "user", "content": "What is the capital of France?"}
        answers = ("The capital of France is Paris.", "It has eight legs, all of them.", "Because of the sky.")
        chats = [{"messages": [question, {"role": "assistant", "content": answer}]} for answer in answers]
        (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        recipe = write_recipe(
            folder,
            folder / "run",
            "mtp",
            {},
            data={"sources": [str(folder / "chats.jsonl")], "max_length": 64, "validation_share": 0.0},
            train={"epochs": 2, "tokens_per_row": 64, "compute_dtype": "float32"},
        )
        for stage in ("prepare", "capture"):
            assert main([stage, str(recipe)]) == 0
        subprocess.run([sys.executable, "-c", TRAIN, str(recipe), str(model)], check=True)
        assert (folder / "run" / "training" / "metrics.jsonl").is_file()
        return model, json.loads(recipe.with_suffix(".told").read_text())

    return train


def test_a_train_stage_takes_neither_memory_nor_reading_for_the_models_layers(
    trained: Callable[[int], tuple[Path, dict[str, Any]]],
) -> None:
    small, least = trained(96)
    large, most = trained(200_000)
    layers = (large / "model.safetensors").stat().st_size - (small / "model.safetensors").stat().st_size
    assert layers > 250 * MIB
    assert (most["peak"] - least["peak"]) * 1024 < 32 * MIB, (least["peak"], most["peak"])
    assert most["read"] - least["read"] < 16 * MIB, (least["read"], most["read"])
    head = {name for name in tensor_specs(large) if name.startswith(f"model.layers.{LAYERS}.")}
    copies = {name for name in head if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    assert len(copies) == 2
    shared = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    assert set(most["fetched"]) == set(least["fetched"]) == shared | head - copies
