"""Facets are interchangeable: every registered loss and mask with every registered algorithm, in a real step.

tests/test_example_plugins.py runs this file where the example plugins are installed as well.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
import yaml

from draftsmith.cli import main
from draftsmith.config.schema import TrainConfig
from draftsmith.errors import ConfigError
from draftsmith.interfaces import AlgorithmSetup, DraftAlgorithm, MaskRule
from draftsmith.plugins import load_plugins, load_reference
from draftsmith.testing.algorithm import AlgorithmCase, make_material, tiny_case
from draftsmith.testing.check import check_class
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.train.optimizers import build_optimizers
from draftsmith.train.scoring import Teacher
from draftsmith.train.setup import build_draft, build_loss
from draftsmith.train.step import Objective, StepResult, train_step

pytestmark = pytest.mark.slow

REGISTRY = load_plugins()


@pytest.fixture(scope="module", params=REGISTRY.algorithms.names())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AlgorithmCase:
    """An algorithm on the tiny verifier that its own conformance tests take."""
    checks = check_class("algorithm", request.param, REGISTRY)
    material = make_material(tmp_path_factory.mktemp("verifier"), checks.family, finish=checks.finish)
    whole = REGISTRY.algorithms.get(request.param).full_vocabulary
    return tiny_case(material, request.param, options=checks.options, draft_size=None if whole else checks.draft_size)


def step(case: AlgorithmCase, loss: str, options: dict[str, object]) -> tuple[StepResult, list[str]]:
    """One step of *case* with that loss, and the names of the trained tensors that it changed."""
    setup = case.algorithm.setup
    model = build_draft(case.algorithm, torch.device("cpu"), seed=0)
    objective = Objective(
        algorithm=case.algorithm,
        model=model,
        teacher=Teacher(setup.weights, setup.vocabulary, device="cpu", compute_dtype=torch.float32),
        loss=build_loss(REGISTRY.losses, loss, options),
        reduction=case.registered.reduction,
        out_of_vocabulary="renormalise",
        compute_dtype=torch.float32,
    )
    before = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
    optimizers = build_optimizers(model, TrainConfig(), {setup.vocabulary.draft_size, setup.vocabulary.target_size})
    optimizers.set_rate(1.0)
    generators = [torch.Generator().manual_seed(0)]
    result = train_step(objective, optimizers, [case.row], generators, clip_norm=1.0)
    changed = [name for name, each in model.named_parameters() if name in before and not each.equal(before[name])]
    return result, changed


@pytest.mark.parametrize("loss", REGISTRY.losses.names())
def test_any_loss_trains_any_algorithm(case: AlgorithmCase, loss: str) -> None:
    result, changed = step(case, loss, check_class("loss", loss, REGISTRY).options)
    assert result.updated
    assert 0 < result.gradient_norm < float("inf")
    assert changed


def refusal(kind: type[DraftAlgorithm], setup: AlgorithmSetup, rule: MaskRule) -> ConfigError | None:
    try:
        kind.check_attention(setup.options, rule, "auto")
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("mask", REGISTRY.masks.names())
def test_any_mask_trains_an_algorithm_or_is_refused_in_words(case: AlgorithmCase, mask: str) -> None:
    """As a recipe's would be, before anything is made: by what the algorithm says of masks, not by trying."""
    registered, setup = case.registered, case.algorithm.setup
    implementation = load_reference(REGISTRY.masks.get(mask).implementation, expected=MaskRule)
    rule = implementation(window=registered.window(setup.options))
    kind = type(case.algorithm)
    refused = refusal(kind, setup, rule)
    if refused is not None:
        assert mask != registered.mask
        assert all(problem.what and problem.hint for problem in refused.problems)
        return
    other = kind(attrs.evolve(setup, mask=rule))
    result, changed = step(attrs.evolve(case, algorithm=other), registered.loss, dict(registered.loss_options))
    assert result.updated
    assert changed


def write_recipe(folder: Path, algorithm: str) -> Path:
    (folder / "chats.jsonl").touch()
    recipe = {
        "verifier": str(make_tiny_verifier(folder / "verifier")),
        "output": str(folder / "run"),
        "algorithm": algorithm,
        "transport": "hs_file",
        "data": {"sources": [str(folder / "chats.jsonl")]},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def test_checking_a_recipe_asks_the_algorithm_about_the_mask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(tmp_path, "dflash")
    assert main(["run", str(path), "--check"]) == 0
    assert "nothing wrong" in capsys.readouterr().out
    assert main(["run", str(path), "--check", "--set", "mask=chained"]) == 2
    refused = capsys.readouterr()
    assert "error: mask: the mask Chained shows blocks the features of their own anchor or later" in refused.err
    assert "nothing wrong" not in refused.out


@pytest.mark.parametrize(
    ("algorithm", "options", "mask", "warned"),
    [
        ("eagle3", [], "chained", False),
        ("eagle3", [], "causal", True),
        ("eagle3", ["ttt_steps=1"], "causal", False),
        ("peagle", [], "causal", True),
        ("dflash", [], "step_by_step", True),
        (
            "dspark",
            ["num_layers=1", "sliding_window=8", "full_attention_indices=[]", "sliding_window_non_causal=false"],
            "anchored_causal",
            False,
        ),
    ],
)
def test_a_mask_that_is_not_served_is_told_before_anything_is_made(
    tmp_path: Path,
    algorithm: str,
    options: list[str],
    mask: str,
    warned: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_recipe(tmp_path, algorithm)
    sets = [f"mask={mask}", *(f"algorithm.options.{each}" for each in options)]
    assert main(["run", str(path), "--check", *(word for each in sets for word in ("--set", each))]) == 0
    printed = capsys.readouterr().out
    assert ("warning: mask: this draft is trained with the mask" in printed) is warned
    assert (f"`{mask}`; vLLM serves drafts of {algorithm} with what `" in printed) is warned
    assert not (tmp_path / "run").exists()
