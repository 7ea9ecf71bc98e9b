"""The simulator counts as vLLM does. Its drafter here knows the verifier's output, and errs where it is told to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.errors import ServingError
from draftsmith.interfaces import Drafter, VocabularyMap
from draftsmith.serving.simulator import Simulation, answer_length, describe, replay, simulate

SIZE = 50


class Oracle(Drafter):
    """Proposes the known sequence, except at the indices *wrong*. Sees what the simulator hands over."""

    def __init__(self, sequence, wrong=()):
        self.sequence, self.wrong = list(sequence), set(wrong)
        self.calls = []

    def reset(self):
        self.calls.append("reset")

    def propose(self, token_ids, taps, num_tokens, *, forced=None):
        assert token_ids.tolist() == self.sequence[: len(token_ids)]
        assert len(taps) == len(token_ids) - 1
        self.calls.append((len(token_ids), None if forced is None else forced.tolist()))
        logits = torch.zeros(num_tokens, SIZE)
        for step in range(num_tokens):
            index = len(token_ids) + step
            token = self.sequence[index] if index < len(self.sequence) else 0
            logits[step, (token + 1) % SIZE if index in self.wrong else token] = 1.0
        return logits


def algorithm(oracle):
    vocabulary = VocabularyMap(d2t=torch.zeros(SIZE, dtype=torch.int64), t2d=torch.ones(SIZE, dtype=torch.bool))
    return SimpleNamespace(drafter=lambda model: oracle, setup=SimpleNamespace(vocabulary=vocabulary))


def run(output, wrong=(), *, prompt=(7, 8, 9), tokens=3, **keywords):
    sequence = [*prompt, *output]
    oracle = Oracle(sequence, wrong)
    simulation = simulate(
        algorithm(oracle),
        torch.nn.Identity(),
        torch.tensor(sequence),
        torch.zeros(len(sequence) - 1, 4),
        len(prompt),
        tokens,
        **keywords,
    )
    return simulation, oracle


def test_a_draft_that_is_always_right():
    # 9 tokens are the answer, 3 more are known. The first comes from the prefill; rounds gain 4: 1 + 4 + 4.
    simulation, oracle = run(range(20, 32), max_tokens=9)
    assert simulation.counters.drafts == 2
    assert simulation.counters.accepted_per_position == (2, 2, 2)
    assert simulation.counters.acceptance_length == 4.0
    assert simulation.complete
    assert oracle.calls == ["reset", (4, None), (8, None)]


def test_a_draft_that_is_always_wrong():
    simulation, _ = run(range(20, 32), range(100), max_tokens=9)
    assert simulation.counters.drafts == 8  # one token a round after the first
    assert simulation.counters.accepted == 0
    assert simulation.counters.drafted == 24
    assert simulation.counters.acceptance_length == 1.0


def test_what_follows_an_error_is_rejected_with_it():
    # Index 4 is the first drafted token; the second draft of the first round is wrong.
    simulation, _ = run(range(20, 32), {5}, max_tokens=9)
    assert [each.accepted for each in simulation.rounds] == [1, 3, 3]
    assert simulation.counters.accepted_per_position == (3, 2, 2)


def test_the_last_round_counts_beyond_the_end_as_vllm_does():
    # The answer is 6 tokens: 1 + 4 + 1 of the second round, which vLLM counts with all 3 accepted.
    simulation, _ = run(range(20, 32), max_tokens=6)
    assert [each.accepted for each in simulation.rounds] == [3, 3]
    # Known only up to the limit, the round is cut short, and the simulation says so.
    short, _ = run(range(20, 26), max_tokens=6)
    assert [each.accepted for each in short.rounds] == [3, 1]
    assert not short.complete


def test_nothing_is_drafted_after_the_end_of_turn():
    simulation, _ = run([20, 21, 2, 30, 31, 32], max_tokens=6, eos_token_ids={2})
    assert [each.start for each in simulation.rounds] == [3]
    assert simulation.counters.accepted_per_position == (1, 1, 1)  # token 30 is accepted, and then cut
    only_eos, _ = run([2, 30, 31, 32], max_tokens=4, eos_token_ids={2})
    assert only_eos.rounds == ()
    assert only_eos.counters.acceptance_length == 1.0
    one_token, _ = run([20, 21, 22, 23], max_tokens=1)
    assert one_token.rounds == ()


@given(outcomes=st.sets(st.integers(3, 60)), answer=st.integers(1, 40), at_once=st.integers(1, 50))
def test_asking_for_many_starts_at_once_changes_no_round(outcomes, answer, at_once):
    sequence = [7, 8, 9, *(20 + index % 25 for index in range(answer + 3))]
    one_by_one, oracle = run(sequence[3:], outcomes, max_tokens=answer)
    asked = []

    class Many(Oracle):
        starts_at_once = at_once

        def propose_each(self, token_ids, taps, bonus, num_tokens, *, forced=None):
            assert token_ids.tolist() == sequence[: bonus[-1] + 1]
            assert len(taps) == bonus[-1]
            asked.extend(bonus)
            return super().propose_each(token_ids, taps, bonus, num_tokens, forced=forced)

    many = simulate(
        algorithm(Many(sequence, outcomes)),
        torch.nn.Identity(),
        torch.tensor(sequence),
        torch.zeros(len(sequence) - 1, 4),
        3,
        3,
        max_tokens=answer,
    )
    assert many == one_by_one
    assert len(set(asked)) == len(asked)
    assert set(asked) <= set(range(3, 3 + answer - 1)), "nothing is drafted beyond the answer's last round"
    if at_once == 1:
        assert asked == [length - 1 for length, _ in oracle.calls[1:]]


def test_draft_ids_become_target_ids():
    kept = torch.tensor([3, 10, 11, 40])
    oracle = Oracle([7, 8, 9, 10, 11, 40, 3])
    oracle.propose = lambda token_ids, taps, num_tokens, forced=None: torch.eye(4)[[2, 3, 0]]
    vocabulary = VocabularyMap(d2t=kept - torch.arange(4), t2d=torch.zeros(SIZE, dtype=torch.bool))
    draft = SimpleNamespace(drafter=lambda model: oracle, setup=SimpleNamespace(vocabulary=vocabulary))
    simulation = simulate(
        draft, torch.nn.Identity(), torch.tensor([7, 8, 9, 10, 11, 40, 3]), torch.zeros(6, 4), 3, 3, max_tokens=4
    )
    assert simulation.rounds[0].draft == (11, 40, 3)
    assert simulation.rounds[0].accepted == 3


@given(
    outcomes=st.sets(st.integers(3, 60)),
    answer=st.integers(1, 40),
    tokens=st.integers(1, 5),
    end=st.none() | st.integers(0, 39),
)
def test_every_token_of_an_answer_comes_from_one_round(outcomes, answer, tokens, end):
    output = [20 + index % 25 for index in range(answer + tokens)]
    if end is not None and end < answer:
        output[end] = 2
    simulation, _ = run(output, outcomes, tokens=tokens, max_tokens=answer, eos_token_ids={2})
    length = answer_length(output, {2}, answer)
    gained = 1 + sum(each.accepted + 1 for each in simulation.rounds)
    overshoot = gained - length
    assert 0 <= overshoot <= tokens
    counters = simulation.counters
    assert counters.drafts == len(simulation.rounds)
    assert counters.drafted == tokens * counters.drafts
    assert list(counters.accepted_per_position) == sorted(counters.accepted_per_position, reverse=True)
    assert counters.accepted == sum(each.accepted for each in simulation.rounds)
    assert counters.acceptance_length == pytest.approx(1 + sum(counters.acceptance_per_position))


def test_totals_and_their_description():
    first, _ = run(range(20, 32), max_tokens=9)
    second, _ = run(range(20, 32), range(100), max_tokens=9)
    total = Simulation.total([first, second], 3)
    assert total == first.counters + second.counters
    assert describe(total)["acceptance_length"] == round(1 + 6 / 10, 4)
    assert describe(total)["acceptance_per_position"] == [0.2, 0.2, 0.2]


def test_lengths_that_do_not_fit():
    with pytest.raises(ServingError, match="cannot simulate 3 tokens"):
        simulate(algorithm(Oracle([1, 2, 3])), torch.nn.Identity(), torch.tensor([1, 2, 3]), torch.zeros(2, 4), 3, 3)


def test_replay_feeds_the_data_back():
    sequence = [7, 8, 9, 20, 21, 22, 23]
    oracle = Oracle(sequence)
    logits = replay(
        algorithm(oracle), torch.nn.Identity(), torch.tensor(sequence), torch.zeros(7, 4), [1, 3, 4, 5, 6], 3
    )
    assert {start: tuple(each.shape) for start, each in logits.items()} == {1: (3, SIZE), 3: (2, SIZE), 4: (1, SIZE)}
    assert [call for call in oracle.calls if call != "reset"] == [(3, [20, 21, 22]), (5, [22, 23, 0]), (6, [23, 0, 0])]
