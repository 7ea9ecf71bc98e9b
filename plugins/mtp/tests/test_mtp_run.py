"""A whole run on a tiny model with a native head, by the command line: what it makes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from make_mimo import add_head
from tiny_runs import assert_refused, run_stages, write_chats, write_recipe

from draftsmith.api import DataFacts
from draftsmith.checkpoint.exported import load_draft
from draftsmith.cli import main
from draftsmith.plugins import load_plugins
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.verifier import read_verifier
from draftsmith_mtp.options import MtpOptions, check_data

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier with a head, one without, and forty conversations."""
    folder = tmp_path_factory.mktemp("run")
    make_tiny_verifier(folder / "headless", "llama")
    make_tiny_verifier(folder / "verifier", "llama")
    add_head(folder / "verifier")
    write_chats(folder)
    return folder


def recipe(home: Path, output: Path, options: dict[str, Any], **values: Any) -> Path:
    return write_recipe(home, output, "mtp", options, **values)


@pytest.mark.parametrize(
    ("options", "more"), [({}, {}), ({"num_steps": 2}, {"mask": "step_by_step", "loss": "kl_div"})]
)
def test_from_conversations_to_a_head_without_a_finding(
    home: Path, tmp_path: Path, options: dict[str, Any], more: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(home, tmp_path / "out", options, **more)
    run_stages(path, capsys)
    told = f"trained with the mask `{more.get('mask')}`; vLLM serves drafts of mtp with what `chained` shows"
    printed = capsys.readouterr().out
    assert printed.count("warning: mask: ") == printed.count(told) == (3 if more else 0)  # prepare, capture and train
    assert (told in (tmp_path / "out" / "checkpoint" / "README.md").read_text(encoding="utf-8")) is bool(more)
    assert main(["lint", str(tmp_path / "out" / "checkpoint")]) == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out" / "training" / "metrics.jsonl").read_text().splitlines()]
    validation = [line for line in lines if line["phase"] == "validation"]
    steps = options.get("num_steps", 3)
    assert f"prefix_{steps - 1}" in validation[-1]
    assert validation[-1]["loss"] < validation[0]["loss"] < 7
    algorithm, model, _ = load_draft(tmp_path / "out" / "checkpoint", load_plugins())
    drafted = algorithm.drafter(model).propose(torch.tensor([5, 6, 7, 8]), torch.randn(3, 64), steps)
    assert drafted.shape == (steps, 320)
    again = recipe(home, tmp_path / "again", options, **more)
    warm = f"train.warm_start={tmp_path / 'out' / 'checkpoint'}"
    assert main(["run", str(again), "--set", warm, "--explain"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"num_steps": 0}, {}, "num_steps"),
        ({}, {"vocabulary": {"draft_size": 128}}, "propose every token of the verifier's vocabulary, not 128"),
        ({}, {"verifier": "headless"}, "no family of multi-token-prediction heads is known for LlamaForCausalLM"),
        ({}, {"export": {"speculative_tokens": 4}}, "4 is more than the 3 tokens"),
        ({"num_stepps": 2}, {}, "num_stepps"),
        ({}, {"mask": "causal", "train": {"attention": "linear"}}, "the mask Causal has no linear form here"),
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
    more = {key: str(home / value) if key == "verifier" else value for key, value in more.items()}
    assert_refused(recipe(home, tmp_path / "out", options, **more), message, capsys)


def test_steps_that_no_answer_reaches_are_refused_before_states_are_captured(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(home, tmp_path / "out", {"num_steps": 300})  # more than a row's
    for stage in ("prepare", "capture"):
        assert main([stage, str(path)]) == 2
        printed = " ".join(capsys.readouterr().err.split())
        assert "300 steps need 301 tokens" in printed
        assert "choose at most" in printed
    assert not (tmp_path / "out" / "states" / "stage.json").exists()


@pytest.mark.parametrize(("longest", "problems"), [(4, 0), (3, 1), (1, 1)])
def test_the_last_step_needs_one_token_more_than_there_are_steps(home: Path, longest: int, problems: int) -> None:
    data = DataFacts(token_ids=frozenset({1}), longest_row=64, longest_answer=longest)
    assert len(check_data(MtpOptions(num_steps=3), read_verifier(home / "verifier"), data)) == problems
