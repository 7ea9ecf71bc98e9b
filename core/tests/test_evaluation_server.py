"""A repetition against a running server: answers streamed over HTTP, counters before and after, a server that dies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from exposition import AnsweringServer, K, served

from draftsmith.errors import ServingError, UserError
from draftsmith.evaluation.results import RoundRecord
from draftsmith.evaluation.server import check_server, run_on_server, served_model
from draftsmith.serving.vllm_process import DraftCounters

GREEDY = {"temperature": 0.0, "max_tokens": 5}
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8]]


@pytest.fixture
def start() -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        yield lambda server: stack.enter_context(served(server.metrics, server.post))


def test_answers_times_and_counters(start):
    server = AnsweringServer()
    counted: list[int] = []
    found, trouble = run_on_server(
        start(server), PROMPTS, GREEDY, concurrency=2, warm_up=[[9, 9]], progress=counted.append
    )
    assert trouble is None
    assert found.complete
    assert [each.output for each in found.requests] == [(3, 2, 1), (5, 4), (6,), (8, 7)]
    assert [each.prompt for each in found.requests] == [0, 1, 2, 3]
    # The warm-up is not counted.
    assert found.counters == DraftCounters.of_rounds([(K, 2)] * 4, K)
    assert len(server.bodies) == 5
    assert server.bodies[0]["prompt"] == [9, 9]
    assert {body["model"] for body in server.bodies} == {"the-model"}
    assert {body["max_tokens"] for body in server.bodies} == {5}
    assert server.most <= 2
    assert max(counted) == 4
    assert found.seconds is not None
    for each in found.requests:
        assert each.times.first_token is not None
        assert each.times.last_token is not None
        assert 0 < each.times.first_token <= each.times.last_token <= found.seconds


def test_rounds_are_taken_from_a_server_that_tells_them(start):
    found, _ = run_on_server(start(AnsweringServer(rounds=True)), PROMPTS, GREEDY, concurrency=2)
    assert [each.rounds for each in found.requests] == [(RoundRecord(drafted=K, accepted=2),)] * 4
    silent, _ = run_on_server(start(AnsweringServer()), PROMPTS, GREEDY, concurrency=2)
    assert [each.rounds for each in silent.requests] == [()] * 4


def test_a_server_that_dies_leaves_what_was_complete(start):
    server = AnsweringServer(dies_at=2)
    found, trouble = run_on_server(start(server), PROMPTS, GREEDY, concurrency=1)
    assert trouble is not None
    assert trouble.startswith("the server went away")
    assert not found.complete
    assert [each.prompt for each in found.requests] == [0, 1]
    assert found.counters is None


def test_a_server_that_refuses_a_prompt_says_why(start):
    found, trouble = run_on_server(start(AnsweringServer()), [[1], [99]], GREEDY, concurrency=1)
    assert trouble is not None
    assert 'refused prompt 1: 400 {"error": "too long"}' in trouble
    assert len(found.requests) == 1


def test_a_server_that_others_use_is_not_measured(start):
    found, trouble = run_on_server(start(AnsweringServer(others=7)), PROMPTS, GREEDY, concurrency=1)
    assert trouble is not None
    assert "28 tokens for others" in trouble
    assert found.counters is None


def test_a_server_without_token_ids(start):
    _, trouble = run_on_server(start(AnsweringServer(token_ids=False)), PROMPTS, GREEDY, concurrency=1)
    assert trouble == "the server tells no token ids"


def test_a_baseline_has_no_counters(start):
    found, trouble = run_on_server(start(AnsweringServer(drafts=False)), PROMPTS, GREEDY, concurrency=2, drafts=False)
    assert trouble is None
    assert found.counters is None
    assert len(found.requests) == 4


def test_servers_are_what_their_names_say(start):
    drafting, plain = AnsweringServer(), AnsweringServer(drafts=False)
    drafting.exposition.count([1])
    assert check_server(start(drafting), drafts=True) == K
    assert check_server(start(plain), drafts=False) == 0
    with pytest.raises(ServingError, match="drafts nothing"):
        check_server(start(plain), drafts=True)
    with pytest.raises(UserError, match="the baseline's server drafts"):
        check_server(start(drafting), drafts=False)
    assert served_model(start(plain)) == "the-model"


def test_another_programs_server_is_refused():
    with (
        served(lambda: (200, "python_info 1.0\n")) as address,
        pytest.raises(ServingError, match="no counters of vLLM"),
    ):
        check_server(address, drafts=False)
    with served(lambda: (200, "")) as address, pytest.raises(ServingError, match="does not tell its models"):
        served_model(address)
