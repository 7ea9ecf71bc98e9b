"""MiMo's head: a qwen2 decoder layer. Contract: vLLM's ``mimo_mtp.py`` and ``qwen2.py``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.api import VerifierFacts
from draftsmith.layer_config import LayerConfig
from draftsmith.layers import Attention, Mlp, RMSNorm, RotaryEmbedding, RotaryTable
from draftsmith_mtp.model import AttendRows, HeadLayer, LayerPass, MtpHead, chosen_rows

__all__ = ["MimoHead", "Qwen2Layer"]


class Qwen2Layer(HeadLayer):
    """Biased queries, keys and values, rotation of the whole head, SwiGLU."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, bias=True)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)
        self.rotary = RotaryEmbedding(config)

    def prepare(self, dtype: torch.dtype) -> LayerPass:
        return _Qwen2Pass(self, dtype)


class _Qwen2Pass(LayerPass):
    def __init__(self, layer: Qwen2Layer, dtype: torch.dtype) -> None:
        self.layer = layer
        self.attention = layer.self_attn.fused(dtype)
        self.mlp = layer.mlp.fused(dtype)
        assert self.attention.qkv_bias is not None
        size = layer.config.query_size
        self.of_query = self.attention.qkv[:size], self.attention.qkv_bias[:size]
        self.of_key_value = self.attention.qkv[size:], self.attention.qkv_bias[size:]

    def __call__(self, hidden: Tensor, positions: Tensor, wanted: Tensor | None, attend: AttendRows) -> Tensor:
        layer, attention = self.layer, self.layer.self_attn
        normed = layer.input_layernorm(hidden)
        table = layer.rotary(positions)
        key, value = attention.key_value(F.linear(normed, *self.of_key_value), self.attention, table)
        if wanted is not None:
            hidden, normed = chosen_rows(hidden, wanted), chosen_rows(normed, wanted)
            table = RotaryTable(*(chosen_rows(each, wanted) for each in table))
        query = attention.query(F.linear(normed, *self.of_query), self.attention, table)
        hidden = hidden + F.linear(attend(query, key, value, wanted).flatten(1), self.attention.o)
        return hidden + layer.mlp.apply_fused(layer.post_attention_layernorm(hidden), self.mlp)


class MimoHead(MtpHead):
    """Source: MiMo (arXiv 2505.07608)."""

    slow_layer: ClassVar[str] = "draftsmith_mtp.replay:SlowQwen2"

    def __init__(self, verifier: VerifierFacts) -> None:
        config = LayerConfig.from_verifier(verifier, layer_type="llama", num_layers=1)
        super().__init__(verifier, Qwen2Layer(config), lambda: RMSNorm(config.hidden_size, config.rms_norm_eps))
