"""Whole runs of an outsider's algorithm on a tiny verifier, until a real vLLM has served the draft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from chats import write_chats
from command_line import verification
from outsider import Outsider

from draftsmith.testing.verifiers import make_tiny_verifier


def write_recipe(folder: Path, **changes: object) -> Path:
    """A run of Medusa heads, unless *changes* say otherwise, on a tiny verifier and its own answers."""
    verifier = folder / "verifier"
    if not verifier.exists():
        make_tiny_verifier(verifier)
        write_chats(folder / "chats.jsonl")
    recipe = {
        "verifier": str(verifier),
        "output": str(folder / "run"),
        "algorithm": "medusa",
        "transport": "hs_file",
        "data": {"sources": ["chats.jsonl"], "max_length": 128},
        "capture": {"engine": "transformers", "store_dtype": "float32"},
        "train": {"epochs": 2, "tokens_per_row": 256},
        **changes,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def serve_what_it_learnt(outsider: Outsider, folder: Path, algorithm: str) -> dict[str, Any]:
    """Figures of a whole run, until a real vLLM has served a draft that knows the verifier's answers."""
    verify = {"prompts": "chats.jsonl", "max_tokens": 16, "max_prompts": 4, "require_vllm": True}
    train = {"epochs": 40, "tokens_per_row": 512, "learning_rate": 0.003, "compute_dtype": "float32"}
    answers = {"keep_cut_answers": True, "responses": "regenerate", "generation": {"max_tokens": 24}}
    data = {"sources": ["chats.jsonl"], "max_length": 128, **answers}
    recipe = write_recipe(folder, algorithm=algorithm, verify=verify, train=train, data=data)
    done = outsider.draftsmith("run", str(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    return verification(folder / "run")


def serve_again(outsider: Outsider, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Figures of the same draft, served once more in an *environment* with these variables."""
    # Other answers: what was served already is not served again.
    command = ("verify", str(folder / "recipe.yaml"), "--overwrite", "--set", "verify.max_tokens=12")
    done = outsider.draftsmith(*command, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return verification(folder / "run")
