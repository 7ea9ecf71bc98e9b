"""A whole run on a tiny verifier, by the command line: prepare, capture, train, export, lint; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import REDUCED, STAGES, assert_data_are_refused, assert_refused, run_stages, write_chats, write_recipe

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
    return write_recipe(home, output, "peagle", {"num_layers": 1, **options}, **{**REDUCED, **values})


def validations(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "training" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["loss"] < 10 for line in lines)
    return [line for line in lines if line["phase"] == "validation"]


def test_from_conversations_to_a_checkpoint_without_a_finding(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    path = recipe(home, output, {"num_depths": 5, "max_anchors": 40})
    run_stages(path, capsys)
    assert main(["lint", str(output / "checkpoint")]) == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out
    found = validations(output)
    assert len(found) == 2
    assert "prefix_4" in found[1]
    assert "parallel_drafting" in (output / "checkpoint" / "README.md").read_text()
    algorithm, model, _ = load_draft(output / "checkpoint", load_plugins())
    drafted = algorithm.drafter(model).propose(torch.tensor([5, 6, 7, 8]), torch.randn(3, 3 * 64), 5)
    assert drafted.shape == (5, 128)


def test_validation_draws_the_same_elements_every_time(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With weights that do not move, every validation has the same loss, although elements are drawn."""
    still = {
        "epochs": 3,
        "tokens_per_row": 256,
        "learning_rate": 1e-30,
        "weight_decay": 0.0,
        "compute_dtype": "float32",
    }
    path = recipe(home, tmp_path / "out", {"num_depths": 5, "max_anchors": 20}, train=still)
    run_stages(path, capsys, STAGES[:3])
    found = [line["loss"] for line in validations(tmp_path / "out")]
    assert len(found) == 3
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"num_depths": 0}, {}, "num_depths"),
        ({"down_sample_ratio": 0.0}, {}, "down_sample_ratio"),
        ({"down_sample_ratio": 1.5}, {}, "down_sample_ratio"),
        ({"fc_norm": True}, {}, "vLLM does not forward it"),
        ({"norm_output": True}, {}, "no hidden state is fed back"),
        ({"layer_ids": [2, 8]}, {}, "[8] is outside 0 … 7"),
        ({"mask_token_id": 320}, {}, "320 is outside the verifier's vocabulary"),
        ({"num_depths": 4}, {"export": {"speculative_tokens": 5}}, "5 is more than the 4 tokens"),
        ({"num_depth": 4}, {}, "num_depth"),
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
    ("options", "message"),
    [
        ({"num_depths": 300}, "300 depths need 301 tokens"),  # more than a row's
        ({"mask_token_id": 1}, "the mask token 1 occurs in the prepared data"),  # of prompts only
    ],
)
def test_what_the_data_do_not_allow_is_said_before_they_are_captured(
    home: Path, tmp_path: Path, options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_data_are_refused(recipe(home, tmp_path / "out", options), message, capsys)
