"""`draftsmith serve`: the command that it becomes, what it refuses before vLLM starts, and what a real server does."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import attrs
import httpx
import pytest
from questions import ANSWER

from draftsmith.api import ServingPlan
from draftsmith.checkpoint.exported import read_config
from draftsmith.cli import main
from draftsmith.errors import CheckpointError, ConfigError, ServingError, UserError
from draftsmith.evaluation.methods import Checkpoint
from draftsmith.evaluation.metrics import agree, difference
from draftsmith.evaluation.results import BASELINE, figures, read_evaluation
from draftsmith.evaluation.run import Settings, evaluate
from draftsmith.evaluation.server import run_on_server, served_model
from draftsmith.serving import serve, vllm_models
from draftsmith.serving.counters import read_metrics
from draftsmith.serving.schedule import Step, as_plan
from draftsmith.serving.serve import ServeCommand, serve_command
from draftsmith.serving.vllm_process import DraftCounters, running_process, running_server


def speculative(command: ServeCommand) -> dict:
    return json.loads(command.command[command.command.index("--speculative-config") + 1])


def test_the_verifier_is_served_with_the_draft(exported, registry):
    found = serve_command(exported.folder, registry, further=["--port", "8001"])
    assert found.command[:5] == (
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(exported.verifier),
    )  # fmt: skip
    assert found.command[-2:] == ("--port", "8001")
    assert speculative(found) == {"method": "eagle3", "model": str(exported.folder), "num_speculative_tokens": 3}
    assert found.schedule == ()
    assert shlex.split(str(found)) == list(found.command)


def test_with_the_vllm_distribution_its_own_command_is_used(exported, registry, monkeypatch):
    monkeypatch.setattr(serve, "version", lambda name: "0.32.0")
    found = serve_command(exported.folder, registry)
    assert found.command[:3] == ("vllm", "serve", str(exported.verifier))


def test_fewer_tokens_and_another_verifier(exported, registry, tmp_path):
    quantised = Path(shutil.copytree(exported.verifier, tmp_path / "quantised"))
    found = serve_command(exported.folder, registry, verifier=str(quantised), num_speculative_tokens=2)
    assert str(quantised) in found.command
    assert speculative(found)["num_speculative_tokens"] == 2


def test_a_hub_name_is_left_to_vllm(exported, registry):
    found = serve_command(exported.folder, registry, verifier="somebody/quantised")
    assert "somebody/quantised" in found.command
    assert any("is not on this machine" in each.what for each in found.findings)


def test_speculation_ends_where_a_batch_is_large(exported, registry):
    found = serve_command(exported.folder, registry, disable_by_batch_size=16)
    assert speculative(found)["num_speculative_tokens_per_batch_size"][:1] == [[1, 16, 3]]
    assert speculative(found)["num_speculative_tokens_per_batch_size"][1][::2] == [17, 0]


def test_a_plan_becomes_the_schedule(exported, registry, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([[1, 4, 3], [5, 64, 2]]))
    steps = speculative(serve_command(exported.folder, registry, plan=plan))["num_speculative_tokens_per_batch_size"]
    assert steps == [[1, 4, 3], [5, 64, 2]]
    both = speculative(serve_command(exported.folder, registry, plan=plan, disable_by_batch_size=8))
    assert [step[::2] for step in both["num_speculative_tokens_per_batch_size"]] == [[1, 3], [5, 2], [9, 0]]
    plan.write_text(json.dumps([[1, 4, 3], [4, 64, 2]]))
    with pytest.raises(ConfigError, match="overlap"):
        serve_command(exported.folder, registry, plan=plan)
    # The plan is held to the number of tokens that is served, not to the checkpoint's.
    plan.write_text(json.dumps([[1, 4, 3]]))
    with pytest.raises(ConfigError, match="served with 2"):
        serve_command(exported.folder, registry, plan=plan, num_speculative_tokens=2)


def test_what_is_asked_for_must_be_there(exported, registry, tmp_path):
    with pytest.raises(UserError, match="4 tokens a round are asked for, 3 were trained"):
        serve_command(exported.folder, registry, num_speculative_tokens=4)
    with pytest.raises(UserError, match="no such verifier") as error:
        serve_command(exported.folder, registry, verifier=str(tmp_path / "gone"))
    assert "--verifier" in str(error.value.where)
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        serve_command(tmp_path, registry)


def test_the_linter_goes_first(checkpoint_copy, registry):
    config = read_config(checkpoint_copy)
    config["transformer_layer_config"]["vocab_size"] = 7
    (checkpoint_copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="vocab_size is 7") as error:
        serve_command(checkpoint_copy, registry)
    assert "draftsmith lint" in str(error.value.hint)


def test_what_this_vllm_cannot_serve(exported, registry, monkeypatch):
    monkeypatch.setattr(vllm_models, "vllm_version", lambda: "0.8.4")
    monkeypatch.setattr(vllm_models, "speculative_keys", lambda: frozenset({"method", "model"}))
    assert serve_command(exported.folder, registry)
    with pytest.raises(ServingError) as error:
        serve_command(exported.folder, registry, disable_by_batch_size=4)
    assert error.value.what == (
        "vLLM 0.8.4 does not take num_speculative_tokens_per_batch_size in its speculative_config; "
        "vLLM 0.25 and later do"
    )
    monkeypatch.setattr(vllm_models, "speculative_methods", lambda: frozenset({"ngram"}))
    with pytest.raises(ServingError) as error:
        serve_command(exported.folder, registry)
    assert error.value.what == "vLLM 0.8.4 does not know the method 'eagle3'; vLLM 0.8.5 and later do"
    assert "written for vLLM 0.32" in str(error.value.hint)
    monkeypatch.setattr(serve, "vllm_version", lambda: None)
    with pytest.raises(ServingError, match="vLLM is not installed"):
        serve_command(exported.folder, registry)


def test_what_the_format_asks_for_is_passed_on(exported, registry, monkeypatch):
    plan = ServingPlan(
        method="eagle3",
        num_speculative_tokens=3,
        engine={"attention_config": {"backend": "it's"}, "enable_prefix_caching": False},
        environment={"TINKER_MODE": "a b"},
        notes=("Only whole blocks.",),
    )
    checkpoint = Checkpoint(folder=exported.folder, plan=plan, verifier=str(exported.verifier), trained=5)
    monkeypatch.setattr(serve, "read_checkpoint", lambda folder, registry: checkpoint)
    monkeypatch.setattr(serve, "unsampled_here", lambda: None)
    found = serve_command(exported.folder, registry)
    assert found.environment == {"TINKER_MODE": "a b"}
    assert found.process_environment()["TINKER_MODE"] == "a b"
    assert found.command[-3:-1] == ("--attention-config", '{"backend": "it\'s"}')
    assert found.command[-1] == "--no-enable-prefix-caching"
    assert str(found).startswith("TINKER_MODE='a b' ")
    assert found.notes == ("Only whole blocks.",)
    monkeypatch.setattr(serve, "unsampled_here", lambda: "This vLLM cannot sample.")
    assert serve_command(exported.folder, registry).notes == ("Only whole blocks.", "This vLLM cannot sample.")


def test_arguments_of_the_chat_template_are_told(export_draft, tiny_verifier, registry, tmp_path):
    noted = {"template_arguments": {"enable_thinking": False}}
    made = export_draft(tmp_path / "draft", tiny_verifier, notes=noted)

    def told(*further):
        return [each for each in serve_command(made.folder, registry, further=further).notes if "template" in each]

    (note,) = told("--port", "8001")
    assert """--default-chat-template-kwargs '{"enable_thinking": false}'""" in note
    assert told("--default-chat-template-kwargs", "{}") == told("--default-chat-template-kwargs={}") == []


def test_the_servers_environment_leaves_its_engine_and_the_hub_alone(exported, registry, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    environment = serve_command(exported.folder, registry).process_environment()
    assert not {"HF_HUB_OFFLINE", "VLLM_ENABLE_V1_MULTIPROCESSING"} & set(environment)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert serve_command(exported.folder, registry).process_environment()["HF_HUB_OFFLINE"] == "1"


def test_a_dry_run_prints_the_command(exported, capsys, monkeypatch):
    started = []
    monkeypatch.setattr("os.execvpe", lambda *arguments: started.append(arguments))
    command = ["serve", str(exported.folder), "--disable-by-batch-size", "4"]
    assert main([*command, "--dry-run", "--", "--port", "8001"]) == 0
    printed = shlex.split(capsys.readouterr().out)
    assert printed[-2:] == ["--port", "8001"]
    assert not started
    assert main(command) == 0
    ((program, arguments, environment),) = started
    assert program == sys.executable
    assert arguments == printed[:-2]
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert main(["serve", str(exported.folder), "--disable-by-batch-size", "0"]) == 2


# --- a real server ----------------------------------------------------------------------------------------------

#: Two requests at once draft less than one, and more draft nothing.
PLAN = [Step(1, 1, 3), Step(2, 2, 1), Step(3, 64, 2)]
#: What both servers are started with. Without a cache of prefixes each repetition does the same work.
OPTIONS = ("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8", "--enforce-eager",
           "--no-enable-prefix-caching")  # fmt: skip
SAMPLING = {"temperature": 0.0, "max_tokens": ANSWER}


@pytest.fixture(scope="module")
def server(by_heart, tmp_path_factory) -> Iterator[str]:
    """What ``draftsmith serve`` becomes, of a draft that knows the answers, with a plan that ends at two requests."""
    folder = tmp_path_factory.mktemp("server")
    plan = folder / "plan.json"
    plan.write_text(json.dumps(as_plan(PLAN)))
    command = [
        sys.executable, "-m", "draftsmith", "serve", str(by_heart.folder), "--plan", str(plan),
        "--disable-by-batch-size", "2", "--", *OPTIONS,
    ]  # fmt: skip
    with running_process(command, log=folder / "log") as address:
        yield address


def answer_at_once(server: str, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """In one request, so that they are in the engine's batch together from their first step on."""
    body = {"model": served_model(server), "prompt": prompts, "return_token_ids": True, **SAMPLING}
    reply = httpx.post(f"{server}/v1/completions", json=body, timeout=300, trust_env=False).raise_for_status()
    return [tuple(choice["token_ids"]) for choice in sorted(reply.json()["choices"], key=itemgetter("index"))]


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_server_drafts_as_the_plan_says(server, by_heart):
    """Its counters tell how many tokens a round were drafted, and the answers are the verifier's own at every load."""

    def answered(load: int) -> DraftCounters:
        before = read_metrics(server).counters
        assert answer_at_once(server, by_heart.prompts[:load]) == by_heart.answers[:load]
        return difference(before, read_metrics(server).counters)

    alone = answered(1)
    assert alone.drafted == 3 * alone.drafts > 0
    # The last one of several, when the others have gone, drafts as one does.
    two = answered(2)
    assert 1 <= two.drafted / two.drafts < 2
    # Three and more draft nothing: as two do, it would come to half of the tokens, as one does to more than all.
    assert answered(4).drafted < 4 * ANSWER / 4
    assert answered(8).drafted < 8 * ANSWER / 4
    # The load has gone, and so has what it changed.
    assert answered(1) == alone
    found, trouble = run_on_server(server, by_heart.prompts, SAMPLING, concurrency=1)
    assert trouble is None
    assert found.counters.acceptance_length > 1.5


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_server_is_held_against_its_evaluation(server, by_heart, prompts_file, tmp_path, monkeypatch, capsys):
    """All is well with the questions that it was evaluated with; others, that the draft knows nothing of, are told."""
    evaluation = tmp_path / "evaluation"
    command = [
        "evaluate", str(by_heart.folder), "--prompts", str(prompts_file), "--server", server, "--concurrency", "1",
        "--repetitions", "1", "--max-tokens", str(ANSWER), "--output", str(evaluation),
    ]  # fmt: skip
    assert main(command) == 0
    (method,) = read_evaluation(evaluation).methods
    evaluated = figures(method, None)["acceptance_length"]

    def watch_while_answering(prompts: list[list[int]]) -> tuple[int, dict]:
        """The pause between the two readings is the time that the answers take."""
        capsys.readouterr()
        with monkeypatch.context() as patch:
            answer = partial(run_on_server, server, prompts, SAMPLING, concurrency=1)
            patch.setattr("draftsmith.cli.watch.time", SimpleNamespace(sleep=lambda _: answer(), time=time.time))
            code = main(["watch", server, "--once", "--json", "--evaluation", str(evaluation)])
        (line,) = capsys.readouterr().out.splitlines()
        return code, json.loads(line)

    code, well = watch_while_answering([*by_heart.prompts, *by_heart.prompts])
    assert (code, well["trouble"], well["alarms"]) == (0, None, [])
    assert well["sample"]["rounds"] >= 100
    assert well["sample"]["acceptance_length"] == pytest.approx(evaluated)

    code, badly = watch_while_answering([prompt[::-1] for prompt in by_heart.prompts])
    assert code == 1
    assert badly["sample"]["rounds"] >= 100
    assert badly["sample"]["acceptance_length"] < 0.9 * evaluated
    assert [each["kind"] for each in badly["alarms"]] == ["acceptance"]


