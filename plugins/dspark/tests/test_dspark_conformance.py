"""DSpark under the conformance kit: replay, packing and checkpoints for every layout, Markov head and attention, and
all of the kit for every family of verifiers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.testing.algorithm import (
    AlgorithmCase,
    AlgorithmTests,
    CheckpointTests,
    FinishTests,
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

LAYOUTS = ("anchor_first", "bonus_anchor")
#: With a head of rank 0 the confidence reads the hidden state alone.
HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {"markov_head": "vanilla", "markov_rank": 16},
    "gated": {"markov_head": "gated", "markov_rank": 7, "confidence_with_markov": False},
    "rnn": {"markov_head": "rnn", "markov_rank": 16},
    "none": {"markov_rank": 0, "confidence_with_markov": False},
}
ATTENTION: dict[str, dict[str, Any]] = {
    "full": {},
    "window_3": {"sliding_window": 3},
    "window_3_causal": {"sliding_window": 3, "sliding_window_non_causal": False},
    "window_2048": {"sliding_window": 2048},
    "mixed": {"sliding_window": 3, "full_attention_indices": (1,)},
    "mixed_causal": {"sliding_window": 4, "full_attention_indices": (0,), "sliding_window_non_causal": False},
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


def _variants() -> list[Any]:
    combinations = itertools.product(LAYOUTS, HEADS, ATTENTION)
    return [
        pytest.param(
            {
                "layout": layout,
                **HEADS[head],
                **ATTENTION[attention],
                "num_layers": 2,
                "block_size": 3 + number % 4,
                "confidence": bool(number % 3),
                "hidden_size": 48 if number % 5 == 4 else None,
            },
            64 if number % 2 else None,
            id=f"{layout}-{head}-{attention}",
        )
        for number, (layout, head, attention) in enumerate(combinations)
    ]


@pytest.mark.parametrize(("options", "draft_size"), _variants())
def test_every_layout_head_and_attention(
    material: Callable[[str], Material], options: dict[str, Any], draft_size: int | None, tmp_path: Path
) -> None:
    """48 drafts, of several block sizes and widths, with full and reduced vocabularies, with and without the
    confidence head. What is trained is what is served; the rest of the kit is put to fewer drafts, below."""
    case = tiny_case(material("qwen3"), "dspark", options=options, draft_size=draft_size)
    replay, packing, checkpoints = ReplayTests(), PackingTests(), CheckpointTests()
    replay.test_replay_matches_training(case)
    replay.test_the_draft_feeds_back_its_own_tokens(case)
    packing.test_packing_changes_nothing(case)
    checkpoints.test_saved_and_loaded_it_drafts_the_same(case, tmp_path, include_embedding=False)
    checkpoints.test_the_checkpoint_holds_what_it_must_and_nothing_else(case)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_of_2048_where_it_hides_something(
    material: Callable[[str], Material], layout: str, causal: bool
) -> None:
    """The kit's documents are shorter. Anchors stand on both sides of the row that first has something hidden."""
    long = long_material(material("qwen3"), 2070, 40)

    def made(window: int) -> tuple[AlgorithmCase, torch.Tensor]:
        attention = {"sliding_window": window, "sliding_window_non_causal": not causal}
        options = {"layout": layout, "num_layers": 2, "markov_rank": 8, **attention}
        case = tiny_case(long, "dspark", options=options)
        batch = case.algorithm.make_batch(case.row, torch.Generator().manual_seed(0))
        return case, slot_logits(case.algorithm.forward(ReplayTests().draft(case), batch)).detach()

    case, logits = made(2048)
    ReplayTests().test_replay_matches_training(case)
    assert (logits - made(2047)[1]).abs().amax() > 10 * ReplayTests.tolerance


@pytest.mark.parametrize("attention", sorted(ATTENTION))
@pytest.mark.parametrize("layout", LAYOUTS)
class TestAttention(LeakTests, ValueTests):
    """Exact zero gradients where nothing may be seen, and all forms of attention, by layout and layers."""

    later_slots_see_the_start = False

    @pytest.fixture
    def case(self, material: Callable[[str], Material], layout: str, attention: str) -> AlgorithmCase:
        options = {"layout": layout, "num_layers": 2, "markov_rank": 8, **ATTENTION[attention]}
        return tiny_case(material("llama"), "dspark", options=options, draft_size=64)


#: From its last row a block of eight just sees the newest verified token.
SLIDING = {"sliding_window": 9}
#: Each family with other options, so that every part of the kit meets them. gemma3 and nested are bonus_anchor: they
#: tie head and embedding, and so repeat their input, which the first row of a fresh anchor_first block reads too.
BY_FAMILY: dict[str, tuple[dict[str, Any], int | None]] = {
    "llama": ({"num_layers": 1, "markov_rank": 8, "hidden_size": 96}, None),
    "llama_tied": ({"layout": "bonus_anchor", "num_layers": 2, "markov_rank": 8, "layer_ids": (0, 7)}, 64),
    "llama3_rope": ({"num_layers": 1, **HEADS["rnn"], "block_size": 5}, 64),
    "qwen3": (
        {"layout": "bonus_anchor", "num_layers": 2, **HEADS["gated"], **SLIDING, "full_attention_indices": (1,)},
        64,
    ),
    "qwen3_yarn": ({"num_layers": 2, **HEADS["vanilla"], **SLIDING, "position_weights": "d_pace"}, None),
    "qwen3_moe": ({"num_layers": 1, **HEADS["none"], "block_size": 2}, None),
    "gemma3": (
        {
            "layout": "bonus_anchor",
            "num_layers": 3,
            **HEADS["vanilla"],
            **SLIDING,
            "sliding_window_non_causal": False,
            "confidence": False,
        },
        64,
    ),
    "gemma3_softcap": ({"num_layers": 1, **HEADS["vanilla"], "hidden_size": 32}, None),
    "granite": ({"num_layers": 1, **HEADS["rnn"], "layer_ids": (3,)}, 64),
    "nested": ({"layout": "bonus_anchor", "num_layers": 2, **HEADS["gated"], "max_anchors": 9}, 200),
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
class TestEveryFamily(ReplayTests, LeakTests, PackingTests, ValueTests, FinishTests, CheckpointTests):
    """All but the training, with every family of tiny verifiers."""

    @pytest.fixture
    def case(self, material: Callable[[str], Material], family: str) -> AlgorithmCase:
        options, draft_size = BY_FAMILY[family]
        return tiny_case(material(family), "dspark", options=options, draft_size=draft_size)


class TestWhole(AlgorithmTests):
    """The whole kit as a third party uses it: one case, all tests."""

    @pytest.fixture
    def case(self, material: Callable[[str], Material]) -> AlgorithmCase:
        return tiny_case(material("qwen3"), "dspark", options={"num_layers": 2, "markov_rank": 16}, draft_size=64)


@pytest.mark.parametrize("family", ["granite", "llama", "nested", "qwen3_moe"])
class TestLearning(LearningTests):
    """Training, with other layouts, heads and options than :class:`TestWhole`."""

    @pytest.fixture
    def case(self, material: Callable[[str], Material], family: str) -> AlgorithmCase:
        options, draft_size = BY_FAMILY[family]
        return tiny_case(material(family), "dspark", options=options, draft_size=draft_size)
