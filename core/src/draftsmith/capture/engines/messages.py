"""What the processes of a capture say to each other. Torch-free."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Sequence
from typing import Any

__all__ = ["REQUEST_KEY", "capture_parameters", "is_sample_id", "report_line", "token_digest"]

#: Key of ``kv_transfer_params`` of a request that is to be captured, and of the server's reply to it.
REQUEST_KEY = "draftsmith"
_SAMPLE_ID = re.compile(r"[0-9a-f]{32}")
#: Bytes up to which a write to a pipe is one piece (POSIX asks for 512 at least, Linux has 4096).
_LINE = 4096


def token_digest(token_ids: Sequence[int]) -> str:
    """16 hex digits over the token ids."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).hexdigest()


def is_sample_id(value: Any) -> bool:
    """Whether *value* is 32 hex digits: ids become names of files and keys, and may come from a network."""
    return isinstance(value, str) and _SAMPLE_ID.fullmatch(value) is not None


def capture_parameters(sample_id: str, digest: str) -> dict[str, Any]:
    """``kv_transfer_params`` of a request that is to be captured."""
    return {REQUEST_KEY: {"sample_id": sample_id, "digest": digest}}


def report_line(*, why: str, **report: Any) -> bytes:
    """A report as a line of JSON, short enough to be written in one piece. *why* is cut where it is longer."""
    while True:
        line = json.dumps({**report, "why": why}).encode() + b"\n"
        if len(line) <= _LINE:
            return line
        why = why[: len(why) // 2]
