"""EAGLE-3 under the conformance kit: replay, packing and checkpoints for every combination of flags, and all of the
kit for every family of verifiers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.testing.algorithm import (
    AlgorithmCase,
    AlgorithmTests,
    CheckpointTests,
    LeakTests,
    LearningTests,
    Material,
    PackingTests,
    ReplayTests,
    ValueTests,
    make_material,
    tiny_case,
)
from draftsmith.testing.verifiers import FAMILIES

NORMS: dict[str, dict[str, Any]] = {
    "plain": {"norm_before_fc": False, "fc_norm": False},
    "before_fc": {"norm_before_fc": True, "fc_norm": False},
    "per_tap": {"norm_before_fc": False, "fc_norm": True},
}


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Material]:
    """Verifiers by family, each made once."""
    made: dict[str, Material] = {}

    def get(family: str) -> Material:
        if family not in made:
            made[family] = make_material(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


def _flags(*windows: int | None) -> list[Any]:
    both = (False, True)
    combinations = itertools.product(("llama", "qwen3"), NORMS, both, both, windows, both)
    return [
        pytest.param(
            {
                "layer_type": layer_type,
                **NORMS[name],
                "norm_before_residual": residual,
                "norm_output": output,
                "sliding_window": window,
                "num_layers": 1 if residual == output else 2,
            },
            64 if reduced else None,
            id=f"{layer_type}-{name}-residual_{residual:d}-output_{output:d}-window_{window}-reduced_{reduced:d}",
        )
        for layer_type, name, residual, output, window, reduced in combinations
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "draft_size"), _flags(None, 3))
def test_every_combination_of_flags(
    material: Callable[[str], Material], options: dict[str, Any], draft_size: int | None
) -> None:
    """96 drafts: every flag, one and two layers, full and reduced vocabulary, W = 3 and no window. What is trained is
    what is served, and packing changes nothing; the rest of the kit is put to fewer drafts, below."""
    case = tiny_case(material("qwen3"), "eagle3", options=options, draft_size=draft_size)
    replay, packing = ReplayTests(), PackingTests()
    replay.test_replay_matches_training(case)
    replay.test_the_draft_feeds_back_its_own_tokens(case)
    packing.test_packing_changes_nothing(case)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "draft_size"), _flags(3))
def test_a_checkpoint_of_every_combination_of_flags(
    material: Callable[[str], Material], options: dict[str, Any], draft_size: int | None, tmp_path: Path
) -> None:
    """48 drafts: a window is a number in the config, and is left to :class:`TestEveryFamily`."""
    case = tiny_case(material("qwen3"), "eagle3", options=options, draft_size=draft_size)
    checkpoints = CheckpointTests()
    checkpoints.test_saved_and_loaded_it_drafts_the_same(case, tmp_path, include_embedding=False)
    checkpoints.test_the_checkpoint_holds_what_it_must_and_nothing_else(case)


#: Each family with other options, so that every part of the kit meets every flag.
BY_FAMILY: dict[str, tuple[dict[str, Any], int | None]] = {
    "llama": ({}, None),
    "llama_tied": ({"ttt_steps": 1, "layer_ids": (0, 7)}, 64),
    "llama3_rope": ({"norm_before_residual": False, "norm_output": False, "norm_before_fc": False}, 64),
    "qwen3": ({"layer_type": "qwen3", "sliding_window": 3}, 64),
    "qwen3_yarn": ({"layer_type": "qwen3", **NORMS["per_tap"], "num_layers": 2}, None),
    "qwen3_moe": ({"ttt_steps": 5, "layer_ids": (1, 2, 4, 6, 7), "step_decay": 1.0}, None),
    "gemma3": ({"norm_output": False, "sliding_window": 5, "num_layers": 3, "ttt_steps": 7}, 64),
    "gemma3_softcap": ({"layer_type": "qwen3", "norm_before_residual": False}, None),
    "granite": ({"layer_ids": (3,), "sliding_window": 2}, 64),
    "nested": (NORMS["per_tap"], 200),
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
class TestEveryFamily(ReplayTests, LeakTests, PackingTests, ValueTests, CheckpointTests):
    """All but the training, with every family of tiny verifiers."""

    @pytest.fixture
    def case(self, material: Callable[[str], Material], family: str) -> AlgorithmCase:
        options, draft_size = BY_FAMILY[family]
        return tiny_case(material(family), "eagle3", options=options, draft_size=draft_size)


class TestWhole(AlgorithmTests):
    """The whole kit as a third party uses it: one case, all tests."""

    @pytest.fixture
    def case(self, material: Callable[[str], Material]) -> AlgorithmCase:
        return tiny_case(material("qwen3"), "eagle3", options={"layer_type": "qwen3"}, draft_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_softcap", "nested"])
class TestLearning(LearningTests):
    """Training, with other norms, heads and options than :class:`TestWhole`."""

    @pytest.fixture
    def case(self, material: Callable[[str], Material], family: str) -> AlgorithmCase:
        options, draft_size = BY_FAMILY[family]
        return tiny_case(material(family), "eagle3", options=options, draft_size=draft_size)
