"""Conformance tests of a plugin as a package: what it imports, declares and explains.

from draftsmith.testing.plugin import PluginTests

class TestPackage(PluginTests):
    plugin = "my_idea"
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from draftsmith import api
from draftsmith.interfaces import (
    CheckpointFormat,
    DraftAlgorithm,
    DraftArchitecture,
    HiddenStateTransport,
    MaskRule,
    PositionLoss,
)
from draftsmith.plugins import LoadedPlugin, PluginRegistry, load_plugins, load_reference
from draftsmith.plugins.manager import FACETS
from draftsmith.testing.public import private_imports

__all__ = ["PluginTests"]

#: What an implementation must derive from; observers and commands are any class, and any function.
_BASES: dict[str, type] = {
    "algorithm": DraftAlgorithm,
    "draft architecture": DraftArchitecture,
    "loss": PositionLoss,
    "mask": MaskRule,
    "checkpoint schema": CheckpointFormat,
    "transport": HiddenStateTransport,
}
_HEAVY = ("torch", "transformers", "datasets", "numpy", "vllm")


class PluginTests:
    """What every package of a plugin must satisfy.

    Attributes:
        plugin: the name of its entry point. It must be installed.
    """

    plugin: ClassVar[str] = ""

    @pytest.fixture
    def registry(self) -> PluginRegistry:
        return load_plugins(raise_conflicts=False)

    @pytest.fixture
    def loaded(self, registry: PluginRegistry) -> LoadedPlugin:
        registry.require(self.plugin)
        return next(each for each in registry.plugins if each.name == self.plugin)

    def items(self, registry: PluginRegistry, loaded: LoadedPlugin) -> list[tuple[str, api.Item]]:
        """(kind, item) of all that it registers."""
        return [(facet.kind, item) for facet in FACETS for item in registry.catalog(facet).of(loaded.provider)]

    def test_its_module_imports_nothing_heavy(self, loaded: LoadedPlugin) -> None:
        """Every command imports it: torch would make each of them wait."""
        name = getattr(loaded.module, "__name__", type(loaded.module).__module__)
        code = f"import sys, {name}; print([each for each in {_HEAVY!r} if each in sys.modules])"
        path = [str(Path(entry or ".").resolve()) for entry in sys.path]
        command = [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "[]", f"importing {name} imports {done.stdout.strip()}"

    def test_it_imports_nothing_private(self, loaded: LoadedPlugin) -> None:
        """Only what docs/plugins/public-api.md lists stays as it is."""
        home = Path(str(loaded.module.__file__))
        package = home.parent if "." in loaded.module.__name__ or home.name == "__init__.py" else home
        assert private_imports(package) == []

    def test_it_says_which_draftsmith_it_needs(self, loaded: LoadedPlugin) -> None:
        """Its metadata ask for draftsmith, in a version that is not older than some other."""
        needed = importlib.metadata.distribution(loaded.provider.distribution).requires or []
        asked = [each for each in needed if re.match(rf"{api.PROJECT_NAME}\b(?!-)", each)]
        assert asked, f"{loaded.provider.distribution} does not depend on {api.PROJECT_NAME}"
        assert any(re.search(r"[>=~]=", each) for each in asked), f"{asked[0]!r} takes any version, however old"

    def test_every_implementation_is_what_it_should_be(self, registry: PluginRegistry, loaded: LoadedPlugin) -> None:
        """Each reference leads to something, and it derives from its interface."""
        for kind, item in self.items(registry, loaded):
            reference: Any = getattr(item, "implementation", None)
            load_reference(reference, expected=_BASES.get(kind), provider=loaded.provider)

    def test_everything_is_explained(self, registry: PluginRegistry, loaded: LoadedPlugin) -> None:
        """Summaries are one line without a full stop, and each option has a text for `draftsmith plugins show`."""
        for kind, item in self.items(registry, loaded):
            assert item.summary.strip(), f"the {kind} {item.name!r} has no summary"
            assert "\n" not in item.summary, f"the summary of the {kind} {item.name!r} has several lines"
            assert not item.summary.endswith("."), f"the summary of the {kind} {item.name!r} ends with a full stop"
            options = getattr(item, "options", None)
            silent = [each.name for each in attrs.fields(options) if not each.metadata.get("help")] if options else []
            assert not silent, f"options of the {kind} {item.name!r} without metadata help: {silent}"
