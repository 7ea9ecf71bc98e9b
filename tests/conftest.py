"""What several whole-repository tests share: a draft on a tiny random verifier, exported."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest


def _setup(registry, facts, algorithm, draft_size, **options):
    import torch

    from draftsmith.interfaces import AlgorithmSetup, VocabularyMap
    from draftsmith.plugins import load_reference
    from draftsmith.verifier_weights import load_verifier_weights

    algorithm = registry.algorithms.get(algorithm)
    chosen = algorithm.options(**options)
    size = facts.vocab_size
    # Every other token, and the lowest ones: neighbours among them, as in a real vocabulary.
    kept = torch.cat([torch.arange(20), torch.arange(20, size, 2)])[:draft_size]
    kept = torch.arange(size) if draft_size == size else kept
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[kept] = True
    mask = load_reference(registry.masks.get(algorithm.mask).implementation)
    return algorithm, AlgorithmSetup(
        options=chosen,
        verifier=facts,
        weights=load_verifier_weights(facts),
        vocabulary=VocabularyMap(d2t=kept - torch.arange(len(kept)), t2d=t2d),
        capture=algorithm.requirements(chosen, facts),
        mask=mask(window=algorithm.window(chosen)),
        architecture=load_reference(registry.architectures.get(algorithm.architecture).implementation),
        attention="auto",
        compute_dtype=torch.float32,
    )


@pytest.fixture(scope="session")
def registry():
    from draftsmith.plugins import load_plugins

    return load_plugins()


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory) -> Path:
    from draftsmith.testing.verifiers import make_tiny_verifier

    return make_tiny_verifier(tmp_path_factory.mktemp("verifier"))


@pytest.fixture(scope="session")
def export_draft(registry):
    """A function that exports a draft: (folder, verifier, algorithm=…, draft_size=…, notes=…, **options). It is fresh,
    unless it is given to *train*, a function of the registered algorithm, the built one, and the model."""

    def export(
        folder: Path,
        verifier: Path,
        *,
        algorithm="eagle3",
        draft_size=None,
        name=None,
        notes=None,
        seed=0,
        train=None,
        **options,
    ):
        import torch

        from draftsmith.checkpoint.export import write_export
        from draftsmith.checkpoint.exported import open_format
        from draftsmith.interfaces import ExportContext
        from draftsmith.plugins import load_reference
        from draftsmith.verifier import read_verifier

        facts = read_verifier(verifier)
        chosen, setup = _setup(registry, facts, algorithm, draft_size or facts.vocab_size, **options)
        torch.manual_seed(seed)
        built = load_reference(chosen.implementation)(setup)
        model = built.build_model()
        if train is not None:
            train(chosen, built, model)
        steps = chosen.max_speculative_tokens(setup.options)
        context = ExportContext(setup=setup, verifier_name=name or str(verifier), speculative_tokens=steps)
        written = {"algorithm": chosen.name, "trained_speculative_tokens": steps, **(notes or {})}
        config, tensors = write_export(
            folder, open_format(registry.schemas.get(chosen.schema)), model, context, written
        )
        return SimpleNamespace(
            folder=folder, verifier=verifier, algorithm=built, model=model, config=config, tensors=tensors
        )

    return export


@pytest.fixture(scope="session")
def exported(export_draft, tiny_verifier, tmp_path_factory):
    """A good checkpoint with a reduced vocabulary; do not change it."""
    return export_draft(tmp_path_factory.mktemp("exported"), tiny_verifier, draft_size=128)


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory) -> Path:
    """Eight short questions in two categories."""
    from questions import write_questions

    return write_questions(tmp_path_factory.mktemp("prompts") / "questions.jsonl")


@pytest.fixture(scope="session")
def by_heart(registry, tiny_verifier, export_draft, prompts_file, tmp_path_factory) -> SimpleNamespace:
    """A draft that has learnt the verifier's answers to these questions."""
    from questions import learn_questions

    return learn_questions(prompts_file, tiny_verifier, registry, export_draft, tmp_path_factory.mktemp("by_heart"))


@pytest.fixture
def checkpoint_copy(exported, tmp_path) -> Path:
    """A copy of the good checkpoint, to be damaged."""
    return Path(shutil.copytree(exported.folder, tmp_path / "checkpoint"))
