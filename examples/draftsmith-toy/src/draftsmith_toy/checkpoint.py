"""The exported files: the format that vLLM finds its drafts by, with a type of this package's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.recurrent import RecurrentFormat
from draftsmith.speculators import target_width


class ToyCheckpoint(RecurrentFormat):
    kind = "toy"
    method = "eagle"  # vLLM's proposer that hands a draft the token and the hidden state before it

    def step_shapes(self, config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        width = target_width(config)
        return {
            **{f"cell.weight_{part}": (3 * width, width) for part in ("ih", "hh")},
            **{f"cell.bias_{part}": (3 * width,) for part in ("ih", "hh")},
            "norm.weight": (width,),
        }
