"""Answers written by the verifier: real generation, resumption by content, cut answers, tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen

from draftsmith.api import VerifierFacts
from draftsmith.config.schema import CaptureConfig, DataConfig, GenerationConfig, NamedConfig, Recipe
from draftsmith.data.conversations import Conversation, Rejection
from draftsmith.data.dataset import open_prepared
from draftsmith.data.generators import Answer, AnswerRequest, Generator, Sampling, TransformersGenerator, VllmGenerator
from draftsmith.data.prepare import run_prepare
from draftsmith.data.regenerate import Answered, AnswerStore, RegenerationPlan, answer_key, regenerate
from draftsmith.data.template import load_tokenizer, render_prompt
from draftsmith.errors import DataError
from draftsmith.stages import RunFolders
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.verifier import read_verifier


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def conversation(*messages: dict[str, Any], line: int = 1) -> Conversation:
    return Conversation(messages=messages, tools=None, source="s", line=line, raw={"line": line})


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> VerifierFacts:
    return read_verifier(make_tiny_verifier(tmp_path_factory.mktemp("verifiers") / "llama", "llama"))


@pytest.fixture(scope="module")
def tokenizer(verifier: VerifierFacts) -> Any:
    return load_tokenizer(verifier.path)


@pytest.fixture
def plan(verifier: VerifierFacts) -> RegenerationPlan:
    return RegenerationPlan(verifier=verifier.fingerprint, sampling=Sampling(), max_tokens=12, max_length=256)


GREEDY = Sampling()


def transformers_engine(
    verifier: VerifierFacts, tokenizer: Any, sampling: Sampling = GREEDY, batch_size: int = 4
) -> TransformersGenerator:
    return TransformersGenerator(
        verifier, tokenizer, sampling, batch_size=batch_size, dtype="float32", trust_remote_code=False
    )


class Scripted(Generator):
    """Answers by a rule, counts what it was asked, and dies after a number of answers like a killed process."""

    name = "scripted"

    def __init__(self, rule: Callable[[AnswerRequest], tuple[Sequence[int], str]], dies_after: int = 10**9) -> None:
        self.rule = rule
        self.dies_after = dies_after
        self.asked: list[str] = []

    def generate(self, requests: Sequence[AnswerRequest]) -> Iterator[Answer]:
        for request in requests:
            if len(self.asked) >= self.dies_after:
                raise KeyboardInterrupt
            self.asked.append(request.key)
            tokens, reason = self.rule(request)
            yield Answer(key=request.key, token_ids=tuple(tokens), finish_reason=reason)


def stops(tokenizer: Any, text: str = "Yes.") -> Callable[[AnswerRequest], tuple[list[int], str]]:
    ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return lambda request: (ids, "stop")


def run_rounds(
    conversations: Sequence[Conversation], tokenizer: Any, plan: RegenerationPlan, path: Path, engine: Generator
) -> list[Answered | Rejection]:
    with AnswerStore(path) as store:
        return list(regenerate(conversations, tokenizer, {}, plan, store, lambda: engine))


# --- rounds -----------------------------------------------------------------------------------------------------


def test_later_turns_follow_the_answers_that_were_given(
    tokenizer: Any, plan: RegenerationPlan, tmp_path: Path
) -> None:
    two = conversation(user("Hi"), {"role": "assistant", "content": "old"}, user("And?"))
    (answered,) = run_rounds([two], tokenizer, plan, tmp_path / "a.jsonl", Scripted(stops(tokenizer)))
    assert isinstance(answered, Answered)
    assert [each["content"] for each in answered.messages] == ["Hi", "Yes.", "And?", "Yes."]
    assert answered.answers == 2
    (row,) = answered.rows
    prompt = render_prompt(tokenizer, answered.messages[:3])
    assert row.token_ids[: len(prompt)] == prompt
    kept = [token for token, wanted in zip(row.token_ids, row.loss_mask, strict=True) if wanted]
    assert tokenizer.decode(kept) == "Yes.<|im_end|>Yes.<|im_end|>"


def test_tool_calls_and_their_results_stay_and_are_not_supervised(
    tokenizer: Any, plan: RegenerationPlan, tmp_path: Path
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    tools = conversation(
        user("2+2?"),
        {"role": "assistant", "content": "calling", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "old"},
    )
    (answered,) = run_rounds([tools], tokenizer, plan, tmp_path / "a.jsonl", Scripted(stops(tokenizer)))
    assert isinstance(answered, Answered)
    assert [each["content"] for each in answered.messages] == ["2+2?", "calling", "4", "Yes."]
    kept = [t for t, wanted in zip(answered.rows[0].token_ids, answered.rows[0].loss_mask, strict=True) if wanted]
    assert tokenizer.decode(kept) == "Yes.<|im_end|>"


def test_what_cannot_be_answered_has_a_reason(tokenizer: Any, plan: RegenerationPlan, tmp_path: Path) -> None:
    found = run_rounds(
        [
            conversation({"role": "system", "content": "Be brief."}, line=1),
            conversation(user("word " * 300), line=2),
            conversation(user("Hi"), line=3),
        ],
        tokenizer,
        plan,
        tmp_path / "a.jsonl",
        Scripted(lambda request: ([2], "stop")),
    )
    assert [each.reason for each in found if isinstance(each, Rejection)] == [
        "no_question",
        "prompt_too_long",
        "empty_answer",
    ]
    assert [each.line for each in found if isinstance(each, Rejection)] == [1, 2, 3]


def test_cut_answers_are_dropped_or_kept_without_an_end(
    tokenizer: Any, plan: RegenerationPlan, tmp_path: Path
) -> None:
    ids = tokenizer("and so on", add_special_tokens=False)["input_ids"]
    engine = Scripted(lambda request: (ids, "length"))
    two = conversation(user("Hi"), {"role": "assistant", "content": "old"}, user("And?"))
    (dropped,) = run_rounds([two], tokenizer, plan, tmp_path / "a.jsonl", engine)
    assert isinstance(dropped, Rejection)
    assert dropped.reason == "cut_answer"
    keeping = evolve(plan, keep_cut_answers=True)
    (kept,) = run_rounds([two], tokenizer, keeping, tmp_path / "a.jsonl", engine)
    assert isinstance(kept, Answered)
    assert (kept.cut_turns, kept.answers) == (1, 1)  # nothing is asked after a cut answer
    assert kept.rows[0].token_ids[-len(ids) :] == ids
    assert len(engine.asked) == 1  # the second run took the stored answer


# --- the store --------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_and_repeats_nothing(tokenizer: Any, plan: RegenerationPlan, tmp_path: Path) -> None:
    rows = [conversation(user(f"Question {n}"), line=n) for n in range(10)]
    path = tmp_path / "answers.jsonl"
    killed = Scripted(stops(tokenizer), dies_after=6)
    with pytest.raises(KeyboardInterrupt):
        run_rounds(rows, tokenizer, plan, path, killed)
    # The kill came while a line was being written.
    with open(path, "ab") as file:
        file.write(b'{"key": "abc", "token_')
    resumed = Scripted(stops(tokenizer))
    # Another order and one more conversation: ids are of the content, not of the place.
    found = run_rounds([*rows[::-1], conversation(user("New"), line=10)], tokenizer, plan, path, resumed)
    assert len(resumed.asked) == 5
    assert not set(resumed.asked) & set(killed.asked)
    assert all(isinstance(each, Answered) for each in found)
    assert len(path.read_text().splitlines()) == 11
    again = Scripted(stops(tokenizer))
    assert run_rounds(rows, tokenizer, plan, path, again) == run_rounds(rows, tokenizer, plan, path, again)
    assert again.asked == []


def test_a_prompt_that_occurs_twice_is_answered_once(tokenizer: Any, plan: RegenerationPlan, tmp_path: Path) -> None:
    engine = Scripted(stops(tokenizer))
    found = run_rounds([conversation(user("Hi"))] * 3, tokenizer, plan, tmp_path / "a.jsonl", engine)
    assert len(engine.asked) == 1
    assert len(found) == 3


def test_whatever_decides_an_answer_decides_its_key(plan: RegenerationPlan) -> None:
    plans = [
        plan,
        evolve(plan, verifier="other"),
        evolve(plan, seed=1),
        evolve(plan, sampling=Sampling(temperature=0.7)),
        evolve(plan, sampling=Sampling(top_p=0.9)),
        evolve(plan, sampling=Sampling(top_k=5)),
        evolve(plan, engine="transformers"),
        evolve(plan, dtype="bfloat16"),
    ]
    keys = [answer_key([1, 2, 3], 8, each) for each in plans]
    keys += [answer_key([1, 2], 8, plan), answer_key([1, 2, 3], 9, plan)]
    assert len(set(keys)) == len(keys)
    assert answer_key([1, 2, 3], 8, evolve(plan, keep_cut_answers=True)) == keys[0]


def test_a_damaged_store_is_an_error_that_says_where(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"key": 1}\n')
    with pytest.raises(DataError, match="damaged") as raised:
        AnswerStore(tmp_path / "a.jsonl")
    assert "byte 0" in str(raised.value.where)


# --- transformers -----------------------------------------------------------------------------------------------


def reference(verifier: VerifierFacts, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding the slow way: one sequence, no cache, no padding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.float32).eval()
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in verifier.eos_token_ids:
                break
    return ids[len(prompt) :]


def test_batched_answers_are_those_of_greedy_decoding_alone(verifier: VerifierFacts, tokenizer: Any) -> None:
    texts = ["Hi", "What is the capital of France?", "Why?", "Write a function that adds two numbers.", "Go on"]
    prompts = [render_prompt(tokenizer, [user(text)]) for text in texts]
    requests = [
        AnswerRequest(key=str(n), prompt_ids=prompt, max_tokens=6 + n, seed=n) for n, prompt in enumerate(prompts)
    ]
    with transformers_engine(verifier, tokenizer) as engine:
        answers = {answer.key: answer for answer in engine.generate(requests)}
    for n, prompt in enumerate(prompts):
        expected = reference(verifier, prompt, 6 + n)
        assert list(answers[str(n)].token_ids) == expected
        ended = expected[-1] in verifier.eos_token_ids
        assert answers[str(n)].finish_reason == ("stop" if ended else "length")


def test_an_answer_ends_at_the_verifiers_end_of_turn(verifier: VerifierFacts, tokenizer: Any) -> None:
    prompt = render_prompt(tokenizer, [user("Hi")])
    free = reference(verifier, prompt, 5)
    # Whatever comes third is declared an end of turn: the answer must stop there, and keep it.
    ending = evolve(verifier, eos_token_ids=(free[2],))
    with transformers_engine(ending, tokenizer) as engine:
        (answer,) = engine.generate([AnswerRequest(key="a", prompt_ids=prompt, max_tokens=5, seed=0)])
    first = free.index(free[2])
    assert list(answer.token_ids) == free[: first + 1]
    assert answer.finish_reason == "stop"


def test_a_sampled_answer_does_not_depend_on_its_neighbours(verifier: VerifierFacts, tokenizer: Any) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.95, top_k=50)
    prompt = render_prompt(tokenizer, [user("Hi")])
    requests = [AnswerRequest(key=str(n), prompt_ids=prompt, max_tokens=8, seed=n) for n in range(4)]
    with transformers_engine(verifier, tokenizer, sampling) as engine:
        together = {answer.key: answer.token_ids for answer in engine.generate(requests)}
        alone = {answer.key: answer.token_ids for each in requests for answer in engine.generate([each])}
    assert together == alone
    assert len(set(together.values())) > 1


def test_top_k_of_one_is_greedy(verifier: VerifierFacts, tokenizer: Any) -> None:
    request = AnswerRequest(key="a", prompt_ids=render_prompt(tokenizer, [user("Hi")]), max_tokens=6, seed=3)
    with transformers_engine(verifier, tokenizer, Sampling(temperature=2.0, top_k=1)) as engine:
        (answer,) = engine.generate([request])
    assert list(answer.token_ids) == reference(verifier, request.prompt_ids, 6)


# --- the stage --------------------------------------------------------------------------------------------------


@frozen
class Run:
    """The part of a resolved run that the prepare stage reads."""

    recipe: Recipe
    folders: RunFolders
    base: Path
    verifier: VerifierFacts


def make_run(verifier: VerifierFacts, tmp_path: Path, engine: Any = "transformers", **data: Any) -> Run:
    data.setdefault("generation", GenerationConfig(max_tokens=10, batch_size=4))
    recipe = Recipe(
        verifier=str(verifier.path),
        algorithm=NamedConfig(name="tiny"),
        output=str(tmp_path / "out"),
        data=DataConfig(sources=["prompts.jsonl"], responses="regenerate", **data),
        capture=CaptureConfig(engine=engine, dtype="float32"),
    )
    return Run(recipe, RunFolders(tmp_path / "out"), tmp_path, verifier)


def write_prompts(tmp_path: Path, count: int) -> None:
    rows = [{"messages": [user(f"What is {n} + {n}?"), {"role": "assistant", "content": ""}]} for n in range(count)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_stage_keeps_answers_when_rows_are_made_anew(verifier: VerifierFacts, tmp_path: Path) -> None:
    write_prompts(tmp_path, 6)
    run = make_run(verifier, tmp_path, keep_cut_answers=True)
    summary = run_prepare(run).summary
    assert summary["answers_written"] == 6
    assert summary["rows"] == 6
    rows = list(open_prepared(run.folders.prepared).train)
    tokenizer = load_tokenizer(verifier.path)
    for row in rows[:2]:
        text = tokenizer.decode(row.prompt_ids)
        assert text.endswith("<|im_start|>assistant\n")
        expected = reference(verifier, row.prompt_ids.tolist(), 10)
        assert row.token_ids[row.loss_mask].tolist() == expected
    store = run.folders.answers / "answers.jsonl"
    before = store.read_bytes()
    # More prompts, a new preparation: the six answers are not written again.
    write_prompts(tmp_path, 8)
    assert run_prepare(run, overwrite=True).summary["rows"] == 8
    assert store.read_bytes().startswith(before)
    assert len(store.read_text().splitlines()) == 8


def test_the_stage_drops_cut_answers_by_default(verifier: VerifierFacts, tmp_path: Path) -> None:
    write_prompts(tmp_path, 3)
    # A random model hardly ever ends its turn within two tokens.
    run = make_run(verifier, tmp_path, generation=GenerationConfig(max_tokens=2))
    with pytest.raises(DataError, match="cut_answer: 3"):
        run_prepare(run)


# --- vLLM -------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_and_transformers_write_the_same_answers(smollm2_path: Path, tmp_path: Path) -> None:
    facts = read_verifier(smollm2_path)
    tokenizer = load_tokenizer(smollm2_path)
    texts = ["What is the capital of France? One word.", "Say hello.", "Count to three."]
    requests = [
        AnswerRequest(key=str(n), prompt_ids=render_prompt(tokenizer, [user(text)]), max_tokens=24, seed=n)
        for n, text in enumerate(texts)
    ]
    with transformers_engine(facts, tokenizer) as engine:
        expected = {answer.key: answer for answer in engine.generate(requests)}
    arguments: dict[str, Any] = {"batch_size": 4, "max_length": 256, "dtype": "float32", "trust_remote_code": False}
    with VllmGenerator(facts, Sampling(), log=tmp_path / "engine.log", **arguments) as engine:
        found = {answer.key: answer for answer in engine.generate(requests)}
        again = {answer.key: answer for answer in engine.generate(requests[:1])}  # a second round, same engine
    assert found == expected
    assert again["0"] == expected["0"]
    assert "stop" in {answer.finish_reason for answer in found.values()}
    stopped = next(answer for answer in found.values() if answer.finish_reason == "stop")
    assert stopped.token_ids[-1] in facts.eos_token_ids


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_that_cannot_load_says_why(verifier: VerifierFacts, tmp_path: Path) -> None:
    from draftsmith.errors import ServingError

    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ServingError, match="vLLM failed while it wrote answers") as raised:
        VllmGenerator(
            evolve(verifier, path=broken),
            Sampling(),
            batch_size=1,
            max_length=64,
            dtype="float32",
            trust_remote_code=False,
            log=tmp_path / "engine.log",
        )
    assert raised.value.where == str(tmp_path / "engine.log")
