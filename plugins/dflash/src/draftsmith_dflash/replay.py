"""The serving path, written the slow way: what vLLM does in a round, with a key/value cache of its own.

Shares no code with the training forward, on purpose: the two are compared in tests, so that a mistake in either is
seen. Only the parameters and the rotary frequencies are the model's.
"""

from __future__ import annotations

from torch import Tensor

from draftsmith.interfaces import Drafter
from draftsmith_dflash.model import DFlashDraft
from draftsmith_dflash.options import LayerAttention, Layout

__all__ = ["BlockDrafter"]


class BlockDrafter(Drafter):
    """Drafts one sequence, in float32.

    Args:
        model: the draft; its trained parameters are read at every call.
        layers: window and causality of each.
        mask_token_id: what the rows after the bonus token read.
        layout: 1 + K rows of which the last K predict, or K rows that all predict.
    """

    def __init__(
        self, model: DFlashDraft, layers: tuple[LayerAttention, ...], mask_token_id: int, layout: Layout
    ) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError

    def backbone(self, token_ids: Tensor, taps: Tensor, num_tokens: int) -> Tensor:
        """Normed hidden states [K, H] of the predicting rows, in one pass; what :meth:`propose` turns into logits."""
        raise NotImplementedError

    def propose(self, token_ids: Tensor, taps: Tensor, num_tokens: int, *, forced: Tensor | None = None) -> Tensor:
        """One pass, all K positions at once: what was drafted before is not read, so *forced* changes nothing."""
        raise NotImplementedError
