"""What is exported, through vLLM's own reader and its own loaders: which head it builds, and what it loads into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make_mimo import add_head
from native_heads import LAYERS, add_native_head, configuration
from native_loader import load_heads
from runner_v2 import vision_environment

from draftsmith.checkpoint.export import write_export
from draftsmith.interfaces import ExportContext
from draftsmith.testing.algorithm import Material, make_material, tiny_case

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CLASSES = {
    "mimo": "MiMoMTPModel",
    "qwen3_5": "Qwen3_5MTP",
    "qwen3_5_moe": "Qwen3_5MoeMTP",
    "qwen3_next": "Qwen3NextMTP",
    "deepseek_v3": "DeepSeekMTPModel",
    "glm4_moe": "Glm4MoeMTPModel",
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Material]:
    made: dict[str, Material] = {}

    def get(kind: str) -> Material:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = (
                make_material(folder, "llama", num_layers=LAYERS, finish=add_head)
                if kind == "mimo"
                else make_material(folder, configuration(kind), num_layers=LAYERS, finish=add_native_head)
            )
        return made[kind]

    return get


def exported(material: Material, folder: Path) -> dict[str, torch.Tensor]:
    """The head in *folder*; its tensors."""
    case = tiny_case(material, "mtp")
    context = ExportContext(setup=case.algorithm.setup, verifier_name=str(material.folder), speculative_tokens=3)
    _, tensors = write_export(folder, case.format, case.algorithm.build_model(), context, {})
    return tensors


@pytest.mark.parametrize("kind", CLASSES)
def test_vllm_builds_the_head_of_the_family(kind: str, material: Callable[[str], Material], tmp_path: Path) -> None:
    """A head's folder is no draft in the speculators format to vLLM, but a model with a native head."""
    from vllm.config.speculative import SpeculativeConfig
    from vllm.transformers_utils.config import get_config

    exported(material(kind), tmp_path / "head")
    found = SpeculativeConfig.hf_config_override(get_config(tmp_path / "head", trust_remote_code=False))
    assert found.architectures == [CLASSES[kind]]
    assert found.n_predict == (None if kind == "qwen3_next" else 1)


@pytest.fixture(scope="module")
def loaded(material: Callable[[str], Material], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM's loader of each family made of a head; and the elements of its tensors ("exported")."""
    folder = tmp_path_factory.mktemp("heads")
    heads = {kind: (material(kind).folder, folder / kind) for kind in CLASSES}
    sizes = {kind: sum(each.numel() for each in exported(material(kind), folder / kind).values()) for kind in CLASSES}
    found = load_heads(heads, folder, vision_environment())
    return {kind: {**found[kind], "exported": sizes[kind]} for kind in CLASSES}


@pytest.mark.parametrize("kind", CLASSES)
def test_vllm_loads_every_tensor_and_misses_none(kind: str, loaded: dict[str, dict[str, Any]]) -> None:
    """Every parameter but the embedding and head, which it takes from the model, is filled from the folder."""
    found = loaded[kind]
    assert "error" not in found, found["error"]
    shared = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")
    assert all(name.endswith(shared) for name in found["unfilled"]), found
    assert found["filled"] == found["exported"]
