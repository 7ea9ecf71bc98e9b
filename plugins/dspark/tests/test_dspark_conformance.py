"""DSpark under the conformance kit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftsmith.testing.algorithm import (
    AlgorithmCase,
    AlgorithmTests,
    Material,
    make_material,
    tiny_case,
)


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Material]:
    """Verifiers by family, each made once."""
    made: dict[str, Material] = {}

    def get(family: str) -> Material:
        if family not in made:
            made[family] = make_material(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


class TestWhole(AlgorithmTests):
    """The whole kit as a third party uses it: one case, all tests."""

    @pytest.fixture
    def case(self, material: Callable[[str], Material]) -> AlgorithmCase:
        return tiny_case(material("qwen3"), "dspark", options={"num_layers": 2, "markov_rank": 16}, draft_size=64)
