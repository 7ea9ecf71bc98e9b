"""One optimiser step, from packed rows to changed weights: forward, score, reduce, backward, clip, step.

:func:`train_step` is what the loop calls and what the benchmarks time. Nothing here knows about files, epochs or
progress; of several ranks each has its own rows of the step. Shapes as in :mod:`draftsmith.interfaces`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import attrs
import torch
from attrs import frozen
from torch import Tensor, nn

from draftsmith.errors import NumericsError, mark_shared
from draftsmith.interfaces import DraftAlgorithm, DraftSlots, PackedRow, PositionLoss, ScoredSlots
from draftsmith.plugins.results import check_objective, check_slots, check_weights
from draftsmith.train.distributed import ALONE, Ranks
from draftsmith.train.metrics import Pairs, add_pairs, slot_metrics
from draftsmith.train.optimizers import Optimizers
from draftsmith.train.scoring import Teacher, score_slots

__all__ = ["Objective", "RowScore", "RowSums", "StepResult", "gather_rows", "reduce_loss", "score_row", "train_step"]

Reduction = Literal["masked_mean", "weighted_mean", "local_mean"]


@frozen(kw_only=True)
class Objective:
    """What a row is scored with: the draft, its algorithm, the teacher, and how positions make one loss.

    Attributes:
        out_of_vocabulary: ``renormalise`` trains on the teacher restricted to the draft's vocabulary everywhere;
            ``mask`` leaves positions out of the loss whose full-vocabulary argmax the draft cannot propose. The
            metrics count them as wrong either way.
        compute_dtype: of the matrix products of the forward pass; weights, their gradients and the loss are float32.
    """

    algorithm: DraftAlgorithm
    model: nn.Module
    teacher: Teacher
    loss: PositionLoss
    reduction: Reduction
    out_of_vocabulary: Literal["renormalise", "mask"]
    compute_dtype: torch.dtype


class RowSums(Protocol):
    """What a step needs of a row, whichever rank scored it: see :class:`RowScore`."""

    @property
    def value(self) -> Tensor: ...
    @property
    def denominator(self) -> Tensor: ...
    @property
    def counted(self) -> Tensor: ...
    @property
    def pairs(self) -> Pairs: ...


@frozen
class _GatheredRow:
    """A row of any rank, in the CPU's memory."""

    value: Tensor
    denominator: Tensor
    counted: Tensor
    pairs: Pairs


@frozen(kw_only=True)
class RowScore:
    """One scored row.

    Attributes:
        value: the scalar to minimise, with its graph; a mean over the row.
        denominator: float32 scalar: what that mean was divided by, so that means of rows combine into one of all.
        counted: float32 scalar: positions that the mean is of. Without any the value is zero, and has a graph all the
            same.
        pairs: metrics, (sum, count) each.
        slots, scored: where they come from; None where the row had no slot.
    """

    value: Tensor
    denominator: Tensor
    counted: Tensor
    pairs: Pairs
    slots: DraftSlots
    scored: ScoredSlots | None

    def culprits(self, row: PackedRow) -> tuple[str, ...]:
        """Ids of the samples with a loss that is not finite; of all samples of the row where none stands out."""
        if self.scored is not None:
            bad_rows = self.slots.teacher_row[~torch.isfinite(self.scored.loss.detach())]
            documents = torch.unique(row.document_ids[bad_rows]).tolist()
            found = tuple(row.sample_ids[document] for document in documents if 0 <= document < len(row.sample_ids))
            if found:
                return found
        return row.sample_ids


@frozen(kw_only=True)
class StepResult:
    """What an optimiser step did.

    Attributes:
        pairs: metrics of all its rows.
        gradient_norm: before clipping; 0 where there was nothing to learn.
        updated: False where no position of any row counted: weights and moments are left alone then.
    """

    pairs: Pairs
    gradient_norm: float
    updated: bool


