"""The picture that tells why: an answer's tokens, accepted from a draft, drafted in vain, or the verifier's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from draftsmith.evaluation.results import Evaluation, Method, RequestRecord
from draftsmith.serving.vllm_process import DraftCounters

__all__ = ["Piece", "covered", "pictured", "pieces", "request_length", "worst_requests"]


class Piece(NamedTuple):
    """One token. A ``rejected`` one is not part of the answer: it stood where the ``bonus`` after it stands."""

    kind: Literal["accepted", "rejected", "bonus"]
    token: int


def pieces(request: RequestRecord) -> Iterator[Piece]:
    """The answer's tokens in order. Where the drafts are known, the first rejected token of each round is among them.

    The first token comes from the prefill, and each round ends with one of the verifier's own. A last round may accept
    beyond the answer's end; that is left out.
    """
    output = request.output
    if output:
        yield Piece("bonus", output[0])
    newest = 0
    for each in request.rounds:
        end = newest + 1 + each.accepted
        yield from (Piece("accepted", token) for token in output[newest + 1 : end])
        if end < len(output):
            if len(each.draft) > each.accepted:
                yield Piece("rejected", each.draft[each.accepted])
            yield Piece("bonus", output[end])
        newest = end
    # What no round is known of: an answer without a draft.
    yield from (Piece("bonus", token) for token in output[newest + 1 :])


def covered(request: RequestRecord) -> bool:
    """Whether the rounds account for the whole answer. Those of a method that drafts nothing in some steps do not."""
    return 1 + sum(each.accepted + 1 for each in request.rounds) >= len(request.output)


def request_length(request: RequestRecord) -> float | None:
    """Acceptance length of one answer; None without a round."""
    rounds = [(each.drafted, each.accepted) for each in request.rounds]
    if not rounds:
        return None
    return DraftCounters.of_rounds(rounds, max(drafted for drafted, _ in rounds)).acceptance_length


def worst_requests(method: Method, count: int) -> Sequence[RequestRecord]:
    """The answers of the first repetition that gained least, of which the rounds are known; worst first."""
    if not method.repetitions:
        return []
    known = [each for each in method.repetitions[0].requests if each.output and each.rounds and covered(each)]
    return sorted(known, key=lambda each: (request_length(each) or 0.0, -len(each.output), each.prompt))[:count]


def pictured(evaluation: Evaluation) -> Method | None:
    """The method whose answers are shown: the simulator's, which knows the rejected tokens, before an engine's."""
    drafting = [
        each
        for each in evaluation.methods
        if each.repetitions and any(one.rounds and covered(one) for one in each.repetitions[0].requests)
    ]
    with_drafts = (
        each
        for each in drafting
        if any(made.draft for request in each.repetitions[0].requests for made in request.rounds)
    )
    return next(with_drafts, drafting[0] if drafting else None)
