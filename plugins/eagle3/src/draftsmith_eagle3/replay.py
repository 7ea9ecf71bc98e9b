"""The serving path, written the slow way: what vLLM does in a round, with a key/value cache of its own.

Shares no code with the training forward, on purpose: the two are compared in tests, so that a mistake in either is
seen. Only the parameters and the rotary frequencies are the model's.

A round (vLLM's ``llm_base_proposer``): the rows of the newly verified tokens, with ids shifted left by one and the
bonus token last, positions not shifted; then one row per further token: its embedding, the fed-back hidden state, the
next position. The rows of drafted tokens are provisional, and dropped when the round ends.
"""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor

from draftsmith import reference
from draftsmith.interfaces import Drafter
from draftsmith.layers import RMSNorm
from draftsmith_eagle3.model import DraftLayer, Eagle3Draft

__all__ = ["Eagle3Drafter"]


@define
class _LayerCache:
    """Keys (rotated) and values of one layer, [rows, kv_heads, head_dim], and the rows' positions."""

    key: Tensor
    value: Tensor

    def cut(self, rows: int) -> None:
        self.key, self.value = self.key[:rows], self.value[:rows]


@define
class _Verified:
    """The rows whose keys are in the cache: their tokens and features."""

    token_ids: Tensor
    taps: Tensor
    layers: list[_LayerCache] = field(factory=list)


class Eagle3Drafter(Drafter):
    """Drafts one sequence, in float32.

    Args:
        model: the draft; its trained parameters are read at every call.
        kept_ids: int64 [V_d], the target id of every draft id.
    """

    def __init__(self, model: Eagle3Draft, kept_ids: Tensor) -> None:
        self.model = model
        self.config = model.config
        self.kept_ids = kept_ids.to(model.fc.weight.device)
        self.head = model.lm_head.weight.detach().float()  # a copy only where it is stored in another dtype
        self.verified: _Verified | None = None

    def reset(self) -> None:
        self.verified = None

    @torch.no_grad()
    def propose(self, token_ids: Tensor, taps: Tensor, num_tokens: int, *, forced: Tensor | None = None) -> Tensor:
        device = self.head.device
        token_ids, taps = token_ids.to(device), taps.to(device, torch.float32)
        rows = token_ids.shape[0] - 1
        if taps.shape[0] != rows:
            raise ValueError(f"{rows} verified tokens need as many rows of features, got {taps.shape[0]}")
        cache, done = self._resume(token_ids[1:], taps)
        hidden = self._fused(taps[done:])
        positions = torch.arange(done, rows, device=device)
        hidden = self._layers(token_ids[1 + done :], hidden, positions, cache)[-1:]
        self.verified = _Verified(token_ids[1:], taps, cache)
        provisional = [_LayerCache(each.key, each.value) for each in cache]
        logits = []
        for step in range(num_tokens):
            normed = self._norm(hidden, self.model.norm.weight)
            logits.append(normed @ self.head.T)
            if step == num_tokens - 1:
                break
            token = self.kept_ids[logits[-1].argmax(-1)] if forced is None else forced[step : step + 1].to(device)
            fed_back = normed if self.model.options.norm_output else hidden
            position = torch.tensor([rows + step], device=device)
            hidden = self._layers(token, fed_back, position, provisional)
        return torch.cat(logits)

    def _resume(self, token_ids: Tensor, taps: Tensor) -> tuple[list[_LayerCache], int]:
        """The cache cut to the rows that this call shares with the last one; at least one row is left to compute."""
        last, self.verified = self.verified, None  # forgotten, should this call fail half way
        if last is None:
            return self._empty_cache(), 0
        common = min(len(token_ids) - 1, len(last.token_ids))
        same = (token_ids[:common] == last.token_ids[:common]) & (taps[:common] == last.taps[:common]).all(-1)
        done = int(same.long().cumprod(0).sum())
        for each in last.layers:
            each.cut(done)
        return last.layers, done

    def _empty_cache(self) -> list[_LayerCache]:
        shape = (0, self.config.num_key_value_heads, self.config.head_dim)
        return [
            _LayerCache(torch.zeros(shape, device=self.head.device), torch.zeros(shape, device=self.head.device))
            for _ in self.model.layers
        ]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return reference.norm(x, weight, self.config.rms_norm_eps)

    def _fused(self, taps: Tensor) -> Tensor:
        model = self.model
        if model.input_norm is not None:
            taps = self._norm(taps, model.input_norm.weight)
        if model.fc_norm is not None:
            parts = taps.chunk(model.num_taps, dim=-1)
            weights = [norm.weight for norm in model.fc_norm if isinstance(norm, RMSNorm)]
            taps = torch.cat([self._norm(part, weight) for part, weight in zip(parts, weights, strict=True)], dim=-1)
        return taps @ model.fc.weight.T

    def _layers(self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: list[_LayerCache]) -> Tensor:
        """Rows of (token, hidden) at *positions* through all layers; their keys and values join *cache*."""
        embedding = self.model.embed_tokens.weight[tokens].float()
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, DraftLayer)
            if index == 0:
                normed = self._norm(hidden, layer.hidden_norm.weight)
                inputs = torch.cat((self._norm(embedding, layer.input_layernorm.weight), normed), dim=-1)
                residual = normed if self.model.options.norm_before_residual else hidden
            else:
                inputs, residual = self._norm(hidden, layer.input_layernorm.weight), hidden
            hidden = residual + self._attention(layer, inputs, positions, cache[index])
            normed = self._norm(hidden, layer.post_attention_layernorm.weight)
            hidden = hidden + reference.feed_forward(normed, layer.mlp)
        return hidden

    def _attention(self, layer: DraftLayer, inputs: Tensor, positions: Tensor, cache: _LayerCache) -> Tensor:
        attention, config = layer.self_attn, self.config
        heads = (-1, config.num_attention_heads, config.head_dim)
        kv_heads = (-1, config.num_key_value_heads, config.head_dim)
        query = (inputs @ attention.q_proj.weight.T).view(heads)
        key = (inputs @ attention.k_proj.weight.T).view(kv_heads)
        if attention.q_norm is not None and attention.k_norm is not None:
            query = self._norm(query, attention.q_norm.weight)
            key = self._norm(key, attention.k_norm.weight)
        cache.key = torch.cat((cache.key, reference.turn(key, positions, self.model.rotary)))
        cache.value = torch.cat((cache.value, (inputs @ attention.v_proj.weight.T).view(kv_heads)))
        key_positions = torch.arange(cache.key.shape[0], device=positions.device)
        distance = positions[:, None] - key_positions[None, :]
        visible = distance >= 0
        if config.sliding_window is not None:
            visible &= distance < config.sliding_window
        query = reference.turn(query, positions, self.model.rotary)
        return reference.attention(query, cache.key, cache.value, visible) @ attention.o_proj.weight.T
