"""A whole run on a tiny verifier: a DFlash draft, a DSpark draft begun from it, calibrated and exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import REDUCED, STAGES, write_chats, write_recipe

from draftsmith.checkpoint.exported import load_draft, read_config
from draftsmith.checkpoint.lint import lint_checkpoint
from draftsmith.checkpoint.training import load_final_weights, load_training_weights
from draftsmith.config.load import load_recipe
from draftsmith.config.resolve import ResolvedRun, resolve
from draftsmith.errors import ConfigError
from draftsmith.pipeline import run_all
from draftsmith.plugins import load_plugins
from draftsmith.stages import StageRecord
from draftsmith.testing.verifiers import make_tiny_verifier

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ResolvedRun]:
    """``recipe(algorithm, output, **train)``: a run on one tiny verifier and its conversations."""
    folder = tmp_path_factory.mktemp("run")
    make_tiny_verifier(folder / "verifier", "qwen3")
    write_chats(folder, words=(12, 40))

    def make(name: str, output: str, options: dict[str, Any] | None = None, **train: Any) -> ResolvedRun:
        rates = {"epochs": 2, "tokens_per_row": 256, "learning_rate": 2e-3, "compute_dtype": "float32", **train}
        chosen = {"num_layers": 1, "block_size": 4, **(options or {})}
        path = write_recipe(folder, folder / output, name, chosen, observers=[], train=rates, **REDUCED)
        return resolve(load_recipe(path), load_plugins())

    return make


@pytest.fixture(scope="module")
def flash(recipe: Callable[..., ResolvedRun]) -> tuple[ResolvedRun, dict[str, StageRecord]]:
    run = recipe("dflash", "flash", epochs=6)
    return run, run_all(run, None, stages=STAGES)


@pytest.fixture(scope="module")
def spark(
    recipe: Callable[..., ResolvedRun], flash: tuple[ResolvedRun, Any]
) -> tuple[ResolvedRun, dict[str, StageRecord]]:
    options = {"layout": "bonus_anchor", "markov_rank": 8}
    run = recipe("dspark", "spark", options, warm_start=str(flash[0].folders.checkpoint))
    return run, run_all(run, None, stages=STAGES)


def log_of(run: ResolvedRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folders.training / "metrics.jsonl").read_text().splitlines()]


def test_it_goes_on_where_dflash_left_off(flash: tuple[ResolvedRun, Any], spark: tuple[ResolvedRun, Any]) -> None:
    """The first step's acceptance is that of the last of DFlash's, not of chance."""
    chance = log_of(flash[0])[0]["alpha_0"]
    last = flash[1]["train"].summary["best"]["alpha_0"]
    first = log_of(spark[0])[0]["alpha_0"]
    assert last > 1.3 * chance
    assert first > chance + 0.6 * (last - chance)


def test_the_confidence_is_trained_and_calibrated(spark: tuple[ResolvedRun, dict[str, StageRecord]]) -> None:
    run, records = spark
    log = log_of(run)
    losses = [line["confidence_loss"] for line in log if line["phase"] == "train"]
    assert sum(losses[-3:]) < sum(losses[:3])
    figures = records["train"].summary["finish"]
    assert log[-1]["phase"] == "finish"
    assert figures["confidence_ece_held_out"] == 1
    assert 0 < figures["confidence_ece_before"] < 0.2
    assert 0 < figures["confidence_ece_after"] < 0.2  # of few rows, on which the fit had no eye
    assert figures["confidence_chains"] > 10
    best, _ = load_training_weights(run.folders.training)
    final, _ = load_final_weights(run.folders.training)
    for name in ("confidence_head.proj.weight", "confidence_head.proj.bias"):
        torch.testing.assert_close(final[name], best[name] / figures["confidence_temperature"])


def test_the_export_carries_it_all(spark: tuple[ResolvedRun, dict[str, StageRecord]]) -> None:
    run, records = spark
    folder = run.folders.checkpoint
    assert not [each for each in lint_checkpoint(folder, run.registry) if each.severity == "error"]
    config, figures = read_config(folder), records["train"].summary["finish"]
    assert config["sample_from_anchor"] is False
    assert config["draftsmith"]["finish"] == figures
    assert [name for name in figures if name.startswith("confidence_temperature_")] == [
        f"confidence_temperature_{slot}" for slot in range(3)
    ]
    card = (folder / "README.md").read_text()
    assert f"finish confidence_ece_before: {figures['confidence_ece_before']:.4g}" in card
    algorithm, model, _ = load_draft(folder, run.registry)
    final, _ = load_final_weights(run.folders.training)
    head = model.state_dict()["confidence_head.proj.weight"]
    assert torch.equal(head, final["confidence_head.proj.weight"].bfloat16().float())
    assert algorithm.setup.options.layout == "bonus_anchor"


def test_a_start_across_layouts_is_refused_before_anything_begins(
    recipe: Callable[..., ResolvedRun], flash: tuple[ResolvedRun, Any]
) -> None:
    with pytest.raises(ConfigError, match="laid out bonus_anchor, this run's anchor_first") as caught:
        recipe("dspark", "crossed", {"markov_rank": 8}, warm_start=str(flash[0].folders.checkpoint))
    assert "train.warm_start" in str(caught.value.problems[0].where)


@pytest.mark.parametrize(("layout", "tokens"), [("anchor_first", 4), ("bonus_anchor", 3)])
def test_more_tokens_than_a_block_gives_are_refused(
    recipe: Callable[..., ResolvedRun], layout: str, tokens: int
) -> None:
    run = recipe("dspark", "many", {"layout": layout})
    assert run.speculative_tokens == tokens
    path = run.base / "many.yaml"
    with pytest.raises(ConfigError, match=f"{tokens + 1} is more than the {tokens} tokens") as caught:
        resolve(load_recipe(path, [f"export.speculative_tokens={tokens + 1}"]), load_plugins())
    assert f"at most {tokens}" in str(caught.value.problems[0].hint)


def test_a_gated_head_is_exported_and_said_to_be_unservable(recipe: Callable[..., ResolvedRun]) -> None:
    run = recipe("dspark", "gated", {"markov_head": "gated", "markov_rank": 8}, epochs=1)
    run_all(run, None, stages=STAGES)
    reason = "vLLM loads the vanilla Markov head alone; this one is of the kind gated"
    assert [
        each.what for each in lint_checkpoint(run.folders.checkpoint, run.registry) if each.severity == "error"
    ] == [reason]
    card = (Path(run.folders.checkpoint) / "README.md").read_text()
    assert f"{reason}." in card
    assert "vllm serve" not in card
