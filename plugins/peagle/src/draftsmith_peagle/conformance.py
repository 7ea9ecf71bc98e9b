"""The case that `draftsmith plugins check peagle` makes: the kit's documents are short, for so many depths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from draftsmith.testing.check import AlgorithmCheck

__all__ = ["PeagleCheck"]


class PeagleCheck(AlgorithmCheck):
    """Four depths, two layers."""

    options: ClassVar[Mapping[str, Any]] = {"num_depths": 4, "num_layers": 2}
