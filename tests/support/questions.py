"""Questions to a tiny verifier, and a draft that knows its answers by heart: what evaluation and serving ask."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from by_heart import Material, learn

from draftsmith.capture.engines.transformers import load_verifier
from draftsmith.data.template import load_tokenizer
from draftsmith.evaluation.prompts import encode, load_prompts
from draftsmith.plugins.manager import PluginRegistry
from draftsmith.serving.verifier_model import generate_greedily
from draftsmith.verifier import read_verifier

TOPICS = ("colour", "number")
#: Tokens of an answer, and how many more are known of it.
ANSWER, BEYOND = 20, 8


def write_questions(path: Path) -> Path:
    """Eight short questions in two categories."""
    rows = [{"prompt": f"Name {topic} {n}.", "category": topic} for topic in TOPICS for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def learn_questions(
    questions: Path, verifier: Path, registry: PluginRegistry, export: Callable[..., SimpleNamespace], folder: Path
) -> SimpleNamespace:
    """The exported draft, with the *prompts* (token ids), and the verifier's own greedy *answers* to them."""
    ids = encode(load_prompts([str(questions)], registry, Path()), load_tokenizer(verifier))
    model = load_verifier(verifier, dtype=torch.float32, device=torch.device("cpu"))
    prompts = [list(each) for each in ids]
    answers = generate_greedily(model, prompts, ANSWER, BEYOND, ())
    material = Material(verifier, read_verifier(verifier), model, prompts, answers)
    found = export(folder, verifier, train=learn(material, registry, steps=120, rate=4e-3))
    found.prompts, found.answers = prompts, [tuple(answer[:ANSWER]) for answer in answers]
    return found
