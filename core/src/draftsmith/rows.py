"""Index arithmetic on packed rows that algorithms share: runs of supervised tokens, the shift by one, chains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from draftsmith.interfaces import DraftSlots, PackedRow

__all__ = ["ChainStep", "ShiftedRow", "chain_slots", "chain_steps", "shift_by_one", "supervised_run"]


def supervised_run(supervised: Tensor, documents: Tensor) -> Tensor:
    """How many supervised tokens follow one another from each row on, itself included, within its document.

    Args:
        supervised: bool [T].
        documents: int64 [T], equal within a document.

    Returns:
        int64 [T]; 0 where the row itself is not supervised.
    """
    count = supervised.shape[0]
    index = torch.arange(count, device=supervised.device)
    breaks = ~supervised
    breaks[1:] |= documents[1:] != documents[:-1]
    ends = torch.cat((torch.nonzero(breaks).flatten(), index.new_tensor([count])))
    following = ends[torch.searchsorted(ends, index, right=True).clamp_max(ends.shape[0] - 1)]
    return torch.where(supervised, following - index, torch.zeros_like(index))


@frozen(kw_only=True)
class ChainStep:
    """The chains alive at one step, n of them.

    Attributes:
        rows: int64 [n], their rows, ascending.
        kept: int64 [n], their places among the chains of the step before (of all chains, at step 0).
        chains: int64 [n], their places among all chains.
    """

    rows: Tensor
    kept: Tensor
    chains: Tensor


@frozen(kw_only=True)
class ShiftedRow:
    """A packed row as a draft reads it that is handed x_{t+1} beside what the verifier made of x_t. R rows.

    A *row* is one such t: every token of a document but its first has one. Padding and document heads are dropped, so
    rows of one document stand together and the shift never crosses documents.

    A *chain* is a row from which the draft continues. Its step k is trained where the verifier itself would stand
    there: x_{t+1} is a token that it emitted (the bonus), and so are all that follow up to the target x_{t+2+k}, in
    the same document. So the steps of a chain form a prefix, exactly as tokens are accepted in serving, and the chains
    alive at step k are a subset of those at step k - 1.

    Attributes:
        token_ids: int64 [R], x_{t+1}; the input of row r at step k is token_ids[r + k].
        packed_index: int64 [R], where x_{t+1} stands in the packed row; the teacher of row r at step k is row r + k's.
        positions: int64 [R], position of row t, which vLLM does not shift.
        document_lengths: rows of each document.
        run: int64 [R], on the CPU: supervised tokens that follow one another from x_{t+1} on. A chain has a step k
            where they are k + 2 at least: x_{t+1} … x_{t+2+k}.
        total_positions: tokens of the packed row, padding included.
    """

    token_ids: Tensor
    packed_index: Tensor
    positions: Tensor
    document_lengths: tuple[int, ...]
    run: Tensor
    total_positions: int


def shift_by_one(row: PackedRow) -> ShiftedRow:
    """Shift *row*. Deterministic."""
    device = row.input_ids.device
    # Index arithmetic on the CPU: a handful of small tensors whose sizes the host must know anyway.
    documents = row.document_ids.cpu()
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[1:] = documents[1:] != documents[:-1]
    packed_index = torch.nonzero((documents >= 0) & ~is_first).flatten()
    row_documents = documents[packed_index]
    lengths = torch.unique_consecutive(row_documents, return_counts=True)[1]
    on_device = packed_index.to(device)
    return ShiftedRow(
        token_ids=row.input_ids[on_device],
        packed_index=on_device,
        positions=row.position_ids[on_device] - 1,
        document_lengths=tuple(lengths.tolist()),
        run=supervised_run(row.loss_mask.cpu()[packed_index], row_documents),
        total_positions=row.input_ids.shape[0],
    )


def chain_steps(shifted: ShiftedRow, num_steps: int) -> tuple[ChainStep, ...]:
    """The chains alive at each of *num_steps* steps, empty ones included; on the device of the row."""
    rows = torch.nonzero(shifted.run >= 2).flatten()
    chains = torch.arange(rows.shape[0])
    steps = [ChainStep(rows=rows, kept=chains, chains=chains)]
    for step in range(1, num_steps):
        kept = torch.nonzero(shifted.run[rows] >= step + 2).flatten()
        rows, chains = rows[kept], chains[kept]
        steps.append(ChainStep(rows=rows, kept=kept, chains=chains))
    device = shifted.token_ids.device
    return tuple(
        ChainStep(rows=each.rows.to(device), kept=each.kept.to(device), chains=each.chains.to(device))
        for each in steps
    )


def chain_slots(
    shifted: ShiftedRow, steps: Sequence[ChainStep], outputs: Sequence[Tensor], head: Tensor, *, decay: float
) -> DraftSlots:
    """What chains draft, step after step: slots with one term, weighted by decay ** step.

    Args:
        steps: of :func:`chain_steps`, all of them.
        outputs: [n_k, H] of each step's chains, normed; steps at which none is alive any more may be left out.
        head: [V_d, H].
    """
    alive = steps[: len(outputs)]
    device = shifted.token_ids.device
    counts = torch.tensor([each.shape[0] for each in outputs])
    step = torch.repeat_interleave(torch.arange(len(outputs)), counts).to(device)
    rows = torch.cat([each.rows + k for k, each in enumerate(alive)])
    return DraftSlots(
        terms=((torch.cat(list(outputs)), head),),
        teacher_row=shifted.packed_index[rows],
        step=step,
        chain=torch.cat([each.chains for each in alive]),
        weight=torch.pow(torch.tensor(decay, device=device), step).float(),
        total_positions=shifted.total_positions,
        num_steps=len(steps),
    )
