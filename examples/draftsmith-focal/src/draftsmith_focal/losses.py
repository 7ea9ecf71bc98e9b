"""The loss, imported when a run asks for it."""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.interfaces import PositionLoss, TeacherChunk


class Focal(PositionLoss):
    """-(1 - q)^gamma log q, with q the draft's probability of the teacher's choice."""

    def __init__(self, gamma: float = 2.0) -> None:
        self.gamma = gamma

    def value(self, logits: Tensor, teacher: TeacherChunk) -> Tensor:
        log_q = torch.log_softmax(logits, dim=-1).gather(-1, teacher.top[:, None]).squeeze(-1)
        # Where q is 1 to the last bit, 0^gamma has no gradient for gamma below 1: keep a little distance.
        unsure = (1 - log_q.exp()).clamp_min(torch.finfo(logits.dtype).tiny)
        return -(unsure**self.gamma) * log_q
