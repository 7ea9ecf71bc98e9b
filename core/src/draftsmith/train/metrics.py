"""Training metrics as (sum, count) pairs, which add up over rows, steps and ranks; and what they divide to.

Definitions follow the terms that vLLM reports for served drafts. Notation: v[c, k] is a value in [0, 1] of the slot at
step k (0-based) of chain c: 1 or 0 for greedy acceptance (the draft's argmax is the verifier's *full-vocabulary*
argmax, so that a token the draft cannot propose counts as wrong), the overlap sum_t min(p_t, q_t) for sampling.

    position_k_acc   mean of the greedy v[:, k] over all supervised slots at step k                 (marginal)
    cond_acc_k       the same over chains whose slots 0 … k-1 are all there and correct
    prefix_k         prod_{j<=k} cond_acc_j: accepted at position k / number of drafts
    eal              1 + sum_k prefix_k: 1 + the mean leading run of correct slots
    alpha_k          mean overlap at step k
    accept_len       1 + mean over chains of sum_k prod_{j<=k} alpha[c, j]
    coverage         mean probability that the verifier gives the draft's vocabulary

A chain may be cut short: its document ends, a prompt follows, or the algorithm samples depths. It says nothing of the
positions it lacks, and counting those as rejected would understate the acceptance. So prefixes are products of
conditional ratios, each over the chains that have the position; where every chain is complete the products telescope
to the plain ratio accepted / drafts, and the identity of eal with the mean leading run is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from draftsmith.interfaces import DraftSlots, ScoredSlots

__all__ = ["Pairs", "add_pairs", "divide", "slot_metrics"]

#: name → float64 [2]: (sum, count).
Pairs = Mapping[str, Tensor]

_SAMPLED = "sampled_cond_"  # conditional overlap of a chain's prefix: the pairs behind accept_len


def slot_metrics(slots: DraftSlots, scored: ScoredSlots) -> dict[str, Tensor]:
    """Pairs of one row, on its device: float64 [2] each. Without slots every pair is (0, 0)."""
    K = slots.num_steps
    step = slots.step
    correct = scored.correct.to(torch.float64)
    overlap = scored.acceptance.to(torch.float64)
    pairs = {"coverage": _pair(scored.kept_mass.to(torch.float64))}
    for k, (acc, alpha) in enumerate(zip(_by_step(correct, step, K), _by_step(overlap, step, K), strict=True)):
        pairs[f"position_{k}_acc"] = acc
        pairs[f"alpha_{k}"] = alpha
    for k, pair in enumerate(_conditional(correct, slots)):
        pairs[f"cond_acc_{k}"] = pair
    for k, pair in enumerate(_conditional(overlap, slots)):
        pairs[f"{_SAMPLED}{k}"] = pair
    return pairs


def _pair(values: Tensor) -> Tensor:
    return torch.stack([values.sum(), values.new_tensor(float(values.numel()))])


def _by_step(values: Tensor, step: Tensor, K: int) -> Tensor:
    """[N] → [K, 2]: sum and count of the values at every step."""
    out = values.new_zeros(K, 2)
    out[:, 0].index_add_(0, step, values)
    out[:, 1].index_add_(0, step, torch.ones_like(values))
    return out


def _conditional(values: Tensor, slots: DraftSlots) -> Tensor:
    """[N] → [K, 2]: over chains having slots 0 … k, sum of prod_{j<=k} v and sum of prod_{j<k} v.

    For greedy values (0 or 1) the second is the number of chains that are correct up to k-1, so that the ratio is
    cond_acc_k; for overlaps it is the same with every chain weighted by the probability of getting there.
    """
    K = slots.num_steps
    chains = int(slots.chain.max()) + 1 if values.numel() else 0
    dense = values.new_zeros(chains, K)
    present = torch.zeros(chains, K, dtype=torch.bool, device=values.device)
    dense[slots.chain, slots.step] = values
    present[slots.chain, slots.step] = True
    reached = present.to(torch.int8).cumprod(1).to(values.dtype)
    survival = dense.cumprod(1)
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], 1)
    return torch.stack([(survival * reached).sum(0), (before * reached).sum(0)], 1)


def add_pairs(parts: Iterable[Pairs]) -> dict[str, Tensor]:
    """The sum of pairs, name by name, in float64. The order of *parts* decides the last bits."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, pair in part.items():
            value = pair.detach().to(torch.float64)
            total[name] = total[name] + value if name in total else value
    return total


def divide(pairs: Pairs) -> dict[str, float]:
    """Name → value. What was never counted is left out, except the lengths, which are 1 then."""
    if not pairs:
        return {}
    table = torch.stack([pair.to(torch.float64) for pair in pairs.values()]).tolist()
    ratio = {name: total / count for name, (total, count) in zip(pairs, table, strict=True) if count > 0}
    values = {name: value for name, value in ratio.items() if not name.startswith(_SAMPLED)}
    prefixes = _prefixes(pairs, ratio, "cond_acc_")
    values |= {f"prefix_{k}": value for k, value in enumerate(prefixes)}
    values["eal"] = 1.0 + math.fsum(prefixes)
    values["accept_len"] = 1.0 + math.fsum(_prefixes(pairs, ratio, _SAMPLED))
    return values


def _prefixes(pairs: Pairs, ratio: Mapping[str, float], stem: str) -> list[float]:
    """Products of the conditional ratios. They stay 0 once they are, and stop where no chain is long enough."""
    out: list[float] = []
    product = 1.0
    while (name := f"{stem}{len(out)}") in pairs and (name in ratio or product == 0.0):
        product *= ratio.get(name, 0.0)
        out.append(product)
    return out
