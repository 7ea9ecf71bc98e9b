"""The closing table of a verification: every figure is there, on a terminal of any width."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from draftsmith.serving.verify import print_verification
from draftsmith.stages import StageRecord


def figures(tokens: int) -> dict[str, Any]:
    rates = [round(0.5 - place / 32, 4) for place in range(tokens)]
    return {"acceptance_length": 1 + sum(rates), "acceptance_per_position": rates, "drafts": 1738}


@pytest.mark.parametrize("tokens", [3, 7, 15])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_figure_of_the_closing_table_is_cut(tokens: int, width: int) -> None:
    each = {"all": figures(tokens), "coding": figures(tokens)}
    summary = {
        "vllm": "0.32.0",
        "num_speculative_tokens": tokens,
        "served": each,
        "simulated": each,
        "ways": {"with_draft": {"identical": 2, "prompts": 2, "ties": 0}},
    }
    written = io.StringIO()
    record = StageRecord(stage="verify", fingerprint={}, complete=True, summary=summary)
    print_verification(Console(file=written, width=width), record)
    found = [line.split() for line in written.getvalue().splitlines()]
    rates = [f"{rate:.3f}" for rate in figures(tokens)["acceptance_per_position"]]
    for who in ("vLLM", "simulator"):
        for source in ("all", "coding"):
            assert [who, source, f"{1 + sum(figures(tokens)['acceptance_per_position']):.3f}", *rates, "1738"] in found
