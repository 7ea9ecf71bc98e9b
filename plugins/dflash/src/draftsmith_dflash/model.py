"""The DFlash draft: blocks of mask tokens that attend to the verifier's features, injected as keys and values.

Source: DFlash (z-lab); names and shapes are those of vLLM's ``qwen3_dflash.py``, which serves it.

Shapes: T context rows, n blocks of B rows, N slots, H width, A tapped layers of width H_t.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from draftsmith.interfaces import AlgorithmSetup, DraftArchitecture
from draftsmith_dflash.batch import Batch
from draftsmith_dflash.mask import Attend
from draftsmith_dflash.options import BlockOptions

__all__ = ["DFlashDraft"]


class DFlashDraft(nn.Module, DraftArchitecture):
    """The draft network. Modules: embed_tokens, fc, hidden_norm, layers.i, norm, lm_head (names as vLLM's).

    ``setup.options`` is a :class:`BlockOptions`. A subclass builds further modules after ``super().__init__(setup)``,
    and initialises them itself.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__()
        options: BlockOptions = setup.options
        self.options = options
        raise NotImplementedError

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """The verifier's embedding and head, where the draft has its width."""
        raise NotImplementedError

    def context(self, taps: Tensor) -> Tensor:
        """Features [T, A * H_t] → what every layer projects to keys and values, [T, H]."""
        raise NotImplementedError

    def forward(self, batch: Batch, attend: Attend) -> Tensor:
        """Normed hidden states [N, H] of the batch's slots; times the head they are logits."""
        raise NotImplementedError
