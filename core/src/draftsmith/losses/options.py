"""Options of the built-in losses. Torch-free."""

from __future__ import annotations

import math
from typing import Any

from attrs import field, frozen
from attrs.validators import and_, gt, lt

from draftsmith.api import LossPart

__all__ = ["HybridOptions", "LogAcceptanceOptions", "SumOptions", "SumTerm"]


@frozen(kw_only=True)
class LogAcceptanceOptions:
    """Options of ``nla``."""

    floor: float = field(
        default=1e-5,
        validator=and_(gt(0), lt(1)),
        metadata={"help": "acceptance below this counts as this, so that the gradient stays bounded"},
    )


@frozen(kw_only=True)
class HybridOptions:
    """Options of ``lk_hybrid``."""

    eta: float = field(
        default=3.0, validator=gt(0), metadata={"help": "how fast the weight moves from KL to TV as acceptance grows"}
    )


@frozen(kw_only=True)
class SumTerm:
    """A term of ``sum`` that has options of its own."""

    weight: float = field(default=1.0, metadata={"help": "its weight in the sum"})
    options: dict[str, Any] = field(factory=dict, metadata={"help": "options of that loss"})


def _are_terms(_: object, __: object, value: dict[str, float | SumTerm]) -> None:
    if not value:
        raise ValueError("terms must name at least one loss, for example {ce: 0.1, tv: 0.9}")
    for name, term in value.items():
        weight = term.weight if isinstance(term, SumTerm) else term
        if not math.isfinite(weight):
            raise ValueError(f"the weight of {name} must be a finite number, got {weight}")


@frozen(kw_only=True)
class SumOptions:
    """Options of ``sum``."""

    terms: dict[str, float | SumTerm] = field(
        validator=_are_terms,
        factory=lambda: {"kl_div": 1.0},
        metadata={
            "help": "weight of each loss by name, such as {ce: 0.1, tv: 0.9}; with its options: "
            "{nla: {weight: 0.9, options: {floor: 1e-4}}}"
        },
    )

    def parts(self) -> list[LossPart]:
        """The losses to add up: any that is registered."""
        return [
            LossPart(name=name, options=term.options if isinstance(term, SumTerm) else {}, where=f"terms.{name}")
            for name, term in self.terms.items()
        ]
