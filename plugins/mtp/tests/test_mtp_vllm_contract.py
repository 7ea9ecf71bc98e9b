"""What is exported, through vLLM's own reader and its own loaders: which head it builds, and what it loads into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from make_mimo import add_head
from native_heads import LAYERS, add_native_head, configuration

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
#: vLLM imports torchvision for Qwen3.5, whose text models need none; set-up leaves it out. Qwen3-Next's loader is the
#: one that Qwen3.5's is made of.
WITHOUT_VISION = [kind for kind in CLASSES if not kind.startswith("qwen3_5")]


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
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's process groups, which its layers ask for when they are built."""
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
            patch.setenv(name, "1")
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            meeting = tmp_path_factory.mktemp("meeting") / "place"
            init_distributed_environment(1, 0, f"file://{meeting}", 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
            yield
        cleanup_dist_env_and_memory()


def built(material: Material, head: Path) -> Any:
    """vLLM's head, as its proposer builds it beside the model."""
    from vllm.config import set_current_vllm_config
    from vllm.config.utils import replace
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import get_model_architecture

    engine = EngineArgs(
        model=str(material.folder),
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        speculative_config={"method": "mtp", "model": str(head), "num_speculative_tokens": 3},
    ).create_engine_config()
    draft = engine.speculative_config.draft_model_config
    config = replace(engine, model_config=draft)
    with set_current_vllm_config(config):
        kind, _ = get_model_architecture(draft)
        return kind(vllm_config=config)


@pytest.mark.parametrize("kind", WITHOUT_VISION)
def test_vllm_loads_every_tensor_and_misses_none(
    kind: str, material: Callable[[str], Material], process: None, tmp_path: Path
) -> None:
    """Every parameter but the embedding and head, which it takes from the model, is filled from the folder."""
    tensors = exported(material(kind), tmp_path / "head")
    head = built(material(kind), tmp_path / "head")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(-7)
        head.load_weights(iter([(name, tensor.float()) for name, tensor in tensors.items()]))
    unfilled = {name for name, parameter in head.named_parameters() if bool((parameter == -7).all())}
    shared = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")
    assert all(name.endswith(shared) for name in unfilled), unfilled
    total = sum(each.numel() for name, each in head.named_parameters() if name not in unfilled)
    assert total == sum(tensor.numel() for tensor in tensors.values())
