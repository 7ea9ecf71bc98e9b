"""DFlash under the conformance kit: windows, causality, widths, block sizes and vocabularies, and all families of
verifiers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
    long_material,
    make_material,
    slot_logits,
    tiny_case,
)
from draftsmith.testing.verifiers import FAMILIES


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Material]:
    """Verifiers by family, each made once."""
    made: dict[str, Material] = {}

    def get(family: str) -> Material:
        if family not in made:
            made[family] = make_material(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


#: Who sees whom: name → options. Those that vLLM serves as trained, and no others (options.check).
ATTENTION: dict[str, dict[str, Any]] = {
    "full": {},
    "window_3": {"sliding_window": 3},
    "window_2048": {"sliding_window": 2048},
    "window_3_causal": {"sliding_window": 3, "sliding_window_non_causal": False},
    "window_2048_causal": {"sliding_window": 2048, "sliding_window_non_causal": False},
    "mixed": {"sliding_window": 3, "full_attention_indices": (1,)},
    "mixed_2048": {"sliding_window": 2048, "full_attention_indices": (0, 2)},
}
SIZES: dict[str, dict[str, Any]] = {
    "default": {},
    "one_anchor": {"max_anchors": 1, "block_size": 9},
    "pairs": {"block_size": 2},
    "narrow": {"hidden_size": 32, "block_size": 5},
    "wide": {"hidden_size": 96, "intermediate_size": 64, "layer_ids": (0, 3)},
}


def _variants() -> list[Any]:
    return [
        pytest.param({"num_layers": 3, **attention, **size}, draft_size, id=f"{kind}-{name}-{draft_size}")
        for kind, attention in ATTENTION.items()
        for name, size in SIZES.items()
        for draft_size in (None, 64)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "draft_size"), _variants())
def test_what_is_trained_is_what_is_served(
    material: Callable[[str], Material], options: dict[str, Any], draft_size: int | None, tmp_path: Path
) -> None:
    """70 drafts: replay at every anchor and slot, packing, and the way through a checkpoint."""
    case = tiny_case(material("qwen3"), "dflash", options=options, draft_size=draft_size)
    ReplayTests().test_replay_matches_training(case)
    PackingTests().test_only_what_the_verifier_wrote_is_supervised(case)
    if options.get("max_anchors") != 1:  # with one anchor a document, hardly any is drawn twice
        PackingTests().test_packing_changes_nothing(case)
    checkpoints = CheckpointTests()
    checkpoints.test_saved_and_loaded_it_drafts_the_same(case, tmp_path, include_embedding=False)
    checkpoints.test_the_checkpoint_holds_what_it_must_and_nothing_else(case)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_of_2048_where_it_hides_something(material: Callable[[str], Material], causal: bool) -> None:
    """The kit's documents are shorter. Anchors stand on both sides of the row that first has something hidden."""
    long = long_material(material("qwen3"), 2070, 40)

    def made(window: int) -> tuple[AlgorithmCase, torch.Tensor]:
        options = {"num_layers": 2, "sliding_window": window, "sliding_window_non_causal": not causal}
        case = tiny_case(long, "dflash", options=options)
        batch = case.algorithm.make_batch(case.row, torch.Generator().manual_seed(0))
        return case, slot_logits(case.algorithm.forward(ReplayTests().draft(case), batch)).detach()

    case, logits = made(2048)
    ReplayTests().test_replay_matches_training(case)
    assert (logits - made(2047)[1]).abs().amax() > 10 * ReplayTests.tolerance


@pytest.mark.parametrize("kind", sorted(ATTENTION))
class TestAttention(LeakTests, ValueTests):
    """Exact zero gradients where nothing may be seen, and all forms of attention, for every kind of layer."""

    later_slots_see_the_start = False

    @pytest.fixture
    def case(self, material: Callable[[str], Material], kind: str) -> AlgorithmCase:
        return tiny_case(material("llama"), "dflash", options={"num_layers": 3, **ATTENTION[kind]}, draft_size=64)


#: Each family with other options, so that every part of the kit meets them.
BY_FAMILY: dict[str, tuple[dict[str, Any], int | None]] = {
    "llama": ({"num_layers": 2}, None),
    "llama_tied": ({"num_layers": 1, "layer_ids": (0, 7)}, 64),
    "llama3_rope": ({"num_layers": 2, "position_weights": "d_pace"}, 64),
    "qwen3": ({"num_layers": 2, "sliding_window": 9, "sliding_window_non_causal": False}, 64),
    "qwen3_yarn": ({"num_layers": 2, "hidden_size": 48, "position_weights": "uniform"}, None),
    "qwen3_moe": ({"num_layers": 2, "block_size": 6, "gamma": 2.0}, None),
    "gemma3": ({"num_layers": 5}, 64),
    "gemma3_softcap": ({"num_layers": 2, "sliding_window": 9, "full_attention_indices": (0,)}, None),
    "granite": ({"num_layers": 2, "block_size": 3}, 64),
    "nested": ({"num_layers": 2, "layer_overrides": {"num_attention_heads": 4}}, 200),
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
class TestEveryFamily(ReplayTests, LeakTests, PackingTests, ValueTests, CheckpointTests):
    """All but the training, with every family of tiny verifiers."""

    @pytest.fixture
    def case(self, material: Callable[[str], Material], family: str) -> AlgorithmCase:
        options, draft_size = BY_FAMILY[family]
        return tiny_case(material(family), "dflash", options=options, draft_size=draft_size)


class TestWhole(AlgorithmTests):
    """The whole kit as a third party uses it: one case, all tests."""

    @pytest.fixture
    def case(self, material: Callable[[str], Material]) -> AlgorithmCase:
        return tiny_case(material("qwen3"), "dflash", draft_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3_rope", "qwen3_yarn", "gemma3_softcap"])
class TestLearning(LearningTests):
    """Training with other weights, layers, widths and heads than :class:`TestWhole`."""

    @pytest.fixture
    def case(self, material: Callable[[str], Material], family: str) -> AlgorithmCase:
        options, draft_size = BY_FAMILY[family]
        return tiny_case(material(family), "dflash", options=options, draft_size=draft_size)
