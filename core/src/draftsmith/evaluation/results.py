"""What an evaluation leaves: counts and times as they were measured, and how they are written and read.

``evaluation.json`` holds what was measured and, under ``figures``, what it comes to. Reading takes the former alone,
so that a figure can never contradict the counts beside it. The layout has a version of its own, :data:`VERSION`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cattrs
from attrs import asdict, field, frozen

from draftsmith.errors import DataError
from draftsmith.evaluation.metrics import (
    Losslessness,
    RequestTimes,
    Spread,
    acceptance_length,
    acceptance_per_position,
    conditional_acceptance,
    draft_acceptance_rate,
    median_over_requests,
    speed_up,
    spread,
    tokens_per_second,
)
from draftsmith.serving.vllm_process import DraftCounters
from draftsmith.stages import write_json_atomically, write_text_atomically

__all__ = [
    "BASELINE",
    "CSV_COLUMNS",
    "FILE",
    "SCHEMA",
    "TABLE",
    "VERSION",
    "Evaluation",
    "Method",
    "PromptRecord",
    "Repetition",
    "RequestRecord",
    "RoundRecord",
    "as_csv",
    "as_json",
    "counters_of",
    "figures",
    "read_evaluation",
    "speed_up_over_baseline",
    "write_evaluation",
]

SCHEMA = "draftsmith.evaluation"
#: Raised whenever a reader of the layout before would read it wrongly.
VERSION = 1
FILE = "evaluation.json"
TABLE = "evaluation.csv"
#: Name of the method without speculation, which the others are compared with.
BASELINE = "none"
MEASURED, SIMULATED, INCOMPLETE, UNAVAILABLE = "measured", "simulated", "incomplete", "unavailable"


@frozen(kw_only=True)
class PromptRecord:
    """One prompt of the evaluation.

    Attributes:
        set: name of the prompt set.
        category: within the set; the set's own name where it has none.
        tokens: of the prompt, template and earlier turns included.
        turn: which of the user's turns it is, counted from 1.
    """

    set: str
    category: str
    tokens: int
    turn: int = 1

    @property
    def label(self) -> str:
        """Its category, and its turn where that is not the first."""
        return self.category if self.turn == 1 else f"{self.category}, turn {self.turn}"


@frozen(kw_only=True)
class RoundRecord:
    """One round: *drafted* tokens proposed, the first *accepted* of them taken.

    Attributes:
        draft: the proposed tokens, where they are known (the simulator knows them, an engine does not tell).
    """

    drafted: int
    accepted: int
    draft: tuple[int, ...] = ()


@frozen(kw_only=True)
class RequestRecord:
    """One prompt's answer.

    Attributes:
        prompt: index into :attr:`Evaluation.prompts`.
        output: token ids of the answer, in the first repetition; empty in the others.
        times: None where nothing was timed.
        rounds: in order, where they are known.
    """

    prompt: int
    times: RequestTimes
    output: tuple[int, ...] = ()
    rounds: tuple[RoundRecord, ...] = ()


@frozen(kw_only=True)
class Repetition:
    """All prompts answered once.

    Attributes:
        counters: of the engine, over all requests; None where nothing is drafted.
        seconds: wall clock from the first request to the last answer; None where it was not timed.
        load_seconds: until the engine was ready; None for a server.
        draft_seconds: of *seconds*, in the draft; None for a server, and where nothing is drafted.
        verify_seconds: of *seconds*, in the verifier's steps; None for a server.
        complete: False where a server went away meanwhile: the answers that were complete, and no counters.
    """

    counters: DraftCounters | None
    requests: tuple[RequestRecord, ...]
    seconds: float | None = None
    load_seconds: float | None = None
    complete: bool = True
    draft_seconds: float | None = None
    verify_seconds: float | None = None

    @property
    def tokens(self) -> int:
        return sum(request.times.tokens for request in self.requests)


@frozen(kw_only=True)
class Method:
    """One way to answer the prompts.

    Attributes:
        name: as it was asked for, such as ``none`` or the folder of a draft; unique in an evaluation.
        status: ``measured``, ``simulated``, ``incomplete`` (repetitions are missing; all of them, where its engine
            was killed in the first) or ``unavailable`` (it cannot be measured here).
        reason: why a method is incomplete or unavailable.
        num_speculative_tokens: K; 0 for none.
        speculative_config: as the engine was given it.
        losslessness: of greedy answers; None where they were not compared.
    """

    name: str
    status: str
    num_speculative_tokens: int = 0
    speculative_config: Mapping[str, Any] = field(factory=dict)
    reason: str | None = None
    repetitions: tuple[Repetition, ...] = ()
    losslessness: Losslessness | None = None


@frozen(kw_only=True)
class Evaluation:
    """Everything of one evaluation.

    Attributes:
        complete: all methods that can be measured here were, as often as asked.
        settings: what was asked for: prompts, sampling, repetitions, engine arguments.
        provenance: where and with what it was measured (:mod:`draftsmith.evaluation.provenance`).
        texts: token id → its text, for the ids that occur in outputs and drafts.
    """

    complete: bool
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    prompts: tuple[PromptRecord, ...]
    methods: tuple[Method, ...]
    texts: Mapping[int, str] = field(factory=dict, repr=False)

    def method(self, name: str) -> Method | None:
        """The method of that name."""
        return next((each for each in self.methods if each.name == name), None)

    @property
    def categories(self) -> tuple[str, ...]:
        """In the order in which they first occur."""
        return tuple(dict.fromkeys(prompt.category for prompt in self.prompts))

    def of_category(self, category: str | None) -> frozenset[int]:
        """Indices of a category's prompts; of all for None."""
        return frozenset(
            index for index, prompt in enumerate(self.prompts) if category is None or prompt.category == category
        )


