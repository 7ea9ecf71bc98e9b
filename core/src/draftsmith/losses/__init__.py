"""The built-in losses, registered through the same hook as anybody's. Torch-free; the formulas are in the modules.

Notation, per position: z draft logits, q = softmax(z), p the teacher restricted to the draft vocabulary and
renormalised, alpha = sum min(p, q).
"""

from __future__ import annotations

from draftsmith.api import Loss
from draftsmith.losses.options import HybridOptions, LogAcceptanceOptions, SumOptions, SumTerm

__all__ = ["BUILTIN_LOSSES", "HybridOptions", "LogAcceptanceOptions", "SumOptions", "SumTerm"]

BUILTIN_LOSSES: tuple[Loss, ...] = (
    Loss(
        name="kl_div",
        summary="forward KL divergence, sum p (log p - log q)",
        implementation="draftsmith.losses.divergence:ForwardKL",
    ),
    Loss(
        name="ce",
        summary="cross-entropy against the teacher's argmax, -log q[argmax p]",
        implementation="draftsmith.losses.divergence:CrossEntropy",
        conformance="draftsmith.testing.builtin:CrossEntropyCheck",
    ),
    Loss(
        name="rkl",
        summary="reverse KL divergence, sum q (log q - log p)",
        implementation="draftsmith.losses.divergence:ReverseKL",
    ),
    Loss(
        name="jsd",
        summary="Jensen-Shannon divergence, mean of KL(p||m) and KL(q||m) with m = (p + q) / 2",
        implementation="draftsmith.losses.divergence:JensenShannon",
    ),
    Loss(
        name="tv",
        summary="total variation, 1 - sum min(p, q): the rejection probability of sampled drafts",
        implementation="draftsmith.losses.overlap:TotalVariation",
        conformance="draftsmith.testing.builtin:OverlapCheck",
    ),
    Loss(
        name="nla",
        summary="negative log acceptance, -log sum min(p, q)",
        implementation="draftsmith.losses.overlap:NegativeLogAcceptance",
        conformance="draftsmith.testing.builtin:OverlapCheck",
        options=LogAcceptanceOptions,
    ),
    Loss(
        name="lk_hybrid",
        summary="lam KL + (1 - lam) TV with lam = exp(-eta alpha): KL far from the teacher, TV near it",
        implementation="draftsmith.losses.overlap:Hybrid",
        conformance="draftsmith.testing.builtin:OverlapCheck",
        options=HybridOptions,
    ),
    Loss(
        name="sum",
        summary="weighted sum of losses of any plugin, by name",
        implementation="draftsmith.losses.weighted:WeightedSum",
        options=SumOptions,
        parts=SumOptions.parts,
    ),
)
