"""Heads whose layer is transformers' own, of every family: tiny models, replayed, packed, exported, loaded again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native_heads import KINDS, LAYERS, add_native_head, configuration
from safetensors.torch import load_file

from draftsmith.checkpoint.export import write_export
from draftsmith.interfaces import ExportContext
from draftsmith.testing.algorithm import (
    AlgorithmCase,
    CheckpointTests,
    LeakTests,
    LearningTests,
    Material,
    PackingTests,
    ReplayTests,
    ValueTests,
    make_material,
    tiny_case,
)
from draftsmith_mtp.families import family_of


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Material]:
    made: dict[str, Material] = {}

    def get(kind: str) -> Material:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = make_material(folder, configuration(kind), num_layers=LAYERS, finish=add_native_head)
        return made[kind]

    return get


@pytest.fixture(params=KINDS)
def material(request: pytest.FixtureRequest, materials: Callable[[str], Material]) -> Material:
    return materials(request.param)


class TestDense(ReplayTests, LeakTests, PackingTests, ValueTests, CheckpointTests):
    """All but the training."""

    @pytest.fixture
    def case(self, materials: Callable[[str], Material]) -> AlgorithmCase:
        return tiny_case(materials("qwen3_5"), "mtp")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "qwen3_5"])
class TestExperts(TestDense):
    """The same, where rows go to experts."""

    bitwise = False

    @pytest.fixture
    def case(self, materials: Callable[[str], Material], kind: str) -> AlgorithmCase:
        return tiny_case(materials(kind), "mtp")


class TestLearning(LearningTests):
    @pytest.fixture
    def case(self, materials: Callable[[str], Material]) -> AlgorithmCase:
        return tiny_case(materials("qwen3_5"), "mtp")


def test_a_head_comes_and_goes_under_the_names_of_its_files(material: Material) -> None:
    """Bit by bit, experts one by one, and without the copies of embedding and head."""
    case = tiny_case(material, "mtp")
    stored = load_file(material.folder / "model.safetensors")
    context = ExportContext(setup=case.algorithm.setup, verifier_name="x", speculative_tokens=3)
    tensors = case.format.tensors(case.algorithm.build_model(), context)
    family, config = family_of(material.facts.text_config), material.facts.text_config
    assert set(tensors) == {
        name for name in stored if family.belongs(name, config) and not family.is_copy(name, config)
    }
    assert all(torch.equal(tensor, stored[name]) for name, tensor in tensors.items())
    recorded = json.loads(json.dumps(case.format.config(context)))
    assert {name: tuple(each.shape) for name, each in tensors.items()} == {
        name: spec.shape for name, spec in case.format.expected_tensors(recorded).items()
    }


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_the_biases_of_a_router_are_neither_trained_nor_rounded(
    materials: Callable[[str], Material], kind: str, tmp_path: Path
) -> None:
    case = tiny_case(materials(kind), "mtp")
    model = case.algorithm.build_model()
    (name,) = [name for name, _ in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert name not in dict(model.named_parameters())
    context = ExportContext(setup=case.algorithm.setup, verifier_name="x", speculative_tokens=3)
    write_export(tmp_path, case.format, model, context, {})
    written = load_file(tmp_path / "model.safetensors")
    bias = f"model.layers.{LAYERS}.mlp.gate.e_score_correction_bias"
    assert torch.equal(written[bias], load_file(materials(kind).folder / "model.safetensors")[bias])
    assert written[bias].dtype == torch.float32
    assert {each.dtype for other, each in written.items() if other != bias} == {torch.bfloat16}
