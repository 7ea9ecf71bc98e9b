"""The network, under the names that its tensors have in vLLM too (serving.py)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from draftsmith.interfaces import AlgorithmSetup, DraftArchitecture
from draftsmith.layers import RMSNorm, Weight, draft_head


class ToyDraft(DraftArchitecture, nn.Module):
    """state ← GRU(embedding of the newest token, state); logits = head(norm(state)). Width H, the verifier's."""

    def __init__(self, setup: AlgorithmSetup) -> None:
        nn.Module.__init__(self)
        width = setup.verifier.hidden_size
        self.embed_tokens = Weight(setup.weights.embed_tokens.detach().float())
        self.cell = nn.GRUCell(width, width)
        self.norm = RMSNorm(width, setup.verifier.rms_norm_eps)
        self.lm_head = Weight(draft_head(setup.weights, setup.vocabulary, setup.compute_dtype))

    def forward(self, tokens: Tensor, state: Tensor) -> Tensor:
        """Tokens int64 [n] and the state before each of them [n, H] → the state behind it [n, H]."""
        after: Tensor = self.cell(self.embed_tokens.weight[tokens], state)
        return after

    def shared_tensors(self) -> Mapping[str, Tensor]:
        return {"embed_tokens.weight": self.embed_tokens.weight, "lm_head.weight": self.lm_head.weight}
