"""Attention under any mask rule: the dense reference, and flex attention.

Shapes: Q queries, N keys, h query heads, g key/value heads (g divides h), d head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from draftsmith.interfaces import MaskRule, Slots
from draftsmith.masks.forms import additive_mask, dense_mask, flex_block_mask

__all__ = ["flex_masked_attention", "masked_attention"]


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, query_slots: Slots, key_slots: Slots
) -> Tensor:
    """Dense attention under any rule: query [Q, h, d], key and value [N, g, d] → [Q, h, d].

    Queries that see nothing give zeros, without NaN in the backward pass.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,nhd->hqn", query, key) / math.sqrt(query.shape[-1])
    weights = torch.softmax(scores + additive_mask(rule, query_slots, key_slots, scores.dtype), dim=-1)
    sees = dense_mask(rule, query_slots, key_slots).any(-1)
    return torch.einsum("hqn,nhd->qhd", weights, value) * sees[:, None, None]


_COMPILED: dict[str, Any] = {}


def _flex_kernel(device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if device.type == "cpu":
        # Uncompiled, a check of values: torch's CPU template has no backward pass and does not compile every mask.
        return flex_attention
    if "flex" not in _COMPILED:
        # Once per process. Lengths change from row to row and step to step, so they are dynamic.
        _COMPILED["flex"] = torch.compile(flex_attention, dynamic=True)
    return _COMPILED["flex"]


def flex_masked_attention(
    query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, query_slots: Slots, key_slots: Slots
) -> Tensor:
    """:func:`masked_attention` by flex attention, with a block mask from the same rule."""
    mask = flex_block_mask(rule, query_slots, key_slots)
    batched = [each.transpose(0, 1)[None] for each in (query, key, value)]
    output: Tensor = _flex_kernel(query.device)(*batched, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
    return output[0].transpose(0, 1)
