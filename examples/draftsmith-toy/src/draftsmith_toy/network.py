"""The network once more, as vLLM runs it. Imported by vLLM alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.utils import AutoWeightsLoader


class Cell(nn.Module):
    embed_tokens: nn.Module

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        model = vllm_config.speculative_config.draft_model_config
        width, heads = model.get_hidden_size(), model.get_num_attention_heads(vllm_config.parallel_config)
        self.cell = nn.GRUCell(width, width)
        self.norm = RMSNorm(width, eps=model.hf_config.rms_norm_eps)
        # vLLM's proposer takes a draft with a cache of its own for granted. Nobody calls the layer that has it.
        self.unused = Attention(
            heads,
            model.get_head_size(),
            scale=1.0,
            num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.layers.{vllm_config.model_config.get_total_num_hidden_layers()}.unused",
        )


class ServedToy(nn.Module):
    """As vLLM's proposer ``eagle`` asks: tokens and the states before them → what the head reads, what is fed back.

    Embedding and head are the verifier's: vLLM puts them there, since nothing here says ``has_own_lm_head``.
    """

    lm_head: nn.Module

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.model = Cell(vllm_config, prefix or "draft")
        self.logits_processor = LogitsProcessor(vllm_config.model_config.get_vocab_size())

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        embedded = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        state = self.model.cell(embedded, hidden_states)
        return self.model.norm(state), state

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        named = ((f"model.{name}", weight) for name, weight in weights)
        loaded: set[str] = AutoWeightsLoader(self).load_weights(named)
        return loaded
