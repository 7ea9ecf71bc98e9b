"""The serving path, written the slow way: what vLLM does in a round, one position at a time.

Shares no code with the training forward, on purpose: the two are compared in tests, so that a mistake in either is
seen. Only the parameters and the rotary frequencies are the model's.

A round (vLLM's ``llm_base_proposer``): the rows of the newly verified tokens, with ids shifted left by one and the
bonus token last, positions not shifted; then one row per further token: its embedding, the fed-back hidden state, the
next position. The rows of drafted tokens are provisional, and dropped when the round ends.

A verified row looks only back, so it is the same in every round that has it. So rounds that start at different tokens
of one sequence run side by side here: the verified rows once, of which each sees those before its bonus token, and
provisional rows of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from attrs import define
from torch import Tensor

from draftsmith import reference
from draftsmith.interfaces import Drafter
from draftsmith.layers import RMSNorm
from draftsmith_eagle3.model import DraftLayer, Eagle3Network

__all__ = ["Eagle3Drafter", "LayerCache", "NetworkDrafter"]


@define
class LayerCache:
    """Keys (rotated) and values of one layer, [rows, kv_heads, head_dim]."""

    key: Tensor
    value: Tensor


class NetworkDrafter(Drafter):
    """Drafts one sequence with EAGLE-3's network, in float32; keeps nothing from call to call.

    A subclass says in :meth:`propose_each` which rows the network reads, and which see which.

    Args:
        model: the draft; its trained parameters are read at every call.
        kept_ids: int64 [V_d], the target id of every draft id.
    """

    #: Enough to make one product of each weight worth it, and few enough for their logits, [starts, K, V_d].
    starts_at_once: ClassVar[int] = 64

    def __init__(self, model: Eagle3Network, kept_ids: Tensor) -> None:
        self.model = model
        self.config = model.config
        self.kept_ids = kept_ids.to(model.fc.weight.device)
        self.head = model.lm_head.weight.detach().float()  # a copy only where it is stored in another dtype

    def propose(self, token_ids: Tensor, taps: Tensor, num_tokens: int, *, forced: Tensor | None = None) -> Tensor:
        rows = token_ids.shape[0] - 1
        if taps.shape[0] != rows:
            raise ValueError(f"{rows} verified tokens need as many rows of features, got {taps.shape[0]}")
        each = None if forced is None else forced[None]
        return self.propose_each(token_ids, taps, [rows], num_tokens, forced=each)[0]

    def empty_caches(self) -> list[LayerCache]:
        """Of every layer, without a row."""
        empty = torch.zeros(0, self.config.num_key_value_heads, self.config.head_dim, device=self.head.device)
        return [LayerCache(empty, empty) for _ in self.model.layers]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The network's norm, with its epsilon."""
        return reference.norm(x, weight, self.config.rms_norm_eps)

    def fused(self, taps: Tensor) -> Tensor:
        """Features [rows, A * H_t] → hidden [rows, H]."""
        model = self.model
        if model.input_norm is not None:
            taps = self.norm(taps, model.input_norm.weight)
        if model.fc_norm is not None:
            parts = taps.chunk(model.num_taps, dim=-1)
            weights = [norm.weight for norm in model.fc_norm if isinstance(norm, RMSNorm)]
            taps = torch.cat([self.norm(part, weight) for part, weight in zip(parts, weights, strict=True)], dim=-1)
        return taps @ model.fc.weight.T

    def embedded(self, tokens: Tensor) -> Tensor:
        """Target ids [rows] → [rows, H]."""
        return self.model.embed_tokens.weight[tokens].float()

    def layers(
        self, embedding: Tensor, hidden: Tensor, positions: Tensor, visible: Tensor, caches: list[LayerCache]
    ) -> Tensor:
        """Rows of (embedding, hidden) at *positions* through all layers; their keys and values join *caches*."""
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, DraftLayer)
            if index == 0:
                normed = self.norm(hidden, layer.hidden_norm.weight)
                inputs = torch.cat((self.norm(embedding, layer.input_layernorm.weight), normed), dim=-1)
                residual = normed if self.model.options.norm_before_residual else hidden
            else:
                inputs, residual = self.norm(hidden, layer.input_layernorm.weight), hidden
            hidden = residual + self._attention(layer, inputs, positions, visible, caches[index])
            normed = self.norm(hidden, layer.post_attention_layernorm.weight)
            hidden = hidden + reference.feed_forward(normed, layer.mlp)
        return hidden

    def _attention(
        self, layer: DraftLayer, inputs: Tensor, positions: Tensor, visible: Tensor, cache: LayerCache
    ) -> Tensor:
        attention, config = layer.self_attn, self.config
        heads = (-1, config.num_attention_heads, config.head_dim)
        kv_heads = (-1, config.num_key_value_heads, config.head_dim)
        query = (inputs @ attention.q_proj.weight.T).view(heads)
        key = (inputs @ attention.k_proj.weight.T).view(kv_heads)
        if attention.q_norm is not None and attention.k_norm is not None:
            query = self.norm(query, attention.q_norm.weight)
            key = self.norm(key, attention.k_norm.weight)
        cache.key = torch.cat((cache.key, reference.turn(key, positions, self.model.rotary)))
        cache.value = torch.cat((cache.value, (inputs @ attention.v_proj.weight.T).view(kv_heads)))
        query = reference.turn(query, positions, self.model.rotary)
        return reference.attention(query, cache.key, cache.value, visible) @ attention.o_proj.weight.T


class Eagle3Drafter(NetworkDrafter):
    """Drafts token by token: the verified rows once, then a row a token that is fed back."""

    @torch.no_grad()
    def propose_each(
        self,
        token_ids: Tensor,
        taps: Tensor,
        bonus: Sequence[int],
        num_tokens: int,
        *,
        forced: Tensor | None = None,
    ) -> Tensor:
        device, window = self.head.device, self.config.sliding_window
        verified = torch.tensor(list(bonus), device=device)  # rows before each bonus token
        count = int(verified.max())
        position, start = torch.arange(count, device=device), torch.arange(len(verified), device=device)
        rows = reference.CachedRows.verified(position)
        visible = rows.visible(position, rows.start, position + 1, window)
        caches = self.empty_caches()
        fused = self.fused(taps[:count].to(device, torch.float32))
        tokens = self.embedded(token_ids[1 : count + 1].to(device))
        hidden = self.layers(tokens, fused, position, visible, caches)[verified - 1]
        logits: list[Tensor] = []
        for step in range(num_tokens):
            normed = self.norm(hidden, self.model.norm.weight)
            logits.append(normed @ self.head.T)
            if step == num_tokens - 1:
                break
            token = self.kept_ids[logits[-1].argmax(-1)] if forced is None else forced[:, step].to(device)
            fed_back = normed if self.model.options.norm_output else hidden
            position = verified + step
            rows.add(position, start)
            visible = rows.visible(position, start, verified, window)
            hidden = self.layers(self.embedded(token), fed_back, position, visible, caches)
        return torch.stack(logits, dim=1)