# --- figures ----------------------------------------------------------------------------------------------------


def counters_of(method: Method, prompts: frozenset[int] | None = None) -> DraftCounters | None:
    """Counters over all repetitions, of some prompts (whose rounds must be known) or of all; None: nothing drafted."""
    if prompts is None:
        known = [each.counters for each in method.repetitions if each.counters is not None]
        return sum(known, DraftCounters.none(0)) if known else None
    rounds = [
        (each.drafted, each.accepted)
        for repetition in method.repetitions
        for request in repetition.requests
        if request.prompt in prompts
        for each in request.rounds
    ]
    return DraftCounters.of_rounds(rounds, method.num_speculative_tokens) if rounds else None


def _over_repetitions(method: Method, figure: Callable[[Repetition], float | None]) -> Spread | None:
    return spread(figure(repetition) for repetition in method.repetitions)


def _over_requests(figure: Callable[[RequestTimes], float | None], prompts: frozenset[int] | None) -> Any:
    def of_repetition(repetition: Repetition) -> float | None:
        return median_over_requests(
            figure(request.times) for request in repetition.requests if prompts is None or request.prompt in prompts
        )

    return of_repetition


def _acceptance_length(repetition: Repetition) -> float | None:
    return acceptance_length(repetition.counters) if repetition.counters else None


def _rate(repetition: Repetition) -> float | None:
    if repetition.seconds is None or not repetition.complete:
        return None
    return tokens_per_second(repetition.tokens, repetition.seconds)


def _share(part: Callable[[Repetition], float | None]) -> Callable[[Repetition], float | None]:
    """Of the wall clock of a repetition."""

    def of_repetition(repetition: Repetition) -> float | None:
        seconds = part(repetition)
        return seconds / repetition.seconds if seconds is not None and repetition.seconds else None

    return of_repetition


