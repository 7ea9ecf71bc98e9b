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


def closing_table(tokens: int, width: int, prompts: str | None = None) -> str:
    """What is printed of a verification with the prompts of that file, or with those of the validation rows."""
    each = {"all": figures(tokens), "coding": figures(tokens)}
    summary = {
        "vllm": "0.32.0",
        "num_speculative_tokens": tokens,
        "served": each,
        "simulated": each,
        "ways": {"with_draft": {"identical": 2, "prompts": 2, "ties": 0}},
    }
    written = io.StringIO()
    record = StageRecord(stage="verify", fingerprint={"verify": {"prompts": prompts}}, complete=True, summary=summary)
    print_verification(Console(file=written, width=width), record)
    return written.getvalue()


@pytest.mark.parametrize("tokens", [3, 7, 15])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_figure_of_the_closing_table_is_cut(tokens: int, width: int) -> None:
    found = [line.split() for line in closing_table(tokens, width).splitlines()]
    rates = [f"{rate:.3f}" for rate in figures(tokens)["acceptance_per_position"]]
    for who in ("vLLM", "simulator"):
        for source in ("all", "coding"):
            assert [who, source, f"{1 + sum(figures(tokens)['acceptance_per_position']):.3f}", *rates, "1738"] in found


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (None, "greedy, prompts not trained on; acceptance"),
        # Such as the very questions that the recipe trains on.
        ("[my]/questions.jsonl", "greedy, prompts of [my]/questions.jsonl; acceptance"),
    ],
)
def test_the_closing_table_says_whose_prompts_it_counts(prompts: str | None, said: str) -> None:
    assert said in " ".join(closing_table(3, 200, prompts).split())
