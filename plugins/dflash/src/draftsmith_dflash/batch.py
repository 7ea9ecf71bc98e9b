"""From a packed row to anchored blocks: where they start, what their rows read, which of them predict what.

An *anchor* is a token that the verifier wrote, after which a draft could begin: in serving it is the bonus token, the
newest one, whose features do not exist yet. Its *block* is B rows at its position and the B - 1 that follow: the
anchor's token, then mask tokens. Step s of its chain predicts x_{p+1+s}: in the ``bonus_anchor`` layout row s + 1, at
the position of the token that it predicts; in the ``anchor_first`` layout row s, one position before it.

A step is trained where the verifier itself would stand there: the anchor and all tokens up to the predicted one are
its own, in one document. So the steps of a chain form a prefix, as tokens are accepted in serving. A block may reach
beyond its document: its last rows then read mask tokens as in serving, and predict nothing.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from draftsmith.attention import AnchoredBlocks
from draftsmith.interfaces import PackedRow
from draftsmith.rows import supervised_run
from draftsmith_dflash.options import Layout

__all__ = ["Batch", "make_batch"]


@frozen(kw_only=True)
class Batch:
    """One packed row with its blocks. T context rows, n blocks of B rows, N supervised slots.

    Context rows are the row's tokens without padding: documents one after the other.

    Attributes:
        taps: [T, A * H_t], features of the context rows.
        positions: int64 [T], positions in their documents.
        blocks: where the blocks hang in the context rows.
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
    blocks: AnchoredBlocks
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
    device = row.input_ids.device
    # Index arithmetic on the CPU: small tensors whose sizes the host must know anyway.
    documents = row.document_ids.cpu()
    context = torch.nonzero(documents >= 0).flatten()
    documents, supervised = documents[context], row.loss_mask.cpu()[context]
    lengths = torch.unique_consecutive(documents, return_counts=True)[1]
    run = supervised_run(supervised, documents)
    # A draft begins where the anchor and one more token are the verifier's, and something was verified before it.
    eligible = torch.nonzero((run >= 2) & (row.position_ids.cpu()[context] > 0)).flatten()
    anchors = _draw(eligible, documents[eligible], max_anchors, generator)
    last = 1 if layout == "bonus_anchor" else 0
    steps = (run[anchors] - 1).clamp_max(block_size - last)
    chain = torch.repeat_interleave(torch.arange(anchors.shape[0]), steps)
    step = torch.arange(chain.shape[0]) - torch.repeat_interleave(steps.cumsum(0) - steps, steps)
    before = context[anchors[chain] + step].to(device)  # x_{p+s} in the packed row
    anchor_rows = context[anchors].to(device)
    token_ids = torch.full((anchors.shape[0], block_size), mask_token_id, dtype=torch.int64, device=device)
    token_ids[:, 0] = row.input_ids[anchor_rows]
    on_device = context.to(device)
    return Batch(
        taps=row.taps[on_device],
        positions=row.position_ids[on_device],
        blocks=AnchoredBlocks(anchors=anchors.tolist(), document_lengths=lengths.tolist(), block_size=block_size),
        token_ids=token_ids,
        block_positions=row.position_ids[anchor_rows][:, None] + torch.arange(block_size, device=device),
        rows=(chain * block_size + step + last).to(device),
        chain=chain.to(device),
        step=step.to(device),
        previous=row.input_ids[before],
        teacher_row=before,
        total_positions=row.input_ids.shape[0],
    )


def _draw(eligible: Tensor, documents: Tensor, budget: int, generator: torch.Generator) -> Tensor:
    """Ascending int64: at most *budget* of the rows *eligible*, drawn evenly, from each of their *documents*."""
    # One number a row whatever the budget: the draw in one document does not depend on how many others it has.
    order = torch.argsort(torch.rand(eligible.shape[0], generator=generator))
    order = order[torch.argsort(documents[order], stable=True)]  # by document, shuffled within
    counts = torch.unique_consecutive(documents[order], return_counts=True)[1]
    place = torch.arange(order.shape[0]) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return eligible[order[place < budget]].sort().values