def _round_cost(method: Method, baseline: Method | None) -> Spread | None:
    """Steps of the verifier alone that a round takes the time of, repetition by repetition."""
    if baseline is None:
        return None
    return spread(
        length * plain / rate
        for length, rate, plain in zip(
            map(_acceptance_length, method.repetitions),
            map(_rate, method.repetitions),
            map(_rate, baseline.repetitions),
            strict=False,
        )
        if length is not None and rate and plain is not None
    )


def speed_up_over_baseline(method: Method, baseline: Method | None) -> Spread | None:
    """Tokens/s in all over the baseline's, repetition by repetition."""
    if baseline is None:
        return None
    return speed_up([_rate(each) for each in method.repetitions], [_rate(each) for each in baseline.repetitions])


def figures(method: Method, baseline: Method | None, prompts: frozenset[int] | None = None) -> dict[str, Any]:
    """What was counted and timed comes to, of all prompts or of some; None for what was not measured.

    The names are those that ``--require`` takes. Of some prompts there is no throughput: all were answered together.
    """
    counters = counters_of(method, prompts)
    found: dict[str, Any] = {
        "rounds": counters.drafts if counters else None,
        "drafted": counters.drafted if counters else None,
        "accepted": counters.accepted if counters else None,
        "acceptance_length": acceptance_length(counters) if counters else None,
        "draft_acceptance_rate": draft_acceptance_rate(counters) if counters else None,
        "acceptance_per_position": list(acceptance_per_position(counters)) if counters else None,
        "conditional_acceptance": list(conditional_acceptance(counters)) if counters else None,
        "tokens_per_second_per_request": _over_repetitions(
            method, _over_requests(lambda times: times.tokens_per_second, prompts)
        ),
        "time_to_first_token": _over_repetitions(method, _over_requests(lambda times: times.first_token, prompts)),
        "inter_token_latency": _over_repetitions(
            method, _over_requests(lambda times: times.inter_token_latency, prompts)
        ),
    }
    if prompts is None:
        found["acceptance_length_spread"] = _over_repetitions(method, _acceptance_length)
        found["tokens_per_second"] = _over_repetitions(method, _rate)
        found["speed_up"] = speed_up_over_baseline(method, baseline)
        found["drafting_share"] = _over_repetitions(method, _share(lambda each: each.draft_seconds))
        found["verifying_share"] = _over_repetitions(method, _share(lambda each: each.verify_seconds))
        found["round_cost"] = _round_cost(method, baseline)
        if method.losslessness is not None:
            found["identical"] = method.losslessness.identical
            found["lossless"] = method.losslessness.lossless
    return found


# --- JSON -------------------------------------------------------------------------------------------------------


def _plain_figures(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: asdict(value) if isinstance(value, Spread) else value for key, value in values.items()}


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """The content of ``evaluation.json``: what was measured, and the figures of each method."""
    value: dict[str, Any] = {"schema": SCHEMA, "version": VERSION, **cattrs.unstructure(evaluation)}
    baseline = evaluation.method(BASELINE)
    for plain, method in zip(value["methods"], evaluation.methods, strict=True):
        plain["figures"] = _plain_figures(figures(method, baseline))
        plain["figures_by_category"] = {
            category: _plain_figures(figures(method, baseline, evaluation.of_category(category)))
            for category in evaluation.categories
        }
    return value


def read_evaluation(path: Path) -> Evaluation:
    """From ``evaluation.json`` or the folder that holds it.

    Raises:
        DataError: it is missing, not an evaluation, or of a later version.
    """
    file = path / FILE if path.is_dir() else path
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError("there is no evaluation", where=str(file), hint="name a folder with evaluation.json") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", where=str(file), hint="evaluate again") from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise DataError("is not an evaluation", where=str(file), hint=f"its key schema would be {SCHEMA!r}")
    if value.get("version") != VERSION:
        raise DataError(
            f"its layout has version {value.get('version')!r}, this draftsmith reads {VERSION}",
            where=str(file),
            hint="evaluate again, or read it with the draftsmith that wrote it",
        )
    try:
        evaluation = cattrs.structure(value, Evaluation)
    except Exception as error:  # cattrs raises groups of whatever the constructors raise
        raise DataError(f"is not complete: {error}", where=str(file), hint="evaluate again") from error
    wrong = _contradiction(evaluation)
    if wrong is not None:
        raise DataError(f"contradicts itself: {wrong}", where=str(file), hint="evaluate again")
    return evaluation


