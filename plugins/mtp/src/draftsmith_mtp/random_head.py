"""A head for a model that has none, for the kit and for trials: a Llama becomes a model of MiMo's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import VerifierError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["add_head"]


def mimo_config(config: dict[str, Any]) -> dict[str, Any]:
    """The Llama's configuration as MiMo's; ``qwen2`` so that no code has to come with the model."""
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise VerifierError(f"{config['model_type']} with these biases is no Llama without biases")
    if config["hidden_size"] // config["num_attention_heads"] != config.get("head_dim", 0):
        raise SystemExit("model: qwen2 has heads of hidden_size / num_attention_heads, this model has others")
    kept = {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias", "pretraining_tp")}
    return {
        **kept,
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
    }


def biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A zero bias beside each projection that qwen2 has one for."""
    import torch

    projections = [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
    return {
        f"{name.removesuffix('weight')}bias": torch.zeros(tensors[name].shape[0], dtype=tensors[name].dtype)
        for name in projections
    }


def random_head(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """A head in the shapes of the model's first layer; norms are one, matrices of the model's own spread."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    first = {name: each for name, each in sorted(tensors.items()) if name.startswith("model.layers.0.")}
    norm = first["model.layers.0.input_layernorm.weight"]
    shapes = {name.removeprefix("model.layers.0."): each.shape for name, each in first.items()}
    shapes["input_proj.weight"] = torch.Size((norm.shape[0], 2 * norm.shape[0]))
    shapes |= {f"{name}_layernorm.weight": norm.shape for name in ("token", "hidden", "final")}
    head = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator) * 0.02
        value = noise if len(shape) > 1 else torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        head[f"model.mtp_layers.0.{name}"] = value.to(norm.dtype)
    return head


def add_head(folder: Path, seed: int = 0) -> None:
    """Make the Llama model in *folder* one of MiMo's layout, in place. It must be of one file."""
    from safetensors.torch import load_file

    from draftsmith.stages import write_tensors

    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors |= biases(tensors)
    tensors |= random_head(tensors, seed)
    config = mimo_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    write_tensors(path, tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
