"""Whether hidden states may be kept: NaN or infinite ones poison a training, and are refused wherever they appear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["all_finite", "refusal"]

#: The integers of a float's width, and its infinity among them. NaN and infinity of one sign are all numbers from
#: there on: of the sign 0 among those with a sign, of the sign 1, which is the highest bit, among those without.
_INTEGERS = {
    torch.bfloat16: (torch.int16, "uint16", 0x7F80),
    torch.float16: (torch.int16, "uint16", 0x7C00),
    torch.float32: (torch.int32, "uint32", 0x7F800000),
}
#: Read from memory once, and then from a processor's cache.
_PART_BYTES = 256 << 10


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    if not tensor.numel():
        return True
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in _INTEGERS:
        return _all_finite_by_bits(tensor)
    # NaN is the least and the greatest of all values that it is among.
    return all(bool(torch.isfinite(each)) for each in torch.aminmax(tensor))


def _all_finite_by_bits(tensor: Tensor) -> bool:
    """In the calling thread. Those of torch spin for milliseconds after it, on cores that what comes next may need."""
    signed, unsigned, infinity = _INTEGERS[tensor.dtype]
    bits: Any = tensor.detach().view(signed).reshape(-1).numpy()
    sign = 1 << (8 * bits.itemsize - 1)
    step = _PART_BYTES // bits.itemsize
    for start in range(0, bits.size, step):
        part = bits[start : start + step]
        if part.max() >= infinity or part.view(unsigned).max() >= sign + infinity:
            return False
    return True


def refusal(states: Tensor) -> str | None:
    """Why *states* must not be stored, or None."""
    if all_finite(states):
        return None
    bad = int((~torch.isfinite(states)).sum())
    return f"{bad} of {states.numel()} values are not finite"
