"""The figures of an evaluation, each defined once. Pure: counts and times in, figures out; nothing is rounded.

Notation. The draft is verified in D rounds (*drafts*); in them F tokens were *drafted* and A of them *accepted*, a_k
of these at position k (k = 1 … K), so that A = a_1 + … + a_K, and a_k can only fall with k. All counts are
differences of two readings of the engine's counters, never taken from a log.

    acceptance length            1 + A / D: tokens that a round yields, the verifier's own (bonus) token included
    acceptance at position k     a_k / D: share of the rounds whose first k tokens were all accepted (marginal)
    conditional acceptance       a_k / a_(k-1), a_0 = D: share of the rounds that reached position k and accepted it
    draft acceptance rate        A / F: share of the drafted tokens that were of use

The acceptance length is one more than the sum of the marginal shares, each of which is the product of the conditional
ones up to it. A method that drafts fewer than K tokens in some rounds is judged by all of its rounds: a position that
was not drafted was not accepted. What nothing was counted of is None, never 0.

Times are those of a request: *started* is when the engine began with it (in process) or when it was sent (server).

    time to first token          first token - started
    inter-token latency          (last token - first token) / (tokens - 1); None for answers of one token
    tokens/s of a request        tokens / (last token - started)
    tokens/s in all              tokens of all requests / wall clock of the repetition
    speed-up                     tokens/s in all, over that of the baseline in the same repetition
    drafting share               seconds in which the worker proposed tokens / wall clock of the repetition
    verifying share              seconds of the worker's other work in its steps / wall clock of the repetition
    cost of a round              acceptance length / speed-up: plain steps that a round takes the time of

The worker's steps run the verifier over new prompts and over drafts, and sample. What the two shares leave of 1 is the
engine's: scheduling, text, waiting for the worker.
Over requests the median is told, over repetitions the median with the lowest and the highest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from attrs import frozen

from draftsmith.serving.vllm_process import DraftCounters

__all__ = [
    "Losslessness",
    "RequestTimes",
    "Spread",
    "acceptance_length",
    "acceptance_per_position",
    "agree",
    "conditional_acceptance",
    "difference",
    "draft_acceptance_rate",
    "largest_relative_gap",
    "median_over_requests",
    "speed_up",
    "spread",
    "tokens_per_second",
]


# --- acceptance -------------------------------------------------------------------------------------------------


def acceptance_length(counters: DraftCounters) -> float | None:
    """1 + A / D; None without a round."""
    return counters.acceptance_length if counters.drafts else None


def acceptance_per_position(counters: DraftCounters) -> tuple[float | None, ...]:
    """a_k / D for k = 1 … K; None without a round."""
    return tuple(_ratio(accepted, counters.drafts) for accepted in counters.accepted_per_position)


def conditional_acceptance(counters: DraftCounters) -> tuple[float | None, ...]:
    """a_k / a_(k-1) for k = 1 … K, with a_0 = D; None where no round came as far as position k."""
    reached = (counters.drafts, *counters.accepted_per_position)
    return tuple(_ratio(accepted, before) for accepted, before in zip(reached[1:], reached, strict=False))


def draft_acceptance_rate(counters: DraftCounters) -> float | None:
    """A / F; None where nothing was drafted."""
    return _ratio(counters.accepted, counters.drafted)


def difference(before: DraftCounters, after: DraftCounters) -> DraftCounters:
    """What was counted between two readings.

    Raises:
        ValueError: a counter has fallen: the server was started anew in between.
    """
    width = max(len(before.accepted_per_position), len(after.accepted_per_position))
    old, new = (_padded(each.accepted_per_position, width) for each in (before, after))
    found = DraftCounters(
        drafts=after.drafts - before.drafts,
        drafted=after.drafted - before.drafted,
        accepted=after.accepted - before.accepted,
        accepted_per_position=tuple(late - early for late, early in zip(new, old, strict=True)),
    )
    if min(found.drafts, found.drafted, found.accepted, *found.accepted_per_position, 0) < 0:
        raise ValueError("a counter has fallen between the two readings")
    return found


def largest_relative_gap(first: DraftCounters, second: DraftCounters, *, at_least: float = 0.0) -> float:
    """Largest relative difference of the two's marginal acceptance at a position.

    Args:
        at_least: positions that both accept more seldom than this are passed over: their counts are too few.
    """
    gaps = [0.0]
    for ours, theirs in zip(acceptance_per_position(first), acceptance_per_position(second), strict=False):
        if ours is None or theirs is None or max(ours, theirs) <= at_least:
            continue
        gaps.append(abs(ours - theirs) / max(ours, theirs))
    return max(gaps)


def _padded(counts: Sequence[int], width: int) -> tuple[int, ...]:
    return (*counts, *[0] * (width - len(counts)))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# --- times ------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class RequestTimes:
    """When the first and the last of *tokens* came, in seconds since the request *started*; None: not known."""

    tokens: int
    first_token: float | None = None
    last_token: float | None = None

    @property
    def inter_token_latency(self) -> float | None:
        if self.first_token is None or self.last_token is None or self.tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.tokens - 1)

    @property
    def tokens_per_second(self) -> float | None:
        return _ratio(self.tokens, self.last_token) if self.last_token is not None else None


def median_over_requests(values: Iterable[float | None]) -> float | None:
    """The median of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def tokens_per_second(tokens: int, seconds: float) -> float | None:
    """All tokens over the wall clock; None for a repetition that took no time."""
    return _ratio(tokens, seconds) if seconds > 0 else None


