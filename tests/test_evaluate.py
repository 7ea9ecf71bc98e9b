"""`draftsmith evaluate`: a draft measured side by side with other methods, by the simulator and in a real vLLM."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import attrs
import psutil
import pytest
import torch
from exposition import AnsweringServer, served
from questions import ANSWER, TOPICS
from runner_v2 import v2_environment

from draftsmith.capture.engines.transformers import load_verifier
from draftsmith.cli import main
from draftsmith.data.template import load_tokenizer, render_prompt
from draftsmith.errors import (
    CheckpointError,
    DataError,
    FingerprintMismatch,
    OutputError,
    ServingError,
    Stopped,
    UserError,
    VerifierError,
)
from draftsmith.evaluation import run as run_module
from draftsmith.evaluation.methods import plan_methods, read_checkpoint, split_names
from draftsmith.evaluation.metrics import Spread, agree, largest_relative_gap
from draftsmith.evaluation.picture import covered, pictured, pieces, request_length, worst_requests
from draftsmith.evaluation.require import parse_requirement
from draftsmith.evaluation.results import counters_of, figures, read_evaluation
from draftsmith.evaluation.run import Settings, evaluate, simulated_name
from draftsmith.evaluation.sweep import Point, parse_sweep, plan_of, read_sweep
from draftsmith.report.build import build_report
from draftsmith.serving import vllm_models
from draftsmith.serving.counters import read_metrics
from draftsmith.serving.schedule import NO_END, Step, read_plan
from draftsmith.serving.serve import serve_command
from draftsmith.serving.verifier_model import generate_greedily
from draftsmith.serving.vllm_process import DraftCounters, EngineDied, EngineResult, running_server
from draftsmith.stages import sole_writer, write_json_atomically
from draftsmith.verifier import read_verifier


def settings(by_heart, prompts_file, **further) -> Settings:
    given = {"max_tokens": ANSWER, "dtype": "float32", "repetitions": 1, **further}
    return Settings(checkpoint=str(by_heart.folder), prompts=(str(prompts_file),), **given)


@pytest.fixture
def without_vllm(monkeypatch):
    monkeypatch.setattr(run_module, "vllm_version", lambda: None)


# --- the simulator alone ----------------------------------------------------------------------------------------


def test_the_simulator_measures_without_vllm(by_heart, prompts_file, registry, tmp_path, without_vllm):
    found = evaluate(settings(by_heart, prompts_file, simulate=True), registry, tmp_path / "out")
    assert found == read_evaluation(tmp_path / "out")
    simulated = found.method(simulated_name(str(by_heart.folder)))
    assert simulated.status == "simulated"
    values = figures(simulated, None)
    assert values["acceptance_length"] > 1.5
    assert values["tokens_per_second"] is None
    assert found.categories == TOPICS
    parts = [counters_of(simulated, found.of_category(topic)) for topic in TOPICS]
    assert parts[0] + parts[1] == counters_of(simulated)
    for method in found.methods[:2]:
        assert (method.status, method.reason) == ("unavailable", "vLLM is not installed")
    # The rounds account for every token of the answers: the first, and those of each round, less what goes beyond.
    for request in simulated.repetitions[0].requests:
        gained = 1 + sum(each.accepted + 1 for each in request.rounds)
        last = request.rounds[-1].accepted + 1
        assert gained - last < len(request.output) <= gained
        assert [each.token for each in pieces(request) if each.kind != "rejected"] == list(request.output)


@pytest.fixture
def conversations_file(tmp_path) -> Path:
    """One conversation of a user with three turns, and one question."""
    path = tmp_path / "conversations.jsonl"
    rows = [{"turns": ["Name colour 1.", "Another.", "One more."], "category": "long"}, {"prompt": "Name number 2."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rendered(tokenizer, turns, answers):
    """Token ids of the last of a user's *turns*, each behind the answer (token ids) to the one before."""
    messages = [{"role": "user", "content": turns[0]}]
    for turn, answer in zip(turns[1:], answers, strict=True):
        text = tokenizer.decode(list(answer), skip_special_tokens=True)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn}]
    return render_prompt(tokenizer, messages)


def test_later_turns_follow_the_verifiers_own_answers(by_heart, conversations_file, registry, tmp_path, without_vllm):
    found = evaluate(settings(by_heart, conversations_file, simulate=True), registry, tmp_path / "out")
    assert [(each.category, each.turn) for each in found.prompts] == [
        ("long", 1), ("long", 2), ("long", 3), ("conversations", 1),
    ]  # fmt: skip
    simulated = found.method(simulated_name(str(by_heart.folder)))
    answers = [each.output for each in simulated.repetitions[0].requests]
    tokenizer, turns = load_tokenizer(by_heart.verifier), ["Name colour 1.", "Another.", "One more."]
    lengths = [len(rendered(tokenizer, turns[:count], answers[: count - 1])) for count in (1, 2, 3)]
    assert [each.tokens for each in found.prompts[:3]] == lengths
    model = load_verifier(by_heart.verifier, dtype=torch.float32, device=torch.device("cpu"))
    third = generate_greedily(model, [rendered(tokenizer, turns, answers[:2])], ANSWER, 0, ())
    assert tuple(third[0]) == answers[2]


