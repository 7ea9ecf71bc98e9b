"""What the tests of training build: a tiny algorithm on a tiny verifier, rows in memory, and a whole run on disk."""

from __future__ import annotations

import json
import random

import attrs
import torch
import yaml

from draftsmith.api import CaptureRequirements
from draftsmith.config.schema import TrainConfig
from draftsmith.interfaces import AlgorithmSetup, PackedRow, VocabularyMap
from draftsmith.losses.divergence import ForwardKL
from draftsmith.train.optimizers import build_optimizers
from draftsmith.train.scoring import Teacher
from draftsmith.train.setup import build_draft
from draftsmith.train.step import Objective
from draftsmith.verifier import read_verifier
from draftsmith.verifier_weights import load_verifier_weights
from draftsmith_tiny.algorithm import Tiny, TinyDraft
from draftsmith_tiny.options import TinyOptions

CPU = torch.device("cpu")


def vocabulary(target_size, draft_size):
    kept = torch.arange(draft_size) * (target_size // draft_size)
    t2d = torch.zeros(target_size, dtype=torch.bool)
    t2d[kept] = True
    return VocabularyMap(d2t=kept - torch.arange(draft_size), t2d=t2d)


def setup(verifier_folder, *, draft_size=None, **options):
    facts = read_verifier(verifier_folder)
    return AlgorithmSetup(
        options=TinyOptions(**options),
        verifier=facts,
        weights=load_verifier_weights(facts),
        vocabulary=vocabulary(facts.vocab_size, draft_size or facts.vocab_size),
        capture=CaptureRequirements(layer_ids=(1, facts.num_layers - 1)),
        mask=None,
        architecture=TinyDraft,
        attention="auto",
        compute_dtype=torch.float32,
    )


def objective(tiny_setup, *, seed=0, **changes):
    algorithm = Tiny(tiny_setup)
    teacher = Teacher(tiny_setup.weights, tiny_setup.vocabulary, device=CPU, compute_dtype=torch.float32)
    values = {
        "algorithm": algorithm,
        "model": build_draft(algorithm, CPU, seed),
        "teacher": teacher,
        "loss": ForwardKL(),
        "reduction": "masked_mean",
        "out_of_vocabulary": "renormalise",
        "compute_dtype": torch.float32,
    }
    return Objective(**{**values, **changes})


def optimizers(model, facts, **config):
    return build_optimizers(model, TrainConfig(**config), {facts.vocab_size})


def row(tiny_setup, lengths=(12, 9), *, seed=0, prompt=3):
    """A packed row with random states; the first *prompt* tokens of every document are not supervised."""
    generator = torch.Generator().manual_seed(seed)
    hidden, taps, total = tiny_setup.verifier.hidden_size, len(tiny_setup.capture.layer_ids), sum(lengths)
    return PackedRow(
        input_ids=torch.randint(tiny_setup.verifier.vocab_size, (total,), generator=generator),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        document_ids=torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)]),
        loss_mask=torch.cat([torch.arange(length) >= prompt for length in lengths]),
        taps=torch.randn(total, taps * hidden, generator=generator),
        last_hidden=torch.randn(total, hidden, generator=generator),
        sample_ids=tuple(f"{seed:016x}{i:016x}" for i in range(len(lengths))),
    )


def generators(count, seed=0):
    return [torch.Generator().manual_seed(seed + i) for i in range(count)]


def without_states(packed, **changes):
    return attrs.evolve(packed, **changes)


# --- a whole run on disk -------------------------------------------------------------------------------------------

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "what", "is", "capital", "of", "France")


def write_conversations(path, count, *, seed=0):
    draw = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            question = " ".join(draw.choices(_WORDS, k=draw.randint(3, 10)))
            answer = " ".join(draw.choices(_WORDS, k=draw.randint(5, 40)))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_recipe(folder, verifier_folder, *, conversations=60, train=(), **changes):
    """A recipe of a whole tiny run below *folder*; returns its path. *train*: changes of ``train:``."""
    write_conversations(folder / "conversations.jsonl", conversations)
    recipe = {
        "verifier": str(verifier_folder),
        "output": str(folder / "run"),
        "algorithm": "tiny",
        "transport": "tiny-files",
        "observers": [],
        "data": {"sources": ["conversations.jsonl"], "max_length": 128, "validation_share": 0.2},
        "vocabulary": {"draft_size": 128},
        "capture": {"engine": "transformers"},
        "train": {"epochs": 3, "tokens_per_row": 256, "learning_rate": 1e-3, "validate_every": 5, **dict(train)},
        **changes,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def resolved(recipe, overrides=()):
    """The run of a recipe, with the tiny plugin found on sys.path."""
    from draftsmith.config.load import load_recipe
    from draftsmith.config.resolve import resolve
    from draftsmith.plugins import load_plugins

    return resolve(load_recipe(recipe, overrides), load_plugins())


def prepare_and_capture(recipe, overrides=()):
    from draftsmith.capture.run import run_capture
    from draftsmith.data.prepare import run_prepare

    run = resolved(recipe, overrides)
    run_prepare(run)
    run_capture(run)


def train(recipe, overrides=()):
    """The train stage, as a start of the command runs it. Module level: other processes are started with it."""
    from draftsmith.train.run import run_train

    torch.set_num_threads(1)
    return run_train(resolved(recipe, overrides))
