"""The network as vLLM runs it. Imported by vLLM alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from draftsmith.recurrent.served import ServedDraft
from draftsmith.speculators import layers_of, target_width
from draftsmith_toy.model import Cell


class ServedToy(ServedDraft):
    def build_step(self, config: Mapping[str, Any]) -> nn.Module:
        return Cell(target_width(config), layers_of(config)["rms_norm_eps"])
