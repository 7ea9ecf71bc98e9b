"""Attention in its forms, all equal in values and gradients: under any mask rule, and in three memory-linear kinds.

* :func:`masked_attention`: dense, under any :class:`~draftsmith.interfaces.MaskRule`; the reference.
* :func:`chained_attention`: a draft that continues from every row, step by step (rule ``chained``).
* :func:`continued_attention`: rows that continue others, all steps in one pass (rule ``chained`` too).
* :func:`anchored_attention`: blocks of slots that hang on anchor rows (rules ``anchored``, ``anchored_causal``).
"""

from draftsmith.attention.anchored import AnchoredBlocks, anchored_attention
from draftsmith.attention.chained import chained_attention
from draftsmith.attention.continued import Continuations, continued_attention
from draftsmith.attention.forms import masked_attention

__all__ = [
    "AnchoredBlocks",
    "Continuations",
    "anchored_attention",
    "chained_attention",
    "continued_attention",
    "masked_attention",
]
