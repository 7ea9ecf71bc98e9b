"""The built-in mask rules, registered through the same hook as anybody's. Torch-free.

A rule is written once, elementwise over (query, key) slots; :mod:`draftsmith.masks.forms` derives the dense, the
additive and the flex form from it.
"""

from __future__ import annotations

from draftsmith.api import Mask

__all__ = ["BUILTIN_MASKS"]

BUILTIN_MASKS: tuple[Mask, ...] = (
    Mask(
        name="causal",
        summary="earlier rows of the same document, within the window",
        implementation="draftsmith.masks.rules:Causal",
        conformance="draftsmith.testing.builtin:CausalCheck",
    ),
    Mask(
        name="chained",
        summary="earlier rows of the same document and the query's own drafted continuation, within the window",
        implementation="draftsmith.masks.rules:Chained",
    ),
    Mask(
        name="anchored",
        summary="the rows before the anchor and all slots of the anchor's block, within the window",
        implementation="draftsmith.masks.rules:Anchored",
        conformance="draftsmith.testing.builtin:AnchoredCheck",
    ),
    Mask(
        name="anchored_causal",
        summary="the rows before the anchor and the slots of its block up to the query's own, within the window",
        implementation="draftsmith.masks.rules:AnchoredCausal",
        conformance="draftsmith.testing.builtin:AnchoredCausalCheck",
    ),
)
