"""The exported configuration through vLLM's own reader, tensors through its own loader, rotary tables against its."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm_loader import Change, Loader, fused, midlayer, one, open_loader, prefixed, renamed

from draftsmith.interfaces import ExportContext
from draftsmith.layer_config import LayerConfig
from draftsmith.layers import RotaryEmbedding
from draftsmith.testing.algorithm import Material, make_material, tiny_case
from draftsmith_eagle3.checkpoint import READ_PLAINLY

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


@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
def test_vllm_fails_without_what_the_linter_misses(material: Material, layer_type: str) -> None:
    """Its class reads these keys as they are, others with a default, and what is not written is not there."""
    from vllm.model_executor.models.llama import LlamaDecoderLayer
    from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    case = tiny_case(material, "eagle3", options={"layer_type": layer_type}, draft_size=64)
    setup = case.algorithm.setup
    config = case.format.config(ExportContext(setup=setup, verifier_name="some/verifier", speculative_tokens=3))
    source = inspect.getsource({"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}[layer_type])
    for key in READ_PLAINLY["qwen3"]:
        broken = copy.deepcopy(config)
        del broken["transformer_layer_config"][key]
        plain = key in READ_PLAINLY[layer_type]
        assert (f"=config.{key}," in source or f"=config.{key})" in source) is plain, key
        found = any(
            each.severity == "error" and f"{key} is missing" in each.what
            for each in case.format.lint(broken, {}, None)
        )
        assert found is plain, key
        with pytest.raises(AttributeError, match=key):
            getattr(SpeculatorsConfig(**SpeculatorsConfig.extract_transformers_pre_trained_config(broken)), key)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 0.8,
            "truncate": False,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        },
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


# --- names of tensors ------------------------------------------------------------------------------------------------

FLAGS = {
    "default": {},
    "no norms": {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False},
    "qwen3": {"layer_type": "qwen3"},
}


@pytest.fixture(scope="module", params=FLAGS)
def loader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    with open_loader(tmp_path_factory.mktemp("loader"), "eagle3", FLAGS[request.param]) as found:
        yield found


CHANGES: dict[str, Change] = {
    "as written": lambda tensors: tensors,
    "midlayer": midlayer,
    "fused": fused,
    "midlayer, fused": lambda tensors: midlayer(fused(tensors)),
    "model.": prefixed("model."),
    "one of them model.": renamed("fc.weight", "model.fc.weight"),
    "model.d2t": renamed("d2t", "model.d2t"),
    "model.lm_head": renamed("lm_head.weight", "model.lm_head.weight"),
    "model.layers.0": lambda tensors: {name.replace("layers.0", "model.layers.0"): x for name, x in tensors.items()},
    "another layer": one("layers.1.mlp.down_proj.weight", 64, 96),
    "a bias of another layer": one("layers.1.mlp.down_proj.bias", 64),
    "a bias": one("fc.bias", 64),
    "a fused bias": one("midlayer.self_attn.qkv_proj.bias", 128),
    "bias of a norm": one("norm.bias", 64),
    "bias of the head": one("lm_head.bias", 64),
    "rotary table": one("midlayer.self_attn.rotary_emb.inv_freq", 8),
    "mask_hidden": one("mask_hidden", 1, 1, 192),
    "another t2d": one("verifier.t2d", 320),
    "input norm": one("input_norm.weight", 192),
    "norm of a tap": one("fc_norm.0.weight", 64),
    "map under vLLM's name": renamed("d2t", "draft_id_to_target_id"),
    "map under both names": one("draft_id_to_target_id", 64),
    "something else": one("projector.weight", 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_lint_loading_and_vllm_agree_on_every_name(loader: Loader, change: str) -> None:
    written = CHANGES["as written"](dict(loader.tensors))
    tensors = CHANGES[change](dict(loader.tensors))
    theirs, ours = loader.load_theirs(tensors), loader.load_ours(tensors)
    assert (theirs is None) == bool(loader.unknown(tensors)), "lint and vLLM"
    assert (theirs is None) == (ours is None), "loading and vLLM"
    if theirs is None or ours is None:
        return
    if "d2t" not in tensors:  # which lint says is missing: the ids that vLLM drafts then are those of nothing
        assert (theirs.pop("draft_id_to_target_id") == -1).all()
        assert "d2t" not in loader.case.format.as_loaded(loader.config, {})
    # What is taken under another name is the same, and what is passed over changes nothing.
    expected = loader.load_theirs(written)
    assert expected is not None
    assert all(torch.equal(each, expected[name]) or change == "input norm" for name, each in theirs.items())
    for name, each in (loader.load_ours(written) or {}).items():
        assert torch.equal(ours[name], each) or (change, name) == ("input norm", "input_norm.weight"), name
