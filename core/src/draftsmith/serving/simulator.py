"""Drafting the slow way: what vLLM does, one position at a time, counted as vLLM counts.

Given what the verifier answers greedily (its *output*), each round of speculative decoding is determined: the draft
proposes K tokens after the newest token, and those that agree with the output are accepted. So a known output and
the verifier's features at its tokens are all that is needed; the verifier itself is not run again.

How vLLM counts (v1, ``vllm:spec_decode_num_*``):

* the first token after the prompt comes from the prefill; the first draft follows it;
* a round counts once it is verified: K drafted tokens, and those accepted of them *before* the answer is cut at its
  end of turn or at its length limit. So the last round may accept tokens that are not part of the answer, and the
  output handed to :func:`simulate` should go on for K tokens beyond the answer's end;
* nothing is drafted for an answer that is complete after its first token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from draftsmith.errors import ServingError
from draftsmith.interfaces import Drafter
from draftsmith.plugins.results import check_drafted, checked
from draftsmith.serving.vllm_process import DraftCounters

if TYPE_CHECKING:
    from torch import Tensor, nn

    from draftsmith.interfaces import DraftAlgorithm

__all__ = ["Round", "Simulation", "answer_length", "replay", "simulate"]


@frozen(kw_only=True)
class Round:
    """One round: *draft* (target ids, K of them) was proposed after the token at index *start*; the first *accepted*
    of them agree with the verifier."""

    start: int
    draft: tuple[int, ...]
    accepted: int


@frozen(kw_only=True)
class Simulation:
    """All rounds of one sequence.

    Attributes:
        rounds: in order.
        num_speculative_tokens: K.
        complete: False where the known output ended before a round's last accepted token was known, so that the
            round may have been counted too low.
    """

    rounds: tuple[Round, ...]
    num_speculative_tokens: int
    complete: bool = True

    @property
    def counters(self) -> DraftCounters:
        """The rounds, counted as vLLM does."""
        return _count(self.rounds, self.num_speculative_tokens)

    @staticmethod
    def total(simulations: Iterable[Simulation], num_speculative_tokens: int) -> DraftCounters:
        """Counters over several sequences."""
        return _count([each for simulation in simulations for each in simulation.rounds], num_speculative_tokens)


def _count(rounds: Iterable[Round], num_speculative_tokens: int) -> DraftCounters:
    return DraftCounters.of_rounds(((len(each.draft), each.accepted) for each in rounds), num_speculative_tokens)


def answer_length(output: Iterable[int], eos_token_ids: Collection[int], max_tokens: int | None) -> int:
    """Number of tokens of *output* that vLLM returns: up to the end of turn, that token included, or the limit."""
    length = 0
    for token in output:
        if max_tokens is not None and length >= max_tokens:
            break
        length += 1
        if token in eos_token_ids:
            break
    return length


@torch.no_grad()
def simulate(
    algorithm: DraftAlgorithm,
    model: nn.Module,
    token_ids: Tensor,
    taps: Tensor,
    prompt_length: int,
    num_speculative_tokens: int,
    *,
    eos_token_ids: Collection[int] = (),
    max_tokens: int | None = None,
) -> Simulation:
    """Draft along a known greedy output.

    Args:
        model: the draft; put it into evaluation mode before.
        token_ids: int64 [T]: the prompt and the verifier's output, best with K tokens beyond the answer's end.
        taps: [T, A * H_t] (or one row less: the newest token needs none), the verifier's features at the tokens.
        prompt_length: tokens of the prompt, in [1, T).
        num_speculative_tokens: K.
        eos_token_ids: tokens that end an answer.
        max_tokens: longest answer; None: the known output is all of it.

    Raises:
        ServingError: the lengths do not fit each other.
    """
    total = int(token_ids.shape[0])
    if not 1 <= prompt_length < total or taps.shape[0] < total - 1:
        raise ServingError(
            f"cannot simulate {total} tokens with a prompt of {prompt_length} and features of {taps.shape[0]}"
        )
    tokens = token_ids.tolist()
    end = prompt_length + answer_length(tokens[prompt_length:], eos_token_ids, max_tokens)
    drafter = _drafter(algorithm, model)
    drafter.reset()
    kept = algorithm.setup.vocabulary.kept_ids().cpu()
    rounds: list[Round] = []
    complete = True
    newest = prompt_length  # index of the newest token, which has no features yet
    drafts: dict[int, list[int]] = {}
    while newest < end - 1:
        if newest not in drafts:  # where the next rounds may start is known, as the whole output is
            starts = range(newest, min(newest + drafter.starts_at_once, end - 1))
            known = starts[-1] + 1
            logits = drafter.propose_each(token_ids[:known], taps[: known - 1], starts, num_speculative_tokens)
            check_drafted(drafter.propose_each, logits, (len(starts), num_speculative_tokens, len(kept)))
            drafts = dict(zip(starts, kept[logits.argmax(dim=-1).cpu()].tolist(), strict=True))
        draft = drafts[newest]
        actual = tokens[newest + 1 : newest + 1 + num_speculative_tokens]
        accepted = _agreeing(draft, actual)
        complete &= not (accepted == len(actual) < num_speculative_tokens)
        rounds.append(Round(start=newest, draft=tuple(draft), accepted=accepted))
        newest += accepted + 1
    return Simulation(rounds=tuple(rounds), num_speculative_tokens=num_speculative_tokens, complete=complete)


def _agreeing(draft: list[int], actual: list[int]) -> int:
    count = 0
    for ours, verifiers in zip(draft, actual, strict=False):
        if ours != verifiers:
            break
        count += 1
    return count


@torch.no_grad()
def replay(
    algorithm: DraftAlgorithm,
    model: nn.Module,
    token_ids: Tensor,
    taps: Tensor,
    starts: Iterable[int],
    num_tokens: int,
) -> dict[int, Tensor]:
    """Draft logits with the data's own tokens fed back, for comparison with the training forward.

    Args:
        token_ids: int64 [T], one document.
        taps: [T, A * H_t].
        starts: indices t of the last token with features; the bonus token is t + 1. K tokens are drafted from each,
            as in serving, zeros standing for what the document does not have any more; only positions that it has
            are returned.
        num_tokens: K.

    Returns:
        start → float32 [k, V_d], the logits of the tokens at t + 2, t + 3, …, with k ≤ K so that they exist.
    """
    drafter = _drafter(algorithm, model)
    total = int(token_ids.shape[0])
    logits: dict[int, Tensor] = {}
    for start in starts:
        count = min(num_tokens, total - start - 2)
        if count < 1:
            continue
        drafter.reset()
        forced = token_ids.new_zeros(num_tokens)
        forced[:count] = token_ids[start + 2 : start + 2 + count]
        drafted = drafter.propose(token_ids[: start + 2], taps[: start + 1], num_tokens, forced=forced)
        logits[start] = check_drafted(drafter.propose, drafted, (num_tokens, None))[:count]
    return logits


def _drafter(algorithm: DraftAlgorithm, model: nn.Module) -> Drafter:
    found = algorithm.drafter(model)
    return checked(algorithm.drafter, found, Drafter, "a draftsmith.interfaces.Drafter")


def describe(counters: DraftCounters) -> dict[str, Any]:
    """Counters and what is derived from them, as plain values."""
    return {
        "drafts": counters.drafts,
        "drafted": counters.drafted,
        "accepted": counters.accepted,
        "accepted_per_position": list(counters.accepted_per_position),
        "acceptance_length": round(counters.acceptance_length, 4),
        "acceptance_per_position": [round(rate, 4) for rate in counters.acceptance_per_position],
    }
