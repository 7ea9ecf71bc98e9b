"""The clocks in a worker of vLLM: what is timed, and what is left alone."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from draftsmith.serving.vllm_timing import EXTENSION, RoundClock

#: Seconds of a verifier's forward pass, of its sampling, and of a proposal in between.
FORWARD, SAMPLING, PROPOSING = 0.02, 0.01, 0.03


class RunnerV1:
    """Has the methods that model runner V1 has."""

    def execute_model(self, scheduled):
        time.sleep(FORWARD)
        return scheduled

    def sample_tokens(self, grammar, *, drafts=True):
        time.sleep(SAMPLING)
        if drafts:
            self.propose_draft_token_ids()
        return grammar

    def propose_draft_token_ids(self):
        time.sleep(PROPOSING)


class RunnerV2:
    """Has the methods that model runner V2 has."""

    def __init__(self):
        self.speculator = SimpleNamespace(propose=lambda: time.sleep(PROPOSING))

    execute_model = RunnerV1.execute_model

    def sample_tokens(self, grammar, *, drafts=True):
        time.sleep(SAMPLING)
        if drafts and self.speculator is not None:
            self.speculator.propose()
        return grammar


def started(runner) -> RoundClock:
    worker = RoundClock()
    worker.model_runner, worker.device = runner, SimpleNamespace(type="cpu")
    worker.draftsmith_start_clocks()
    return worker


@pytest.mark.parametrize("runner", [RunnerV1, RunnerV2])
def test_steps_and_drafting_are_timed(runner):
    worker = started(runner())
    for _ in range(3):
        assert worker.model_runner.execute_model("scheduled") == "scheduled"
        assert worker.model_runner.sample_tokens("grammar") == "grammar"
    time.sleep(0.2)  # between the steps: nobody's
    found = worker.draftsmith_read_clocks()
    assert found["drafting"] >= 3 * PROPOSING
    rest = found["steps"] - found["drafting"]
    assert rest >= 3 * (FORWARD + SAMPLING)
    assert worker.draftsmith_read_clocks() == found


@pytest.mark.parametrize("runner", [RunnerV1, RunnerV2])
def test_without_a_draft_there_is_no_time_of_drafting(runner):
    made = runner()
    if runner is RunnerV2:
        made.speculator = None
    worker = started(made)
    worker.model_runner.execute_model(None)
    worker.model_runner.sample_tokens(None, drafts=False)
    found = worker.draftsmith_read_clocks()
    assert found["drafting"] is None
    assert found["steps"] >= FORWARD + SAMPLING


def test_what_vllm_is_told_leads_to_the_clocks():
    module, _, name = EXTENSION.rpartition(".")
    assert (module, name) == (RoundClock.__module__, "RoundClock")
    # vLLM refuses an extension that hides something of the worker.
    assert all(each.startswith(("__", "draftsmith_")) for each in dir(RoundClock))
