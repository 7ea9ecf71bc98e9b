"""Options of the transport. Torch-free."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, in_, instance_of, optional

__all__ = ["FileOptions"]


@frozen(kw_only=True)
class FileOptions:
    """How samples are kept in the folder."""

    folder: str | None = field(
        default=None,
        validator=optional(instance_of(str)),
        metadata={"help": "keep the states here instead of in the run's output; one folder belongs to one run"},
    )
    encoding: Literal["plain", "fp8"] = field(
        default="plain",
        validator=in_(("plain", "fp8")),
        metadata={"help": "fp8: states in eight bits, scaled by token and layer: half the bytes, and not exact"},
    )
    shard_mebibytes: int = field(default=512, validator=ge(1), metadata={"help": "size of a shard, about"})
    loose_samples: int = field(
        default=2048,
        validator=ge(1),
        metadata={"help": "a writer compacts its loose files into shards when it has so many"},
    )
    fsync: bool = field(
        default=True, metadata={"help": "wait for the disk before a sample becomes visible (survives a power cut)"}
    )
