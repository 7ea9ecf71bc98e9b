"""The heads, under the names that vLLM gives their tensors (``vllm/model_executor/models/medusa.py``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.interfaces import AlgorithmSetup, DraftArchitecture
from draftsmith.layers import Weight, draft_head


class Head(nn.Module):
    """x + silu(W x), once for each layer. [n, H] → [n, H]."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))
        for layer in self.layers:
            # As published: an untrained head says what the verifier's output layer says.
            nn.init.zeros_(layer.get_parameter("weight"))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(DraftArchitecture, nn.Module):
    def __init__(self, setup: AlgorithmSetup) -> None:
        nn.Module.__init__(self)
        options, width = setup.options, setup.verifier.hidden_size
        self.blocks = nn.ModuleList(Head(width, options.num_layers) for _ in range(options.num_heads))
        self.lm_head = Weight(draft_head(setup.weights, setup.vocabulary, setup.compute_dtype))

    def shared_tensors(self) -> Mapping[str, Tensor]:
        return {"lm_head.weight": self.lm_head.weight}

    def replace_head(self, weight: Tensor) -> None:
        """Take a checkpoint's output layer in place of the verifier's, as vLLM does, unless the two are the same."""
        own = weight.to(self.lm_head.weight)
        if not torch.equal(own, self.lm_head.weight):
            self.lm_head.weight = nn.Parameter(weight.float().clone(), requires_grad=False)
