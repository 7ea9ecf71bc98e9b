"""A whole run on a tiny verifier, by the command line: prepare, capture, train, export, lint; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import REDUCED, assert_data_are_refused, assert_refused, run_stages, write_chats, write_recipe

from draftsmith.checkpoint.exported import load_draft
from draftsmith.cli import main
from draftsmith.plugins import load_plugins
from draftsmith.testing.verifiers import make_tiny_verifier

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier and forty conversations."""
    folder = tmp_path_factory.mktemp("run")
    make_tiny_verifier(folder / "verifier", "qwen3")
    write_chats(folder)
    return folder


def recipe(home: Path, output: Path, options: dict[str, Any], **values: Any) -> Path:
    return write_recipe(home, output, "dflash", {"num_layers": 1, **options}, **{**REDUCED, **values})


@pytest.mark.parametrize(
    "options",
    [
        {"max_anchors": 4},
        {"num_layers": 2, "sliding_window": 8, "full_attention_indices": [0], "position_weights": "d_pace"},
        {"hidden_size": 32, "block_size": 4},
    ],
)
def test_from_conversations_to_a_checkpoint_without_a_finding(
    home: Path, tmp_path: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(home, tmp_path / "out", options)
    run_stages(path, capsys)
    assert main(["lint", str(tmp_path / "out" / "checkpoint")]) == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out" / "training" / "metrics.jsonl").read_text().splitlines()]
    validation = [line for line in lines if line["phase"] == "validation"]
    assert len(validation) == 2
    assert all(0 < line["loss"] < 10 for line in lines)
    assert f"prefix_{options.get('block_size', 8) - 2}" in validation[1]
    algorithm, model, _ = load_draft(tmp_path / "out" / "checkpoint", load_plugins())
    token_ids, taps = torch.tensor([5, 6, 7, 8]), torch.randn(3, 5 * 64)
    drafted = algorithm.drafter(model).propose(token_ids, taps, options.get("block_size", 8) - 1)
    assert drafted.shape == (options.get("block_size", 8) - 1, 128)


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"sliding_window": 0}, {}, "sliding_window"),
        ({"layer_ids": [2, 8]}, {}, "[8] is outside 0 … 7"),
        ({"sliding_window": 4, "full_attention_indices": [1]}, {}, "the draft has no layers [1]"),
        ({"mask_token_id": 320}, {}, "320 is outside the verifier's vocabulary"),
        ({"block_size": 4}, {"export": {"speculative_tokens": 4}}, "4 is more than the 3 tokens"),
        ({"sliding_window_non_causal": False}, {}, "vLLM would serve all layers causally"),
        ({"block_sise": 4}, {}, "block_size"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(
    home: Path,
    tmp_path: Path,
    options: dict[str, Any],
    more: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_refused(recipe(home, tmp_path / "out", options, **more), message, capsys)


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({}, {"mask": "causal"}, "the mask Causal shows blocks the features of their own anchor"),
        ({}, {"mask": "anchored_causal"}, "the mask AnchoredCausal makes every layer causal"),
        (
            {"sliding_window": 8, "sliding_window_non_causal": False},
            {"mask": "anchored_causal", "train": {"attention": "linear"}},
            "the mask AnchoredCausal has no linear form",
        ),
    ],
)
def test_a_mask_that_vllm_would_not_serve_is_refused_before_anything_is_made(
    home: Path,
    tmp_path: Path,
    options: dict[str, Any],
    more: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_refused(recipe(home, tmp_path / "out", options, **more), message, capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 129}, "a block of 129 needs 129 tokens"),
        ({"mask_token_id": 1}, "the mask token 1 occurs in the prepared data"),  # of prompts only
    ],
)
def test_what_the_data_do_not_allow_is_said_before_they_are_captured(
    home: Path, tmp_path: Path, options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_data_are_refused(recipe(home, tmp_path / "out", options), message, capsys)
