"""Whether hidden states may be kept: NaN or infinite ones poison a training, and are refused wherever they appear."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["all_finite", "refusal"]


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite.

    A sum is finite only if all its terms are, and is an order of magnitude faster than ``isfinite`` on 16-bit
    values. Only a sum that is not finite (which finite terms may overflow into) needs the exact test.
    """
    total = tensor.sum(dtype=torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())


def refusal(states: Tensor) -> str | None:
    """Why *states* must not be stored, or None."""
    if all_finite(states):
        return None
    bad = int((~torch.isfinite(states)).sum())
    return f"{bad} of {states.numel()} values are not finite"
