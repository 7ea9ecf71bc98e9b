"""Runs on tiny verifiers by the command line: conversations, recipes, and how what cannot work is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.cli import main

__all__ = [
    "REDUCED",
    "STAGES",
    "assert_data_are_refused",
    "assert_refused",
    "run_stages",
    "write_chats",
    "write_own_answers",
    "write_recipe",
]

STAGES = ("prepare", "capture", "train", "export")
#: For algorithms whose drafts have a vocabulary of their own.
REDUCED = {"vocabulary": {"draft_size": 128}, "capture": {"engine": "transformers"}}
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "what", "is", "capital", "of", "France")


def write_chats(folder: Path, *, words: tuple[int, int] = (8, 20), count: int = 40) -> Path:
    """*count* conversations of random words, each text of *words* (fewest, most) of them: ``chats.jsonl``."""
    draw, path = random.Random(0), folder / "chats.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            question, answer = (" ".join(draw.choices(_WORDS, k=draw.randint(*words))) for _ in range(2))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def write_recipe(home: Path, output: Path, algorithm: str, options: Mapping[str, Any], **values: Any) -> Path:
    """A recipe for the folders ``verifier`` and ``chats.jsonl`` in *home*, beside *output*; *values* replace its."""
    content = {
        "verifier": str(home / "verifier"),
        "output": str(output),
        "algorithm": {"name": algorithm, "options": dict(options)},
        "transport": "hs_file",
        "data": {"sources": [str(home / "chats.jsonl")], "max_length": 128, "validation_share": 0.2},
        "train": {"epochs": 2, "tokens_per_row": 256, "learning_rate": 2e-3, "compute_dtype": "float32"},
        **values,
    }
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def write_own_answers(folder: Path, verifier: Path, algorithm: str) -> tuple[Path, Path]:
    """A recipe for a whole run on *verifier*'s own answers, until vLLM has served what it made: (recipe, output).

    Args:
        algorithm: as YAML.
    """
    text = "What is the capital of France? Why is the sky blue, please? How many legs does a spider have?"
    answer = {"role": "assistant", "content": "(the verifier writes its own)"}
    chats = [
        {"messages": [{"role": "user", "content": text[start : start + 20]}, answer]} for start in range(0, 70, 6)
    ]
    (folder / "conversations.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    output, recipe = folder / "run", folder / "recipe.yaml"
    recipe.write_text(
        f"""
verifier: {verifier}
output: {output}
algorithm: {algorithm}
data:
  sources: [conversations.jsonl]
  max_length: 128
  validation_share: 0.2
  keep_cut_answers: true
  responses: regenerate
  generation: {{max_tokens: 24}}
capture: {{engine: transformers, store_dtype: float32}}
train: {{epochs: 60, tokens_per_row: 512, learning_rate: 0.003, compute_dtype: float32}}
verify: {{prompts: conversations.jsonl, max_tokens: 16, require_vllm: true}}
"""
    )
    return recipe, output


def run_stages(recipe: Path, capsys: pytest.CaptureFixture[str], stages: tuple[str, ...] = STAGES) -> None:
    for stage in stages:
        assert main([stage, str(recipe)]) == 0, capsys.readouterr().err


def assert_refused(recipe: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The run is refused with *message* and with what to do, before anything is made."""
    assert main(["run", str(recipe)]) == 2
    _assert_told(message, capsys)
    assert not recipe.with_suffix("").exists()


def assert_data_are_refused(recipe: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The data are refused with *message* and what to do: when they are prepared, and before states are captured."""
    for stage in ("prepare", "capture"):
        assert main([stage, str(recipe)]) == 2
        _assert_told(message, capsys)
    assert not (recipe.with_suffix("") / "states" / "stage.json").exists()


def _assert_told(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert "→" in printed, "it does not say what to do"