@frozen(kw_only=True)
class Spread:
    """A figure over repetitions: the median, the lowest and the highest of *count* values."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of what is known of *values*; None where nothing is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(median=statistics.median(known), low=min(known), high=max(known), count=len(known))


def agree(first: Spread, second: Spread) -> bool:
    """Whether two spreads of one figure overlap: the difference is within what repetitions differ by.

    Where two evaluations of n repetitions differ by chance alone, their spreads part in 2 / C(2n, n) of all cases,
    whatever the distribution (all orders of the 2n values are alike, and two of the ways to deal them out have all of
    the one below all of the other): one in 10 of 3 repetitions, in 126 of 5, in 6435 of 8. That holds for counts, and
    for ratios within a repetition (``speed_up``); the speeds themselves are also those of a machine at its hour.
    """
    return max(first.low, second.low) <= min(first.high, second.high)


def speed_up(rates: Sequence[float | None], baseline: Sequence[float | None]) -> Spread | None:
    """Ratios, each of two rates of the *same* repetition: what slows the machine then slows both."""
    return spread(rate / other for rate, other in zip(rates, baseline, strict=False) if rate is not None and other)


# --- losslessness -----------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Losslessness:
    """Greedy answers compared with those of the verifier alone.

    Attributes:
        prompts: compared.
        identical: token by token.
        ties: of the others, those that part where the verifier's two logits lie within rounding.
        largest_gap: between the two logits where answers part, tie or not; None: no answer parts so.
    """

    prompts: int
    identical: int
    ties: int
    largest_gap: float | None = None

    @property
    def differing(self) -> int:
        """Answers that rounding does not explain."""
        return self.prompts - self.identical - self.ties

    @property
    def lossless(self) -> bool:
        return self.differing == 0

    @staticmethod
    def of(prompts: int, gaps: Iterable[tuple[float | None, bool]]) -> Losslessness:
        """From the answers that part: (gap of the logits, whether that is a tie) of each."""
        parting = list(gaps)
        known = [gap for gap, _ in parting if gap is not None and math.isfinite(gap)]
        return Losslessness(
            prompts=prompts,
            identical=prompts - len(parting),
            ties=sum(tie for _, tie in parting),
            largest_gap=max(known, default=None),
        )
