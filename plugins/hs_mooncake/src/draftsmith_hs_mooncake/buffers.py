"""Tensors as memory that the store sends from and receives into."""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections import deque
from typing import Any

import torch
import xxhash
from torch import Tensor

from draftsmith_hs_mooncake.store import Region

__all__ = ["checksum", "empty", "region_of", "tensor_bytes"]


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor in pages of its own, which are used again when it is dropped.

    Pages that are new to the process cost as much time as their transfer. The C library's heap keeps its pages too,
    but buffers of ever other sizes, some of them held for a while, fragment it: a process that reads for hours would
    grow by many samples.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _OWN_PAGES:
        return torch.empty(shape, dtype=dtype)
    pages = _take(size)
    buffer = (ctypes.c_char * size).from_buffer(pages)  # the tensor's storage holds it alive, and nothing else does
    weakref.finalize(buffer, _give_back, pages).atexit = False
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _take(size: int) -> mmap.mmap:
    for _ in range(len(_spare)):
        try:
            pages = _spare.popleft()
        except IndexError:  # another thread was faster
            break
        if size <= len(pages) <= 2 * size:
            return pages
        _spare.append(pages)
    return mmap.mmap(-1, size)


def _give_back(pages: mmap.mmap) -> None:
    """Runs wherever the last reference goes, so it takes no lock."""
    _spare.append(pages)


def tensor_bytes(tensor: Tensor) -> Tensor:
    """uint8 [bytes]: the memory of a contiguous CPU tensor, not a copy."""
    return tensor.reshape(-1).view(torch.uint8)


#: From this size on a tensor has pages of its own.
_OWN_PAGES = 1 << 20
#: Pages of tensors that were dropped; the oldest of more go back to the system.
_spare: deque[mmap.mmap] = deque(maxlen=4)


def checksum(data: Tensor) -> str:
    """xxh3-64, 16 hex digits, of a contiguous uint8 tensor."""
    array: Any = data.numpy()
    return str(xxhash.xxh3_64_hexdigest(array))


def region_of(data: Tensor) -> Region:
    """The memory of a contiguous uint8 tensor, held alive by it."""
    return Region(data.data_ptr(), data.numel(), data)
