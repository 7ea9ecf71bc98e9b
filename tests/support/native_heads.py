"""Tiny random models of every family with a native head but MiMo's (tools/make_mimo.py), in their own layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftsmith.verifier import read_verifier
from draftsmith_mtp.families import family_of

__all__ = ["KINDS", "LAYERS", "add_native_head", "configuration"]

LAYERS = 2
QWEN = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    # the one that vLLM's kernel for CPUs knows
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
GROUPED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
#: class of the configuration, what is special about it
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", {**QWEN, "mtp_num_hidden_layers": 1}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**QWEN, **EXPERTS, "mtp_num_hidden_layers": 1}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **QWEN,
            **EXPERTS,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **GROUPED,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **GROUPED,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
}


def configuration(kind: str) -> Callable[..., Any]:
    name, special = KINDS[kind]

    def build(common: dict[str, Any], **changes: Any) -> Any:
        import transformers

        return getattr(transformers, name)(**{**common, **special, **changes})

    return build


def add_native_head(folder: Path) -> None:
    """A random head in the model's own layout: a matrix an expert, and copies where the family has them."""
    facts = read_verifier(folder)
    family = family_of(facts.text_config)
    assert family.network is not None
    head = resolve_name(family.network)(facts)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in sorted(head.state_dict().items()):
        noise = torch.randn(tensor.shape, generator=generator)
        value = noise * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.1 * noise + (not head.adds_one)
        for own, part in _single_experts(name, value).items():
            tensors[family.model_name(own, facts.text_config)] = part.contiguous()
    prefix = family.prefix_of(facts.text_config)
    for copy in family.copies:
        source = "model.embed_tokens.weight" if "embed" in copy else "lm_head.weight"
        tensors[prefix + copy] = tensors[source].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _single_experts(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    prefix, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        halves = {"gate": 0, "up": 1}
        return {
            f"{prefix}.{number}.{part}_proj.weight": each.chunk(2)[half]
            for number, each in enumerate(value)
            for part, half in halves.items()
        }
    if last == "down_proj":
        return {f"{prefix}.{number}.down_proj.weight": each for number, each in enumerate(value)}
    return {name: value}
