"""The case that `draftsmith plugins check mtp` makes."""

from __future__ import annotations

from pathlib import Path

from draftsmith.testing.check import AlgorithmCheck
from draftsmith_mtp.random_head import add_head

__all__ = ["MtpCheck"]


class MtpCheck(AlgorithmCheck):
    """The head of a tiny model of MiMo's layout."""

    family = "llama"

    @staticmethod
    def finish(folder: Path) -> None:
        add_head(folder)
