"""Tensors as memory that the store sends from and receives into."""

from __future__ import annotations

import math
import mmap
from typing import Any

import torch
import xxhash
from torch import Tensor

from draftsmith_hs_mooncake.store import Region

__all__ = ["checksum", "empty", "region_of", "tensor_bytes"]


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor whose memory goes back to the system when it is dropped.

    Buffers of ever other sizes, some of them kept for a while, fragment the C library's heap: a process that reads for
    hours would grow by many samples.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _OWN_PAGES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)


def tensor_bytes(tensor: Tensor) -> Tensor:
    """uint8 [bytes]: the memory of a contiguous CPU tensor, not a copy."""
    return tensor.reshape(-1).view(torch.uint8)


#: From this size on a tensor has pages of its own.
_OWN_PAGES = 1 << 20


def checksum(data: Tensor) -> str:
    """xxh3-64, 16 hex digits, of a contiguous uint8 tensor."""
    array: Any = data.numpy()
    return str(xxhash.xxh3_64_hexdigest(array))


def region_of(data: Tensor) -> Region:
    """The memory of a contiguous uint8 tensor, held alive by it."""
    return Region(data.data_ptr(), data.numel(), data)
