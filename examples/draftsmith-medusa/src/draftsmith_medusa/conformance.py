"""What draftsmith's conformance kit must know of Medusa heads."""

from __future__ import annotations

from draftsmith.testing.check import AlgorithmCheck


class MedusaCheck(AlgorithmCheck):
    """The heads read the verifier's state alone, and begin as its own output layer."""

    reads_the_bonus_token = False
    begins_as_a_guess = False
