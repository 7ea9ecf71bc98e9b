"""What draftsmith's conformance kit must know of Medusa heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from draftsmith.testing.check import AlgorithmCheck


class MedusaCheck(AlgorithmCheck):
    """The heads read the verifier's state alone, and begin as its own output layer.

    A single block of the tiny verifier's width is too small to learn the kit's documents by heart.
    """

    options: ClassVar[Mapping[str, Any]] = {"num_layers": 2}
    reads_the_bonus_token = False
    begins_as_a_guess = False
