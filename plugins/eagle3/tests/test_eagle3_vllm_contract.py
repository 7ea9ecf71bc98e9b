"""The exported configuration through vLLM's own reader, and the draft's rotary tables against vLLM's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from draftsmith.interfaces import ExportContext
from draftsmith.layer_config import LayerConfig
from draftsmith.layers import RotaryEmbedding
from draftsmith.testing.algorithm import Material, make_material, tiny_case

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "qwen3_yarn")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False},
        {
            "layer_type": "qwen3",
            "norm_before_fc": False,
            "fc_norm": True,
            "sliding_window": 16,
            "layer_ids": (1, 2, 4, 6, 7),
        },
    ],
)
def test_vllm_reads_what_was_trained(material: Material, options: dict[str, Any]) -> None:
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    case = tiny_case(material, "eagle3", options=options, draft_size=64)
    setup = case.algorithm.setup
    config = case.format.config(ExportContext(setup=setup, verifier_name="some/verifier", speculative_tokens=3))
    speculative = SpeculatorsConfig.extract_vllm_speculative_config(copy.deepcopy(config))
    plan = case.format.serving(config)
    assert speculative["method"] == plan.method
    assert speculative["num_speculative_tokens"] == plan.num_speculative_tokens == 3
    draft = SpeculatorsConfig(**SpeculatorsConfig.extract_transformers_pre_trained_config(copy.deepcopy(config)))
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert getattr(draft, flag) is getattr(setup.options, flag)
    kind = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}[setup.options.layer_type]
    assert draft.architectures == [kind]
    assert tuple(draft.eagle_aux_hidden_state_layer_ids) == setup.capture.layer_ids
    assert draft.num_aux_hidden_states == len(setup.capture.layer_ids)
    assert draft.draft_vocab_size == 64
    assert draft.vocab_size == setup.verifier.vocab_size
    assert draft.head_dim == setup.verifier.head_dim
    if setup.options.sliding_window is not None:
        assert draft.layer_types == ["sliding_attention"]
        assert draft.sliding_window == setup.options.sliding_window


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rotary_tables_are_those_of_vllm(rope: dict[str, Any], material: Material) -> None:
    import attrs
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    facts = attrs.evolve(material.facts, rope_parameters=rope)
    config = LayerConfig.from_verifier(facts, layer_type="llama", num_layers=1)
    with set_current_vllm_config(VllmConfig()):
        theirs = get_rope(
            config.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
            dtype=torch.float32,
        )
    positions = torch.tensor([0, 1, 7, 100, 511])
    table = RotaryEmbedding(config)(positions)
    half = config.head_dim // 2
    cos, sin = theirs.cos_sin_cache[positions].float().chunk(2, dim=-1)
    torch.testing.assert_close(table.cos[:, :half], cos, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(table.sin[:, :half], sin, rtol=1e-4, atol=1e-4)
