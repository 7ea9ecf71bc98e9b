"""What draftsmith's conformance kit must know of the cell."""

from __future__ import annotations

from draftsmith.testing.check import AlgorithmCheck


class ToyCheck(AlgorithmCheck):
    """It begins with the verifier's hidden state, and a fresh cell keeps half of that."""

    begins_as_a_guess = False
