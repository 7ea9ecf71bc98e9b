"""Who sees whom when all depths are read in one pass, and the attention that follows from it.

An element (anchor a, depth d) finds in vLLM's cache the verified rows up to a and the mask rows of its own round up to
its own: real keys j <= a of its document, and the keys of elements (a, 1 … d). That is the core's ``chained`` rule, of
which all steps are there at once, in a memory-linear form; any other rule is attended densely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from draftsmith.attention import Continuations, chained_attention, continued_attention, masked_attention
from draftsmith.interfaces import MaskRule
from draftsmith.masks.forms import concatenate_slots, refuse_other_forms
from draftsmith.masks.rules import Chained

__all__ = ["Attend", "element_attention"]

#: (query [R, h, d], key, value [R, g, d] of the rows; query [N, h, d], key, value [N, g, d] of the elements; which
#: rows they continue) → outputs [R, h, d] and [N, h, d]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Continuations], tuple[Tensor, Tensor]]


def element_attention(rule: MaskRule, form: Literal["auto", "linear", "dense", "flex"]) -> Attend:
    """The attention of *rule* in the wanted form; ``auto`` is the memory-linear one where the rule has it.

    Raises:
        ConfigError: a form that only the built-in rule has, with another rule.
    """
    if type(rule) is not Chained:
        refuse_other_forms(rule, form, "chained")
    chosen: Literal["linear", "dense", "flex"] = "linear" if form == "auto" else form

    def attend(
        row_query: Tensor,
        row_key: Tensor,
        row_value: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        chains: Continuations,
    ) -> tuple[Tensor, Tensor]:
        if type(rule) is Chained:
            lengths, window = chains.document_lengths, rule.window
            rows = chained_attention(
                row_query, row_key, row_value, document_lengths=lengths, window=window, form=chosen
            )
            elements = continued_attention(query, row_key, row_value, key, value, chains, window=window, form=chosen)
            return rows, elements
        total, device = row_query.shape[0], query.device
        slots = concatenate_slots([chains.real_slots(total, device), chains.slots(device)])
        queries, keys, values = (torch.cat(each) for each in ((row_query, query), (row_key, key), (row_value, value)))
        output = masked_attention(queries, keys, values, rule, slots, slots)
        return output[:total], output[total:]

    return attend
