"""The conformance kit for what is installed, by name, as ``draftsmith plugins check`` runs it.

Each kind has a class here that builds its case from the name alone. Where that is not enough, such as for an algorithm
that needs a verifier of its own, the item names a class in its own package (``api.Item.conformance``) that derives
from one of these, or from the kit's:

class MyIdeaCheck(AlgorithmCheck):
    options = {"depth": 2}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from draftsmith import api
from draftsmith.interfaces import HiddenStateTransport, MaskRule, PositionLoss
from draftsmith.plugins import PluginRegistry, load_plugins, load_reference
from draftsmith.plugins.manager import FACETS
from draftsmith.testing.algorithm import AlgorithmCase, AlgorithmTests, Material, make_material, tiny_case
from draftsmith.testing.losses import LossTests
from draftsmith.testing.masks import MaskTests
from draftsmith.testing.plugin import PluginTests
from draftsmith.testing.transport import TransportTests

__all__ = [
    "AlgorithmCheck",
    "LossCheck",
    "MaskCheck",
    "TransportCheck",
    "check_class",
]


class AlgorithmCheck(AlgorithmTests):
    """An algorithm with its default options.

    Attributes:
        item: its name.
        family: of the tiny verifier, as ``make_material`` takes it.
        options: changes to its default options.
        draft_size: tokens that the draft can propose; None: all. An algorithm that proposes every token gets all.
    """

    item: ClassVar[str] = ""
    family: ClassVar[str | Callable[..., Any]] = "qwen3"
    options: ClassVar[Mapping[str, Any]] = {}
    draft_size: ClassVar[int | None] = 64

    @staticmethod
    def finish(folder: Path) -> None:
        """What else the verifier's folder needs, such as tensors that only vLLM knows."""

    @pytest.fixture
    def material(self, tmp_path_factory: pytest.TempPathFactory) -> Material:
        """Made once for all tests of the class: pytest no longer wants methods as fixtures of that scope."""
        made: dict[str, Material] = vars(type(self)).get("_made", {})
        if not made:
            made["material"] = make_material(tmp_path_factory.mktemp("verifier"), self.family, finish=self.finish)
            type(self)._made = made  # type: ignore[attr-defined]
        return made["material"]

    @pytest.fixture
    def case(self, material: Material) -> AlgorithmCase:
        whole = load_plugins(raise_conflicts=False).algorithms.get(self.item).full_vocabulary
        return tiny_case(material, self.item, options=self.options, draft_size=None if whole else self.draft_size)


class LossCheck(LossTests):
    """A loss with its default options."""

    item: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def loss(self) -> PositionLoss:
        from draftsmith.train.setup import build_loss

        return build_loss(load_plugins(raise_conflicts=False).losses, self.item, self.options)


class MaskCheck(MaskTests):
    """A mask rule."""

    item: ClassVar[str] = ""

    @pytest.fixture
    def rule(self) -> Callable[[int | None], MaskRule]:
        registered = load_plugins(raise_conflicts=False).masks.get(self.item)
        rule: Callable[[int | None], MaskRule] = load_reference(registered.implementation, expected=MaskRule)
        return rule


class TransportCheck(TransportTests):
    """A transport on this machine, with its default options."""

    item: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def transport(self, tmp_path: Path) -> HiddenStateTransport:
        registered = load_plugins(raise_conflicts=False).transports.get(self.item)
        implementation = load_reference(registered.implementation, expected=HiddenStateTransport)
        transport: HiddenStateTransport = implementation(registered.options(**self.options), tmp_path / "run")
        return transport


_CLASSES: Mapping[str, type] = {
    "algorithm": AlgorithmCheck,
    "loss": LossCheck,
    "mask": MaskCheck,
    "transport": TransportCheck,
}


def check_class(kind: str, name: str, registry: PluginRegistry) -> type:
    """The tests of one installed item, or (*kind* ``plugin``) of a plugin's package.

    Raises:
        UnknownNameError, PluginError: it is not there, or the class that it names is not.
    """
    if kind == "plugin":
        return type("TestPackage", (PluginTests,), {"plugin": name})
    facet = next(each for each in FACETS if each.kind == kind)
    item: api.Item = registry.catalog(facet).get(name)
    base = _CLASSES[kind] if item.conformance is None else load_reference(item.conformance, expected=object)
    return type("TestItem", (base,), {"item": name})
