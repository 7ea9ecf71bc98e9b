"""From a packed row to the elements that the draft is trained on: which rows are continued, and how far.

Rows are EAGLE-3's: row t reads x_{t+1} and the features of x_t, and predicts x_{t+2}. An *element* (anchor a, depth d)
stands for the mask row that vLLM puts d places after row a: it reads no token and no features, and predicts
x_{a+2+d}. Depth 0 are the rows themselves.

Which elements are trained is drawn by COD (conditional-on-distribution) sampling: an element of depth d exists only
where that of depth d - 1 was kept, so that all rows an element sees in serving are there. Of a row's seeds (all rows
with a target, or a random part of them) depth d keeps (seeds - d) · max(ratio ** d, minimum) elements at most.

An element is trained where the verifier itself would stand there: x_{a+1} … x_{a+2+d} are its own tokens, in one
document. So no chain leaves its document or begins before it, and chains are prefixes, as tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import asdict, frozen
from torch import Tensor

from draftsmith.attention import Continuations
from draftsmith.interfaces import PackedRow
from draftsmith.rows import ShiftedRow, shift_by_one

__all__ = ["Batch", "make_batch", "sample_anchors"]


@frozen(kw_only=True)
class Batch(ShiftedRow):
    """One packed row, shifted, with its elements. R rows, w of them with a target, N elements of depth >= 1.

    Slots are the w rows, then the N elements, chain after chain.

    Attributes:
        taps: [R, A * H_t], features of x_t.
        starts: int64 [w], the rows that have a target, ascending.
        chains: the elements: which rows they continue.
        anchor: int64 [N], the row that each element continues.
        depth: int64 [N], 1, 2, … in each chain.
        teacher_row: int64 [w + N], packed row whose teacher distribution the slot predicts.
        step: int64 [w + N], depth of each slot.
        chain: int64 [w + N], chain of each slot, in [0, w).
    """

    taps: Tensor
    starts: Tensor
    chains: Continuations
    anchor: Tensor
    depth: Tensor
    teacher_row: Tensor
    step: Tensor
    chain: Tensor


def make_batch(
    row: PackedRow,
    *,
    num_depths: int,
    ratio: float,
    minimum: float,
    max_anchors: int | None,
    generator: torch.Generator,
) -> Batch:
    """Shift *row* and draw its elements. Random only by *generator*."""
    shifted = shift_by_one(row)
    run = shifted.run
    device = row.input_ids.device
    starts = torch.nonzero(run >= 2).flatten()
    length = torch.zeros_like(run)
    drawn = sample_anchors(run, num_depths, ratio, minimum, max_anchors, generator)
    for number, anchors in enumerate(drawn, 1):
        length[anchors] = number
    continued = torch.nonzero(length).flatten()
    chains = Continuations(
        rows=continued.tolist(), lengths=length[continued].tolist(), document_lengths=shifted.document_lengths
    )
    anchor, depth = chains.row_of_each(), chains.step_of_each()
    rows, step = torch.cat((starts, anchor)), torch.cat((torch.zeros_like(starts), depth))
    chain = torch.searchsorted(starts, rows)
    return Batch(
        **asdict(shifted, recurse=False),
        taps=row.taps[shifted.packed_index - 1],
        starts=starts.to(device),
        chains=chains,
        anchor=anchor.to(device),
        depth=depth.to(device),
        teacher_row=shifted.packed_index[(rows + step).to(device)],
        step=step.to(device),
        chain=chain.to(device),
    )


def sample_anchors(
    run: Tensor,
    num_depths: int,
    ratio: float,
    minimum: float,
    max_anchors: int | None,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """The anchors of depth 1, 2, … below *num_depths*, each int64 and ascending; every one is among those before it.

    Args:
        run: int64 [R], as of :class:`~draftsmith.rows.ShiftedRow`.
        ratio, minimum: depth d keeps max(ratio ** d, minimum) of the seeds, less d.
        max_anchors: seeds at most; None: all rows with a target.
    """
    seeds = _kept(torch.nonzero(run >= 2).flatten(), max_anchors, generator)
    # The row before has a target too, in the same document: an element may stand here that continues it.
    follows = torch.zeros_like(run, dtype=torch.bool)
    follows[1:] = run[:-1] >= 3
    places = seeds[follows[seeds]]
    for depth in range(1, num_depths):
        size = int((seeds.shape[0] - depth) * max(ratio**depth, minimum))
        if size <= 0 or not places.numel():
            return
        places = _kept(places, size, generator)
        yield places - depth
        places = places + 1
        places = places[places < run.shape[0]]
        places = places[follows[places]]


def _kept(rows: Tensor, most: int | None, generator: torch.Generator) -> Tensor:
    """*rows*, or so many of them, drawn evenly; ascending."""
    count = rows.shape[0]
    if most is None or count <= most:
        return rows
    return rows[torch.randperm(count, generator=generator)[:most]].sort().values
