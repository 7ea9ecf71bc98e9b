"""Hidden states in eight bits: float8_e4m3fn values, and one scale for each token and layer id. For transports.

A scale is the power of two that brings the largest value of its H into (224, 448], the upper end of what e4m3 holds.
Multiplying by it rounds nothing, so the error is that of e4m3 alone: a value x of a token whose largest is m comes
back within max(|x| / 16, m / 229376), which is 2^-4 of itself down to 1 / 14336 of the largest. What was coded once
comes back unchanged from every further coding.

It takes half the bytes of 16-bit states, and 4 bytes more for each token and id.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["SCALE_BYTES", "VALUES", "decode", "encode", "pack", "stored_bytes", "unpack"]

#: dtype of the coded values.
VALUES = torch.float8_e4m3fn
#: Bytes of a scale, which is float32.
SCALE_BYTES = 4
_LARGEST = 448.0
#: Scales below this, and their inverses, are not normal in float32. Values so small are as good as zero.
_SMALLEST_EXPONENT = -126
_PART_ROWS = 256


def encode(states: Tensor) -> tuple[Tensor, Tensor]:
    """*states* in eight bits.

    Args:
        states: finite, float32, float16 or bfloat16 [T, ids, H]; any device.

    Returns:
        values: float8_e4m3fn [T, ids, H], contiguous.
        scales: float32 [T, ids]; never zero.
    """
    rows = states.detach().reshape(-1, states.shape[-1])
    values = torch.empty(rows.shape, dtype=VALUES, device=states.device)
    largest = torch.empty(len(rows), device=states.device)
    for part, coded, top in zip(*(_in_parts(each) for each in (rows, values, largest)), strict=True):
        numbers = part.float()
        torch.amax(numbers.abs(), -1, out=top)
        numbers = numbers * _scales(top).reciprocal_().unsqueeze(-1)
        coded.copy_(numbers.clamp_(-_LARGEST, _LARGEST))
    return values.view(states.shape), _scales(largest).view(states.shape[:-1])


def decode(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What :func:`encode` was given, in *dtype* [T, ids, H]; what *dtype* cannot hold becomes its largest value.

    Args:
        values: float8_e4m3fn [T, ids, H].
        scales: float32 [T, ids].
    """
    # A table, not a cast: torch casts one value at a time, which takes ten times as long.
    table, limit = _table(values.device), torch.finfo(dtype).max
    coded = values.contiguous().view(torch.uint8).view(-1, values.shape[-1])
    states = torch.empty(coded.shape, dtype=dtype, device=values.device)
    for part, scale, out in zip(*(_in_parts(each) for each in (coded, scales.reshape(-1), states)), strict=True):
        numbers = table.index_select(0, part.reshape(-1).int()).view(part.shape).mul_(scale.unsqueeze(-1))
        out.copy_(numbers.clamp_(-limit, limit))
    return states.view(values.shape)


def pack(states: Tensor) -> Tensor:
    """*states* [T, ids, H] as one run of bytes, uint8 [stored_bytes(T, ids, H)]: all scales, then all values."""
    values, scales = encode(states)
    return torch.cat([scales.view(-1).view(torch.uint8), values.view(-1).view(torch.uint8)])


def unpack(data: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`pack`.

    Args:
        data: contiguous uint8, its memory aligned to 4 bytes.
        shape: T, ids, H.
    """
    tokens, ids, _ = shape
    scales, values = data[: SCALE_BYTES * tokens * ids], data[SCALE_BYTES * tokens * ids :]
    return decode(values.view(VALUES).view(shape), scales.view(torch.float32).view(tokens, ids), dtype)


def stored_bytes(tokens: int, ids: int, hidden_size: int) -> int:
    """Bytes of the values and scales of *tokens* tokens."""
    return tokens * ids * (hidden_size + SCALE_BYTES)


def _in_parts(rows: Tensor) -> tuple[Tensor, ...]:
    """Rows of [N, …] in parts whose intermediate results stay in a processor's cache, or are few on a GPU."""
    size = _PART_ROWS if rows.device.type == "cpu" else 64 * _PART_ROWS
    return torch.split(rows, size)


def _scales(largest: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(largest / _LARGEST)
    exponent = (exponent - (mantissa == 0.5).int()).clamp_(min=_SMALLEST_EXPONENT)
    return torch.ldexp(torch.ones_like(largest), exponent)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """float32 [256]: the number that each byte stands for."""
    return torch.arange(256, dtype=torch.uint8).view(VALUES).float().to(device)
