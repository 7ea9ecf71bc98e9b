"""Attention of rows that continue others in one pass: each sees a real row's context, then its own chain up to itself.

A draft that reads several steps at once has, after some of its real rows, rows for the steps 1 … m, at the positions
that follow. The row of step s that continues row t sees the real (step 0) keys of rows j <= t of its document and the
keys of the same chain's steps 1 … s. With a window W it sees positions above position(t) + s - W alone:
:class:`draftsmith.masks.rules.Chained`, with all steps in one call, and chains of different lengths.

Shapes: T real rows, N continuing rows, h query heads, g key/value heads (g divides h), d head dimension.

Three forms, equal in values and gradients:

* ``linear``: a fused kernel over the real keys, a few neighbouring chains at a time, which also returns the
  log-sum-exp of its scores; the keys of a row's own chain are single dot products, merged by log-sum-exp. Memory is
  linear in T and in N.
* ``dense``: scores [h, N, T + N] and the mask as a tensor. The reference.
* ``flex``: flex attention with a block mask from the same rule. For GPUs; on CPUs it has no backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from attrs import field, frozen
from torch import Tensor

from draftsmith.attention.forms import flex_masked_attention, masked_attention
from draftsmith.attention.kernels import by_key_head
from draftsmith.attention.tiles import TILE_ROWS, Tile, additive, device_kind, tiles_backward, tiles_forward
from draftsmith.interfaces import Slots
from draftsmith.masks.forms import concatenate_slots, document_slots
from draftsmith.masks.rules import Chained

__all__ = ["Continuations", "continued_attention"]

#: Elements of [rows, h, d] that are multiplied at once where rows meet their own chains.
CHAIN_ELEMENTS = {"cpu": 2**18, "accelerator": 2**26}


def _numbers(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@frozen(kw_only=True)
class Continuations:
    """Which real rows of a packed row are continued, and how far. Numbers only: built once a row, used by every layer.

    Continuing rows stand chain after chain, each in the order of its steps 1, 2, …

    Attributes:
        rows: the rows that are continued, strictly ascending, each inside a document.
        lengths: steps of each, at least 1. A chain may reach beyond its document: its positions go on.
        document_lengths: real rows of each document, one after the other; what is left of T is padding.

    Raises:
        ValueError: rows that do not ascend or lie in no document, or a chain without a step.
    """

    rows: tuple[int, ...] = field(converter=_numbers)
    lengths: tuple[int, ...] = field(converter=_numbers)
    document_lengths: tuple[int, ...] = field(converter=_numbers)

    def __attrs_post_init__(self) -> None:
        if len(self.rows) != len(self.lengths):
            raise ValueError(f"{len(self.rows)} rows are continued, and {len(self.lengths)} lengths given")
        if any(length < 1 for length in self.lengths):
            raise ValueError("a chain has at least one step")
        if any(second <= first for first, second in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError("the continued rows must be distinct and ascend")
        if self.rows and not 0 <= self.rows[0] <= self.rows[-1] < sum(self.document_lengths):
            raise ValueError(
                f"rows {self.rows[0]} … {self.rows[-1]} do not lie in documents of {sum(self.document_lengths)} rows"
            )

    def __len__(self) -> int:
        """N, of all chains together."""
        return sum(self.lengths)

    def row_of_each(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 [N]: the real row that each continues."""
        return self._repeated(self.rows).to(device)

    def step_of_each(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 [N]: 1, 2, … in each chain."""
        starts = [end - length for end, length in zip(accumulate(self.lengths), self.lengths, strict=True)]
        return (torch.arange(len(self)) - self._repeated(starts) + 1).to(device)

    def real_slots(self, total: int, device: torch.device | str = "cpu") -> Slots:
        """Slots [T] of the real rows."""
        return document_slots(self.document_lengths, total, device)

    def slots(self, device: torch.device | str = "cpu") -> Slots:
        """Slots [N] of the continuing rows."""
        rows, step = self.row_of_each(device), self.step_of_each(device)
        index, document, position, _ = self.real_slots(sum(self.document_lengths), device)
        return Slots(index[rows], document[rows], position[rows] + step, step)

    def _repeated(self, numbers: Sequence[int]) -> Tensor:
        each, count = (torch.tensor(values, dtype=torch.int64) for values in (numbers, self.lengths))
        return torch.repeat_interleave(each, count)


def continued_attention(
    query: Tensor,
    real_key: Tensor,
    real_value: Tensor,
    key: Tensor,
    value: Tensor,
    continuations: Continuations,
    *,
    window: int | None = None,
    form: Literal["linear", "dense", "flex"] = "linear",
) -> Tensor:
    """Attention of all continuing rows at once, scaled by 1/sqrt(d).

    Args:
        query: [N, h, d], chain after chain.
        real_key, real_value: [T, g, d], of the real rows.
        key, value: [N, g, d], of the continuing rows.
        continuations: which rows they continue.
        window: W; None means no window.
        form: see the module.

    Returns:
        [N, h, d].

    Raises:
        ValueError: shapes that do not fit *continuations*, heads that do not divide, or an unknown form.
    """
    _check(query, real_key, key, continuations)
    if not len(continuations):
        return query * 0.0
    if form == "linear":
        output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            query, real_key, real_value, key, value, continuations, window
        )
        return output
    slots = continuations.slots(query.device)
    key_slots = concatenate_slots([continuations.real_slots(real_key.shape[0], query.device), slots])
    keys, values = torch.cat([real_key, key]), torch.cat([real_value, value])
    if form == "dense":
        return masked_attention(query, keys, values, Chained(window), slots, key_slots)
    if form == "flex":
        return flex_masked_attention(query, keys, values, Chained(window), slots, key_slots)
    raise ValueError(f"unknown attention form {form!r}; known: linear, dense, flex")


def _check(query: Tensor, real_key: Tensor, key: Tensor, continuations: Continuations) -> None:
    for name, rows in (("query", query.shape[0]), ("key", key.shape[0])):
        if rows != len(continuations):
            raise ValueError(f"the chains have {len(continuations)} rows, {name} {rows}")
    used = sum(continuations.document_lengths)
    if used > real_key.shape[0]:
        raise ValueError(f"documents of {used} rows do not fit {real_key.shape[0]}")
    if query.shape[1] % real_key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads cannot share {real_key.shape[1]} key heads evenly")


# --- linear -----------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """The ``linear`` form. Keeps its inputs, the output and the merged log-sum-exp, no scores and no mask."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        real_key: Tensor,
        real_value: Tensor,
        key: Tensor,
        value: Tensor,
        continuations: Continuations,
        window: int | None,
    ) -> Tensor:
        output, lse = tiles_forward(query, real_key, real_value, _tiles(continuations, window, query))
        _add_chains(output, lse, query, key, value, continuations, window)
        result = output.flatten(1, 2).to(query.dtype)
        ctx.plan = (continuations, window)
        ctx.save_for_backward(query, real_key, real_value, key, value, result, lse)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        continuations, window = ctx.plan
        query, real_key, real_value, key, value, output, lse = ctx.saved_tensors
        grad = grad.contiguous()
        grad_query, *grad_chain = _chains_backward(grad, query, key, value, output, lse, continuations, window)
        tiles = _tiles(continuations, window, query)
        grad_real = tiles_backward(grad, query, real_key, real_value, output, lse, tiles, grad_query)
        return grad_query, *grad_real, *grad_chain, None, None


