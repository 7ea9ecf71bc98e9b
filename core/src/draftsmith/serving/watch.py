"""Is the draft still worth it? A server's counters over a window of time, and what to do where it is not.

What a round costs is taken from an evaluation: with acceptance length L and speed-up s there, a round took L / s times
as long as a step without a draft. At that price speculation pays while the acceptance length is above L / s. An
evaluation holds for its own concurrency; of several the one nearest to the present number of requests is taken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import asdict, frozen

from draftsmith.errors import DataError
from draftsmith.evaluation.metrics import (
    acceptance_length,
    acceptance_per_position,
    difference,
    draft_acceptance_rate,
)
from draftsmith.evaluation.results import BASELINE, Evaluation, figures
from draftsmith.serving.counters import Reading

__all__ = ["Alarm", "Expectation", "Sample", "Window", "alarms", "expectation", "nearest"]

#: Rounds that a window must have counted before anything is concluded from them.
ENOUGH = 100
#: Positions that fewer rounds than this share accept are not worth drafting.
RARELY = 0.1
#: How many times the concurrency of an evaluation the load may be for it to tell something.
FAR = 2.0


@frozen(kw_only=True)
class Sample:
    """Figures of one window. What nothing was counted of is None."""

    seconds: float
    rounds: int
    acceptance_length: float | None
    acceptance_per_position: tuple[float | None, ...]
    draft_acceptance_rate: float | None
    drafted_per_second: float
    accepted_per_second: float
    tokens_per_second: float
    time_to_first_token: float | None
    inter_token_latency: float | None
    running: int
    waiting: int

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


@frozen(kw_only=True)
class Expectation:
    """What an evaluation measured.

    Attributes:
        acceptance_length: of the checkpoint.
        break_even: acceptance length at which a round gains what it costs; None where no speed-up was measured.
        concurrency: requests at once; None where their number was not limited. What a round costs is then of no one
            load, and what is accepted is of any.
    """

    acceptance_length: float
    break_even: float | None
    concurrency: int | None


@frozen(kw_only=True)
class Alarm:
    """Something to act on: its *kind* (``acceptance`` or ``load``), what is wrong, and what to do."""

    kind: str
    what: str
    hint: str


class Window:
    """The readings of the last *seconds*. A restart of the server empties it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._readings: deque[Reading] = deque()

    def add(self, reading: Reading) -> bool:
        """Take in a reading; False where the server was started anew since the last one."""
        continued = True
        if self._readings:
            last = self._readings[-1]
            try:
                difference(last.counters, reading.counters)
                continued = reading.generated >= last.generated  # all that falls where little or nothing is drafted
            except ValueError:
                continued = False
        if not continued:
            self._readings.clear()
        self._readings.append(reading)
        while len(self._readings) > 2 and reading.time - self._readings[1].time >= self._seconds:
            self._readings.popleft()
        return continued

    def sample(self) -> Sample | None:
        """What happened between the oldest and the newest reading; None before there are two."""
        if len(self._readings) < 2:
            return None
        old, new = self._readings[0], self._readings[-1]
        seconds = max(new.time - old.time, 1e-9)
        found = difference(old.counters, new.counters)
        return Sample(
            seconds=new.time - old.time,
            rounds=found.drafts,
            acceptance_length=acceptance_length(found),
            acceptance_per_position=acceptance_per_position(found),
            draft_acceptance_rate=draft_acceptance_rate(found),
            drafted_per_second=found.drafted / seconds,
            accepted_per_second=found.accepted / seconds,
            tokens_per_second=(new.generated - old.generated) / seconds,
            time_to_first_token=_mean(
                new.first_token_seconds - old.first_token_seconds, new.first_tokens - old.first_tokens
            ),
            inter_token_latency=_mean(new.gap_seconds - old.gap_seconds, new.gaps - old.gaps),
            running=new.running,
            waiting=new.waiting,
        )


def _mean(total: float, count: float) -> float | None:
    return total / count if count > 0 else None


def expectation(evaluation: Evaluation, method: str | None = None) -> Expectation | None:
    """What the evaluation says of its checkpoint (or of another *method*); None where it measured no acceptance.

    Raises:
        DataError: its concurrency is neither a number nor None.
    """
    chosen = evaluation.method(method or str(evaluation.settings.get("checkpoint")))
    if chosen is None:
        return None
    found = figures(chosen, evaluation.method(BASELINE))
    length, cost = found["acceptance_length"], found["round_cost"]
    if length is None:
        return None
    concurrency = evaluation.settings.get("concurrency", 1)
    if concurrency is not None and (isinstance(concurrency, bool) or not isinstance(concurrency, int)):
        raise DataError(
            f"its settings have the concurrency {concurrency!r}, which is no number of requests at once",
            hint="evaluate again",
        )
    return Expectation(
        acceptance_length=length,
        break_even=None if cost is None or concurrency is None else cost.median,
        concurrency=concurrency,
    )


def nearest(expectations: Sequence[Expectation], running: int) -> Expectation | None:
    """The expectation whose concurrency is nearest to the present load, by ratio; one of no limit where there is no
    other."""
    load = max(running, 1)

    def distance(each: Expectation) -> float:
        if each.concurrency is None:
            return math.inf
        return max(each.concurrency / load, load / max(each.concurrency, 1))

    return min(expectations, key=distance, default=None)


def alarms(sample: Sample, expectations: Sequence[Expectation], below: float) -> Iterator[Alarm]:
    """What a window's figures call for.

    Args:
        below: share by which the acceptance length may fall below what was evaluated.
    """
    expected = nearest(expectations, sample.running)
    length = sample.acceptance_length
    if length is None or sample.rounds < ENOUGH or expected is None:
        return
    if length < (1 - below) * expected.acceptance_length:
        yield Alarm(
            kind="acceptance",
            what=f"acceptance length {length:.2f}, {expected.acceptance_length:.2f} when it was evaluated",
            hint=_fewer_tokens(sample)
            + "are these other prompts than it was trained on? Evaluate with them, and train on such answers",
        )
    covered = expected.concurrency is not None and sample.running <= FAR * expected.concurrency
    if expected.break_even is not None and covered and length < expected.break_even:
        yield Alarm(
            kind="load",
            what=f"with {sample.running} requests at once a round costs {expected.break_even:.2f} steps without a "
            f"draft, and yields {length:.2f} tokens",
            hint=_fewer_tokens(sample)
            + f"draft less at this load (draftsmith serve --plan, or --disable-by-batch-size {max(sample.running, 1)}"
            ", of fewer requests where it pays), or serve without the draft",
        )


def _fewer_tokens(sample: Sample) -> str:
    """Advice to draft only as many tokens as are accepted now and then; empty where all of them are."""
    shares = sample.acceptance_per_position
    worthwhile = sum(share is not None and share >= RARELY for share in shares)
    if worthwhile == len(shares) or not worthwhile:
        return ""
    return (
        f"lower the tokens a round to {worthwhile} (--speculative-tokens {worthwhile}): those after are accepted in "
        f"less than {RARELY:.0%} of the rounds; "
    )
