"""Options of the tiny algorithm and of the tiny transport."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, optional


@frozen(kw_only=True)
class TinyOptions:
    steps: int = field(default=3, validator=ge(1), metadata={"help": "tokens drafted from one start"})
    width: int = field(default=48, validator=ge(1), metadata={"help": "hidden width of the mixer"})
    dropout: float = field(default=0.1, validator=ge(0), metadata={"help": "of the mixer's output"})
    starts: float = field(default=0.8, metadata={"help": "share of the possible starts drawn for every row"})
    sliding_window: int | None = field(default=None, validator=optional(ge(1)), metadata={"help": "sliding window"})


@frozen(kw_only=True)
class FilesOptions:
    """The transport has none."""
