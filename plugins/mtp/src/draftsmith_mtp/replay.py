"""The serving path, written the slow way: what vLLM does in a round, one position at a time.

Shares no code with the training forward, on purpose: the two are compared in tests, so that a mistake in either is
seen. Only the parameters and the rotary frequencies are the model's.

A round (vLLM's ``llm_base_proposer``): the rows of the newly verified tokens, with ids shifted left by one and the
bonus token last, positions not shifted; then one row per further token: its embedding, the head's own hidden state,
the next position. The rows of drafted tokens are provisional, and dropped when the round ends.

A verified row looks only back, so it is the same in every round that has it. So rounds that start at different tokens
of one sequence run side by side here: the verified rows once, of which each sees those before its bonus token, and
provisional rows of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftsmith import reference
from draftsmith.interfaces import Drafter
from draftsmith_mtp.layers import TransformersLayer
from draftsmith_mtp.mimo import Qwen2Layer
from draftsmith_mtp.model import MtpDraft, MtpHead

__all__ = ["MtpDrafter", "SlowLayer", "SlowQwen2", "SlowTransformers"]


class SlowLayer(ABC):
    """A decoder layer as it is served: built for a head when a round begins, it keeps the keys of all its rows."""

    def __init__(self, head: MtpHead) -> None:
        self.head = head

    @abstractmethod
    def __call__(self, hidden: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Rows [N, H] at int64 *positions* [N] through the layer; their keys join those before.

        Args:
            visible: bool [N, rows], the rows so far and these: which of them each sees.
        """


class MtpDrafter(Drafter):
    """Drafts one sequence, in float32; keeps nothing from call to call.

    Args:
        model: the draft; its trained parameters are read at every call.
        final_norm: the verifier's, for families whose head is fed what comes after it.
    """

    #: Enough to make one product of each weight worth it, and few enough for their logits, [starts, K, V].
    starts_at_once: ClassVar[int] = 64

    def __init__(self, model: MtpDraft, final_norm: nn.Module) -> None:
        self.model = model
        self.head: MtpHead = model.head
        self.family = model.family
        self.final_norm = final_norm
        self.lm_head = model.lm_head.weight.detach().float()  # a copy only where it is stored in another dtype

    def propose(self, token_ids: Tensor, taps: Tensor, num_tokens: int, *, forced: Tensor | None = None) -> Tensor:
        rows = token_ids.shape[0] - 1
        if taps.shape[0] != rows:
            raise ValueError(f"{rows} verified tokens need as many rows of features, got {taps.shape[0]}")
        each = None if forced is None else forced[None]
        return self.propose_each(token_ids, taps, [rows], num_tokens, forced=each)[0]

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
        device = self.lm_head.device
        layer: SlowLayer = resolve_name(self.head.slow_layer)(self.head)
        verified = torch.tensor(list(bonus), device=device)  # rows before each bonus token
        count = int(verified.max())
        position, start = torch.arange(count, device=device), torch.arange(len(verified), device=device)
        rows = reference.CachedRows.verified(position)
        visible = rows.visible(position, rows.start, position + 1)
        fed = taps[:count].to(device, torch.float32)
        if self.family.feeds == "normed":
            fed = self.final_norm(fed)
        mixed = self._mixed(token_ids[1 : count + 1].to(device), fed, position)
        hidden = layer(mixed, position, visible)[verified - 1]
        logits: list[Tensor] = []
        for step in range(num_tokens):
            normed = self._norm(hidden, self.head.final_layernorm)
            logits.append(normed @ self.lm_head.T)
            if step == num_tokens - 1:
                break
            token = logits[-1].argmax(-1) if forced is None else forced[:, step].to(device)
            position = verified + step
            rows.add(position, start)
            own = normed if self.family.recycles == "normed" else hidden
            hidden = layer(self._mixed(token, own, position), position, rows.visible(position, start, verified))
        return torch.stack(logits, dim=1)

    def _mixed(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Rows of (token, hidden) → the decoder layer's input."""
        embedding = self.model.embed_tokens.weight[tokens].float()
        if self.family.zeroes_first:
            embedding = torch.where(positions[:, None] == 0, torch.zeros_like(embedding), embedding)
        both = [self._norm(embedding, self.head.token_layernorm), self._norm(hidden, self.head.hidden_layernorm)]
        if self.family.concatenation == "hidden_embedding":
            both.reverse()
        return torch.cat(both, dim=-1) @ self.head.input_proj.weight.T

    def _norm(self, x: Tensor, norm: nn.Module) -> Tensor:
        weight = norm.get_parameter("weight")
        return reference.norm(x, weight + 1 if self.head.adds_one else weight, self.head.eps)


class SlowQwen2(SlowLayer):
    """MiMo's."""

    def __init__(self, head: MtpHead) -> None:
        super().__init__(head)
        assert isinstance(head.layer, Qwen2Layer)
        self.layer = head.layer
        empty = torch.zeros(0, self.layer.config.num_key_value_heads, self.layer.config.head_dim)
        self.key = self.value = empty.to(head.input_proj.weight.device)

    def __call__(self, hidden: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        layer = self.layer
        normed = reference.norm(hidden, layer.input_layernorm.weight, self.head.eps)
        hidden = hidden + self._attention(normed, positions, visible)
        normed = reference.norm(hidden, layer.post_attention_layernorm.weight, self.head.eps)
        return hidden + reference.feed_forward(normed, layer.mlp)

    def _attention(self, normed: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        attention, config = self.layer.self_attn, self.layer.config

        def projected(projection: nn.Linear, heads: int) -> Tensor:
            return (normed @ projection.weight.T + projection.bias).view(-1, heads, config.head_dim)

        query = reference.turn(projected(attention.q_proj, config.num_attention_heads), positions, self.layer.rotary)
        key = reference.turn(projected(attention.k_proj, config.num_key_value_heads), positions, self.layer.rotary)
        self.key = torch.cat((self.key, key))
        self.value = torch.cat((self.value, projected(attention.v_proj, config.num_key_value_heads)))
        return reference.attention(query, self.key, self.value, visible) @ attention.o_proj.weight.T


class SlowTransformers(SlowLayer):
    """The layer as transformers runs it in generation: the whole of it, with its own cache."""

    def __init__(self, head: MtpHead) -> None:
        from transformers import DynamicCache

        super().__init__(head)
        assert isinstance(head.layer, TransformersLayer)
        self.layer: Any = head.layer
        self.cache = DynamicCache()

    def __call__(self, hidden: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        layer = self.layer
        attended, _ = layer.self_attn(
            hidden_states=layer.input_layernorm(hidden)[None],
            position_embeddings=layer.tables(hidden, positions),
            attention_mask=visible[None, None],
            past_key_values=self.cache,
        )
        hidden = hidden + attended[0]
        fed: Tensor = layer.mlp(layer.post_attention_layernorm(hidden)[None])[0]
        return hidden + fed