# --- the real rows


def _tiles(continuations: Continuations, window: int | None, like: Tensor) -> Iterator[Tile]:
    """The continuing rows of each document, in tiles of so many."""
    rows, steps = continuations.row_of_each(), continuations.step_of_each()
    ends = torch.tensor(list(accumulate(continuations.document_lengths)), dtype=torch.int64)
    bounds = [0, *torch.searchsorted(rows, ends).tolist()]
    most = TILE_ROWS[device_kind(like)]
    for place, (low, high) in enumerate(pairwise(bounds)):
        begin = int(ends[place]) - continuations.document_lengths[place]
        for start in range(low, high, most):
            part = slice(start, min(start + most, high))
            # What each sees begins after this row, in a window; and it ends with the row that it continues.
            before = None if window is None else rows[part] + steps[part] - window
            first = begin if before is None else max(begin, int(before.min()) + 1)
            stop = int(rows[part.stop - 1]) + 1
            if first < stop:
                yield Tile(part, slice(first, stop), _mask(rows[part], before, slice(first, stop), like))


def _mask(rows: Tensor, before: Tensor | None, keys: slice, like: Tensor) -> Tensor:
    """[Q, K]: of the real rows *keys*, each sees those after *before* (None: all) up to *rows*."""
    key = torch.arange(keys.start, keys.stop, device=like.device)
    hidden = key > rows.to(like.device)[:, None]
    if before is not None:
        hidden |= key <= before.to(like.device)[:, None]
    return additive(hidden, like)


