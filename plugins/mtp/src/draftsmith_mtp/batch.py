"""From a packed row to what the head is trained on: the shift, the chains, and which of their steps count.

Index t of the head's sequence consumes (embedding of x_{t+1}, the verifier's last hidden state at t) and predicts
x_{t+2}: the shift by one of :class:`draftsmith.rows.ShiftedRow`. Which hidden state that is, before or after the
verifier's final norm, is the family's.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from attrs import frozen
from torch import Tensor

from draftsmith.interfaces import PackedRow
from draftsmith.rows import ChainStep, ShiftedRow, chain_steps, shift_by_one

__all__ = ["Batch", "make_batch"]


@frozen(kw_only=True)
class Batch(ShiftedRow):
    """One packed row, shifted. R rows, verifier of width H.

    Attributes:
        hidden: [R, H], the hidden state of x_t that the head is fed.
        steps: the chains alive at each step; empty ones included.
    """

    hidden: Tensor
    steps: tuple[ChainStep, ...]


def make_batch(row: PackedRow, num_steps: int, feed: Callable[[Tensor], Tensor]) -> Batch:
    """Shift *row* and find its chains of up to *num_steps* steps. Deterministic.

    Args:
        row: its ``taps`` are the last layer's output, before the final norm.
        feed: makes of it what the head is fed.
    """
    shifted = shift_by_one(row)
    return Batch(
        **attrs.asdict(shifted, recurse=False),
        hidden=feed(row.taps[shifted.packed_index - 1]),
        steps=chain_steps(shifted, num_steps),
    )
