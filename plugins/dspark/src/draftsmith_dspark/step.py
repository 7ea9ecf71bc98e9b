"""DSpark's training recipe: what the core drives. The network is in model.py, the serving path in replay.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.interfaces import AlgorithmSetup, Drafter, DraftSlots, ScoredSlots
from draftsmith_dflash.batch import Batch
from draftsmith_dflash.step import BlockAlgorithm, position_weights
from draftsmith_dspark.calibration import calibrate
from draftsmith_dspark.heads import SlotOrder
from draftsmith_dspark.model import DSparkDraft
from draftsmith_dspark.options import DSparkOptions
from draftsmith_dspark.replay import DSparkDrafter

__all__ = ["DSpark"]

#: Where the slots' confidence logits, float32 [N], are found again.
CONFIDENCE = "confidence"


class DSpark(BlockAlgorithm):
    """Every slot of a block in one pass, its logits corrected by the token before it: the data's, in training.

    Source: DSpark (DeepSeek). The objective is 0.1 CE + 0.9 |p - q|_1 on the corrected logits, and the confidence
    head's binary cross-entropy against the acceptance 1 - |p - q|_1 / 2; each a mean weighted by exp(-k/4).
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        options: DSparkOptions = setup.options
        self.layout = options.layout
        super().__init__(setup)
        self.options: DSparkOptions = options

    def forward(self, model: nn.Module, batch: Batch) -> DraftSlots:
        assert isinstance(model, DSparkDraft)
        slots = super().forward(model, batch)
        ((hidden, head),) = slots.terms
        embedded = None if model.markov_head is None else model.markov_head.embed(batch.previous)
        terms = [(hidden, head)]
        extra: dict[str, Tensor] = {}
        if model.confidence_head is not None:
            # The gradient of its loss reaches the hidden states and the embeddings, as in the paper.
            extra[CONFIDENCE] = model.confidence_head(
                hidden, embedded if self.options.confidence_with_markov else None
            )
            if not extra[CONFIDENCE].numel():  # its weights take part in a distributed reduction all the same
                terms[0] = (hidden + 0.0 * extra[CONFIDENCE].sum(), head)
        if model.markov_head is not None and embedded is not None:
            order = SlotOrder(batch.chain, batch.step)
            terms.append((model.markov_head.low_rank(hidden, embedded, order), model.markov_head.markov_w2.weight))
        return attrs.evolve(slots, terms=terms, extra={**slots.extra, **extra})

    def objective(self, slots: DraftSlots, scored: ScoredSlots, loss: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The core's loss on the corrected logits, and the confidence head's."""
        logits = slots.extra.get(CONFIDENCE)
        if logits is None:
            return loss, {}
        target = scored.acceptance
        # Fixed weights, whatever those of the draft's loss are: how sure the head is must not depend on them.
        weight = position_weights(attrs.evolve(self.options, position_weights="exponential"), slots.step)
        each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        total, count = (each * weight).sum(), weight.sum()
        predicted = torch.sigmoid(logits.detach())
        metrics = {
            "confidence_loss": torch.stack((total.detach(), count)),
            "confidence_abs_error": _pair((predicted - target).abs()),
            "confidence_bias": _pair(predicted - target),
        }
        return loss + self.options.confidence_weight * total / count, metrics

    def finish(self, model: nn.Module, validation: Iterable[tuple[DraftSlots, ScoredSlots]]) -> Mapping[str, float]:
        """Calibrate the confidence head on the validation rows; see :mod:`draftsmith_dspark.calibration`."""
        assert isinstance(model, DSparkDraft)
        if model.confidence_head is None:
            return {}
        # Row by row: a row's slots hold its hidden states.
        found = calibrate((slots, scored, slots.extra[CONFIDENCE]) for slots, scored in validation)
        if found is None:
            return {}
        model.confidence_head.cool(found.shared)
        return found.figures()

    def drafter(self, model: nn.Module) -> Drafter:
        assert isinstance(model, DSparkDraft)
        kept_ids = self.setup.vocabulary.kept_ids()
        return DSparkDrafter(model, self.layer_attention(), self.mask_token_id, self.layout, kept_ids)


def _pair(values: Tensor) -> Tensor:
    return torch.stack((values.sum(), values.new_tensor(float(values.numel()))))
