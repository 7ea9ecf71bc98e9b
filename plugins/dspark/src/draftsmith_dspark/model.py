"""The DSpark draft: DFlash's network and the two heads.

Shapes: N slots, H draft width, r rank, V_d draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection

from draftsmith.interfaces import AlgorithmSetup
from draftsmith_dflash.model import DFlashDraft
from draftsmith_dspark.heads import ConfidenceHead, markov_head
from draftsmith_dspark.options import DSparkOptions

__all__ = ["DSparkDraft"]


class DSparkDraft(DFlashDraft):
    """The draft network. Beside DFlash's modules: ``markov_head`` (None for rank 0), ``confidence_head`` (or None)."""

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        options: DSparkOptions = setup.options
        self.options: DSparkOptions = options
        width = self.config.hidden_size
        self.markov_head = markov_head(
            options.markov_head,
            target_size=setup.verifier.vocab_size,
            draft_size=setup.vocabulary.draft_size,
            rank=options.markov_rank,
            hidden_size=width,
        )
        self.confidence_head: ConfidenceHead | None = None
        if options.confidence:
            self.confidence_head = ConfidenceHead(width, options.markov_rank if options.confidence_with_markov else 0)
        for head in (self.markov_head, self.confidence_head):
            if head is not None:
                head.initialise(options.initializer_range)

    def vocabulary_tensors(self) -> Collection[str]:
        return {*super().vocabulary_tensors(), "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
