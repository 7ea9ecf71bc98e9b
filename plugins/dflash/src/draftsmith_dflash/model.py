"""The DFlash draft: blocks of mask tokens that attend to the verifier's features, injected as keys and values.

Source: DFlash (z-lab); names and shapes are those of vLLM's ``qwen3_dflash.py``, which serves it. The features pass
``fc`` and ``hidden_norm`` once, and every layer projects the result to keys and values with the same matrices as the
rows of the blocks; no layer's input norm is applied to them.

Shapes: T context rows, n blocks of B rows, N slots, H width, A tapped layers of width H_t, V_t and V_d target and
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.interfaces import AlgorithmSetup, DraftArchitecture
from draftsmith.layer_config import LayerConfig
from draftsmith.layers import Attention, Mlp, RMSNorm, RotaryEmbedding, RotaryTable, Weight, draft_head, initialise
from draftsmith_dflash.batch import Batch
from draftsmith_dflash.mask import Attend
from draftsmith_dflash.options import BlockOptions, layer_attention, layer_config

__all__ = ["DFlashDraft"]


class DraftLayer(nn.Module):
    """A decoder layer, qwen3-style."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)


class DFlashDraft(nn.Module, DraftArchitecture):
    """The draft network. Modules: embed_tokens, fc, hidden_norm, layers.i, norm, lm_head (names as vLLM's).

    A draft of the verifier's width has the verifier's embedding and (restricted) head in place and frozen; one of
    another width has its own, trained. ``setup.options`` is a :class:`BlockOptions`. A subclass builds further modules
    after ``super().__init__(setup)``, and initialises them itself.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__()
        options: BlockOptions = setup.options
        self.options = options
        self.config = layer_config(options, setup.verifier)
        self.compute_dtype = setup.compute_dtype
        width, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.is_shared = width == setup.verifier.hidden_size
        embedding = setup.weights.embed_tokens.detach()
        head = draft_head(setup.weights, setup.vocabulary, setup.compute_dtype)
        if not self.is_shared:
            embedding, head = (torch.empty(each.shape[0], width) for each in (embedding, head))
        self.embed_tokens = Weight(embedding, trained=not self.is_shared)
        self.fc = nn.Linear(len(setup.capture.layer_ids) * setup.verifier.hidden_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        self.layers = nn.ModuleList(DraftLayer(self.config) for _ in range(self.config.num_layers))
        self.norm = RMSNorm(width, eps)
        self.lm_head = Weight(head, trained=not self.is_shared)
        self.rotary = RotaryEmbedding(self.config)
        self.attention = layer_attention(options)
        initialise(self, options.initializer_range)

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """The verifier's embedding, and the rows of its head that the draft can propose; nothing for another width."""
        if not self.is_shared:
            return {}
        return {"embed_tokens.weight": self.embed_tokens.weight, "lm_head.weight": self.lm_head.weight}

    def vocabulary_tensors(self) -> Collection[str]:
        return {"embed_tokens.weight", "lm_head.weight"}

    def context(self, taps: Tensor) -> Tensor:
        """Features [T, A * H_t] → what every layer projects to keys and values, [T, H]."""
        projected = F.linear(taps.to(self.compute_dtype), self.fc.weight.to(self.compute_dtype))
        normed: Tensor = self.hidden_norm(projected)
        return normed

    def forward(self, batch: Batch, attend: Attend) -> Tensor:
        """Normed hidden states [N, H] of the batch's slots; times the head they are logits."""
        if not len(batch.blocks):
            return self._nothing(batch)
        context = self.context(batch.taps)
        hidden = F.embedding(batch.token_ids.flatten(), self.embed_tokens.weight).to(self.compute_dtype)
        tables = self.rotary(batch.positions), self.rotary(batch.block_positions.flatten())
        for index in range(len(self.layers)):
            is_last = index == len(self.layers) - 1
            hidden = self._layer(index, context, hidden, tables, batch, attend, batch.rows if is_last else None)
        normed: Tensor = self.norm(hidden)
        return normed

    def _nothing(self, batch: Batch) -> Tensor:
        """[0, H], still a function of every trained weight, so that ranks with nothing to predict stay in step."""
        normed: Tensor = self.norm(self.context(batch.taps[:0]))
        weights = [each.flatten()[:1] for each in self.parameters() if each.requires_grad]
        return normed + 0.0 * torch.cat(weights).sum().to(normed.dtype)

    def _layer(
        self,
        index: int,
        context: Tensor,
        hidden: Tensor,
        tables: tuple[RotaryTable, RotaryTable],
        batch: Batch,
        attend: Attend,
        wanted: Tensor | None,
    ) -> Tensor:
        """One layer on all block rows, [n * B, H]; only the rows *wanted* go on after the attention (None: all)."""
        layer = self.layers[index]
        assert isinstance(layer, DraftLayer)
        weights, mlp = layer.self_attn.fused(self.compute_dtype), layer.mlp.fused(self.compute_dtype)
        size = self.config.query_size
        context_table, table = tables
        projected = self._projected(layer.input_layernorm, hidden, weights.qkv, is_first=index == 0)
        query = layer.self_attn.query(projected[:, :size], weights, table)
        key, value = layer.self_attn.key_value(projected[:, size:], weights, table)
        context_projected = F.linear(context, weights.qkv[size:])
        context_key, context_value = layer.self_attn.key_value(context_projected, weights, context_table)
        kind = self.attention[index]
        attended = attend(query, context_key, context_value, key, value, batch.blocks, kind).flatten(1)
        if wanted is not None:
            attended, hidden = attended.index_select(0, wanted), hidden.index_select(0, wanted)
        hidden = hidden + F.linear(attended, weights.o)
        return hidden + layer.mlp.apply_fused(layer.post_attention_layernorm(hidden), mlp)

    def _projected(self, norm: RMSNorm, hidden: Tensor, weight: Tensor, *, is_first: bool) -> Tensor:
        """Queries, keys and values of all block rows, before norms and rotation, [n * B, q + 2 kv]."""
        if not is_first:
            return F.linear(norm(hidden), weight)
        # All mask rows enter the first layer alike: one stands for them.
        by_block = hidden.view(-1, self.options.block_size, hidden.shape[-1])
        distinct = F.linear(norm(torch.cat((by_block[:, 0], by_block[0, 1:2]))), weight)
        masks = distinct[-1].expand(by_block.shape[0], by_block.shape[1] - 1, -1)
        return torch.cat((distinct[:-1, None], masks), 1).flatten(0, 1)
