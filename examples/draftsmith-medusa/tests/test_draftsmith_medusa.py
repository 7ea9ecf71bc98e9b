"""Medusa heads under draftsmith's conformance kit, and what is special about them."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch

import draftsmith_medusa
from draftsmith.testing.algorithm import (
    AlgorithmCase,
    AlgorithmTests,
    CheckpointTests,
    LeakTests,
    Material,
    PackingTests,
    ReplayTests,
    ValueTests,
    make_material,
    slot_logits,
    tiny_case,
)
from draftsmith.testing.public import private_imports


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "qwen3")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("gemma"), "gemma3")


class TestOneBlock(ReplayTests, LeakTests, PackingTests, ValueTests, CheckpointTests):
    """All but the training: one block of this width is too small to learn the documents by heart."""

    reads_the_bonus_token = False
    begins_as_a_guess = False

    @pytest.fixture
    def case(self, material: Material) -> AlgorithmCase:
        return tiny_case(material, "medusa")


class TestDeep(AlgorithmTests):
    """Two blocks a head, one head more, and a verifier whose norm scales by 1 + w."""

    reads_the_bonus_token = False
    begins_as_a_guess = False

    @pytest.fixture
    def case(self, gemma: Material) -> AlgorithmCase:
        return tiny_case(gemma, "medusa", options={"num_heads": 4, "num_layers": 2})


def test_an_untrained_head_says_what_the_verifier_says_of_the_bonus_token(material: Material) -> None:
    case = tiny_case(material, "medusa")
    slots = case.algorithm.forward(
        case.algorithm.build_model(), case.algorithm.make_batch(case.row, torch.Generator())
    )
    weights = material.weights
    before = case.row.last_hidden[slots.teacher_row - slots.step - 1]
    verifier = weights.final_norm(before.float()) @ weights.lm_head.float().T
    torch.testing.assert_close(slot_logits(slots), verifier)


def test_a_checkpoint_of_other_heads_is_not_begun_from(material: Material) -> None:
    case = tiny_case(material, "medusa")
    (problem,) = case.format.warm_start_problems(
        {"num_heads": 5, "num_hidden_layers": 1}, case.algorithm.setup.options, material.facts
    )
    assert "num_heads is 3, the other's 5" in str(problem)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "llama"}, "model_type medusa"),
        ({"original_lm_head": False}, "share one output layer"),
        ({"hidden_size": 1}, "another verifier"),
        ({"truncated_vocab_size": 64}, "refuses heads with a reduced vocabulary"),
    ],
)
def test_lint_finds_what_vllm_would_not(material: Material, change: dict[str, object], text: str) -> None:
    case = tiny_case(material, "medusa")
    config = {"model_type": "medusa", "original_lm_head": True, "num_heads": 3}
    config |= {"hidden_size": material.facts.hidden_size, "vocab_size": material.facts.vocab_size}
    assert not case.format.lint(config, {}, material.facts)
    (finding,) = case.format.lint({**config, **change}, {}, material.facts)
    assert text in f"{finding.what} {finding.hint}"
    assert attrs.asdict(finding)["severity"] == "error"


def test_it_imports_nothing_private() -> None:
    assert not private_imports(Path(draftsmith_medusa.__file__).parent)