def _contradiction(evaluation: Evaluation) -> str | None:
    """What no evaluation that was measured says, such as an answer to a prompt that there is not; None: nothing."""
    for method in evaluation.methods:
        for request in (each for repetition in method.repetitions for each in repetition.requests):
            if not 0 <= request.prompt < len(evaluation.prompts):
                return f"{method.name} answers prompt {request.prompt}, and there are {len(evaluation.prompts)}"
            if not all(0 <= each.accepted <= method.num_speculative_tokens for each in request.rounds):
                return f"a round of {method.name} accepts more than its {method.num_speculative_tokens} tokens"
    return None


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """``evaluation.json`` and ``evaluation.csv``, each whole or not at all."""
    write_json_atomically(folder / FILE, as_json(evaluation))
    write_text_atomically(folder / TABLE, as_csv(evaluation))


# --- CSV --------------------------------------------------------------------------------------------------------

#: Figures of a method over repetitions, which the table tells with their spread.
_SPREADS = ("tokens_per_second", "speed_up", "tokens_per_second_per_request", "time_to_first_token",
            "inter_token_latency", "drafting_share", "verifying_share", "round_cost")  # fmt: skip
_COUNTS = ("rounds", "drafted", "accepted", "acceptance_length", "draft_acceptance_rate")
CSV_COLUMNS = (
    "method",
    "status",
    "reason",
    "category",
    "prompts",
    "num_speculative_tokens",
    "repetitions",
    *_COUNTS,
    "acceptance_per_position",
    "conditional_acceptance",
    *(f"{name}{end}" for name in _SPREADS for end in ("", "_low", "_high")),
    "identical",
    "lossless",
)
ALL = "all"


def as_csv(evaluation: Evaluation) -> str:
    """One line for each method over all prompts, and one for each of its categories where there are several.

    Shares by position stand in one cell, separated by blanks; what was not measured is empty. Text that a spreadsheet
    would take for a formula has an apostrophe before it.
    """
    text = io.StringIO()
    # Lines end as RFC 4180 has them: with a line feed alone, csv leaves a carriage return in a name unquoted.
    writer = csv.DictWriter(text, CSV_COLUMNS, restval="", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(_csv_rows(evaluation))
    return text.getvalue()


def _csv_rows(evaluation: Evaluation) -> Iterable[dict[str, Any]]:
    baseline = evaluation.method(BASELINE)
    categories: Sequence[str | None] = [None]
    if len(evaluation.categories) > 1:
        categories = [None, *evaluation.categories]
    for method in evaluation.methods:
        for category in categories if method.repetitions else [None]:
            prompts = None if category is None else evaluation.of_category(category)
            yield {
                "method": _text_cell(method.name),
                "status": method.status,
                "reason": _text_cell(method.reason or ""),
                "category": ALL if category is None else _text_cell(category),
                "prompts": len(evaluation.prompts if prompts is None else prompts),
                "num_speculative_tokens": method.num_speculative_tokens,
                "repetitions": len(method.repetitions),
                **_csv_cells(figures(method, baseline, prompts)),
            }


def _text_cell(text: str) -> str:
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _csv_cells(values: Mapping[str, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Spread):
            cells |= {name: value.median, f"{name}_low": value.low, f"{name}_high": value.high}
        elif isinstance(value, list):
            cells[name] = " ".join("" if each is None else repr(each) for each in value)
        elif value is not None:
            cells[name] = value
    return {name: value for name, value in cells.items() if name in CSV_COLUMNS}
