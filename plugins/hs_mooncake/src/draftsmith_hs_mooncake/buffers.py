"""Tensors as memory that the store sends from and receives into."""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import Tensor

from draftsmith_hs_mooncake.store import Region

__all__ = ["checksum", "region_of", "tensor_bytes"]


def tensor_bytes(tensor: Tensor) -> Tensor:
    """uint8 [bytes]: the memory of a contiguous CPU tensor, not a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def checksum(data: Tensor) -> str:
    """xxh3-64, 16 hex digits, of a contiguous uint8 tensor."""
    array: Any = data.numpy()
    return str(xxhash.xxh3_64_hexdigest(array))


def region_of(data: Tensor) -> Region:
    """The memory of a contiguous uint8 tensor, held alive by it."""
    return Region(data.data_ptr(), data.numel(), data)
