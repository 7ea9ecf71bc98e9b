"""Options of the built-in losses. Torch-free."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import and_, gt, lt

from draftsmith.errors import did_you_mean

__all__ = ["HybridOptions", "LogAcceptanceOptions", "SumOptions"]


#: The losses that ``sum`` can add up: those that depend on the draft's probabilities alone.
SUMMABLE = ("ce", "jsd", "kl_div", "lk_hybrid", "nla", "rkl", "tv")


def _are_terms(_: object, __: object, value: dict[str, float]) -> None:
    if not value:
        raise ValueError("terms must name at least one loss, for example {ce: 0.1, tv: 0.9}")
    for name in value:
        if name not in SUMMABLE:
            raise ValueError(f"terms: no loss {name!r}; {did_you_mean(name, SUMMABLE) or ', '.join(SUMMABLE)}")


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
class SumOptions:
    """Options of ``sum``."""

    terms: dict[str, float] = field(
        validator=_are_terms,
        factory=lambda: {"kl_div": 1.0},
        metadata={"help": "weight of each loss by name, such as {ce: 0.1, tv: 0.9}"},
    )
