"""What the processes of a capture say to each other. Torch-free."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

__all__ = ["token_digest"]


def token_digest(token_ids: Sequence[int]) -> str:
    """16 hex digits over the token ids."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).hexdigest()
