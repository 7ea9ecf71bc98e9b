"""The network. Training and vLLM run the same cell, each between its own embedding and head."""

from __future__ import annotations

from torch import Tensor, nn

from draftsmith.interfaces import AlgorithmSetup
from draftsmith.layers import RMSNorm
from draftsmith.recurrent.training import RecurrentDraft


class Cell(nn.Module):
    """state ← GRU(embedding of the newest token, state); the head reads norm(state)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)
        self.norm = RMSNorm(width, eps)

    def forward(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """[n, H] and [n, H] → what the head reads and the state after the token, [n, H] each."""
        state = self.cell(embedded, state)
        return self.norm(state), state


class ToyDraft(RecurrentDraft):
    step: Cell

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup, Cell(setup.verifier.hidden_size, setup.verifier.rms_norm_eps))
