"""Who sees whom in anchored blocks, and the attention that follows from it.

A row of a block with anchor p sees the context rows before p of its document (those whose features exist when x_p is
the newest token), within the layer's window, and the rows of its own block: all of them, or, in a causal layer, those
up to its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from draftsmith.interfaces import MaskRule
from draftsmith_dflash.batch import Batch
from draftsmith_dflash.options import LayerAttention

__all__ = ["Attend", "block_attention"]

#: (query [n, B, h, d], context key, context value [T, g, d], block key, block value [n, B, g, d], batch, which layer's
#: window and causality) → [n, B, h, d]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Batch, LayerAttention], Tensor]


def block_attention(rule: MaskRule, form: Literal["auto", "linear", "dense", "flex"]) -> Attend:
    """The attention of *rule* in the wanted form."""
    raise NotImplementedError
