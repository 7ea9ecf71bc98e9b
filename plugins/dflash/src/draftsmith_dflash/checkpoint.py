"""The exported format: speculators' ``dflash`` config.json and tensors, as vLLM 0.32 loads them."""

from __future__ import annotations

from draftsmith.interfaces import CheckpointFormat

__all__ = ["DFlashCheckpoint"]


class DFlashCheckpoint(CheckpointFormat):
    """Reads, writes and checks DFlash drafts. What all speculators formats share is linted by the core."""
