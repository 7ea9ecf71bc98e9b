"""The serving path, written the slow way: what vLLM does in a round, with a key/value cache of its own.

Shares no code with the training forward, on purpose: the two are compared in tests, so that a mistake in either is
seen. Only the parameters and the rotary frequencies are the model's.

A round (vLLM's ``v1/spec_decode/dflash.py``): the features of newly verified tokens pass ``fc`` and ``hidden_norm``,
and every layer writes their keys and values into its cache, at their positions; then one pass over the bonus token and
the mask tokens, which attend to the cache and to each other. Their own keys and values are dropped after the round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define
from torch import Tensor

from draftsmith import reference
from draftsmith.interfaces import Drafter
from draftsmith_dflash.model import DFlashDraft, DraftLayer
from draftsmith_dflash.options import LayerAttention, Layout

__all__ = ["BlockDrafter"]


@define
class _Verified:
    """Features in the caches, [rows, A * H_t]; per layer keys (rotated) and values [rows, kv_heads, head_dim]."""

    taps: Tensor
    layers: list[tuple[Tensor, Tensor]]


class BlockDrafter(Drafter):
    """Drafts one sequence, in float32.

    Args:
        model: the draft; its trained parameters are read at every call.
        layers: window and causality of each.
        mask_token_id: what the rows after the bonus token read.
        layout: 1 + K rows of which the last K predict, or K rows that all predict.
    """

    def __init__(
        self, model: DFlashDraft, layers: Sequence[LayerAttention], mask_token_id: int, layout: Layout
    ) -> None:
        self.model = model
        self.layers = layers
        self.config = model.config
        self.mask_token_id = mask_token_id
        self.layout = layout
        self.verified: _Verified | None = None

    def reset(self) -> None:
        self.verified = None

    def propose(self, token_ids: Tensor, taps: Tensor, num_tokens: int, *, forced: Tensor | None = None) -> Tensor:
        """One pass, all K positions at once: what was drafted before is not read, so *forced* changes nothing."""
        with torch.no_grad():
            return self.backbone(token_ids, taps, num_tokens) @ self.model.lm_head.weight.float().T

    @torch.no_grad()
    def backbone(self, token_ids: Tensor, taps: Tensor, num_tokens: int) -> Tensor:
        """Normed hidden states [K, H] of the predicting rows; K = *num_tokens*, else as :meth:`propose`."""
        device = self.model.fc.weight.device
        token_ids, taps = token_ids.to(device), taps.to(device, torch.float32)
        start = token_ids.shape[0] - 1  # position of the bonus token
        if taps.shape[0] != start:
            raise ValueError(f"{start} verified tokens need as many rows of features, got {taps.shape[0]}")
        caches = self._verify(taps)
        unused = 1 if self.layout == "bonus_anchor" else 0
        rows = token_ids.new_full((num_tokens + unused,), self.mask_token_id)
        rows[0] = token_ids[-1]
        positions = start + torch.arange(rows.shape[0], device=device)
        hidden = self.model.embed_tokens.weight[rows].float()
        for layer, cache, kind in zip(self.model.layers, caches, self.layers, strict=True):
            assert isinstance(layer, DraftLayer)
            normed = self._norm(hidden, layer.input_layernorm.weight)
            hidden = hidden + self._attention(layer, normed, positions, cache, kind)
            normed = self._norm(hidden, layer.post_attention_layernorm.weight)
            hidden = hidden + reference.feed_forward(normed, layer.mlp)
        return self._norm(hidden[unused:], self.model.norm.weight)

    def _verify(self, taps: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The caches of the tokens with these features; what the last call has in common with this one is kept."""
        last, self.verified = self.verified, None  # forgotten, should this call fail half way
        done, layers = 0, [self._no_rows() for _ in self.model.layers]
        if last is not None:
            common = min(taps.shape[0], last.taps.shape[0])
            done = int((taps[:common] == last.taps[:common]).all(-1).long().cumprod(0).sum())
            layers = [(key[:done], value[:done]) for key, value in last.layers]
        context = self._norm(taps[done:] @ self.model.fc.weight.T, self.model.hidden_norm.weight)
        positions = torch.arange(done, taps.shape[0], device=taps.device)
        caches = []
        for layer, (key, value) in zip(self.model.layers, layers, strict=True):
            assert isinstance(layer, DraftLayer)
            new_key, new_value = self._key_value(layer, context, positions)
            caches.append((torch.cat((key, new_key)), torch.cat((value, new_value))))
        self.verified = _Verified(taps, caches)
        return caches

    def _no_rows(self) -> tuple[Tensor, Tensor]:
        nothing = self.model.fc.weight.new_zeros(0, self.config.num_key_value_heads, self.config.head_dim)
        return nothing, nothing

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return reference.norm(x, weight, self.config.rms_norm_eps)

    def _key_value(self, layer: DraftLayer, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        attention = layer.self_attn
        assert attention.k_norm is not None
        heads = (-1, self.config.num_key_value_heads, self.config.head_dim)
        key = self._norm((inputs @ attention.k_proj.weight.T).view(heads), attention.k_norm.weight)
        return reference.turn(key, positions, self.model.rotary), (inputs @ attention.v_proj.weight.T).view(heads)

    def _attention(
        self,
        layer: DraftLayer,
        inputs: Tensor,
        positions: Tensor,
        cache: tuple[Tensor, Tensor],
        kind: LayerAttention,
    ) -> Tensor:
        attention, config = layer.self_attn, self.config
        assert attention.q_norm is not None
        query = (inputs @ attention.q_proj.weight.T).view(-1, config.num_attention_heads, config.head_dim)
        query = reference.turn(self._norm(query, attention.q_norm.weight), positions, self.model.rotary)
        own_key, own_value = self._key_value(layer, inputs, positions)
        key, value = torch.cat((cache[0], own_key)), torch.cat((cache[1], own_value))
        # The cache holds every position before the bonus token; the rows follow.
        distance = positions[:, None] - torch.arange(key.shape[0], device=positions.device)[None, :]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if kind.causal:
            visible &= distance >= 0
        if kind.window is not None:
            # As wide to both sides where attention is not causal (vLLM's _maybe_symmetrize_window).
            visible &= distance.abs() < kind.window
        return reference.attention(query, key, value, visible) @ attention.o_proj.weight.T
