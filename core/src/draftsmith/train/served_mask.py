"""Whether a draft is trained under the mask by which vLLM will serve it, as its algorithm declares."""

from __future__ import annotations

from types import NoneType
from typing import TYPE_CHECKING

import torch

from draftsmith.interfaces import MaskRule, Slots
from draftsmith.masks.forms import block_slots, concatenate_slots, dense_mask, document_slots, step_slots
from draftsmith.masks.rules import Anchored
from draftsmith.plugins.results import checked
from draftsmith.train.setup import build_mask

if TYPE_CHECKING:
    from draftsmith.config.resolve import ResolvedRun

__all__ = ["mask_remark", "same_in_effect"]


def mask_remark(run: ResolvedRun) -> str | None:
    """What to know of a mask that is not the one by which vLLM serves the draft; None: it is, or nothing is said.

    An algorithm knows its own default to fit: of that, nothing is asked.
    """
    algorithm, options = run.algorithm, run.algorithm_options
    if run.mask.name == algorithm.mask:
        return None
    told = algorithm.served_mask(options)
    name: str | None = checked(algorithm.served_mask, told, (str, NoneType), "the name of a mask, or None")
    if name is None or name == run.mask.name:
        return None
    trained, served = build_mask(run), build_mask(run, run.registry.masks.get(name, where=f"mask of {algorithm.name}"))
    tokens = algorithm.max_speculative_tokens(options)
    if same_in_effect(trained, served, tokens=tokens, length=run.recipe.train.tokens_per_row):
        return None
    return (
        f"this draft is trained with the mask `{run.mask.name}`; vLLM serves drafts of {algorithm.name} with what "
        f"`{name}` shows, whatever they were trained with, and may accept less than validation says. Leave `mask` out "
        "to train what is served"
    )


def same_in_effect(rule: MaskRule, served: MaskRule, *, tokens: int, length: int) -> bool:
    """Whether *rule* shows every drafting query what *served* does.

    Compared on what training has: blocks that hang on anchors where vLLM's rule is one of those, and else rows
    continued by steps. Every row of two short documents drafts, and the last one of a row as long as training's, where
    a window or a reach of its own would tell.

    Args:
        tokens: K, those of a round.
        length: of a packed row.
    """
    for lengths, first in (((5, 4), 0), ((length,), length - 1)):
        rows = document_slots(lengths)
        starts = torch.arange(first, rows.index.shape[0])
        if isinstance(served, Anchored):
            # As long as the longer of the two layouts: K rows behind the anchor's own.
            queries = block_slots(rows, starts, tokens + 1)
            keys = concatenate_slots([rows, queries])
        else:
            drafting = Slots(*(each[starts] for each in rows))
            steps = [step_slots(drafting, step) for step in range(tokens)]
            queries, keys = concatenate_slots(steps), concatenate_slots([rows, *steps[1:]])
        if not torch.equal(dense_mask(rule, queries, keys), dense_mask(served, queries, keys)):
            return False
    return True
