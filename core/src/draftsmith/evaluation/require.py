"""``--require "acceptance_length>=2.1"``: demands on an evaluation, for somebody's continuous integration."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from draftsmith.errors import UserError, did_you_mean
from draftsmith.evaluation.metrics import Spread
from draftsmith.evaluation.results import BASELINE, Evaluation, Method, figures

__all__ = ["FIGURES", "Requirement", "check_methods", "failures", "parse_requirement"]

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
#: Figures that can be demanded; those with a spread are held to their median.
FIGURES = (
    "acceptance_length",
    "draft_acceptance_rate",
    "acceptance_per_position",
    "conditional_acceptance",
    "rounds",
    "drafted",
    "accepted",
    "tokens_per_second",
    "tokens_per_second_per_request",
    "time_to_first_token",
    "inter_token_latency",
    "speed_up",
    "drafting_share",
    "verifying_share",
    "round_cost",
    "identical",
    "lossless",
)
_BY_POSITION = ("acceptance_per_position", "conditional_acceptance")
_FORM = re.compile(
    r"\s*(?:(?P<method>[^<>]+?)\s*:\s*)?(?P<figure>[A-Za-z_]+)\s*(?:\[(?P<position>\d+)\])?"
    r"\s*(?P<operator>>=|<=|==|>|<)\s*(?P<value>\S+)\s*"
)
_HINT = "such as acceptance_length>=2.1, acceptance_per_position[1]>=0.6 or METHOD:speed_up>1"


@frozen(kw_only=True)
class Requirement:
    """One demand.

    Attributes:
        text: as it was given.
        method: name of the method that it is made on; None: the checkpoint itself.
        figure: one of :data:`FIGURES`.
        position: 1 … K, for figures by position; None else.
    """

    text: str
    method: str | None
    figure: str
    position: int | None
    operator: str
    value: float

    def failure(self, evaluation: Evaluation, checkpoint: str) -> str | None:
        """Why the evaluation does not meet it, or None. A figure that was not measured does not."""
        name = self.method or checkpoint
        method = evaluation.method(name)
        if method is None:
            return f"{self.text}: no method {name!r} was evaluated"
        found = self._measured(method, evaluation)
        if found is None:
            why = f" ({method.reason})" if method.reason else ""
            return f"{self.text}: {self.figure} of {name} was not measured{why}"
        if _OPERATORS[self.operator](found, self.value):
            return None
        return f"{self.text}: it is {found:.6g}"

    def _measured(self, method: Method, evaluation: Evaluation) -> float | None:
        value = figures(method, evaluation.method(BASELINE)).get(self.figure)
        if isinstance(value, list):
            place = (self.position or 0) - 1
            value = value[place] if place < len(value) else None
        if isinstance(value, Spread):
            value = value.median
        return None if value is None else float(value)


def parse_requirement(text: str) -> Requirement:
    """A demand as it stands on the command line: ``[METHOD:]FIGURE[POSITION] OPERATOR NUMBER``.

    Raises:
        UserError: it reads otherwise, or names no figure.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise UserError(f"cannot be read: {text!r}", where="--require", hint=_HINT)
    figure, position = match["figure"], match["position"]
    if figure not in FIGURES:
        near = did_you_mean(figure, FIGURES) or f"known figures: {', '.join(FIGURES)}"
        raise UserError(f"there is no figure {figure!r}", where=f"--require {text!r}", hint=near)
    if (figure in _BY_POSITION) != (position is not None) or position == "0":
        wanted = f"{figure}[1]" if figure in _BY_POSITION else figure
        raise UserError(f"write {wanted}: positions count from 1", where=f"--require {text!r}", hint=_HINT)
    return Requirement(
        text=text.strip(),
        method=match["method"],
        figure=figure,
        position=None if position is None else int(position),
        operator=match["operator"],
        value=_number(match["value"], text),
    )


def _number(value: str, text: str) -> float:
    truth = {"true": 1.0, "false": 0.0}
    try:
        number = truth[value.lower()] if value.lower() in truth else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{value!r} is not a number", where=f"--require {text!r}", hint=_HINT)
    return number


def check_methods(requirements: Sequence[Requirement], names: Sequence[str]) -> None:
    """Make sure that demands are made on methods of the evaluation, before anything is measured.

    Args:
        names: of its methods.

    Raises:
        UserError: there is none of that name.
    """
    for each in requirements:
        if each.method is not None and each.method not in names:
            near = did_you_mean(each.method, names) or f"its methods: {', '.join(names)}"
            raise UserError(f"no method {each.method!r} is evaluated", where=f"--require {each.text!r}", hint=near)


def failures(requirements: Sequence[Requirement], evaluation: Evaluation, checkpoint: str) -> list[str]:
    """Every demand that is not met, and why."""
    found = (each.failure(evaluation, checkpoint) for each in requirements)
    return [why for why in found if why is not None]
