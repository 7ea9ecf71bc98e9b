"""From a packed row to what the draft is trained on: the shift, the chains, and which of their steps count.

Index t of the draft's sequence consumes (embedding of x_{t+1}, features g_t) and predicts x_{t+2}: the shift by one of
:class:`draftsmith.rows.ShiftedRow`, with the features of the row's own token. Rows that no longer carry a target are
not computed.
"""

from __future__ import annotations

import attrs
from attrs import frozen
from torch import Tensor

from draftsmith.interfaces import PackedRow
from draftsmith.rows import ChainStep, ShiftedRow, chain_steps, shift_by_one

__all__ = ["Batch", "make_batch"]


@frozen(kw_only=True)
class Batch(ShiftedRow):
    """One packed row, shifted. R rows, A tapped layers of width H_t.

    Attributes:
        taps: [R, A * H_t], features of x_t.
        steps: the chains alive at each step; empty ones included.
    """

    taps: Tensor
    steps: tuple[ChainStep, ...]


def make_batch(row: PackedRow, num_steps: int) -> Batch:
    """Shift *row* and find its chains of up to *num_steps* steps. Deterministic."""
    shifted = shift_by_one(row)
    return Batch(
        **attrs.asdict(shifted, recurse=False),
        taps=row.taps[shifted.packed_index - 1],
        steps=chain_steps(shifted, num_steps),
    )
