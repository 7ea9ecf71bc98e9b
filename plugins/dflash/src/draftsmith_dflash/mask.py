"""Who sees whom in anchored blocks, and the attention that follows from it.

A row of a block with anchor p sees the context rows before p of its document (those whose features exist when x_p is
the newest token), within the layer's window, and the rows of its own block: all of them, or, in a causal layer, those
up to its own. Those are the core's rules ``anchored`` and ``anchored_causal``, for which it has a block-sparse form;
any other rule is attended densely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from draftsmith.attention import AnchoredBlocks, anchored_attention, masked_attention
from draftsmith.errors import ConfigError, Problem
from draftsmith.interfaces import MaskRule
from draftsmith.masks.forms import block_slots, concatenate_slots, dense_mask, document_slots, refuse_other_forms
from draftsmith.masks.rules import Anchored
from draftsmith_dflash.options import LayerAttention

__all__ = ["Attend", "block_attention", "check_causality", "check_context"]

#: (query [n * B, h, d]; context key, context value [T, g, d]; block key, block value [n * B, g, d]; where the blocks
#: hang; the layer's window and causality) → [n * B, h, d]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, AnchoredBlocks, LayerAttention], Tensor]


def block_attention(rule: MaskRule, form: Literal["auto", "linear", "dense", "flex"]) -> Attend:
    """The attention of *rule* in the wanted form; ``auto`` is the block-sparse one where the rule has it.

    The built-in rule is taken with each layer's own window and causality; any other one with the window.

    Raises:
        ConfigError: a form that only the built-in rule has, with another rule.
    """
    if type(rule) is not Anchored:
        refuse_other_forms(rule, form, "anchored")
    chosen: Literal["linear", "dense", "flex"] = "linear" if form == "auto" else form

    def attend(
        query: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        block_key: Tensor,
        block_value: Tensor,
        blocks: AnchoredBlocks,
        layer: LayerAttention,
    ) -> Tensor:
        if type(rule) is Anchored:
            parts = (context_key, context_value, block_key, block_value)
            return anchored_attention(query, *parts, blocks, window=layer.window, causal=layer.causal, form=chosen)
        slots = blocks.slots(query.device)
        keys = concatenate_slots([blocks.context_slots(context_key.shape[0], query.device), slots])
        key, value = torch.cat([context_key, block_key]), torch.cat([context_value, block_value])
        return masked_attention(query, key, value, type(rule)(layer.window), slots, keys)

    return attend


def check_context(rule: MaskRule) -> None:
    """Raises:
    ConfigError: *rule* lets a block see features of its anchor or of later rows, which do not exist when it drafts.
    """
    rows = document_slots([4])
    anchor = 2
    visible = dense_mask(rule, block_slots(rows, torch.tensor([anchor]), 3), rows)
    if bool(visible[:, anchor:].any()):
        raise ConfigError(
            [
                Problem(
                    f"the mask {type(rule).__name__} shows blocks the features of their own anchor or later, which "
                    "vLLM does not have yet",
                    where="mask",
                    hint="use the mask `anchored`",
                )
            ]
        )


def check_causality(rule: MaskRule, layers: Sequence[LayerAttention]) -> None:
    """Raises:
    ConfigError: *rule* makes layers causal that are served seeing their whole block.
    """
    wide = [index for index, layer in enumerate(layers) if not layer.causal]
    if isinstance(rule, Anchored) and rule.causal and wide:
        raise ConfigError(
            [
                Problem(
                    f"the mask {type(rule).__name__} makes every layer causal, and vLLM would serve layers {wide} "
                    "seeing their whole block",
                    where="mask",
                    hint="use the mask `anchored`: with sliding_window_non_causal: false, sliding layers are causal",
                )
            ]
        )
