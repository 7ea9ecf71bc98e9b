"""DFlash's training recipe: what the core drives. The network is in model.py, the serving path in replay.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from draftsmith.interfaces import AlgorithmSetup, DraftAlgorithm, Drafter, DraftSlots, MaskRule, PackedRow, ScoredSlots
from draftsmith_dflash.batch import Batch, make_batch
from draftsmith_dflash.mask import block_attention, check_causality, check_context
from draftsmith_dflash.model import DFlashDraft
from draftsmith_dflash.options import (
    BlockOptions,
    LayerAttention,
    Layout,
    layer_attention,
    mask_token,
    max_speculative_tokens,
    position_gamma,
)
from draftsmith_dflash.replay import BlockDrafter

__all__ = ["BlockAlgorithm", "DFlash", "pace_weights", "position_weights"]


def position_weights(options: BlockOptions, step: Tensor) -> Tensor:
    """float32 [N]: the fixed weight of slots at *step* (ones for ``d_pace``, whose weights follow from the scores)."""
    if options.position_weights == "exponential":
        return torch.exp(-step.float() / position_gamma(options))
    return torch.ones(step.shape, device=step.device)


def pace_weights(confidence: Tensor, chain: Tensor, step: Tensor, counted: Tensor, smoothing: float) -> Tensor:
    """D-PACE's weights: float32 [N], how many slots of the block are reached by way of this one, itself included.

    With q the draft's probability of the right token, s = (1 - a) q + a (1 where a slot does not count) and
    C_j = prod_{i <= j} s_i, the weight of slot k is sum_{j >= k} C_j over the slots that count; 0 if it does not.

    Args:
        confidence: float32 [N], q.
        chain, step: int64 [N], as in :class:`~draftsmith.interfaces.DraftSlots`.
        counted: bool [N].
        smoothing: a.
    """
    blocks = int(chain.max()) + 1 if chain.numel() else 0
    steps = int(step.max()) + 1 if step.numel() else 0
    factors = confidence.new_ones(blocks, steps)
    factors[chain, step] = torch.where(counted, (1 - smoothing) * confidence + smoothing, 1.0)
    counts = confidence.new_zeros(blocks, steps)
    counts[chain, step] = counted.to(counts.dtype)
    reached = factors.cumprod(1) * counts
    return reached.flip(1).cumsum(1).flip(1)[chain, step] * counted


class BlockAlgorithm(DraftAlgorithm):
    """Anchored blocks in either layout. A subclass says the layout and what slots it makes of the hidden states.

    Attributes:
        layout: which rows of a block predict; a subclass may set it per instance, before ``super().__init__(setup)``.
        mask_token_id: what the rows after the anchor's read.
    """

    layout: Layout = "bonus_anchor"

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self.options: BlockOptions = setup.options
        self.mask_token_id = mask_token(self.options, setup.verifier)
        self.check_attention(self.options, setup.mask, setup.attention)
        self.attend = block_attention(setup.mask, setup.attention)

    @classmethod
    def check_attention(
        cls, options: BlockOptions, mask: MaskRule, form: Literal["auto", "linear", "dense", "flex"]
    ) -> None:
        check_context(mask)
        check_causality(mask, layer_attention(options))
        block_attention(mask, form)

    def layer_attention(self) -> Sequence[LayerAttention]:
        """Window and causality of every layer."""
        return layer_attention(self.options)

    def build_model(self) -> nn.Module:
        model = self.setup.architecture(self.setup)  # type: ignore[call-arg]
        assert isinstance(model, nn.Module)
        return model

    def make_batch(self, row: PackedRow, generator: torch.Generator) -> Batch:
        """The anchors are drawn anew for every row, from *generator* alone."""
        return make_batch(
            row,
            block_size=self.options.block_size,
            max_anchors=self.options.max_anchors,
            mask_token_id=self.mask_token_id,
            layout=self.layout,
            generator=generator,
        )

    def hidden(self, model: nn.Module, batch: Batch) -> Tensor:
        """The backbone: normed hidden states [N, H] of the batch's slots."""
        hidden: Tensor = model(batch, self.attend)
        return hidden

    def forward(self, model: nn.Module, batch: Batch) -> DraftSlots:
        """Slots with one term, hidden times head. Subclasses add terms with ``attrs.evolve``."""
        return DraftSlots(
            terms=((self.hidden(model, batch), model.get_parameter("lm_head.weight")),),
            teacher_row=batch.teacher_row,
            step=batch.step,
            chain=batch.chain,
            weight=position_weights(self.options, batch.step),
            total_positions=batch.total_positions,
            num_steps=max_speculative_tokens(self.options, self.layout),
        )

    def weights(self, slots: DraftSlots, scored: ScoredSlots, counted: Tensor) -> Tensor:
        if self.options.position_weights != "d_pace":
            return slots.weight
        smoothing = self.options.pace_smoothing
        return pace_weights(scored.top_probability, slots.chain, slots.step, counted, smoothing)


class DFlash(BlockAlgorithm):
    """One denoising step: every mask row of a block predicts the token at its own position.

    Source: DFlash (z-lab). Its loss is a mean of cross-entropies weighted by exp(-k/gamma).
    """

    def drafter(self, model: nn.Module) -> Drafter:
        assert isinstance(model, DFlashDraft)
        return BlockDrafter(model, self.layer_attention(), self.mask_token_id, self.layout)
