"""Calibration of the confidence head after training: temperatures, and how far the head is off before and after.

A slot's confidence is the probability that it is accepted, given that those before it were; vLLM multiplies them up
to the *survival* of each slot, and verifies where survival is worth it. So survival is what has to be right. The
paper's sequential temperature scaling fits one temperature a slot, in order: that of slot k makes the survival of slot
k likeliest, those before it being fixed. vLLM's head is one linear map for all slots and has no place for them, so a
single temperature, fitted on the survival of all slots at once, is folded into its weights; the ones by slot are
reported, and stand in the exported config for whoever can use them.

The temperatures that are kept are fitted on all validation rows. The error after calibration is measured on rows that
had no part in the fit: every second row under the temperatures of the others, and these under its own. A single row
cannot be split, since its chains share their documents; the error is then that of the fit itself, and said to be.

The truth is the overlap of draft and verifier, as scored on the validation rows: the probability of acceptance when
sampling. Survival's truth is its running product.

Shapes: C chains (blocks), K slots a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from attrs import asdict, frozen
from torch import Tensor
from torch.nn import functional as F

from draftsmith.interfaces import DraftSlots, ScoredSlots

__all__ = ["Calibration", "Chains", "calibrate", "expected_calibration_error", "fit_sequentially", "fit_shared"]

#: Bins of the expected calibration error (arXiv 1706.04599).
BINS = 15
#: Temperatures are looked for in this range: first on a grid, then by golden sections around its best point.
RANGE = (0.05, 20.0)
GRID = 121
SECTIONS = 40


@frozen(kw_only=True)
class Chains:
    """What the head says of validation chains, and what is true of them. float64, on the CPU.

    Attributes:
        logits: [C, K].
        acceptance: [C, K], of each slot, given the ones before it.
        present: bool [C, K]: the chain has the slot; a prefix of each row.
        row: int64 [C], the validation row that the chain is of, counted from 0 over those that have any.
    """

    logits: Tensor
    acceptance: Tensor
    present: Tensor
    row: Tensor

    @classmethod
    def of(cls, rows: Iterable[tuple[DraftSlots, ScoredSlots, Tensor]]) -> Chains | None:
        """From scored rows and their slots' logits [N]; None where there is no slot at all."""
        parts = [_dense(*row) for row in rows]
        if not parts:
            return None
        places = [torch.full(part["logits"].shape[:1], place) for place, part in enumerate(parts)]
        return cls(row=torch.cat(places), **{name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def only(self, chosen: Tensor) -> Chains:
        """The chains where *chosen*, bool [C], says so."""
        return Chains(**{name: tensor[chosen] for name, tensor in asdict(self).items()})

    @property
    def true_survival(self) -> Tensor:
        """[C, K]."""
        return self.acceptance.cumprod(1)

    def survival(self, temperatures: Tensor) -> Tensor:
        """[C, K], under *temperatures* [K] or [1], or those of each chain, [C, K] or [C, 1]."""
        return torch.sigmoid(self.logits / temperatures).cumprod(1)


@frozen(kw_only=True)
class Calibration:
    """The outcome.

    Attributes:
        shared: the temperature that is folded into the head.
        by_slot: [K], the paper's.
        error_before, error_shared, error_by_slot: expected calibration error of survival, in [0, 1].
        held_out: the last two are measured on rows that the temperatures were not fitted on.
    """

    chains: int
    shared: float
    by_slot: tuple[float, ...]
    error_before: float
    error_shared: float
    error_by_slot: float
    held_out: bool

    def figures(self) -> dict[str, float]:
        """By the names that are reported."""
        return {
            "confidence_chains": float(self.chains),
            "confidence_ece_before": self.error_before,
            "confidence_ece_after": self.error_shared,
            "confidence_ece_by_slot": self.error_by_slot,
            "confidence_ece_held_out": float(self.held_out),
            "confidence_temperature": self.shared,
            **{f"confidence_temperature_{slot}": value for slot, value in enumerate(self.by_slot)},
        }


def calibrate(rows: Iterable[tuple[DraftSlots, ScoredSlots, Tensor]]) -> Calibration | None:
    """Temperatures from scored rows and their slots' logits [N]; None where there is nothing to fit them on."""
    chains = Chains.of(rows)
    if chains is None:
        return None
    by_slot, shared = fit_sequentially(chains), fit_shared(chains)
    held_out = bool(chains.row.any())  # there are two rows at least
    measured = [torch.tensor([shared]), torch.tensor(by_slot)]
    if held_out:
        measured = [_by_other_half(chains, lambda half: [fit_shared(half)]), _by_other_half(chains, fit_sequentially)]
    errors = [expected_calibration_error(chains, temperatures) for temperatures in (torch.ones(1), *measured)]
    return Calibration(
        chains=chains.logits.shape[0],
        shared=shared,
        by_slot=tuple(by_slot),
        error_before=errors[0],
        error_shared=errors[1],
        error_by_slot=errors[2],
        held_out=held_out,
    )


def _by_other_half(chains: Chains, fit: Callable[[Chains], list[float]]) -> Tensor:
    """[C, n]: for each chain the n temperatures that *fit* finds on the half of the rows that its own is not in."""
    half = chains.row % 2
    return torch.tensor([fit(chains.only(half != each)) for each in (0, 1)])[half]


def fit_sequentially(chains: Chains) -> list[float]:
    """One temperature a slot, each fitted on the survival of its slot with those before it fixed. 1 for a slot that
    no chain has."""
    temperatures: list[float] = []
    before = torch.ones_like(chains.logits[:, 0])
    truth = chains.true_survival
    for slot in range(chains.logits.shape[1]):
        there = chains.present[:, slot]
        logits, prefix, target = chains.logits[there, slot], before[there], truth[there, slot]
        if not target.numel():
            temperatures.append(1.0)
            continue

        temperatures.append(_minimum(_slot_surprise(prefix, logits, target)))
        before = before * torch.sigmoid(chains.logits[:, slot] / temperatures[-1])
    return temperatures


def fit_shared(chains: Chains) -> float:
    """The one temperature under which the survival of all slots is likeliest."""
    truth = chains.true_survival[chains.present]

    def surprise(values: Tensor) -> Tensor:
        return torch.cat([_surprise(chains.survival(value)[chains.present][None], truth) for value in values])

    return _minimum(surprise)


def expected_calibration_error(chains: Chains, temperatures: Tensor) -> float:
    """Mean over all slots of |mean predicted - mean true survival| of the slot's bin, in bins of equal width."""
    predicted = chains.survival(temperatures.to(chains.logits))[chains.present]
    truth = chains.true_survival[chains.present]
    bins = (predicted * BINS).long().clamp_max(BINS - 1)
    difference = torch.zeros(BINS, dtype=predicted.dtype).index_add_(0, bins, predicted - truth)
    return float(difference.abs().sum() / predicted.numel())


def _dense(slots: DraftSlots, scored: ScoredSlots, logits: Tensor) -> dict[str, Tensor]:
    """The slots of one row as [chains that have any, K]."""
    chain, step = slots.chain.cpu(), slots.step.cpu()
    chains, place = torch.unique(chain, return_inverse=True)
    shape = (chains.shape[0], slots.num_steps)
    dense = {
        "logits": torch.zeros(shape, dtype=torch.float64),
        "acceptance": torch.ones(shape, dtype=torch.float64),
        "present": torch.zeros(shape, dtype=torch.bool),
    }
    dense["logits"][place, step] = logits.detach().cpu().double()
    dense["acceptance"][place, step] = scored.acceptance.detach().cpu().double()
    dense["present"][place, step] = True
    return dense


def _slot_surprise(prefix: Tensor, logits: Tensor, target: Tensor) -> Callable[[Tensor], Tensor]:
    """Temperatures [G] → surprise [G] of one slot's survival [n], given that of the slot before, *prefix*."""
    return lambda values: _surprise(prefix * torch.sigmoid(logits / values[:, None]), target)


def _surprise(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean binary cross-entropy [G] of *predicted* [G, n] against *target* [n], kept finite."""
    predicted = predicted.clamp(1e-12, 1 - 1e-12)
    return F.binary_cross_entropy(predicted, target.expand_as(predicted), reduction="none").mean(-1)


def _minimum(surprise: Callable[[Tensor], Tensor]) -> float:
    """The temperature of least *surprise*, a function of float64 [G] → [G]."""
    grid = torch.linspace(math.log(RANGE[0]), math.log(RANGE[1]), GRID, dtype=torch.float64)
    best = int(surprise(grid.exp()).argmin())
    low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, GRID - 1)])
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(SECTIONS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        values = surprise(torch.tensor([left, right], dtype=torch.float64).exp())
        low, high = (low, right) if values[0] <= values[1] else (left, high)
    return math.exp((low + high) / 2)
