"""The arithmetic of a decoder layer, the slow way, and which rows see which: for serving paths that tests compare with
the training forward.

Nothing here is shared with :mod:`draftsmith.layers`, on purpose: a mistake in either is then seen.

Shapes: T rows, N keys, h query heads, g key/value heads (g divides h), d head dimension.
"""

from __future__ import annotations

import torch
from attrs import define
from torch import Tensor

from draftsmith.layers import Mlp, RotaryEmbedding

__all__ = ["CachedRows", "attention", "feed_forward", "norm", "turn"]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean of squares + eps) · weight, over the last dimension."""
    variance = (x * x).mean(-1, keepdim=True)
    return x / torch.sqrt(variance + eps) * weight


def turn(x: Tensor, positions: Tensor, rotary: RotaryEmbedding) -> Tensor:
    """Rotary embedding of [T, heads, d] as a product of complex numbers: (first + i · second half) · exp(i · angle).

    Only the frequencies (and their scaling) are those of *rotary*.
    """
    angle = positions[:, None] * rotary.inverse_frequency
    turns = torch.polar(torch.full_like(angle, rotary.scaling), angle)[:, None]
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * turns
    return torch.cat((turned.real, turned.imag), dim=-1)


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Head by head: query [T, h, d], key and value [N, g, d], *visible* bool [T, N] → [T, h · d]."""
    group = query.shape[1] // key.shape[1]
    output = torch.empty_like(query)
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // group].T * query.shape[-1] ** -0.5
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
        output[:, head] = weights @ value[:, head // group]
    return output.flatten(1)


def feed_forward(x: Tensor, mlp: Mlp) -> Tensor:
    """down(gate · sigmoid(gate) · up) of [T, H]."""
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    return (gate * torch.sigmoid(gate) * up) @ mlp.down_proj.weight.T


#: Of rows that all starts share.
_VERIFIED = -1


@define
class CachedRows:
    """Where the rows stand whose keys a drafter's caches hold, when rounds that start at different tokens of one
    sequence run side by side: verified rows once, and provisional rows of each start. Both int64 [rows].

    Attributes:
        position: in the sequence.
        start: to which of the starts a provisional row belongs; -1: to all.
    """

    position: Tensor
    start: Tensor

    @classmethod
    def verified(cls, position: Tensor) -> CachedRows:
        """Verified rows at *position*, int64 [rows]."""
        return cls(position, torch.full_like(position, _VERIFIED))

    def add(self, position: Tensor, start: Tensor) -> None:
        """Provisional rows at *position* of *start*, both int64 [N]."""
        self.position, self.start = torch.cat((self.position, position)), torch.cat((self.start, start))

    def visible(self, position: Tensor, start: Tensor, verified: Tensor, window: int | None = None) -> Tensor:
        """bool [N, rows]: which of them rows at *position* of *start* see, who have *verified* rows before them."""
        seen = torch.where(self.start == _VERIFIED, self.position < verified[:, None], self.start == start[:, None])
        return seen if window is None else seen & (position[:, None] - self.position < window)
