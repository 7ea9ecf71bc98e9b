"""Who sees whom in the recursion, and the attention that follows from it.

A query of row t at step k stands for the k-th drafted token after row t. In vLLM's cache it finds the verified rows
up to t and the rows of its own chain: step-0 keys j <= t, and the keys of row t at steps 1 … k. That is the core's
``chained`` rule, the default here. FastMTP trains otherwise: a query of step k sees the keys of step k alone, of all
rows up to its own (:class:`StepByStep`). Both have a memory-linear form; any other rule is attended densely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from draftsmith.attention import chained_attention, masked_attention
from draftsmith.interfaces import MaskRule, Slots
from draftsmith.masks.forms import concatenate_slots, document_slots, refuse_other_forms, step_slots
from draftsmith.masks.rules import Chained

__all__ = ["Attend", "StepByStep", "chain_attention", "continues_all"]

#: (query [R, h, d] of step k, (key, value) [R, g, d] of steps 0 … k, document lengths) → [R, h, d]
Attend = Callable[[Tensor, Sequence[tuple[Tensor, Tensor]], Sequence[int]], Tensor]


class StepByStep(MaskRule):
    """Rows up to the query's own, of its document, at the query's own step. Source: FastMTP (arXiv 2509.18362)."""

    def __call__(self, query: Slots, key: Slots) -> Tensor:
        same = (query.document == key.document) & (key.document >= 0) & (query.step == key.step)
        visible = same & (key.index <= query.index)
        return visible if self.window is None else visible & (key.position > query.position - self.window)


def continues_all(rule: MaskRule) -> bool:
    """Whether a row may see what others made of later steps, so that every row must go through all of them."""
    return type(rule) is not Chained


def chain_attention(rule: MaskRule, form: Literal["auto", "linear", "dense", "flex"]) -> Attend:
    """The attention of *rule* in the wanted form; ``auto`` is the memory-linear one where the rule has it.

    Raises:
        ConfigError: a form that only the built-in rules have, with another rule.
    """
    if type(rule) not in (Chained, StepByStep):
        refuse_other_forms(rule, form, "chained")
    chosen: Literal["linear", "dense", "flex"] = "linear" if form == "auto" else form

    def attend(query: Tensor, steps: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int]) -> Tensor:
        window = rule.window
        if type(rule) is Chained:
            (key, value), *chain = steps
            return chained_attention(query, key, value, chain, document_lengths=lengths, window=window, form=chosen)
        if type(rule) is StepByStep and chosen != "dense":
            # One step's rows among themselves are a causal sequence, as step 0 of a chain is.
            return chained_attention(query, *steps[-1], document_lengths=lengths, window=window, form=chosen)
        rows = document_slots(lengths, query.shape[0], query.device)
        slots = [step_slots(rows, step) for step in range(len(steps))]
        keys, values = (torch.cat(each) for each in zip(*steps, strict=True))
        return masked_attention(query, keys, values, rule, slots[-1], concatenate_slots(slots))

    return attend
