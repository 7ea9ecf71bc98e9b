"""Whether hidden states may be kept: NaN or infinite ones poison a training, and are refused wherever they appear."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["all_finite", "refusal"]


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite.

    NaN is the least and the greatest of all values that it is among. On a CPU both are found among 16-bit values
    twenty times as fast as a sum, and that ten times as fast as ``isfinite`` of each.
    """
    if not tensor.numel():
        return True
    return all(bool(torch.isfinite(each)) for each in torch.aminmax(tensor))


def refusal(states: Tensor) -> str | None:
    """Why *states* must not be stored, or None."""
    if all_finite(states):
        return None
    bad = int((~torch.isfinite(states)).sum())
    return f"{bad} of {states.numel()} values are not finite"