def score_row(objective: Objective, row: PackedRow, generator: torch.Generator) -> RowScore:
    """Forward and loss of one row, in the grad mode and train or eval mode that the caller has set.

    Args:
        row: on the model's device.
        generator: on the CPU; the algorithm draws from it alone.
    """
    batch = objective.algorithm.make_batch(row, generator)
    with _autocast(row.input_ids.device, objective.compute_dtype):
        slots = objective.algorithm.forward(objective.model, batch)
    check_slots(objective.algorithm, slots, objective.teacher.draft_size)
    if slots.teacher_row.numel() == 0:
        return _empty_score(objective, row, slots)
    scored = score_slots(
        slots,
        objective.teacher,
        row.last_hidden,
        objective.loss,
        teacher_token=row.teacher_token,
        teacher_logsumexp=row.teacher_logsumexp,
        expected=_expected(objective, slots, row),
    )
    counted = scored.kept if objective.out_of_vocabulary == "mask" else torch.ones_like(scored.kept)
    weight = check_weights(objective.algorithm, objective.algorithm.weights(slots, scored, counted), slots)
    slots = attrs.evolve(slots, weight=weight.detach())
    loss, denominator = reduce_loss(scored.loss, slots, counted, objective.reduction)
    value, extra = check_objective(objective.algorithm, objective.algorithm.objective(slots, scored, loss))
    weight = denominator.detach().to(torch.float64)
    pairs = {"loss": torch.stack([value.detach().to(torch.float64) * weight, weight]), **slot_metrics(slots, scored)}
    return RowScore(
        value=value,
        denominator=denominator,
        counted=counted.sum().to(denominator.dtype),
        pairs={**pairs, **extra},
        slots=slots,
        scored=scored,
    )


def _expected(objective: Objective, slots: DraftSlots, row: PackedRow) -> Tensor | None:
    """What :func:`reduce_loss` will weigh the slots with, up to a common factor; None where it is not known yet."""
    if objective.out_of_vocabulary != "mask":
        return slots.weight
    if row.teacher_token is None:
        return None
    return slots.weight * (objective.teacher.draft_ids(row.teacher_token[slots.teacher_row]) >= 0)