@pytest.mark.slow
@pytest.mark.vllm
def test_two_evaluations_of_real_servers_agree(server, by_heart, prompts_file, registry, tmp_path):
    """In acceptance, and in the speed-up, which is taken within a repetition. By chance alone two of eight repetitions
    each part in one of 6435 cases."""
    with running_server(by_heart.verifier, *OPTIONS, log=tmp_path / "log") as alone:
        asked = Settings(
            checkpoint=str(by_heart.folder), prompts=(str(prompts_file),), max_prompts=4, max_tokens=ANSWER,
            repetitions=8, warm_up=1, concurrency=1, dtype="float32",
            servers={BASELINE: alone, str(by_heart.folder): server},
        )  # fmt: skip
        evaluations = {name: evaluate(asked, registry, tmp_path / name) for name in ("once", "twice")}
        pair = attrs.evolve(asked, concurrency=2, repetitions=2)
        evaluations["pair"] = evaluate(pair, registry, tmp_path / "pair")
    found = {}
    for name, each in evaluations.items():
        none, draft = each.methods
        assert each.complete
        assert draft.losslessness.identical == 4
        found[name] = figures(draft, none)
    once, twice = found["once"], found["twice"]
    assert once["speed_up"].count == 8
    assert agree(once["speed_up"], twice["speed_up"])
    assert agree(once["acceptance_length_spread"], twice["acceptance_length_spread"])
    assert once["acceptance_length"] == twice["acceptance_length"]
    # What does differ is told: two at once draft less.
    assert not agree(once["acceptance_length_spread"], found["pair"]["acceptance_length_spread"])
