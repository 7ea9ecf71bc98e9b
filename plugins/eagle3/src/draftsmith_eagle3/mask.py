"""Who sees whom in training-time test, and the attention that follows from it.

A query of row t at step k stands for the k-th drafted token after row t. In vLLM's cache it finds the verified rows
up to t and the rows of its own chain: step-0 keys j <= t, and the keys of row t at steps 1 … k. That is the core's
``chained`` rule, for which it has a memory-linear form; any other rule is attended densely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from draftsmith.attention import chained_attention, masked_attention
from draftsmith.interfaces import MaskRule
from draftsmith.masks.forms import concatenate_slots, document_slots, refuse_other_forms, step_slots
from draftsmith.masks.rules import Chained

__all__ = ["Attend", "chain_attention"]

#: (query [R, h, d] of step k, step-0 key, step-0 value [R, g, d], (key, value) of steps 1 … k, document lengths)
Attend = Callable[[Tensor, Tensor, Tensor, Sequence[tuple[Tensor, Tensor]], Sequence[int]], Tensor]


def chain_attention(rule: MaskRule, form: Literal["auto", "linear", "dense", "flex"]) -> Attend:
    """The attention of *rule* in the wanted form; ``auto`` is the memory-linear one where the rule has it.

    Raises:
        ConfigError: a form that only the built-in rule has, with another rule.
    """
    if type(rule) is not Chained:
        refuse_other_forms(rule, form, "chained")
    chosen: Literal["linear", "dense", "flex"] = "linear" if form == "auto" else form

    def attend(
        query: Tensor, key: Tensor, value: Tensor, chain: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int]
    ) -> Tensor:
        if type(rule) is Chained:
            window = rule.window
            return chained_attention(query, key, value, chain, document_lengths=lengths, window=window, form=chosen)
        rows = document_slots(lengths, query.shape[0], query.device)
        steps = [step_slots(rows, step) for step in range(len(chain) + 1)]
        keys = torch.cat([key, *(each for each, _ in chain)])
        values = torch.cat([value, *(each for _, each in chain)])
        return masked_attention(query, keys, values, rule, steps[-1], concatenate_slots(steps))

    return attend
