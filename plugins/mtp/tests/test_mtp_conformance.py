"""MTP under the conformance kit: all of it for MiMo's layout, and replay under other options."""

from __future__ import annotations

from typing import Any

import pytest
from make_mimo import add_head

from draftsmith.testing.algorithm import AlgorithmCase, AlgorithmTests, Material, ReplayTests, make_material, tiny_case


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("mimo"), "llama", finish=add_head)


class TestMimo(AlgorithmTests):
    """The whole kit."""

    @pytest.fixture
    def case(self, material: Material) -> AlgorithmCase:
        return tiny_case(material, "mtp")


@pytest.mark.parametrize("options", [{"num_steps": 1}, {"num_steps": 5, "step_decay": 1.0}])
class TestOptions(ReplayTests):
    """What is trained is what is served."""

    @pytest.fixture
    def case(self, material: Material, options: dict[str, Any]) -> AlgorithmCase:
        return tiny_case(material, "mtp", options=options)
