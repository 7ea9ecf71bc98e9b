"""Building blocks against transformers' own modules, and their hand-written gradients against autograd."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.api import VerifierFacts
from draftsmith.errors import CheckpointError
from draftsmith.layer_config import LayerConfig, inherited_rope, override_problems
from draftsmith.layers import Attention, Mlp, RMSNorm, RotaryEmbedding, RotaryTable, rms_norm, rotate

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def facts(**changes: Any) -> VerifierFacts:
    values: dict[str, Any] = {
        "path": "/nowhere",
        "fingerprint": "0",
        "architectures": ("LlamaForCausalLM",),
        "model_type": "llama",
        "hidden_size": 64,
        "num_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": 320,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    }
    return VerifierFacts(**{**values, **changes})


def config(layer_type: Any = "llama", **changes: Any) -> LayerConfig:
    return LayerConfig.from_verifier(facts(**changes), layer_type=layer_type, num_layers=1)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        YARN,
        LLAMA3,
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rotary_tables_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    ours = config(rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=64,
            num_attention_heads=4,
            head_dim=32,
            max_position_embeddings=512,
            rope_parameters=dict(ours.rope_parameters),
        )
    )
    positions = torch.tensor([0, 1, 5, 130, 511])
    x = torch.randn(5, 4, 32)
    table = RotaryEmbedding(ours)(positions)
    cos, sin = theirs(x, positions[None])
    torch.testing.assert_close(table, RotaryTable(cos[0], sin[0]))
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(rotate(x, table), want[0].transpose(0, 1))


def test_rotary_tables_do_not_depend_on_the_width() -> None:
    """A draft may be of a width that its heads do not divide."""
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    odd, even = (RotaryEmbedding(config(hidden_size=width, rope_parameters=scaled)) for width in (33, 64))
    assert torch.equal(odd.inverse_frequency, even.inverse_frequency)


#: Everything that YaRN's tables depend on.
YARN_IN_FULL = {
    **YARN,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "attention_factor": 0.8,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "truncate": False,
}


@pytest.mark.parametrize("rope", [YARN_IN_FULL, LLAMA3], ids=["yarn", "llama3"])
def test_nothing_of_a_scaling_is_lost(rope: dict[str, Any]) -> None:
    ours = config(rope_parameters=rope)
    assert ours.rope_parameters == rope
    assert LayerConfig.from_dict(ours.to_dict()).rope_parameters == rope
    assert not override_problems(ours, {"rope_parameters": rope}, {})


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.25}, {"rope_type": "default"}),
        ({"rope_type": "default", "rope_theta": 5.0, "mrope_section": [1, 2, 3]}, {"rope_type": "default"}),
        ({"rope_type": "dynamic", "rope_theta": 5.0, "factor": 2.0}, {"rope_type": "default"}),
        ({"rope_type": "longrope", "rope_theta": 5.0, "long_factor": [1.0]}, {"rope_type": "default"}),
        ({"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 6.0}}, {"rope_type": "default"}),
        (
            {"rope_type": "yarn", "rope_theta": 5.0, "factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_only_what_both_sides_compute_alike_is_inherited(given: dict[str, Any], kept: dict[str, Any]) -> None:
    assert inherited_rope(facts(rope_parameters=given)) == {"rope_theta": 5.0, **kept}


def test_what_a_scaling_needs_and_the_verifier_does_not_say_is_a_problem() -> None:
    derived = config(rope_parameters={"rope_type": "yarn", "rope_theta": 5.0})
    found = [each.what for each in override_problems(derived, None, {})]
    assert found == [
        "the rotary scaling 'yarn' needs factor",
        "the rotary scaling 'yarn' needs original_max_position_embeddings",
    ]


def test_expert_width_is_not_the_drafts() -> None:
    assert config(is_mixture_of_experts=True, intermediate_size=8).intermediate_size == 3 * 64


@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
@pytest.mark.parametrize(("window", "full"), [(None, ()), (5, ()), (5, (0, 2))])
def test_configuration_survives_its_dictionary(layer_type: Any, window: int | None, full: tuple[int, ...]) -> None:
    ours = attrs.evolve(
        config(layer_type, rope_parameters=YARN),
        num_layers=3,
        sliding_window=window,
        full_attention=full,
        eos_token_id=2,
    )
    assert LayerConfig.from_dict(ours.to_dict()) == ours
    kinds = ["sliding_attention" if window and index not in full else "full_attention" for index in range(3)]
    assert ours.to_dict()["layer_types"] == kinds


def test_a_width_of_its_own_brings_a_feed_forward_of_its_own() -> None:
    ours = LayerConfig.from_verifier(facts(), layer_type="qwen3", num_layers=1, hidden_size=32)
    assert (ours.hidden_size, ours.intermediate_size, ours.query_size) == (32, 96, 4 * 32)
    given = LayerConfig.from_verifier(facts(), layer_type="qwen3", num_layers=1, hidden_size=32, intermediate_size=48)
    assert given.intermediate_size == 48


def test_old_spellings_are_read() -> None:
    plain = config().to_dict()
    for key in ("rope_parameters", "layer_types", "head_dim"):
        del plain[key]
    read = LayerConfig.from_dict({**plain, "rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert read.rope_parameters == {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}
    assert read.head_dim == 64 // 4


@pytest.mark.parametrize("change", [{"model_type": "gemma3"}, {"hidden_size": None}])
def test_configurations_without_a_draft_in_vllm_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="transformer_layer_config"):
        LayerConfig.from_dict({**config().to_dict(), **change})


@pytest.mark.parametrize("shape", [(5, 8), (5, 2, 8)])
def test_norm_and_its_gradients(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5))
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-5), (x, weight))


def test_norm_computes_in_float32_and_answers_in_the_input_dtype() -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16) * 100
    norm = RMSNorm(8, 1e-6)
    want = F.rms_norm(x.float(), (8,), None, 1e-6).bfloat16()
    assert torch.equal(norm(x), want)


def test_rotation_and_its_gradients() -> None:
    x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(5, 3, dtype=torch.float64).repeat(1, 2)
    table = RotaryTable(angles.cos() * 1.5, angles.sin() * 1.5)
    turned = torch.complex(*x.detach().chunk(2, -1)) * torch.polar(
        torch.full((5, 1, 3), 1.5).double(), angles[:, None, :3]
    )
    torch.testing.assert_close(rotate(x, table), torch.cat((turned.real, turned.imag), -1))
    assert torch.autograd.gradcheck(lambda a: rotate(a, table), (x,))


def test_feed_forward_is_that_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    ours, theirs = Mlp(config()), LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=96))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(7, 64, requires_grad=True)
    direction = torch.randn(7, 64)

    def run(module: torch.nn.Module) -> list[Tensor]:
        out = module(x)
        inputs = [x, *(p for _, p in sorted(module.named_parameters()))]
        return [out, *torch.autograd.grad((out * direction).sum(), inputs)]

    for got, want in zip(run(ours), run(theirs), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
def test_projections_are_those_of_transformers(layer_type: str) -> None:
    """With identity attention weights left out: queries and keys after norm and rotation, values as they are."""
    from transformers import Qwen3Config
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    ours = Attention(config(layer_type))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, table = torch.randn(6, 64), RotaryEmbedding(config())(torch.arange(6))
    weights = ours.fused(torch.float32)
    projected = x @ weights.qkv.T
    query = ours.query(projected[:, :128], weights, table)
    key, value = ours.key_value(projected[:, 128:], weights, table)
    heads = Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-5)
    theirs = Qwen3Attention(heads, 0)
    if layer_type == "llama":
        theirs.q_norm, theirs.k_norm = torch.nn.Identity(), torch.nn.Identity()
    theirs.load_state_dict(ours.state_dict())
    want_query = theirs.q_norm(theirs.q_proj(x).view(6, 4, 32)).transpose(0, 1)[None]
    want_key = theirs.k_norm(theirs.k_proj(x).view(6, 2, 32)).transpose(0, 1)[None]
    want_query, want_key = apply_rotary_pos_emb(want_query, want_key, table.cos[None], table.sin[None])
    torch.testing.assert_close(query, want_query[0].transpose(0, 1))
    torch.testing.assert_close(key, want_key[0].transpose(0, 1))
    torch.testing.assert_close(value, theirs.v_proj(x).view(6, 2, 32))