# --- a row's own chain


def _back(continuations: Continuations, window: int | None) -> range:
    """How many steps back in its chain a row may look: 0, its own key, and so on."""
    longest = max(continuations.lengths)
    return range(longest if window is None else min(longest, window))


def _pieces(query: Tensor) -> Iterator[slice]:
    """Slices of all continuing rows, whose elements fit the budget."""
    total, heads, dim = query.shape
    size = max(1, CHAIN_ELEMENTS[device_kind(query)] // (heads * dim))
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _shifted(piece: slice, back: int) -> tuple[slice, slice]:
    """The rows of *piece* that have a row so many places before them, and those rows. The chain's is among them."""
    first = max(piece.start, back)
    return slice(first, piece.stop), slice(first - back, max(piece.stop - back, 0))


def _scores(query: Tensor, key: Tensor, short: Tensor, dtype: torch.dtype) -> Tensor:
    """Scaled scores [n, g, h/g] of each row [n, g, h/g, d] and one key [n, g, d]; -inf where *short* [n] is True."""
    scores = (query * key.unsqueeze(2)).sum(-1, dtype=dtype).mul_(1.0 / math.sqrt(query.shape[-1]))
    return scores.masked_fill_(short[:, None, None], float("-inf"))


def _add_chains(
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    continuations: Continuations,
    window: int | None,
) -> None:
    """Merge what the rows see of their own chains into *output* and *lse* of the real rows, in place."""
    grouped = by_key_head(query, key.shape[1])  # [N, g, h/g, d]
    steps = continuations.step_of_each(query.device)
    back = _back(continuations, window)
    for piece in _pieces(query):
        scores = lse.new_full((*lse[piece].shape, len(back)), float("-inf"))
        for each in back:
            rows, mates = _shifted(piece, each)
            found = _scores(grouped[rows], key[mates], steps[rows] <= each, lse.dtype)
            scores[rows.start - piece.start :, ..., each] = found
        merged = torch.logaddexp(lse[piece], scores.logsumexp(-1))
        output[piece] *= torch.exp(lse[piece] - merged)[..., None]
        weights = scores.sub_(merged[..., None]).exp_()
        for each in back:
            rows, mates = _shifted(piece, each)
            weight = weights[rows.start - piece.start :, ..., each, None]
            output[rows].addcmul_(weight, value[mates].unsqueeze(2).to(output.dtype))
        lse[piece] = merged


def _chains_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    continuations: Continuations,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries (as far as they see their own chains), and of the chains' keys and values."""
    kv_heads = key.shape[1]
    q, g, o = (by_key_head(each, kv_heads) for each in (query, grad, output))
    steps = continuations.step_of_each(query.device)
    scale = 1.0 / math.sqrt(query.shape[-1])
    grad_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
    grad_q = by_key_head(grad_query, kv_heads)
    # A key has a gradient from every later step of its chain: in float32, as one sum would be.
    grad_key, grad_value = (torch.zeros(key.shape, dtype=lse.dtype, device=key.device) for _ in range(2))
    for piece in _pieces(query):
        delta = (g[piece] * o[piece]).sum(-1, dtype=lse.dtype)
        for each in _back(continuations, window):
            rows, mates = _shifted(piece, each)
            k, v = key[mates], value[mates].unsqueeze(2)
            weight = _scores(q[rows], k, steps[rows] <= each, lse.dtype).sub_(lse[rows]).exp_()
            score = (g[rows] * v).sum(-1, dtype=lse.dtype).sub_(delta[rows.start - piece.start :])
            score.mul_(weight).mul_(scale)
            weight, score = weight[..., None].to(g.dtype), score[..., None].to(g.dtype)
            grad_q[rows] += score * k.unsqueeze(2)
            grad_key[mates] += (score * q[rows]).sum(2)
            grad_value[mates] += (weight * g[rows]).sum(2)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)
