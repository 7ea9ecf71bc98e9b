"""From a packed row to anchored blocks: where they start, what their rows read, which of them predict what.

An *anchor* is a token that the verifier wrote, after which a draft could begin: in serving it is the bonus token, the
newest one, whose features do not exist yet. Its *block* is B rows at its position and the B - 1 that follow: the
anchor's token, then mask tokens. Step s of its chain predicts x_{p+1+s}: in the ``bonus_anchor`` layout row s + 1, at
the position of the token that it predicts; in the ``anchor_first`` layout row s, one position before it.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from draftsmith.interfaces import PackedRow
from draftsmith_dflash.options import Layout

__all__ = ["Batch", "make_batch"]


@frozen(kw_only=True)
class Batch:
    """One packed row with its blocks. T context rows, n blocks of B rows, N supervised slots.

    Context rows are the row's tokens without padding: documents one after the other.

    Attributes:
        taps: [T, A * H_t], features of the context rows.
        positions: int64 [T], positions in their documents.
        document_lengths: context rows of each document.
        anchors: int64 [n], context row of each anchor, ascending. Its block sees the rows before it.
        token_ids: int64 [n, B], what the block rows read: the anchor's token, then the mask token.
        block_positions: int64 [n, B].
        rows: int64 [N], block row of each slot, in [0, n * B).
        chain: int64 [N], block of each slot, in [0, n); ascending.
        step: int64 [N], its place in the chain: 0, 1, … without gaps.
        previous: int64 [N], target id of the token before the predicted one, x_{p+s}.
        teacher_row: int64 [N], packed row whose teacher distribution the slot predicts, that of x_{p+s}.
        total_positions: tokens of the packed row, padding included.
    """

    taps: Tensor
    positions: Tensor
    document_lengths: tuple[int, ...]
    anchors: Tensor
    token_ids: Tensor
    block_positions: Tensor
    rows: Tensor
    chain: Tensor
    step: Tensor
    previous: Tensor
    teacher_row: Tensor
    total_positions: int


def make_batch(
    row: PackedRow,
    *,
    block_size: int,
    max_anchors: int,
    mask_token_id: int,
    layout: Layout,
    generator: torch.Generator,
) -> Batch:
    """Draw at most *max_anchors* anchors a document, and lay out their blocks. Random only by *generator*."""
    raise NotImplementedError
