"""The learning rate as a pure function of the step: there is no scheduler state that a resume could lose."""

from __future__ import annotations

import math

__all__ = ["rate_factor", "warmup_steps"]


def warmup_steps(total_steps: int, warmup_share: float) -> int:
    """Steps of linear warm-up: *warmup_share* of *total_steps*, rounded; never all of them."""
    return min(round(total_steps * warmup_share), max(total_steps - 1, 0))


def rate_factor(kind: str, step: int, total_steps: int, warmup: int) -> float:
    """Factor in (0, 1] on the peak learning rate for the optimiser step number *step* (0-based).

    Warm-up rises linearly and reaches 1 at step ``warmup - 1``; no step has rate zero, which would waste it.
    After it, ``constant`` stays at 1; ``linear`` and ``cosine`` fall so that they would be 0 one step *after* the
    last one.

    Raises:
        ValueError: unknown *kind*.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(total_steps - warmup, 1)
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return 1.0 - done
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    raise ValueError(f"unknown schedule {kind!r}")
