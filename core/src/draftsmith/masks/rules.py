"""Mask rules, written elementwise over slots so that every attention form can be derived from them."""

from __future__ import annotations

from torch import Tensor

from draftsmith.interfaces import MaskRule, Slots

__all__ = ["Anchored", "AnchoredCausal", "Causal", "Chained"]


class Causal(MaskRule):
    """Rows up to the query's own, of its document and inside the window. Steps play no part."""

    def __call__(self, query: Slots, key: Slots) -> Tensor:
        visible = _same_document(query, key) & (key.index <= query.index)
        return visible if self.window is None else visible & _in_window(query, key, self.window)


class Chained(MaskRule):
    """Real rows up to the query's own, then the keys of the query's own drafted continuation.

    A query (row t, step k) sees the step-0 keys of rows j <= t of its document, and of every later step s <= k only
    the key at its own row: exactly the cache that vLLM holds when it drafts the k-th continuation from start t. The
    window counts positions, and a continuation's position is position(t) + k, so it slides with the step.
    """

    def __call__(self, query: Slots, key: Slots) -> Tensor:
        real = (key.step == 0) & (key.index <= query.index)
        own_chain = (key.step > 0) & (key.index == query.index) & (key.step <= query.step)
        visible = _same_document(query, key) & (real | own_chain)
        return visible if self.window is None else visible & _in_window(query, key, self.window)


class Anchored(MaskRule):
    """Blocks that hang on anchors: the rows before the anchor, then the block's own slots, all of them.

    A slot of a block has the index of its anchor's row and a step >= 1 (slot s: s + 1, position(anchor) + s). It sees
    the step-0 keys of rows j < index of its document (strictly: the anchor's own features do not exist yet) and the
    slots of the same anchor. Within a window W it sees positions (p - W, p + W): a window is as wide to both sides
    where attention is not causal, as in vLLM's kernels. Step-0 queries see what is before them.
    """

    #: Whether a slot sees the slots of its block up to its own only; the window then is (p - W, p].
    causal = False

    def __call__(self, query: Slots, key: Slots) -> Tensor:
        context = (key.step == 0) & (key.index < query.index)
        own_block = (key.step > 0) & (query.step > 0) & (key.index == query.index)
        if self.causal:
            own_block = own_block & (key.step <= query.step)
        visible = _same_document(query, key) & (context | own_block)
        if self.window is None:
            return visible
        return visible & _in_window(query, key, self.window) & (key.position < query.position + self.window)


class AnchoredCausal(Anchored):
    """:class:`Anchored`, with slots that see their block up to their own slot only."""

    causal = True


def _same_document(query: Slots, key: Slots) -> Tensor:
    return (query.document == key.document) & (key.document >= 0)


def _in_window(query: Slots, key: Slots, window: int) -> Tensor:
    # vLLM keeps the keys at positions (p - W, p] for a query at position p.
    return key.position > query.position - window
