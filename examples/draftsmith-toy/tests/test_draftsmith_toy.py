"""The cell under draftsmith's conformance kit, and what is special about it."""

from __future__ import annotations

from pathlib import Path

import pytest

import draftsmith_toy
from draftsmith.interfaces import ExportContext
from draftsmith.testing.algorithm import AlgorithmCase, Material, make_material, tiny_case
from draftsmith.testing.public import private_imports
from draftsmith_toy.conformance import ToyCheck


class TestToy(ToyCheck):
    item = "toy"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "llama")


@pytest.fixture
def case(material: Material) -> AlgorithmCase:
    return tiny_case(material, "toy")


def exported(case: AlgorithmCase) -> ExportContext:
    return ExportContext(setup=case.algorithm.setup, verifier_name="the-verifier", speculative_tokens=3)


def test_the_exported_type_is_this_packages_own_and_the_method_one_that_vllm_has(case: AlgorithmCase) -> None:
    config = case.format.config(exported(case))
    assert config["speculators_model_type"] == "toy"
    plan = case.format.serving(config)
    assert (plan.method, plan.num_speculative_tokens, plan.as_model) == ("eagle", 3, True)


def test_embedding_and_head_are_the_verifiers_and_left_out(case: AlgorithmCase) -> None:
    context = exported(case)
    tensors = case.format.tensors(case.algorithm.build_model(), context)
    expected = case.format.expected_tensors(case.format.config(context))
    assert set(tensors) == {name for name, spec in expected.items() if spec.required}
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(tensors)


def test_a_cell_of_another_width_is_found_by_lint(case: AlgorithmCase, material: Material) -> None:
    config = case.format.config(exported(case))
    assert not case.format.lint(config, {}, material.facts)
    config["transformer_layer_config"]["hidden_size"] += 1
    assert any("belongs to another verifier" in each.hint for each in case.format.lint(config, {}, material.facts))


def test_it_imports_nothing_private() -> None:
    assert not private_imports(Path(draftsmith_toy.__file__).parent)
