"""From a packed row to what the draft is trained on: the shift, the chains, and which of their steps count.

Index t of the draft's sequence consumes (embedding of x_{t+1}, features g_t) and predicts x_{t+2}. A *row* of the
batch is one such t: every token of a document but its first has one (the features of its predecessor). Padding and
document heads are dropped, so rows of one document stand together and the shift never crosses documents.

A *chain* is a row from which the draft continues. Its step k is trained where the verifier itself would stand there:
x_{t+1} is a token that it emitted (the bonus), and so are all that follow up to the target x_{t+2+k}, in the same
document. So the steps of a chain form a prefix, exactly as tokens are accepted in serving, and the chains alive at
step k are a subset of those at step k - 1: rows that no longer carry a target are not computed.
"""

from __future__ import annotations

import torch
from attrs import fields, frozen
from torch import Tensor

from draftsmith.interfaces import PackedRow
from draftsmith.rows import supervised_run

__all__ = ["Batch", "Shifted", "Step", "make_batch", "shift"]


@frozen(kw_only=True)
class Step:
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
class Shifted:
    """One packed row, shifted. R rows, A tapped layers of width H_t.

    Attributes:
        token_ids: int64 [R], x_{t+1}; the input of row r at step k is token_ids[r + k].
        packed_index: int64 [R], where x_{t+1} stands in the packed row; the teacher of row r at step k is row r + k's.
        positions: int64 [R], position of row t, which vLLM does not shift.
        taps: [R, A * H_t], features of x_t.
        document_lengths: rows of each document.
        total_positions: tokens of the packed row, padding included: what the reference's mean divides by.
    """

    token_ids: Tensor
    packed_index: Tensor
    positions: Tensor
    taps: Tensor
    document_lengths: tuple[int, ...]
    total_positions: int


@frozen(kw_only=True)
class Batch(Shifted):
    """One packed row, shifted, and its chains.

    Attributes:
        steps: the chains alive at each step; empty ones included.
    """

    steps: tuple[Step, ...]


def make_batch(row: PackedRow, num_steps: int) -> Batch:
    """Shift *row* and find its chains of up to *num_steps* steps. Deterministic."""
    shifted, run = shift(row)
    steps = tuple(_to(step, row.input_ids.device) for step in _steps(run, num_steps))
    return Batch(**{each.name: getattr(shifted, each.name) for each in fields(Shifted)}, steps=steps)


def shift(row: PackedRow) -> tuple[Shifted, Tensor]:
    """*row* shifted; and int64 [R], on the CPU: how many supervised tokens follow one another from x_{t+1} on.

    A chain of row r has a step k that is trained where they are k + 2 at least: x_{t+1} … x_{t+2+k}.
    """
    # Index arithmetic on the CPU: a handful of small tensors whose sizes the host must know anyway.
    documents = row.document_ids.cpu()
    supervised = row.loss_mask.cpu()
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[1:] = documents[1:] != documents[:-1]
    packed_index = torch.nonzero((documents >= 0) & ~is_first).flatten()
    row_documents = documents[packed_index]
    lengths = torch.unique_consecutive(row_documents, return_counts=True)[1]
    on_device = packed_index.to(row.input_ids.device)
    shifted = Shifted(
        token_ids=row.input_ids[on_device],
        packed_index=on_device,
        positions=row.position_ids[on_device] - 1,
        taps=row.taps[on_device - 1],
        document_lengths=tuple(lengths.tolist()),
        total_positions=row.input_ids.shape[0],
    )
    return shifted, supervised_run(supervised[packed_index], row_documents)


def _steps(run: Tensor, num_steps: int) -> list[Step]:
    rows = torch.nonzero(run >= 2).flatten()
    chains = torch.arange(rows.shape[0])
    steps = [Step(rows=rows, kept=chains, chains=chains)]
    for step in range(1, num_steps):
        kept = torch.nonzero(run[rows] >= step + 2).flatten()
        rows, chains = rows[kept], chains[kept]
        steps.append(Step(rows=rows, kept=kept, chains=chains))
    return steps


def _to(step: Step, device: torch.device) -> Step:
    return Step(rows=step.rows.to(device), kept=step.kept.to(device), chains=step.chains.to(device))
