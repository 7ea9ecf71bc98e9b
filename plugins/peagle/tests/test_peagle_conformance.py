"""P-EAGLE under the conformance kit: layers, flags, windows, depths, vocabularies, and all families of verifiers."""

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

#: The kit's answers are so short that some depths of the default are hardly ever drawn.
FEW: dict[str, Any] = {"num_depths": 4, "num_layers": 1}


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Material]:
    """Verifiers by family, each made once."""
    made: dict[str, Material] = {}

    def get(family: str) -> Material:
        if family not in made:
            made[family] = make_material(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


def _flags() -> list[Any]:
    both = (False, True)
    combinations = itertools.product(("llama", "qwen3"), both, both, (None, 3), both)
    return [
        pytest.param(
            {
                "layer_type": layer_type,
                "norm_before_fc": before_fc,
                "norm_before_residual": residual,
                "sliding_window": window,
                "num_layers": 1 + number % 3,
                "num_depths": 2 + number % 4,
                "down_sample_ratio": (0.7, 1.0)[number % 2],
                "train_mask_embedding": bool(number % 5),
            },
            64 if reduced else None,
            id=f"{layer_type}-fc_{before_fc:d}-residual_{residual:d}-window_{window}-reduced_{reduced:d}",
        )
        for number, (layer_type, before_fc, residual, window, reduced) in enumerate(combinations)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "draft_size"), _flags())
def test_what_is_trained_is_what_is_served(
    material: Callable[[str], Material], options: dict[str, Any], draft_size: int | None, tmp_path: Path
) -> None:
    """32 drafts: every flag, one to three layers, two to five depths, W = 3 and no window, sampled and all elements;
    replay at every anchor and depth, packing, and the way through a checkpoint."""
    case = tiny_case(material("qwen3"), "peagle", options=options, draft_size=draft_size)
    replay, packing, checkpoints = ReplayTests(), PackingTests(), CheckpointTests()
    replay.test_replay_matches_training(case)
    replay.test_starts_side_by_side_draft_what_each_drafts_alone(case, "data")
    packing.test_packing_changes_nothing(case)
    checkpoints.test_saved_and_loaded_it_drafts_the_same(case, tmp_path, include_embedding=False)
    checkpoints.test_the_checkpoint_holds_what_it_must_and_nothing_else(case)


@pytest.mark.parametrize("window", [1, 2, 3])
class TestNarrowWindows(LeakTests, ValueTests):
    """Exact zero gradients where a window hides what the round began with, and all forms of attention."""

    later_slots_see_the_start = False

    @pytest.fixture
    def case(self, material: Callable[[str], Material], window: int) -> AlgorithmCase:
        options = {**FEW, "num_layers": 2, "sliding_window": window}
        return tiny_case(material("llama"), "peagle", options=options, draft_size=64)


#: Each family with other options, so that every part of the kit meets every one of them.
BY_FAMILY: dict[str, tuple[dict[str, Any], int | None]] = {
    "llama": (FEW, None),
    "llama_tied": ({**FEW, "num_depths": 1, "layer_ids": (0, 7)}, 64),
    "llama3_rope": ({**FEW, "norm_before_residual": True, "norm_before_fc": False}, 64),
    "qwen3": ({**FEW, "layer_type": "qwen3", "sliding_window": 6}, 64),
    "qwen3_yarn": ({**FEW, "layer_type": "qwen3", "num_layers": 2}, None),
    "qwen3_moe": ({**FEW, "num_depths": 5, "layer_ids": (1, 2, 4, 6, 7), "down_sample_ratio": 1.0}, None),
    "gemma3": ({**FEW, "sliding_window": 8, "num_layers": 3}, 64),
    "gemma3_softcap": ({**FEW, "layer_type": "qwen3", "norm_before_residual": True, "max_anchors": 9}, None),
    "granite": ({**FEW, "layer_ids": (3,), "train_mask_embedding": False}, 64),
    "nested": ({**FEW, "mask_token_id": 7, "num_depths": 3}, 200),
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
class TestEveryFamily(ReplayTests, LeakTests, PackingTests, ValueTests, CheckpointTests):
    """All but the training, with every family of tiny verifiers."""

    @pytest.fixture
    def case(self, material: Callable[[str], Material], family: str) -> AlgorithmCase:
        options, draft_size = BY_FAMILY[family]
        return tiny_case(material(family), "peagle", options=options, draft_size=draft_size)


class TestWhole(AlgorithmTests):
    """The whole kit as a third party uses it: one case, all tests."""

    @pytest.fixture
    def case(self, material: Callable[[str], Material]) -> AlgorithmCase:
        return tiny_case(material("qwen3"), "peagle", options={**FEW, "num_layers": 2}, draft_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_softcap", "granite"])
class TestLearning(LearningTests):
    """Training, with other norms, heads and options than :class:`TestWhole`.

    Mask rows are all alike until attention tells them apart, and at the kit's usual rate it saturates before it does.
    """

    overfit_steps = 900
    overfit_learning_rate = 1e-3

    @pytest.fixture
    def case(self, material: Callable[[str], Material], family: str) -> AlgorithmCase:
        options, draft_size = BY_FAMILY[family]
        return tiny_case(material(family), "peagle", options=options, draft_size=draft_size)
