"""The fused projection: from the draft's slots to loss, gradient and metrics, no [tokens, vocabulary] matrix between.

The rows whose teacher distribution some slot predicts are cut into chunks. For each chunk the teacher's logits are
computed once; the slots of all steps that predict those rows follow, one group a step, in the same buffers. Where
the draft's head is frozen, the gradient in the slots' inputs is computed in the same pass, so that the backward pass
only scales it. That in a trained head (or low-rank correction) is a sum over slots, each times the gradient of its
loss, which only the backward pass knows. But up to a common factor those are the position weights, unless the
algorithm does something unusual; with these the sum is made at once, and the chunks are repeated only if the guess
turns out wrong.

To need no copy of the teacher for a group, rows are ordered by how many slots predict them, most first: the group of
every row's m-th slot then meets a prefix of the chunk.

Shapes: T packed rows, N slots, C rows of a chunk, H_t verifier width, d draft width, V_t and V_d vocabularies.
Softmax, loss and metrics are float32 whatever the dtype of the matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from draftsmith.interfaces import DraftSlots, PositionLoss, ScoredSlots, VerifierWeights, VocabularyMap
from draftsmith.losses.base import DraftChunk, ProbabilityLoss, TeacherProbabilities
from draftsmith.plugins.results import check_gradient, check_losses

__all__ = ["Teacher", "score_slots"]

#: Elements of one [C, V_d] buffer. On a CPU a chunk's matrix products must be large enough to run at full speed and
#: its elementwise work is cut again, to stay in the cache; on an accelerator only memory limits it.
CHUNK_ELEMENTS = {"cpu": 3 * 2**20, "accelerator": 2**26}
#: Elements of the pieces in which the elementwise work of a chunk is done on a CPU: a few of them fit the L2 caches.
PIECE_ELEMENTS = 2**18
#: Rows of a chunk where a large vocabulary fills the budget: with far fewer, products run at two thirds of full speed.
MINIMUM_ROWS = 512
#: Vocabulary rows multiplied at once for full-vocabulary statistics, which bounds the copy of a head of another dtype.
STATISTICS_BLOCK = 8192


class Teacher:
    """The verifier's head: its distribution at a row, recomputed from the stored last hidden state.

    logits = softcap(scale * lm_head(final_norm(y))), with the verifier's own norm module, applied exactly once.
    """

    def __init__(
        self,
        weights: VerifierWeights,
        vocabulary: VocabularyMap,
        *,
        device: torch.device | str,
        compute_dtype: torch.dtype,
    ) -> None:
        self.device = torch.device(device)
        self.compute_dtype = compute_dtype
        self.vocabulary_size = vocabulary.target_size
        self.draft_size = vocabulary.draft_size
        self.is_full = vocabulary.is_identity
        self._norm = weights.final_norm.to(self.device).requires_grad_(False)
        self._softcap = weights.logit_softcap
        self._scale = weights.logit_scale
        self._head = weights.lm_head.detach()
        kept = vocabulary.kept_ids()
        self._kept_head = self._head if self.is_full else self._head[kept.to(self._head.device)]
        self._kept_head = self._kept_head.to(self.device, compute_dtype)
        if self.is_full:
            self._head = self._kept_head
        draft_ids = torch.full((self.vocabulary_size,), -1, dtype=torch.int64)
        draft_ids[kept.cpu()] = torch.arange(self.draft_size)
        self._draft_ids = draft_ids.to(self.device)

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """int64, of the shape of *tokens* (target ids): their draft ids, -1 where the draft cannot propose them."""
        return self._draft_ids[tokens]

    def hidden(self, last_hidden: Tensor) -> Tensor:
        """[T, H_t] before the final norm → [T, H_t] after it, in the compute dtype."""
        with torch.no_grad():
            normed: Tensor = self._norm(last_hidden.to(self.device, torch.float32))
            return normed.to(self.compute_dtype)

    def kept_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """float32 [C, V_d], the logits of the draft vocabulary, from :meth:`hidden`'s rows; written to *out*."""
        return self._finish(_project(hidden, self._kept_head, out))

    def statistics(self, last_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of the full vocabulary, at each row of *last_hidden* [T, H_t].

        Returns:
            argmax, int64 [T]; log-sum-exp of the logits, float32 [T].
        """
        with torch.no_grad():
            return self._statistics(self.hidden(last_hidden))

    def _statistics(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        token = torch.zeros(rows, dtype=torch.int64, device=self.device)
        largest = torch.full((rows,), float("-inf"), device=self.device)
        total = torch.full((rows,), float("-inf"), device=self.device)
        step = max(MINIMUM_ROWS, _chunk_elements(self.device) // STATISTICS_BLOCK)
        for first in range(0, self.vocabulary_size, STATISTICS_BLOCK):
            block = self._head[first : first + STATISTICS_BLOCK].to(self.device, self.compute_dtype)
            for start in range(0, rows, step):
                part = slice(start, start + step)
                logits = self._finish(_project(hidden[part], block))
                maximum, index = logits.max(-1)
                larger = maximum > largest[part]
                token[part] = torch.where(larger, index + first, token[part])
                largest[part] = torch.maximum(maximum, largest[part])
                sums = logits.sub_(maximum[:, None]).exp_().sum(-1).log_().add_(maximum)
                total[part] = torch.logaddexp(total[part], sums)
        return token, total

    def _finish(self, logits: Tensor) -> Tensor:
        if self._scale != 1.0:
            logits.mul_(self._scale)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits


def score_slots(
    slots: DraftSlots,
    teacher: Teacher,
    last_hidden: Tensor,
    loss: PositionLoss,
    *,
    teacher_token: Tensor | None = None,
    teacher_logsumexp: Tensor | None = None,
    expected: Tensor | None = None,
) -> ScoredSlots:
    """Loss and metrics of N slots against the teacher. Only ``loss`` carries a gradient, and only a first one.

    Args:
        slots: the draft's predictions before projection.
        teacher: the verifier's head.
        last_hidden: [T, H_t], the verifier's stream before its final norm.
        loss: the loss per position.
        teacher_token, teacher_logsumexp: [T], from :meth:`Teacher.statistics` at capture. With both, only the V_d
            rows of the head are multiplied; without, the full head is.
        expected: float32 [N]: what the gradient of each slot's loss will be, up to a common factor. A right guess
            saves the second pass that heads in training otherwise take.

    Raises:
        ValueError: only one of the two statistics is given.
    """
    if (teacher_token is None) != (teacher_logsumexp is None):
        raise ValueError("teacher_token and teacher_logsumexp come together")
    with torch.no_grad(), torch.autocast(teacher.device.type, enabled=False):
        groups = _Groups.of(slots.teacher_row)
        target = _Target.of(teacher, last_hidden, groups.rows, teacher_token, teacher_logsumexp)
    inputs = [x for x, _ in slots.terms]
    weights = [weight for _, weight in slots.terms]
    scorer = _Scorer(teacher=teacher, target=target, groups=groups, loss=loss, slots=slots.teacher_row.shape[0])
    # Dtypes are chosen here, product by product: an enclosing autocast must not choose others.
    with torch.autocast(teacher.device.type, enabled=False):
        values: Tensor = _Score.apply(  # type: ignore[no-untyped-call]
            scorer, len(inputs), torch.is_grad_enabled(), expected, *inputs, *weights
        )
    return ScoredSlots(
        loss=values,
        correct=scorer.correct,
        acceptance=scorer.acceptance,
        kept_mass=scorer.kept_mass,
        kept=scorer.kept,
        top_probability=scorer.top_probability,
    )


# --- which slots meet which rows --------------------------------------------------------------------------------


@define
class _Groups:
    """Teacher rows [R], distinct, those of most slots first; and for each m the m-th slot of every row that has one.

    ``slots[m]`` is int64 [R_m]: the slot of rows[0], rows[1], … rows[R_m - 1].
    """

    rows: Tensor
    slots: list[Tensor]

    @classmethod
    def of(cls, teacher_row: Tensor) -> _Groups:
        by_row = torch.argsort(teacher_row, stable=True)
        rows, counts = torch.unique_consecutive(teacher_row[by_row], return_counts=True)
        if not rows.numel():
            return cls(rows, [])
        starts = counts.cumsum(0) - counts
        order = torch.argsort(counts, descending=True, stable=True)
        rows, counts, starts = rows[order], counts[order], starts[order]
        slots = [by_row[starts[: int((counts > m).sum())] + m] for m in range(int(counts[0]))]
        return cls(rows, slots)

    def chunks(self, size: int) -> Iterator[tuple[slice, list[Tensor]]]:
        """Slices of ``rows`` and, for each, the groups' slots; each group meets a prefix of the slice."""
        for start in range(0, self.rows.shape[0], size):
            stop = min(start + size, self.rows.shape[0])
            yield slice(start, stop), [part for each in self.slots if (part := each[start:stop]).numel()]


@define
class _Target:
    """What is known of the teacher at the rows [R] before its logits are computed; None: computed with them."""

    hidden: Tensor
    token: Tensor | None
    logsumexp: Tensor | None

    @classmethod
    def of(
        cls, teacher: Teacher, last_hidden: Tensor, rows: Tensor, token: Tensor | None, logsumexp: Tensor | None
    ) -> _Target:
        hidden = teacher.hidden(last_hidden[rows.to(last_hidden.device)])
        if token is not None and logsumexp is not None:
            return cls(hidden, token[rows].to(teacher.device), logsumexp[rows].to(teacher.device, torch.float32))
        if teacher.is_full:
            return cls(hidden, None, None)
        return cls(hidden, *teacher._statistics(hidden))


# --- chunks -----------------------------------------------------------------------------------------------------


@define
class _Buffers:
    """Reused by every chunk: the teacher's p and log p, the draft's logits (then their gradient), and two pieces."""

    log_p: Tensor
    p: Tensor
    logits: Tensor
    piece: Tensor
    scratch: Tensor


@define
class _Teaching:
    """One chunk of the teacher. ``draft_id`` is the full-vocabulary argmax as a draft id, -1 where it is not kept."""

    chunk: TeacherProbabilities
    draft_id: Tensor


@define(slots=False)
class _Scorer:
    """Walks the chunks, for values, for gradients in the inputs, and for gradients in the weights."""

    teacher: Teacher
    target: _Target
    groups: _Groups
    loss: PositionLoss
    slots: int
    values: Tensor = field(init=False)
    correct: Tensor = field(init=False)
    acceptance: Tensor = field(init=False)
    kept_mass: Tensor = field(init=False)
    top_probability: Tensor = field(init=False)
    kept: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        device = self.teacher.device
        self.values, self.acceptance, self.kept_mass, self.top_probability = (
            torch.zeros(self.slots, device=device) for _ in range(4)
        )
        self.correct, self.kept = (torch.zeros(self.slots, dtype=torch.bool, device=device) for _ in range(2))

    def walk(
        self,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        *,
        input_grads: Sequence[Tensor | None] = (),
        weight_grads: Sequence[Tensor | None] = (),
        factors: Tensor | None = None,
    ) -> None:
        """One pass over all chunks.

        Args:
            inputs, weights: the terms.
            input_grads: [N, d] per term, overwritten with d loss_i / d x_i.
            weight_grads: [V_d, d] per term, to which d sum_i factors_i loss_i / d weight is added.
            factors: float32 [N]; needed where a weight's gradient is wanted.
        """
        wants_grad = any(each is not None for each in (*input_grads, *weight_grads))
        dtype = self.teacher.compute_dtype
        weights = [each.detach().to(dtype) for each in weights]
        inputs = [each.detach() for each in inputs]
        rows = _chunk_rows(self.teacher, self.groups.rows.shape[0])
        buffers = self._buffers(rows)
        for part, groups in self.groups.chunks(rows):
            teaching = self._teach(part, buffers)
            for slots in groups:
                logits = buffers.logits[: slots.shape[0]]
                gathered = [each[slots].to(dtype) for each in inputs]
                _project_sum(gathered, weights, logits)
                self._score(slots, logits, teaching, buffers, wants_grad)
                if not wants_grad:
                    continue
                gradient = logits.to(dtype)
                for place, (x, weight) in enumerate(zip(gathered, weights, strict=True)):
                    if input_grads and (target := input_grads[place]) is not None:
                        target.index_copy_(0, slots, (gradient @ weight).to(target.dtype))
                    if weight_grads and factors is not None and (target := weight_grads[place]) is not None:
                        _accumulate(target, gradient, (x * factors[slots][:, None]).to(dtype))

    def _buffers(self, rows: int) -> _Buffers:
        size = self.teacher.draft_size
        pieces = _piece_rows(self.teacher, rows)
        new = [torch.empty(count, size, device=self.teacher.device) for count in (rows, rows, rows, pieces, pieces)]
        return _Buffers(*new)

    def _teach(self, part: slice, buffers: _Buffers) -> _Teaching:
        """The teacher's chunk: one product, and its probabilities, piece by piece."""
        hidden = self.target.hidden[part]
        rows = hidden.shape[0]
        log_p, p = buffers.log_p[:rows], buffers.p[:rows]
        # p's buffer holds the raw logits until each piece of it is overwritten by probabilities.
        self.teacher.kept_logits(hidden, out=p)
        device = p.device
        kept_mass, negative_entropy = torch.ones(rows, device=device), torch.empty(rows, device=device)
        top = torch.empty(rows, dtype=torch.int64, device=device)
        draft_id = torch.empty(rows, dtype=torch.int64, device=device)
        token = None if self.target.token is None else self.target.token[part]
        logsumexp = None if self.target.logsumexp is None else self.target.logsumexp[part]
        for piece in _pieces(rows, buffers.piece.shape[0]):
            logits = p[piece]
            kept = self.teacher.draft_ids(token[piece]) if token is not None else None
            if kept is None:
                draft_id[piece] = top[piece] = logits.argmax(-1)
            else:
                draft_id[piece] = kept
                top[piece] = _restricted_top(logits, kept)
            torch.log_softmax(logits, -1, out=log_p[piece])
            if logsumexp is not None and not self.teacher.is_full:
                place = top[piece, None]
                restricted = (logits.gather(-1, place) - log_p[piece].gather(-1, place)).squeeze(-1)
                kept_mass[piece] = torch.exp(restricted - logsumexp[piece]).clamp_max_(1.0)
            torch.exp(log_p[piece], out=p[piece])
            negative_entropy[piece] = torch.linalg.vecdot(p[piece], log_p[piece])
        return _Teaching(TeacherProbabilities.build(log_p, kept_mass, top, p, negative_entropy), draft_id)

    def _score(self, slots: Tensor, logits: Tensor, teaching: _Teaching, buffers: _Buffers, wants_grad: bool) -> None:
        """Values and metrics of one group; *logits* [n, V_d] become their own gradient where one is wanted."""
        rows = logits.shape[0]
        values, acceptance, top_log = (torch.empty(rows, device=logits.device) for _ in range(3))
        correct = torch.empty(rows, dtype=torch.bool, device=logits.device)
        kept = teaching.draft_id[:rows] >= 0
        for piece in _pieces(rows, buffers.piece.shape[0]):
            z, chunk = logits[piece], teaching.chunk.part(piece)
            log_q, scratch = buffers.piece[: z.shape[0]], buffers.scratch[: z.shape[0]]
            correct[piece] = _agrees(z, teaching.draft_id[piece], exactly=not wants_grad) & kept[piece]
            torch.log_softmax(z, -1, out=log_q)
            top_log[piece] = log_q.gather(-1, chunk.top[:, None]).squeeze(-1)
            if isinstance(self.loss, ProbabilityLoss):
                q = torch.exp(log_q, out=z)
                acceptance[piece] = self._overlap(chunk, q, scratch)
                if wants_grad:
                    found = self.loss.with_gradient(DraftChunk(log_q, q), chunk)
                    values[piece], gradient = check_gradient(self.loss, "with_gradient", found, z)
                else:
                    value = self.loss.of_log_q(log_q, chunk)
                    values[piece], gradient = check_losses(self.loss.of_log_q, value, z.shape[0]), q
            else:
                acceptance[piece] = self._overlap(chunk, log_q.exp_(), scratch)
                if wants_grad:
                    found = self.loss.value_and_grad(z, chunk)
                    values[piece], gradient = check_gradient(self.loss, "value_and_grad", found, z)
                else:
                    value = self.loss.value(z, chunk)
                    values[piece], gradient = check_losses(self.loss.value, value, z.shape[0]), z
            if gradient.data_ptr() != z.data_ptr():
                z.copy_(gradient)
        self.values[slots], self.acceptance[slots], self.correct[slots] = values, acceptance, correct
        self.top_probability[slots] = top_log.exp_()
        self.kept_mass[slots], self.kept[slots] = teaching.chunk.kept_mass[:rows], kept

    def _overlap(self, chunk: TeacherProbabilities, q: Tensor, scratch: Tensor) -> Tensor:
        """sum_v min(p_v, q_v) with the full-vocabulary p: tokens that are not kept are never accepted."""
        if self.teacher.is_full:
            return torch.minimum(chunk.p, q, out=scratch).sum(-1)
        torch.mul(chunk.p, chunk.kept_mass[:, None], out=scratch)
        return torch.minimum(scratch, q, out=scratch).sum(-1)


class _Score(torch.autograd.Function):
    """loss [N] of the terms (x_1 … x_n, weight_1 … weight_n)."""

    @staticmethod
    def forward(
        ctx: Any, scorer: _Scorer, terms: int, recording: bool, expected: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        needs = [recording and wanted for wanted in ctx.needs_input_grad[4:]]
        ctx.scorer, ctx.terms, ctx.expected = scorer, terms, expected
        ctx.trains_weights = any(needs[terms:])
        guessed = [wanted and (place < terms or expected is not None) for place, wanted in enumerate(needs)]
        ctx.grads = [_zeros(x, scorer) if wanted else None for x, wanted in zip(tensors, guessed, strict=True)]
        scorer.walk(
            tensors[:terms],
            tensors[terms:],
            input_grads=ctx.grads[:terms],
            weight_grads=ctx.grads[terms:],
            factors=expected,
        )
        if ctx.trains_weights:
            ctx.save_for_backward(*tensors)
        # A tensor of its own: the output holds ctx, which holds the scorer, which must not hold the output.
        return scorer.values.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Any, ...]:
        terms, grads = ctx.terms, ctx.grads
        units, weight_grads = grads[:terms], grads[terms:]
        scaled = [None if unit is None else unit * grad_loss[:, None].to(unit.dtype) for unit in units]
        if ctx.trains_weights:
            factor = _common_factor(grad_loss, ctx.expected)
            if factor is not None:
                weight_grads = [None if each is None else each * factor for each in weight_grads]
            else:
                tensors = ctx.saved_tensors
                weight_grads = [
                    _zeros(each, ctx.scorer) if wanted else None
                    for each, wanted in zip(tensors[terms:], ctx.needs_input_grad[4 + terms :], strict=True)
                ]
                ctx.scorer.walk(tensors[:terms], tensors[terms:], weight_grads=weight_grads, factors=grad_loss)
        return None, None, None, None, *scaled, *weight_grads


def _zeros(tensor: Tensor, scorer: _Scorer) -> Tensor:
    return torch.zeros_like(tensor, device=scorer.teacher.device)


def _common_factor(grad_loss: Tensor, expected: Tensor | None) -> Tensor | None:
    """The scalar c with grad_loss = c · expected, but for rounding; None where there is none."""
    if expected is None or not expected.numel():
        return None
    largest = expected.abs().argmax()
    if expected[largest] == 0:
        return None
    factor = grad_loss[largest] / expected[largest]
    return factor if torch.allclose(grad_loss, expected * factor, rtol=1e-5, atol=0.0) else None


# --- products and sizes -----------------------------------------------------------------------------------------


def _project(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """float32 x @ weight.T; into *out*, where one is given."""
    return (x @ weight.t()).float() if out is None else _project_sum([x], [weight], out)


def _project_sum(inputs: Sequence[Tensor], weights: Sequence[Tensor], out: Tensor) -> Tensor:
    """The sum of x @ weight.T into *out*, float32. Narrower products are summed in their dtype, as vLLM does."""
    (x, *others), (weight, *other_weights) = inputs, weights
    narrow = x.dtype != out.dtype
    total = x @ weight.t() if narrow else torch.mm(x, weight.t(), out=out)
    for x, weight in zip(others, other_weights, strict=True):
        total.addmm_(x, weight.t())
    return out.copy_(total) if narrow else out


def _accumulate(target: Tensor, gradient: Tensor, x: Tensor) -> None:
    if target.dtype == gradient.dtype:
        target.addmm_(gradient.t(), x)
    else:
        target.add_(gradient.t() @ x)


def _agrees(logits: Tensor, draft_id: Tensor, *, exactly: bool) -> Tensor:
    """bool [C]: the draft's argmax (the first of equals, as vLLM takes it) is *draft_id* [C].

    Logits of bfloat16 products tie easily. Validation wants that decided; in training, where argmax would take
    several times as long, a tie for the first place counts.
    """
    if exactly:
        return logits.argmax(-1) == draft_id
    return logits.gather(-1, draft_id.clamp_min(0)[:, None]).squeeze(-1) >= logits.amax(-1)


def _restricted_top(logits: Tensor, kept: Tensor) -> Tensor:
    """Argmax within the draft vocabulary: the full argmax where it is kept; searched for only in the other rows."""
    missing = (kept < 0).nonzero().squeeze(-1)
    if not missing.numel():
        return kept
    top = kept.clone()
    top[missing] = logits[missing].argmax(-1)
    return top


def _pieces(rows: int, size: int) -> Iterator[slice]:
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _chunk_elements(device: torch.device) -> int:
    return CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "accelerator"]


def _chunk_rows(teacher: Teacher, rows: int) -> int:
    """C: as many rows as the budget allows, in chunks of equal size."""
    most = max(MINIMUM_ROWS, _chunk_elements(teacher.device) // teacher.draft_size)
    return max(1, math.ceil(rows / max(1, math.ceil(rows / most))))


def _piece_rows(teacher: Teacher, rows: int) -> int:
    return rows if teacher.device.type != "cpu" else min(rows, max(1, PIECE_ELEMENTS // teacher.draft_size))