def reduce_loss(loss: Tensor, slots: DraftSlots, counted: Tensor, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """One loss of N positions, and its denominator. Zero, not NaN, where nothing counts.

    masked_mean    sum e w m / sum m      (so that a decay of w changes the scale)
    weighted_mean  sum e w m / sum w m
    local_mean     sum e w m / positions  (masked ones included)

    Args:
        loss: float32 [N], e.
        counted: bool [N], m.
    """
    m = counted.to(loss.dtype)
    w = slots.weight.to(loss.dtype) * m
    if reduction == "masked_mean":
        denominator = m.sum()
    elif reduction == "weighted_mean":
        denominator = w.sum()
    else:
        denominator = loss.new_tensor(float(slots.total_positions))
    # Multiplying by a zero weight would let a NaN of a position that does not count through.
    total = torch.where(counted, loss * w, torch.zeros_like(loss)).sum()
    return total / torch.where(denominator > 0, denominator, torch.ones_like(denominator)), denominator


def train_step(
    objective: Objective,
    optimizers: Optimizers,
    rows: Sequence[PackedRow],
    generators: Sequence[torch.Generator],
    *,
    clip_norm: float,
    ranks: Ranks = ALONE,
) -> StepResult:
    """One optimiser step over *rows*; its loss is the mean over all their positions, not a mean of means.

    The denominator of a row is known only after its forward pass, so each row's gradient is accumulated times its
    own denominator, and the sum is divided by the total in the pass that clips.

    Args:
        rows, generators: this rank's of the step; it may have none.
        ranks: all of which take the step together, and return the same.

    Raises:
        NumericsError: the loss or the gradient is not finite. Weights and optimiser state are untouched then.
        DraftsmithError: another rank failed.
    """
    optimizers.zero_grad()
    scores = []
    for row, generator in zip(rows, generators, strict=True):
        score = score_row(objective, row, generator)
        if score.value.requires_grad:
            torch.autograd.backward(score.value * score.denominator)
        scores.append(_without_graph(score))
    sums = gather_rows(ranks, scores)
    _sum_gradients(ranks, optimizers.parameters)
    total, counted = (
        torch.stack([getattr(each, name) for each in sums]).sum() if sums else torch.zeros(())
        for name in ("denominator", "counted")
    )
    # Positions that do not count may be in the denominator, and a step of nothing would still move by its momentum.
    norm, scale = _clipped(optimizers.parameters, torch.where(counted > 0, total, 0.0), clip_norm)
    finite = math.isfinite(norm) and all(math.isfinite(value) for value in _values(sums))
    if not finite:
        optimizers.zero_grad()
        raise _numerics_error(ranks, scores, rows, norm)
    updated = scale is not None
    if scale is not None:
        torch._foreach_mul_(_gradients(optimizers.parameters), scale)
        optimizers.step()
    return StepResult(pairs=add_pairs(each.pairs for each in sums), gradient_norm=norm, updated=updated)


def gather_rows(ranks: Ranks, scores: Sequence[RowScore]) -> Sequence[RowSums]:
    """The rows that all ranks scored, by place, so that sums over them are added up in the order of one process.

    Raises:
        DraftsmithError: another rank failed.
    """
    if ranks.world == 1:
        return scores
    return [_unpacked(row) for row in ranks.in_order(ranks.exchange([_packed(score) for score in scores]))]


def _packed(score: RowScore) -> tuple[list[float], dict[str, list[float]]]:
    values = torch.stack([score.value.detach(), score.denominator.detach(), score.counted]).tolist()
    if not score.pairs:
        return values, {}
    table = torch.stack([pair.detach().to(torch.float64) for pair in score.pairs.values()]).tolist()
    return values, dict(zip(score.pairs, table, strict=True))


def _unpacked(row: tuple[list[float], dict[str, list[float]]]) -> RowSums:
    value, denominator, counted = torch.tensor(row[0]).unbind()
    pairs = {name: torch.tensor(pair, dtype=torch.float64) for name, pair in row[1].items()}
    return _GatheredRow(value, denominator, counted, pairs)


def _sum_gradients(ranks: Ranks, parameters: Sequence[Tensor]) -> None:
    """Add up over the ranks. A rank without rows has no gradients, and takes part with zeros."""
    if ranks.world == 1:
        return
    present = ranks.exchange([parameter.grad is not None for parameter in parameters])
    for parameter, somewhere in zip(parameters, map(any, zip(*present, strict=True)), strict=True):
        if somewhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    ranks.sum_(_gradients(parameters))


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def _empty_score(objective: Objective, row: PackedRow, slots: DraftSlots) -> RowScore:
    """A row without a supervised slot: loss zero, but a function of every trained weight.

    Ranks add up their gradients, and wait for one another: each must have one of every weight, whatever its row holds.
    """
    zero = slots.weight.new_zeros(())
    outputs = [x for x, _ in slots.terms] + [each for each in objective.model.parameters() if each.requires_grad]
    value = torch.stack([each.float().sum() * 0.0 for each in outputs]).sum()
    # A mean over all positions is also over those of this row, unless it stands for one that could not be read.
    holds_tokens = objective.reduction == "local_mean" and bool((row.document_ids >= 0).any())
    denominator = zero + slots.total_positions if holds_tokens else zero
    weight = denominator.to(torch.float64)
    pairs = {"loss": torch.stack([weight * 0.0, weight])} if holds_tokens else {}
    return RowScore(value=value, denominator=denominator, counted=zero, pairs=pairs, slots=slots, scored=None)


def _without_graph(score: RowScore) -> RowScore:
    """What is needed after the backward pass, without what keeps its activations alive."""
    scored = score.scored and attrs.evolve(score.scored, loss=score.scored.loss.detach())
    slots = attrs.evolve(score.slots, terms=(), extra={})
    return attrs.evolve(score, value=score.value.detach(), scored=scored, slots=slots)


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _clipped(parameters: Sequence[Tensor], total: Tensor, clip_norm: float) -> tuple[float, Tensor | None]:
    """Gradient norm after division by *total*, and the factor that divides and clips; None: nothing to learn."""
    gradients = _gradients(parameters)
    if not gradients or float(total) == 0:
        return 0.0, None
    norm = torch.nn.utils.get_total_norm(gradients) / total
    clip = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
    return float(norm), clip / total


def _values(scores: Sequence[RowSums]) -> list[float]:
    return torch.stack([score.value for score in scores]).tolist() if scores else []


def _numerics_error(ranks: Ranks, scores: Sequence[RowScore], rows: Sequence[PackedRow], norm: float) -> NumericsError:
    mine = [(math.isfinite(float(score.value)), score.culprits(row)) for score, row in zip(scores, rows, strict=True)]
    found = ranks.in_order(ranks.exchange(mine))
    bad = [culprits for finite, culprits in found if not finite]
    what = "loss" if bad else "gradient"
    names = list(dict.fromkeys(name for culprits in bad or [each for _, each in found] for name in culprits))
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return mark_shared(
        NumericsError(
            f"the {what} is not finite (gradient norm {norm})",
            where=f"samples {shown}",
            hint="no weight was changed, and the last checkpoint is intact; check these samples, lower the learning "
            "rate, or compute in float32",
        )
    )