def test_a_later_turn_beyond_the_context(by_heart, conversations_file, registry, tmp_path, without_vllm):
    first = len(render_prompt(load_tokenizer(by_heart.verifier), [{"role": "user", "content": "Name colour 1."}]))
    limit = read_verifier(by_heart.verifier).max_position_embeddings
    # Room for the first turn and its answer, and no more.
    asked = settings(by_heart, conversations_file, simulate=True, max_tokens=(limit - first) * 2 // 3)
    with pytest.raises(DataError, match="longer than the context leaves room for"):
        evaluate(asked, registry, tmp_path / "out")
    found = evaluate(attrs.evolve(asked, skip_long_prompts=True), registry, tmp_path / "skipped")
    assert [(each.category, each.turn) for each in found.prompts] == [("long", 1), ("conversations", 1)]


def test_the_worst_answers_are_shown_token_by_token(by_heart, prompts_file, registry, tmp_path, without_vllm):
    found = evaluate(settings(by_heart, prompts_file, simulate=True), registry, tmp_path / "out")
    method = pictured(found)
    assert method is not None
    assert method.status == "simulated"
    worst = worst_requests(method, 3)
    lengths = [request_length(each) for each in method.repetitions[0].requests]
    assert [request_length(each) for each in worst] == sorted(lengths)[:3]
    drafted = {each.kind for request in method.repetitions[0].requests for each in pieces(request)}
    assert drafted == {"accepted", "rejected", "bonus"}
    assert all(piece.token in found.texts for request in worst for piece in pieces(request))


def test_the_same_evaluation_is_read_and_another_is_refused(by_heart, prompts_file, registry, tmp_path, without_vllm):
    asked = settings(by_heart, prompts_file, simulate=True, max_prompts=2)
    first = evaluate(asked, registry, tmp_path / "out")
    assert len(first.prompts) == 2
    assert evaluate(asked, registry, tmp_path / "out") == first  # its time of day too
    with pytest.raises(FingerprintMismatch, match=r"settings\.max_tokens: 20 → 5"):
        evaluate(attrs.evolve(asked, max_tokens=5), registry, tmp_path / "out")
    anew = evaluate(attrs.evolve(asked, max_tokens=5), registry, tmp_path / "out", overwrite=True)
    assert anew.settings["max_tokens"] == 5


def test_what_another_stage_made_is_never_overwritten(by_heart, prompts_file, tmp_path, capsys):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(by_heart.folder, checkpoint)
    write_json_atomically(
        checkpoint / "stage.json",
        {"stage": "export", "complete": True, "fingerprint": {}, "summary": {}, "seconds": 0.0, "version": "0"},
    )
    command = ["evaluate", str(checkpoint), "--prompts", str(prompts_file), "--output", str(checkpoint), "--overwrite"]
    assert main(command) == 2
    assert "holds the output of the export stage" in capsys.readouterr().err
    assert (checkpoint / "model.safetensors").is_file()


@pytest.mark.parametrize("left", [None, "{"], ids=["lost", "damaged"])
def test_a_complete_evaluation_without_its_file_is_made_again(
    by_heart, prompts_file, registry, tmp_path, engines, left
):
    engines()
    asked = settings(by_heart, prompts_file, repetitions=1)
    first = evaluate(asked, registry, tmp_path / "out")
    (tmp_path / "out" / "evaluation.json").unlink()
    if left is not None:
        (tmp_path / "out" / "evaluation.json").write_text(left)
    assert evaluate(asked, registry, tmp_path / "out").methods == first.methods
    assert read_evaluation(tmp_path / "out").complete


def test_one_command_at_a_time_works_in_a_folder(by_heart, prompts_file, registry, tmp_path, engines):
    asked = settings(by_heart, prompts_file)
    engines(at_0=Stopped("by SIGINT", number=2))
    with pytest.raises(Stopped):
        evaluate(asked, registry, tmp_path / "out")
    engines()
    with sole_writer(tmp_path / "out"), pytest.raises(OutputError, match="another draftsmith command is at work"):
        evaluate(asked, registry, tmp_path / "out")
    assert evaluate(asked, registry, tmp_path / "out").complete


def test_the_command_prints_and_demands(by_heart, prompts_file, tmp_path, without_vllm, capsys):
    command = [
        "evaluate", str(by_heart.folder), "--prompts", str(prompts_file), "--max-tokens", str(ANSWER),
        "--dtype", "float32", "--simulate", "--repetitions", "1", "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    name = simulated_name(str(by_heart.folder))
    assert main([*command, "--show", "1", "--require", f"{name}: acceptance_length > 1"]) == 0
    shown = capsys.readouterr()
    assert "Acceptance length by category" in shown.out
    assert "the answers that gained least" in shown.out
    assert main([*command, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["schema"] == "draftsmith.evaluation"
    assert value["provenance"]["command"][0] == "draftsmith"
    assert main([*command, "--csv", "--require", "acceptance_length>=2"]) == 1
    shown = capsys.readouterr()
    assert "was not measured (vLLM is not installed)" in shown.err
    rows = list(csv.DictReader(io.StringIO(shown.out)))
    assert {row["category"] for row in rows if row["status"] == "simulated"} == {"all", *TOPICS}


# --- what cannot be asked for -----------------------------------------------------------------------------------


def test_without_vllm_it_says_what_to_install(by_heart, prompts_file, registry, tmp_path, without_vllm):
    with pytest.raises(ServingError, match="vLLM is not installed") as error:
        evaluate(settings(by_heart, prompts_file), registry, tmp_path / "out")
    assert "--simulate" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_no_vllm_serves(by_heart, prompts_file, registry, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_models, "speculative_methods", lambda: frozenset({"ngram"}))
    with pytest.raises(ServingError, match=r"does not know the method 'eagle3'; vLLM 0\.8\.5 and later do"):
        evaluate(settings(by_heart, prompts_file), registry, tmp_path / "out")


def test_a_vllm_that_cannot_sample_here(by_heart, prompts_file, registry, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "unsampled_here", lambda: "vLLM 1 cannot sample")
    with pytest.raises(ServingError, match="vLLM 1 cannot sample") as error:
        evaluate(settings(by_heart, prompts_file, temperature=0.7), registry, tmp_path / "out")
    assert error.value.hint is None
    monkeypatch.setattr(run_module, "run_engines", Engines({}))
    assert evaluate(settings(by_heart, prompts_file), registry, tmp_path / "greedy").complete


def test_keys_that_the_vllm_lacks(by_heart, exported, export_draft, tiny_verifier, registry, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_models, "speculative_keys", lambda: frozenset({"method", "model"}))
    parallel = export_draft(tmp_path / "parallel", tiny_verifier, algorithm="peagle")
    own, other = plan_methods(str(by_heart.folder), [str(parallel.folder)], registry)
    assert own.reason is None
    assert str(other.reason).endswith(
        "does not take parallel_drafting in its speculative_config; vLLM 0.16 and later do"
    )
    names = [str(exported.folder), "medusa:hub/name", "ngram"]
    sampling = plan_methods(str(by_heart.folder), names, registry, draft_sample_method="probabilistic")
    told = "does not take draft_sample_method in its speculative_config; vLLM 0.32 and later do"
    assert [told in str(each.reason) for each in sampling] == [True, True, True, False]


def test_a_verifier_that_is_not_there(by_heart, prompts_file, registry, tmp_path):
    with pytest.raises(VerifierError, match="no such verifier"):
        evaluate(settings(by_heart, prompts_file, verifier=str(tmp_path / "gone")), registry, tmp_path / "out")


def test_no_checkpoint(prompts_file, registry, tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        evaluate(Settings(checkpoint=str(tmp_path), prompts=(str(prompts_file),)), registry, tmp_path / "out")


def test_prompts_beyond_the_context(by_heart, prompts_file, registry, tmp_path):
    limit = read_verifier(by_heart.verifier).max_position_embeddings
    with pytest.raises(DataError, match="longer than the context"):
        evaluate(settings(by_heart, prompts_file, max_tokens=limit), registry, tmp_path / "out")
    with pytest.raises(DataError, match="no prompts are named"):
        evaluate(Settings(checkpoint=str(by_heart.folder), prompts=()), registry, tmp_path / "out")


def test_more_tokens_than_were_trained(by_heart, prompts_file, registry, tmp_path):
    trained = read_checkpoint(by_heart.folder, registry).trained
    with pytest.raises(UserError, match=f"{trained + 1} tokens a round are asked for, {trained} were trained"):
        evaluate(settings(by_heart, prompts_file, num_speculative_tokens=trained + 1), registry, tmp_path / "out")


def test_prompts_are_rendered_as_the_checkpoints_data_were(
    export_draft, tiny_verifier, prompts_file, registry, tmp_path, without_vllm
):
    noted = {"template_arguments": {"enable_thinking": False}}
    made = export_draft(tmp_path / "draft", tiny_verifier, notes=noted)
    plain = Settings(checkpoint=str(made.folder), prompts=(str(prompts_file),), simulate=True)
    tokenizer = load_tokenizer(tiny_verifier)
    for given, wanted in (({}, False), ({"enable_thinking": True}, True)):
        job = run_module._prepare(attrs.evolve(plain, template_arguments=given), registry, tmp_path / "out")
        assert job.settings.template_arguments == {"enable_thinking": wanted}
        for prompt, ids in zip(job.prompts, job.token_ids, strict=True):
            assert list(ids) == render_prompt(tokenizer, list(prompt.messages), {"enable_thinking": wanted})
            assert list(ids) != render_prompt(tokenizer, list(prompt.messages), {"enable_thinking": not wanted})


def test_a_simulation_of_sampling(by_heart, prompts_file, registry, tmp_path):
    with pytest.raises(UserError, match="greedy answers only"):
        evaluate(settings(by_heart, prompts_file, simulate=True, temperature=0.7), registry, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json", "--csv"], "exclude each other"),
        (["--repetitions", "0"], "0 is not at least 1"),
        (["--top-p", "1.5"], "not between"),
        (["--require", "length>2"], "no figure 'length'"),
        (["--against", "none,ngram", "--require", "ngarm: speed_up>1"], "did you mean 'ngram'"),
        (["--engine", "block_size"], "write --engine KEY=VALUE"),
        (["--engine", "block_size=[1"], "the value is no YAML"),
        (["--template", "thinking=true"], "takes no such argument"),
    ],
)
def test_options_that_make_no_sense(by_heart, prompts_file, options, message, capsys):
    command = ["evaluate", str(by_heart.folder), "--prompts", str(prompts_file), "--simulate"]
    assert main([*command, *options]) == 2
    assert message in capsys.readouterr().err


# --- methods ----------------------------------------------------------------------------------------------------


def test_names_are_split_and_kept_once():
    assert split_names(["none, ngram", "suffix,ngram", ""]) == ["none", "ngram", "suffix"]


def test_each_method_becomes_what_vllm_is_given(by_heart, exported, registry, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "arctic_inference" else find_spec(name, *rest)
    )
    other, small = str(exported.folder), tmp_path / "small"
    small.mkdir()
    names = [
        "ngram",
        "none",
        other,
        f"draft_model:{small}",
        "suffix",
        "ngarm",
        "medusa:hub/name",
        str(by_heart.folder),
    ]
    plans = plan_methods(
        str(by_heart.folder), names, registry, num_speculative_tokens=2, draft_sample_method="probabilistic"
    )
    assert [each.name for each in plans] == [
        "none", str(by_heart.folder), "ngram", other, f"draft_model:{small}", "suffix", "ngarm", "medusa:hub/name",
    ]  # fmt: skip
    found = {each.name: each for each in plans}
    assert found["none"].speculative_config is None
    assert found["ngram"].speculative_config == {"method": "ngram", "num_speculative_tokens": 2}
    assert found[other].speculative_config == {
        "method": "eagle3", "model": other, "num_speculative_tokens": 2, "draft_sample_method": "probabilistic",
    }  # fmt: skip
    assert found[f"draft_model:{small}"].speculative_config["model"] == str(small)
    assert found["medusa:hub/name"].speculative_config["model"] == "hub/name"
    assert found["suffix"].reason == "vLLM needs arctic-inference==0.1.1 for it, which is not installed"
    assert "did you mean 'ngram'" in found["ngarm"].reason
    assert found[other].reason is None


def test_suffixes_need_a_version_that_has_them(by_heart, registry, tmp_path, monkeypatch):
    package = tmp_path / "arctic_inference"
    package.mkdir()
    (package / "__init__.py").touch()
    find_spec = importlib.util.find_spec
    spec = importlib.util.spec_from_file_location(
        "arctic_inference", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: spec if name == "arctic_inference" else find_spec(name, *rest)
    )
    for reason in ("vLLM needs arctic-inference==0.1.1 for it, which is not installed", None):
        _, suffix = plan_methods(str(by_heart.folder), ["suffix"], registry)
        assert suffix.reason == reason
        (package / "suffix_decoding").mkdir(exist_ok=True)


def test_methods_have_options_of_their_own(by_heart, registry):
    names = [
        "ngram:prompt_lookup_max=4:prompt_lookup_min=2",
        "ngram:num_speculative_tokens=5",
        "medusa:hub/name:quantization=fp8",
    ]
    _, first, second, third = plan_methods(str(by_heart.folder), names, registry)
    assert first.name == names[0]
    assert first.speculative_config == {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    }  # fmt: skip
    assert second.num_speculative_tokens == 5
    assert third.speculative_config["model"] == "hub/name"
    assert third.speculative_config["quantization"] == "fp8"
    demand = parse_requirement(f"{names[0]}: speed_up > 1")
    assert (demand.method, demand.figure, demand.value) == (names[0], "speed_up", 1.0)
    with pytest.raises(UserError, match="has no option 'prompt_lookup_maxx'"):
        plan_methods(str(by_heart.folder), ["ngram:prompt_lookup_maxx=4"], registry)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("draft_model", "draft_model needs a model"),
        ("draft_model:./gone", "there is no such model"),
        ("some/folder", "is no draft's folder"),
    ],
)
def test_methods_that_cannot_be_meant(by_heart, registry, name, message):
    with pytest.raises(UserError, match=message):
        plan_methods(str(by_heart.folder), [name], registry)


# --- a course of events that no engine plays on demand ----------------------------------------------------------


def answered(request, prompts: int) -> EngineResult:
    """What an engine would say: two tokens a prompt, and one round of a draft."""
    drafts = "speculative_config" in request.engine
    return EngineResult(
        name=request.name,
        outputs=((5, 6),) * prompts,
        finish_reasons=("length",) * prompts,
        counters=DraftCounters.of_rounds([(3, 1)] * prompts, 3) if drafts else None,
        rounds=(((3, 1),),) * prompts if drafts else (),
        times=((0.1, 0.2),) * prompts,
        generate_seconds=0.5 if drafts else 1.0,
    )


class Engines:
    """Stands in for vLLM; *events* say what becomes of each start, by its number."""

    def __init__(self, events):
        self.events, self.started = dict(events), []

    def __call__(self, requests, folder, *, required=None, progress=None):
        (request,) = requests
        self.started.append(request.name)
        event = self.events.get(len(self.started) - 1)
        if event is not None:
            raise event
        return {request.name: answered(request, len(request.prompts))}


@pytest.fixture
def engines(monkeypatch):
    def install(**events):
        stand_in = Engines({int(name.removeprefix("at_")): event for name, event in events.items()})
        monkeypatch.setattr(run_module, "run_engines", stand_in)
        return stand_in

    return install


def test_methods_are_measured_in_turn(by_heart, prompts_file, registry, tmp_path, engines):
    started = engines().started
    found = evaluate(
        settings(by_heart, prompts_file, repetitions=2, against=("none", "ngram")), registry, tmp_path / "out"
    )
    assert started == ["method-0-0", "method-1-0", "method-2-0", "method-0-1", "method-1-1", "method-2-1"]
    assert found.complete
    assert figures(found.methods[1], found.method("none"))["speed_up"].median == 2.0
    assert found.methods[1].losslessness.lossless
    assert [bool(each.requests[0].output) for each in found.methods[0].repetitions] == [True, False]


def test_a_method_that_fails_keeps_its_row_and_the_others_go_on(by_heart, prompts_file, registry, tmp_path, engines):
    stand_in = engines(at_2=ServingError("vLLM failed (engine: method-2-0): no such head\n    log"))
    found = evaluate(
        settings(by_heart, prompts_file, repetitions=2, against=("none", "ngram")), registry, tmp_path / "out"
    )
    assert stand_in.started[2:] == ["method-2-0", "method-0-1", "method-1-1"]
    failed = found.method("ngram")
    assert (failed.status, failed.reason) == ("unavailable", "vLLM failed (engine: method-2-0): no such head")
    assert [each.status for each in found.methods] == ["measured", "measured", "unavailable"]


def test_one_whose_engine_is_killed_at_once_is_incomplete(by_heart, prompts_file, tmp_path, engines, capsys):
    engines(at_2=EngineDied("vLLM failed (engine: method-2-0): ended by signal 9 (out of memory?)\n    log"))
    command = [
        "evaluate", str(by_heart.folder), "--prompts", str(prompts_file), "--against", "none,ngram",
        "--repetitions", "2", "--max-tokens", "2", "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    assert main(command) == 1
    found = read_evaluation(tmp_path / "out")
    failed = found.method("ngram")
    assert (failed.status, failed.repetitions) == ("incomplete", ())
    assert failed.reason.startswith("0 of 2 repetitions; its engine died: vLLM failed (engine: method-2-0): ended by")
    assert "ngram: incomplete: 0 of 2 repetitions" in " ".join(capsys.readouterr().out.split())
    engines()
    assert main(command) == 0


def test_one_that_fails_later_is_incomplete(by_heart, prompts_file, registry, tmp_path, engines):
    engines(at_3=ServingError("vLLM failed (engine: method-1-1): ended by signal 9 (out of memory?)"))
    asked = settings(by_heart, prompts_file, repetitions=2)
    found = evaluate(asked, registry, tmp_path / "out")
    failed = found.methods[1]
    assert failed.status == "incomplete"
    assert failed.reason.startswith("1 of 2 repetitions; vLLM failed")
    assert not found.complete
    # The folder is not taken for a complete one: the same command goes on.
    engines()
    assert evaluate(asked, registry, tmp_path / "out").complete


@pytest.mark.parametrize("start", [0, 1], ids=["baseline", "checkpoint"])
def test_without_the_checkpoint_or_the_baseline_it_is_incomplete(by_heart, prompts_file, tmp_path, engines, start):
    engines(**{f"at_{start}": ServingError("vLLM failed (engine: method): ended by signal 9 (out of memory?)")})
    command = [
        "evaluate", str(by_heart.folder), "--prompts", str(prompts_file), "--repetitions", "1", "--max-tokens", "2",
        "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    assert main(command) == 1
    found = read_evaluation(tmp_path / "out")
    assert not found.complete
    assert (found.methods[start].status, found.methods[1 - start].status) == ("unavailable", "measured")
    engines()  # whatever it was has passed: the same command tries again
    assert main(command) == 0
    assert read_evaluation(tmp_path / "out").complete


def test_what_was_measured_before_a_kill_is_kept(by_heart, prompts_file, registry, tmp_path, engines):
    engines(at_1=Stopped("by SIGTERM", number=15))
    with pytest.raises(Stopped):
        evaluate(settings(by_heart, prompts_file, repetitions=2), registry, tmp_path / "out")
    kept = read_evaluation(tmp_path / "out")
    assert not kept.complete
    assert [each.status for each in kept.methods] == ["incomplete", "incomplete"]
    assert kept.methods[0].reason == "1 of 2 repetitions"
    assert kept.methods[0].repetitions[0].tokens == 16


# --- running servers --------------------------------------------------------------------------------------------


def test_running_servers_are_measured_in_turn(by_heart, prompts_file, tmp_path, capsys):
    drafting, plain = AnsweringServer(), AnsweringServer(drafts=False)
    with served(drafting.metrics, drafting.post) as here, served(plain.metrics, plain.post) as there:
        command = [
            "evaluate", str(by_heart.folder), "--prompts", str(prompts_file), "--repetitions", "2",
            "--max-tokens", "2", "--output", str(tmp_path / "out"), "--server", here, "--server", f"none={there}",
        ]  # fmt: skip
        assert main(command) == 0
    found = read_evaluation(tmp_path / "out")
    none, draft = found.methods
    assert (none.name, draft.name, draft.num_speculative_tokens) == ("none", str(by_heart.folder), 3)
    assert counters_of(draft) == DraftCounters.of_rounds([(3, 2)] * 16, 3)
    assert draft.losslessness.identical == 8
    assert figures(draft, none)["speed_up"].count == 2
    assert len(drafting.bodies) == 2 * (8 + 2)
    assert found.provenance["checkpoints"]


def test_acceptance_by_category_from_a_server_that_tells_rounds(by_heart, prompts_file, registry, tmp_path):
    server = AnsweringServer(rounds=True)
    with served(server.metrics, server.post) as address:
        asked = settings(by_heart, prompts_file, servers={str(by_heart.folder): address}, max_tokens=2)
        found = evaluate(asked, registry, tmp_path / "out")
    (draft,) = found.methods
    for topic in TOPICS:
        assert counters_of(draft, found.of_category(topic)) == DraftCounters.of_rounds([(3, 2)] * 4, 3)
    rows = csv.DictReader(io.StringIO((tmp_path / "out" / "evaluation.csv").read_text()))
    assert [row["category"] for row in rows if row["acceptance_length"]] == ["all", *TOPICS]
    assert "By category" in build_report([tmp_path / "out"])


def test_a_server_answers_later_turns(by_heart, conversations_file, registry, tmp_path):
    drafting, plain = AnsweringServer(), AnsweringServer(drafts=False)
    with served(drafting.metrics, drafting.post) as here, served(plain.metrics, plain.post) as there:
        servers = {str(by_heart.folder): here, "none": there}
        asked = settings(by_heart, conversations_file, servers=servers, max_tokens=2, warm_up=0, concurrency=1)
        found = evaluate(asked, registry, tmp_path / "out")
    assert [each.turn for each in found.prompts] == [1, 2, 3, 1]
    # The baseline's server says what comes between: the first turn, and then the second.
    assert [len(each.bodies) for each in (plain, drafting)] == [2 + 4, 4]
    prompts = [body["prompt"] for body in drafting.bodies]
    assert [len(prompt) for prompt in prompts] == [each.tokens for each in found.prompts]
    answers = [each.output for each in found.method("none").repetitions[0].requests]
    tokenizer, turns = load_tokenizer(by_heart.verifier), ["Name colour 1.", "Another.", "One more."]
    assert prompts[2] == list(rendered(tokenizer, turns, answers[:2]))

    dying = AnsweringServer(dies_at=0)
    with served(dying.metrics, dying.post) as address, pytest.raises(ServingError, match="the server went away"):
        evaluate(attrs.evolve(asked, servers={str(by_heart.folder): address}), registry, tmp_path / "dead")


def test_a_server_that_dies_in_the_middle_leaves_what_was_measured(by_heart, prompts_file, tmp_path, capsys):
    dying = AnsweringServer(dies_at=13)  # with a warm-up of two: in the second repetition, after one answer of it
    with served(dying.metrics, dying.post) as address:
        command = [
            "evaluate", str(by_heart.folder), "--prompts", str(prompts_file), "--repetitions", "2",
            "--max-tokens", "2", "--output", str(tmp_path / "out"), "--server", address, "--concurrency", "1",
        ]  # fmt: skip
        assert main(command) == 1
    shown = capsys.readouterr()
    assert "1 of 2 repetitions; the server went away" in shown.out
    found = read_evaluation(tmp_path / "out")
    assert not found.complete
    (draft,) = found.methods
    assert draft.status == "incomplete"
    assert [each.complete for each in draft.repetitions] == [True, False]
    assert [len(each.requests) for each in draft.repetitions] == [8, 1]
    assert counters_of(draft) == DraftCounters.of_rounds([(3, 2)] * 8, 3)
    assert figures(draft, None)["tokens_per_second"].count == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--server", "none=http://127.0.0.1:9"], "no server of the checkpoint"),
        (["--server", "http://127.0.0.1:9", "--server", "http://127.0.0.1:8"], "two servers of"),
        (["--server", "http://127.0.0.1:9", "--against", "ngram"], "a running server has its own"),
        (["--server", "http://127.0.0.1:9", "--simulate"], "no states to simulate with"),
        (["--server", "ftp://127.0.0.1"], "no address of a server"),
    ],
)
def test_servers_that_make_no_sense(by_heart, prompts_file, tmp_path, options, message, capsys):
    command = ["evaluate", str(by_heart.folder), "--prompts", str(prompts_file), "--output", str(tmp_path / "out")]
    assert main([*command, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_server(by_heart, prompts_file, registry, tmp_path, capsys):
    """What `draftsmith serve` starts is measured, and watched."""
    command = serve_command(by_heart.folder, registry).command
    options = command[command.index("--speculative-config") :]
    with real_server(by_heart, tmp_path / "log", options, "--per-request-spec-decode-metrics", "detailed") as address:
        asked = settings(
            by_heart, prompts_file, concurrency=4, servers={str(by_heart.folder): address}, warm_up=1, repetitions=2
        )
        found = evaluate(asked, registry, tmp_path / "out")
        assert main(["watch", address, "--once", "--every", "0.1"]) == 0
    assert "nothing was drafted" in capsys.readouterr().out
    (draft,) = found.methods
    assert found.complete
    counters = counters_of(draft)
    assert figures(draft, None)["acceptance_length"] > 1.5
    # The counters of a server against the answers: each round yields what it accepted and one more, the prefill one; a
    # last round may go beyond the end.
    for repetition in draft.repetitions:
        tokens = sum(request.times.tokens for request in repetition.requests)
        counted = len(repetition.requests) + repetition.counters.drafts + repetition.counters.accepted
        assert tokens <= counted <= tokens + 3 * len(repetition.requests)
    assert counters.drafted == 3 * counters.drafts
    # What it tells of each request is what its counters hold.
    assert counters_of(draft, found.of_category(None)) == counters
    assert all(covered(each) for repetition in draft.repetitions for each in repetition.requests)
    assert [len(each.output) for each in draft.repetitions[0].requests] == [ANSWER] * 8


@contextlib.contextmanager
def real_server(by_heart, log: Path, options, *further):
    """A vLLM server of the draft, with the options that `draftsmith serve` has for it."""
    arguments = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--max-num-seqs", "4", *further]
    with running_server(by_heart.verifier, *options, *arguments, log=log) as address:
        yield address


def kill_server(address: str) -> None:
    """With all of its processes, and no time to say good-bye."""
    port = address.rpartition(":")[2]
    (server,) = (
        each
        for each in psutil.Process().children()
        if "vllm.entrypoints.openai.api_server" in each.cmdline() and port in each.cmdline()
    )
    for process in [*server.children(recursive=True), server]:
        process.send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_server_that_is_killed_in_the_middle(by_heart, prompts_file, registry, tmp_path, capsys):
    """Before that: two evaluations of it agree, and it samples."""
    command = serve_command(by_heart.folder, registry).command
    options = command[command.index("--speculative-config") :]
    with real_server(by_heart, tmp_path / "log", options, "--no-enable-prefix-caching") as address:
        asked = settings(by_heart, prompts_file, concurrency=4, servers={str(by_heart.folder): address}, repetitions=2)
        once, twice = (evaluate(asked, registry, tmp_path / name).methods[0] for name in ("once", "twice"))
        lengths = [figures(each, None)["acceptance_length_spread"] for each in (once, twice)]
        assert agree(*lengths)
        # Greedy answers are the same ones, so that all counts are.
        assert counters_of(once) == counters_of(twice)
        outputs = [[request.output for request in each.repetitions[0].requests] for each in (once, twice)]
        assert outputs[0] == outputs[1]

        sampling = attrs.evolve(asked, temperature=1.5, top_p=0.9, seed=3, repetitions=1)
        (sampled,) = evaluate(sampling, registry, tmp_path / "sampled").methods
        assert sampled.status == "measured"
        assert sampled.losslessness is None
        assert [request.output for request in sampled.repetitions[0].requests] != outputs[0]
        # A draft that knows the greedy answers by heart gains less from others.
        assert 1 <= figures(sampled, None)["acceptance_length"] < lengths[0].median

        file, over = tmp_path / "killed" / "evaluation.json", threading.Event()

        def kill_in_the_second_repetition() -> None:
            while not (file.is_file() or over.wait(0.01)):
                pass
            before = read_metrics(address).generated
            while not over.wait(0.01) and read_metrics(address).generated < before + 250:
                pass
            kill_server(address)

        killer = threading.Thread(target=kill_in_the_second_repetition)
        killer.start()
        try:
            code = main([
                "evaluate", str(by_heart.folder), "--prompts", str(prompts_file), "--repetitions", "2",
                "--warm-up", "0", "--max-tokens", "150", "--concurrency", "1", "--server", address,
                "--output", str(file.parent),
            ])  # fmt: skip
        finally:
            over.set()
            killer.join()
    assert code == 1
    assert "1 of 2 repetitions; the server went away" in capsys.readouterr().out
    found = read_evaluation(file.parent)
    assert not found.complete
    (draft,) = found.methods
    assert (draft.status, [each.complete for each in draft.repetitions]) == ("incomplete", [True, False])
    whole, cut = draft.repetitions
    assert len(whole.requests) == 8
    assert 1 <= len(cut.requests) < 8
    # Answers that were complete are whole, and nothing is counted of the rest.
    for request in cut.requests:
        assert request.times.tokens == whole.requests[request.prompt].times.tokens
    assert cut.counters is None
    assert counters_of(draft) == whole.counters
    assert figures(draft, None)["tokens_per_second"].count == 1


# --- sweeps -----------------------------------------------------------------------------------------------------

#: What a draft of K tokens gains with so many requests at once.
GAINS = {(1, 1): 1.5, (2, 1): 2.0, (3, 1): 2.5, (1, 4): 1.2, (2, 4): 1.25, (3, 4): 1.1, (1, 16): 0.8, (2, 16): 0.6,
         (3, 16): 0.5}  # fmt: skip


def swept(requests, folder, *, required=None, progress=None):
    (request,) = requests
    config = request.engine.get("speculative_config")
    gain = GAINS[config["num_speculative_tokens"], request.engine["max_num_seqs"]] if config else 1.0
    found = answered(request, len(request.prompts))
    # The second repetition of four requests differs by more than one and two tokens do.
    wobble = 0.9 if request.name.endswith("-1") and request.engine["max_num_seqs"] == 4 and config else 1.0
    return {request.name: attrs.evolve(found, generate_seconds=1.0 / (gain * wobble))}


def test_a_sweep_finds_the_tokens_for_each_load(by_heart, prompts_file, tmp_path, monkeypatch, capsys, registry):
    monkeypatch.setattr(run_module, "run_engines", swept)
    command = [
        "evaluate", str(by_heart.folder), "--prompts", str(prompts_file), "--repetitions", "2", "--max-tokens", "2",
        "--output", str(tmp_path / "out"), "--sweep", "tokens=1..3", "--sweep", "concurrency=1,4,16",
    ]  # fmt: skip
    assert main(command) == 0
    shown = capsys.readouterr().out
    # Of one request three tokens, of four the least that is as fast, of sixteen none.
    assert "1 to 1 requests: 3 tokens a round" in shown
    assert "2 to 4 requests: 1 tokens a round" in shown
    assert "5 to more requests: no draft" in shown
    sweep = read_sweep(tmp_path / "out" / "sweep.json")
    assert sweep.complete
    assert [(each.tokens, each.concurrency) for each in sweep.points] == [
        (tokens, load) for load in (1, 4, 16) for tokens in (1, 2, 3)
    ]
    assert sweep.points[2].speed_up.median == 2.5
    assert read_plan(tmp_path / "out" / "plan.json", 3) == list(sweep.plan)
    found = serve_command(by_heart.folder, registry, plan=tmp_path / "out" / "plan.json")
    assert [step.tokens for step in found.schedule] == [3, 1, 0]
    assert len(read_evaluation(tmp_path / "out" / "concurrency-4").methods) == 4
    page = build_report([tmp_path / "out"])
    assert page.count("<polyline") == 3  # a line for each number of tokens
    assert page.count("<circle") == 9
    assert "3 tokens a round: requests at once 1, × none 2.5" in page
    assert "<li>5 to more requests: no draft</li>" in page
    (tmp_path / "out" / "sweep.json").write_text('{"schema": "draftsmith.sweep", "version": 2}')
    with pytest.raises(DataError, match="cannot be read as a sweep"):
        build_report([tmp_path / "out"])


def test_a_sweep_that_measures_nothing_makes_no_plan(by_heart, prompts_file, tmp_path, engines, capsys):
    engines(at_1=ServingError("vLLM failed (engine: method-1-0): no"))
    command = [
        "evaluate", str(by_heart.folder), "--prompts", str(prompts_file), "--repetitions", "1", "--max-tokens", "2",
        "--output", str(tmp_path / "out"), "--sweep", "tokens=2",
    ]  # fmt: skip
    assert main(command) == 1
    assert "K=2: vLLM failed" in capsys.readouterr().out
    assert not (tmp_path / "out" / "plan.json").exists()


def test_sweeps_are_read():
    assert parse_sweep(["tokens=1..3,8", "concurrency=4,1,4"]) == {"tokens": (1, 2, 3, 8), "concurrency": (1, 4)}
    for text in ("tokens", "layers=1", "tokens=", "tokens=0..2", "tokens=3..1", "tokens=a", "tokens=1..99999999999"):
        with pytest.raises(UserError, match="sweep"):
            parse_sweep([text])
    with pytest.raises(UserError, match="swept twice"):
        parse_sweep(["tokens=1", "tokens=2"])


def test_what_a_sweep_cannot_have(by_heart, prompts_file, tmp_path, capsys):
    command = ["evaluate", str(by_heart.folder), "--prompts", str(prompts_file), "--output", str(tmp_path / "out")]
    for further, message in (
        (["--sweep", "tokens=1", "--json"], "a sweep has no such thing"),
        (["--sweep", "tokens=1", "--simulate"], "no simulator has"),
        (["--sweep", "tokens=1..9"], "4 tokens a round are asked for, 3 were trained"),
    ):
        assert main([*command, *further]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_plan_covers_all_loads_and_joins_equal_steps():
    def point(tokens, load, median):
        gained = Spread(median=median, low=median, high=median, count=1)
        return Point(tokens=tokens, concurrency=load, acceptance_length=2.0, tokens_per_second=None, speed_up=gained)

    points = [point(2, 1, 2.0), point(2, 4, 1.5), point(2, 16, 1.0), point(2, 64, 0.5)]
    assert plan_of(points) == [Step(1, 4, 2), Step(5, NO_END, 0)]
    assert plan_of(points[:1]) == [Step(1, NO_END, 2)]
    assert plan_of([]) == []


# --- a real vLLM ------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.vllm
def test_in_a_real_vllm(by_heart, export_draft, prompts_file, registry, tmp_path):
    asked = settings(by_heart, prompts_file, against=("none", "ngram", "draft_model:/nowhere/at/all"), simulate=True)
    with pytest.raises(UserError, match="no such model"):
        evaluate(asked, registry, tmp_path / "out")
    broken = tmp_path / "broken"
    broken.mkdir()
    parallel = export_draft(tmp_path / "peagle", by_heart.verifier, algorithm="peagle")
    asked = attrs.evolve(asked, against=("none", "ngram", str(parallel.folder), f"draft_model:{broken}"))
    found = evaluate(asked, registry, tmp_path / "out")
    none, served, ngram, other, failed, simulated = found.methods
    assert found.complete
    assert other.status == "measured"
    assert other.losslessness.identical == 8
    assert (failed.status, simulated.status) == ("unavailable", "simulated")
    assert "vLLM failed" in failed.reason
    # vLLM's counters against its own account of each request's rounds, and against the length of the answers.
    for method in (served, ngram, other):
        assert counters_of(method) == counters_of(method, found.of_category(None))
        for request in method.repetitions[0].requests:
            gained = 1 + sum(each.accepted + 1 for each in request.rounds)
            last = request.rounds[-1].accepted + 1 if request.rounds else 0
            assert gained - last <= len(request.output)
            # N-grams draft nothing in some steps, which are no rounds; the checkpoint drafts in each.
            assert method is ngram or len(request.output) <= gained
    assert [covered(each) for each in served.repetitions[0].requests] == [True] * 8
    assert largest_relative_gap(counters_of(served), counters_of(simulated), at_least=0.05) <= 0.03
    assert served.losslessness.identical == 8
    assert figures(served, none)["acceptance_length"] > 1.5
    assert figures(served, none)["speed_up"].count == 1
    for method in (none, served, ngram):
        (made,) = method.repetitions
        spent = made.verify_seconds + (made.draft_seconds or 0.0)
        assert (made.draft_seconds is None) == (method is none)
        assert 0.2 * made.seconds < spent <= made.seconds
    # A head with a forward pass for each token costs more than looking a sequence up.
    assert figures(served, none)["drafting_share"].median > figures(ngram, none)["drafting_share"].median > 0
    times = [request.times for request in served.repetitions[0].requests]
    assert all(0 < each.first_token < each.last_token for each in times)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(tmp_path / "out" / "vllm")
    assert evaluate(asked, registry, tmp_path / "out") == found


@pytest.mark.slow
@pytest.mark.vllm
def test_a_sweep_in_a_real_vllm(by_heart, prompts_file, registry, tmp_path, capsys):
    """Which number of tokens is best here is not known; that the plan follows from what was measured is."""
    folder = tmp_path / "out"
    command = [
        "evaluate", str(by_heart.folder), "--prompts", str(prompts_file), "--max-prompts", "4", "--dtype", "float32",
        "--max-tokens", str(ANSWER), "--repetitions", "1", "--warm-up", "0", "--output", str(folder),
        "--sweep", "tokens=1,3", "--sweep", "concurrency=2",
    ]  # fmt: skip
    assert main(command) == 0
    assert "Speed-up over no draft" in capsys.readouterr().out
    sweep, found = read_sweep(folder / "sweep.json"), read_evaluation(folder / "concurrency-2")
    assert sweep.complete
    assert [(each.tokens, each.concurrency, each.reason) for each in sweep.points] == [(1, 2, None), (3, 2, None)]
    none, *drafts = found.methods
    for method, point in zip(drafts, sweep.points, strict=True):
        counted = counters_of(method)
        assert counted.drafted == point.tokens * counted.drafts
        assert point.speed_up == figures(method, none)["speed_up"]
        assert method.losslessness.identical == 4
    one, three = (point.acceptance_length for point in sweep.points)
    assert 1 < one <= 2 < three <= 4
    gained = {point.tokens: point.speed_up.median for point in sweep.points}
    fastest = max(gained, key=gained.get)
    best = fastest if gained[fastest] > 1 else 0
    assert sweep.plan == (Step(1, NO_END, best),)
    assert serve_command(by_heart.folder, registry, plan=folder / "plan.json").schedule == sweep.plan


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("draft_sample_method", ["greedy", "probabilistic"])
def test_a_real_vllm_samples(by_heart, prompts_file, registry, tmp_path, monkeypatch, draft_sample_method):
    """Each repetition from the seed anew. Without a GPU, vLLM's own kernels run in Triton's interpreter: those that it
    has for CPUs cannot sample. What V2 samples with, and the kernel of top-p, the interpreter does not run."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    for name, value in v2_environment().items():
        monkeypatch.setenv(name, value)
        monkeypatch.syspath_prepend(value.split(os.pathsep)[0])
    asked = settings(
        by_heart, prompts_file, against=(), max_prompts=3, max_tokens=8, repetitions=2, warm_up=0,
        temperature=0.8, seed=3, draft_sample_method=draft_sample_method,
    )  # fmt: skip
    found = evaluate(asked, registry, tmp_path / "out")
    (method,) = found.methods
    assert (method.status, method.losslessness) == ("measured", None)
    assert method.speculative_config["draft_sample_method"] == draft_sample_method
    one, other = [json.loads(path.read_text()) for path in (tmp_path / "out" / "vllm").glob("method-0-*.json")]
    assert one["outputs"] == other["outputs"]
    assert one["outputs"] != [list(answer[:8]) for answer in by_heart.answers[:3]]
    assert one["counters"] == other["counters"]
    assert one["counters"]["drafted"] > 0
