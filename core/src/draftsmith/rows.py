"""Index arithmetic on packed rows that algorithms share."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["supervised_run"]


def supervised_run(supervised: Tensor, documents: Tensor) -> Tensor:
    """How many supervised tokens follow one another from each row on, itself included, within its document.

    Args:
        supervised: bool [T].
        documents: int64 [T], equal within a document.

    Returns:
        int64 [T]; 0 where the row itself is not supervised.
    """
    count = supervised.shape[0]
    index = torch.arange(count, device=supervised.device)
    breaks = ~supervised
    breaks[1:] |= documents[1:] != documents[:-1]
    ends = torch.cat((torch.nonzero(breaks).flatten(), index.new_tensor([count])))
    following = ends[torch.searchsorted(ends, index, right=True).clamp_max(ends.shape[0] - 1)]
    return torch.where(supervised, following - index, torch.zeros_like(index))
