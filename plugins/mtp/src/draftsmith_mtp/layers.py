"""Heads whose decoder layer is the family's own class in transformers: gated attention, latent attention, experts.

transformers hands every attention to a function that is registered by name. The recursion's attention is registered
there, so that a layer's projections, norms, rotation, gates and experts are transformers' own, and only *who sees
whom* is ours. Contract for names: the families' files in vLLM (families.py); transformers keeps the matrices of all
experts in one tensor, the files hold one each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftsmith.api import VerifierFacts
from draftsmith.errors import VerifierError
from draftsmith_mtp.model import AttendRows, HeadLayer, LayerPass, MtpHead, chosen_rows, fit_tensors

__all__ = ["Qwen3Head", "TransformersHead", "TransformersLayer"]

#: The name under which transformers finds the recursion's attention.
_ATTENTION = "draftsmith_mtp"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class TransformersLayer(HeadLayer):
    """One decoder layer with full attention, as transformers builds it for the verifier's configuration.

    Attributes:
        norm: a fresh norm of the verifier's kind, of its width.

    Raises:
        VerifierError: transformers does not know the model.
    """

    def __init__(self, verifier: VerifierFacts) -> None:
        super().__init__()
        model, config = _one_layer(verifier)
        layer = model.layers[0].to_empty(device="cpu").float()
        for name, part in layer.named_children():  # the parameters' names are then those of the model's files
            setattr(self, name, part)
        # Its tables are computed: it has no tensor of the files.
        self.rotary = type(model.rotary_emb)(config)
        self.norm: Callable[[], nn.Module] = _fresh_norm(model.norm, verifier)

    def prepare(self, dtype: torch.dtype) -> LayerPass:
        return _TransformersPass(self)

    def tables(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of int64 *positions* [N], as the layer's attention takes them."""
        tables: tuple[Tensor, Tensor] = self.rotary(x[None], positions[None])
        return tables


class _TransformersPass(LayerPass):
    def __init__(self, layer: TransformersLayer) -> None:
        self.layer = layer

    def __call__(self, hidden: Tensor, positions: Tensor, wanted: Tensor | None, attend: AttendRows) -> Tensor:
        layer: Any = self.layer
        normed = layer.input_layernorm(hidden)
        attended, _ = layer.self_attn(
            hidden_states=normed[None],
            position_embeddings=layer.tables(normed, positions),
            attention_mask=None,
            attend_rows=attend,
        )
        hidden = hidden + attended[0]
        if wanted is not None:
            hidden = chosen_rows(hidden, wanted)
        fed: Tensor = layer.mlp(layer.post_attention_layernorm(hidden)[None])[0]
        return hidden + fed


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    attend_rows: AttendRows | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, h, N, d], key and value [1, g, N, d] → [1, N, h, d of the values]."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if attend_rows is None:  # a layer that is run by itself, with a mask of its own
        output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, is_causal=False
        )
        return output, None
    width, value_width = query.shape[-1], value.shape[-1]
    query = query * (scaling * width**0.5)
    padded = nn.functional.pad(value, (0, width - value_width))
    rows = [each[0].transpose(0, 1) for each in (query, key.to(query.dtype), padded.to(query.dtype))]
    attended = attend_rows(rows[0], rows[1], rows[2], None)
    return attended[None, :, :, :value_width], None


def _one_layer(verifier: VerifierFacts) -> tuple[Any, Any]:
    """transformers' text model with one layer, on the meta device, and its configuration."""
    from transformers import AutoConfig, AutoModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention)
    try:
        config = AutoConfig.from_pretrained(verifier.path, local_files_only=True).get_text_config()
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = ["full_attention"]
        if getattr(config, "mlp_layer_types", None) is not None:
            config.mlp_layer_types = config.mlp_layer_types[-1:]
        if getattr(config, "first_k_dense_replace", None) is not None:
            config.first_k_dense_replace = 0  # the head's layer comes after all others
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise VerifierError(
            f"transformers cannot build a layer of a model of type {verifier.model_type!r}: {error}",
            where=str(verifier.path),
            hint="install a transformers version that knows it",
        ) from error
    model.config._attn_implementation = _ATTENTION
    model.layers[0].self_attn.config._attn_implementation = _ATTENTION
    return model, model.config


def _fresh_norm(example: nn.Module, verifier: VerifierFacts) -> Callable[[], nn.Module]:
    return lambda: type(example)(verifier.hidden_size, eps=verifier.rms_norm_eps)


class TransformersHead(MtpHead):
    """A head around a :class:`TransformersLayer`."""

    slow_layer: ClassVar[str] = "draftsmith_mtp.replay:SlowTransformers"

    def __init__(self, verifier: VerifierFacts) -> None:
        layer = TransformersLayer(verifier)
        super().__init__(verifier, layer, layer.norm)

    def stored(self, names: Iterable[str]) -> dict[str, Tensor]:
        given = super().stored(())
        wanted: dict[str, Tensor] = {}
        for name in names:
            expert = _EXPERT.fullmatch(name)
            if expert is None or name in given:
                wanted[name] = given[name]
                continue
            number = int(expert[2])
            if expert[3] == "down":
                wanted[name] = given[f"{expert[1]}.down_proj"][number]
            else:
                gate, up = given[f"{expert[1]}.gate_up_proj"][number].chunk(2)
                wanted[name] = gate if expert[3] == "gate" else up
        return wanted

    def load_stored(self, tensors: Mapping[str, Tensor]) -> None:
        fit_tensors(self.state_dict(), _with_experts_together(tensors))


class Qwen3Head(TransformersHead):
    """Qwen3.5 and Qwen3-Next: norms that scale by 1 + weight, attention with a gate."""

    adds_one: ClassVar[bool] = True


def _with_experts_together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of single experts as transformers keeps them: all gates and ups in one tensor, all downs in another."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            found[name] = tensor
        else:
            experts.setdefault(expert[1], {})[int(expert[2]), expert[3]] = tensor
    for prefix, parts in experts.items():
        numbers = sorted({number for number, _ in parts})
        gate_up = [torch.cat((parts[number, "gate"], parts[number, "up"])) for number in numbers]
        found[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        found[f"{prefix}.down_proj"] = torch.stack([parts[number, "down"] for number in numbers])
    return found
