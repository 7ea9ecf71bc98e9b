"""The prepare stage on real files: what is stored, counted, rejected, and reused."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from draftsmith.api import VerifierFacts
from draftsmith.config.schema import CaptureConfig, DataConfig, NamedConfig, Recipe, VocabularyConfig
from draftsmith.data.conversations import Conversation
from draftsmith.data.dataset import open_prepared, sample_id
from draftsmith.data.prepare import _draw, run_prepare, split_by_hash
from draftsmith.data.template import load_tokenizer, render_prompt
from draftsmith.errors import ConfigError, DataError, FingerprintMismatch, VerifierError
from draftsmith.stages import RunFolders
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.verifier import read_verifier


@frozen
class Run:
    """The part of a resolved run that the prepare stage reads."""

    recipe: Recipe
    folders: RunFolders
    base: Path
    verifier: VerifierFacts


def conversation(number: int, answer: str = "It is {}.") -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"What is {number} + {number}?"},
            {"role": "assistant", "content": answer.format(2 * number)},
        ]
    }


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_verifier(tmp_path_factory.mktemp("verifiers") / "llama", "llama")


@pytest.fixture
def make_run(tiny_verifier: Path, tmp_path: Path) -> Callable[..., Run]:
    def make(
        rows: list[Any] | None = None, *, verifier: Path = tiny_verifier, draft_size: int | None = None, **data: Any
    ) -> Run:
        if rows is not None:
            write(tmp_path / "data.jsonl", rows)
        data.setdefault("sources", ["data.jsonl"])
        recipe = Recipe(
            verifier=str(verifier),
            algorithm=NamedConfig(name="tiny"),
            output=str(tmp_path / "out"),
            data=DataConfig(**data),
            vocabulary=VocabularyConfig(draft_size=draft_size),
            capture=CaptureConfig(engine="transformers"),
        )
        return Run(recipe, RunFolders(tmp_path / "out"), tmp_path, read_verifier(verifier))

    return make


def rejected(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folders.prepared / "rejected.jsonl").read_text().splitlines()]


# --- what is stored ---------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_encoded(make_run: Any, tiny_verifier: Path) -> None:
    run = make_run([conversation(n) for n in range(20)], validation_share=0.2)
    record = run_prepare(run)
    data = open_prepared(run.folders.prepared)
    assert record.complete
    assert len(data.train) + len(data.validation) == 20
    assert len(data.validation) >= 1
    assert data.summary == record.summary
    tokenizer = load_tokenizer(tiny_verifier)
    prompts = {
        tuple(render_prompt(tokenizer, conversation(n)["messages"][:1])): f"It is {2 * n}.<|im_end|>"
        for n in range(20)
    }
    for table in (data.train, data.validation):
        for index, row in enumerate(table):
            assert row.token_ids.dtype == torch.int64
            assert row.loss_mask.dtype == torch.bool
            assert (
                row.sample_id == sample_id(row.token_ids.tolist(), row.loss_mask.tolist()) == table.sample_ids[index]
            )
            assert len(row.sample_id) == 32
            assert table.lengths[index] == len(row.token_ids) == len(row.loss_mask)
            assert table.supervised[index] == int(row.loss_mask.sum())
            assert row.source == "data.jsonl"
            answer = prompts.pop(tuple(row.prompt_ids.tolist()))
            assert tokenizer.decode(row.token_ids[row.loss_mask]) == answer
    assert not prompts
    summary = record.summary
    assert summary["train_tokens"] == sum(data.train.lengths)
    assert summary["validation_supervised_tokens"] == sum(data.validation.supervised)
    assert pickle.loads(pickle.dumps(data)).train[0].sample_id == data.train[0].sample_id
    with pytest.raises(IndexError):
        data.train[len(data.train)]


def test_the_vocabulary_counts_supervised_training_tokens(make_run: Any) -> None:
    run = make_run([conversation(n) for n in range(20)], draft_size=16, validation_share=0.2)
    summary = run_prepare(run).summary
    data = open_prepared(run.folders.prepared)
    counts = torch.zeros(run.verifier.vocab_size, dtype=torch.int64)
    for row in data.train:
        counts += torch.bincount(row.token_ids[row.loss_mask], minlength=len(counts))
    kept = sorted(range(len(counts)), key=lambda token: (-int(counts[token]), token))[:16]
    vocabulary = data.vocabulary()
    assert vocabulary.kept_ids().tolist() == sorted(kept)
    assert vocabulary.target_size == run.verifier.vocab_size
    assert summary["coverage"] == pytest.approx(int(counts[kept].sum()) / int(counts.sum()), abs=1e-6)
    assert summary["distinct_supervised_tokens"] == int((counts > 0).sum())


def test_what_an_algorithm_may_know_of_the_rows(make_run: Any) -> None:
    """Tokens of prompts and of validation count too; a row that training cuts is as long as it is then."""
    run = make_run([conversation(n, "It is {}." + " Truly." * (n % 3)) for n in range(20)], validation_share=0.2)
    run_prepare(run)
    data = open_prepared(run.folders.prepared)
    rows = [*data.train, *data.validation]
    facts = data.facts(tokens_per_row=10_000)
    assert facts.token_ids == {token for row in rows for token in row.token_ids.tolist()}
    assert facts.longest_row == max(row.token_ids.shape[0] for row in rows)
    masks = ["".join("#" if each else "." for each in row.loss_mask.tolist()) for row in rows]
    assert facts.longest_answer == max(len(each) for mask in masks for each in mask.split(".")) > 0
    prompt = min(mask.index("#") for mask in masks)
    for cut, answer in ((3, 0), (prompt, 0), (prompt + 1, 1), (prompt + 2, 2), (facts.longest_row - 1, None)):
        seen = data.facts(tokens_per_row=cut)
        expected = max(len(each) for mask in masks for each in mask[:cut].split("."))
        assert (seen.longest_row, seen.longest_answer) == (cut, expected)
        assert answer in (None, expected)


def test_too_large_a_draft_vocabulary(make_run: Any) -> None:
    with pytest.raises(DataError, match="cannot be taken from the verifier's"):
        run_prepare(make_run([conversation(1)], draft_size=10**6))


# --- what is rejected, counted, cut -----------------------------------------------------------------------------


def test_bad_rows_are_written_down_and_counted(make_run: Any) -> None:
    asked = {"role": "user", "content": "Hi"}
    run = make_run(
        [
            conversation(1),
            '{"messages": \n',
            {"messages": [asked, {"role": "assistant", "content": ""}]},
            {"messages": [asked]},
            {"messages": [asked, {"role": "Claude", "content": "Hello"}]},
            {"messages": [{"role": "assistant", "content": "Welcome!"}, *conversation(2)["messages"]]},
            {**conversation(3), "finish_reason": "length"},
            conversation(1),
        ],
        validation_share=0.0,
    )
    console = Console(record=True, width=200, file=io.StringIO())
    summary = run_prepare(run, console).summary
    told = console.export_text()
    assert "train: 2 rows" in told
    assert "rejected: 5 rows (malformed_json 1, " in told
    assert "1 duplicates left out" in told
    assert summary["rejected"] == {
        "malformed_json": 1,
        "empty_assistant_turn": 1,
        "no_assistant_turn": 1,
        "unknown_role:Claude": 1,
        "cut_answer": 1,
    }
    assert (summary["read"], summary["rows"], summary["duplicates"]) == (8, 2, 1)
    assert (summary["opening_answers"], summary["cut_answers"]) == (1, 1)
    lines = rejected(run)
    assert [each["line"] for each in lines] == [2, 3, 4, 5, 7]
    assert all(each["detail"] and each["source"] == "data.jsonl" for each in lines)
    assert lines[0]["row"] == '{"messages":'
    assert lines[3]["row"]["messages"][1]["content"] == "Hello"
    # Every row that was read is accounted for.
    assert summary["read"] == summary["rows"] + summary["duplicates"] + sum(summary["rejected"].values())


def test_cut_answers_are_kept_when_asked_for(make_run: Any, tiny_verifier: Path) -> None:
    run = make_run([{**conversation(3), "finish_reason": "length"}], keep_cut_answers=True, validation_share=0.0)
    assert run_prepare(run).summary["cut_answers"] == 1
    (row,) = open_prepared(run.folders.prepared).train
    assert load_tokenizer(tiny_verifier).decode(row.token_ids[row.loss_mask]) == "It is 6."


def test_long_rows_are_cut_at_the_tail_and_kept_if_any_answer_is_left(make_run: Any) -> None:
    long_answer, long_question = conversation(1, "word " * 100), conversation(2)
    long_question["messages"][0]["content"] = "word " * 100
    run = make_run([conversation(0), long_answer, long_question], max_length=64, validation_share=0.0)
    summary = run_prepare(run).summary
    assert (summary["rows"], summary["truncated"], summary["longest"]) == (2, 1, 64)
    assert summary["rejected"] == {"too_long": 1}
    rows = list(open_prepared(run.folders.prepared).train)
    assert rows[1].loss_mask[-1]
    assert max(open_prepared(run.folders.prepared).train.lengths) == 64
    assert len(open_prepared(run.folders.prepared).validation) == 0
    assert open_prepared(run.folders.prepared).validation.lengths == []


def test_a_row_that_is_no_unicode_is_written_down_like_others(make_run: Any) -> None:
    run = make_run([conversation(1), conversation(2), '{"messages": [{"role": "user", "content": "\\ud800"}]}\n'])
    assert run_prepare(run).summary["rejected"] == {"not_unicode": 1}
    assert rejected(run)[0]["row"]["messages"][0]["content"] == "\ud800"


def test_a_note_on_missing_ends_of_turn_is_not_made_of_cut_answers(make_run: Any) -> None:
    cut = {**conversation(3), "finish_reason": "length"}
    run = make_run([conversation(1), conversation(2), cut], keep_cut_answers=True)
    summary = run_prepare(run).summary
    assert summary["cut_answers"] == 1
    assert not summary["notes"]


def test_without_supervised_tokens_the_run_stops(make_run: Any) -> None:
    run = make_run(["{\n", {"messages": [{"role": "user", "content": "Hi"}]}])
    with pytest.raises(DataError, match=r"nothing to train on \(rejected: malformed_json: 1, no_assistant_turn: 1\)"):
        run_prepare(run)
    assert len(rejected(run)) == 2
    with pytest.raises(DataError, match="no complete prepared data"):
        open_prepared(run.folders.prepared)
    # Mended data may take its place without --overwrite: a failed preparation holds nothing.
    assert run_prepare(make_run([conversation(1)])).summary["rows"] == 1


def test_no_sources_and_missing_sources(make_run: Any) -> None:
    with pytest.raises(DataError, match="no conversations"):
        run_prepare(make_run([], sources=[]))
    with pytest.raises(DataError, match="no such file"):
        run_prepare(make_run(sources=["gone.jsonl"]))


def test_a_verifier_without_a_chat_template(make_run: Any, tmp_path: Path) -> None:
    base = make_tiny_verifier(tmp_path / "base", "llama", chat_template=None)
    with pytest.raises(VerifierError, match="no chat template"):
        run_prepare(make_run([conversation(1)], verifier=base))


def test_a_template_argument_that_nothing_reads(make_run: Any) -> None:
    with pytest.raises(ConfigError, match="takes no such argument"):
        run_prepare(make_run([conversation(1)], template_arguments={"enable_thinkin": False}))


def test_a_tokenizer_of_another_model(make_run: Any) -> None:
    run = make_run([conversation(1)])
    with pytest.raises(DataError, match="the verifier has 8"):
        run_prepare(evolve(run, verifier=evolve(run.verifier, vocab_size=8)))


# --- reuse ------------------------------------------------------------------------------------------------------


def test_complete_data_is_reused_and_nothing_else_is(make_run: Any, tmp_path: Path, tiny_verifier: Path) -> None:
    rows = [conversation(n) for n in range(5)]
    run = make_run(rows)
    first = run_prepare(run)
    before = (run.folders.prepared / "train" / "state.json").stat().st_mtime_ns
    assert run_prepare(run) == first
    assert (run.folders.prepared / "train" / "state.json").stat().st_mtime_ns == before

    with pytest.raises(FingerprintMismatch, match="max_length"):
        run_prepare(make_run(max_length=99))
    with pytest.raises(FingerprintMismatch, match="template_arguments"):
        run_prepare(make_run(template_arguments={"enable_thinking": True}))
    with pytest.raises(FingerprintMismatch, match="draft_size"):
        run_prepare(make_run(draft_size=16))
    with pytest.raises(FingerprintMismatch, match="sources"):
        run_prepare(make_run([*rows, conversation(9)]))
    write(tmp_path / "data.jsonl", rows)

    other = tmp_path / "other"
    shutil.copytree(tiny_verifier, other)
    template = next(path for path in (other / "chat_template.jinja", other / "tokenizer_config.json") if path.exists())
    template.write_text(template.read_text().replace("<think>", "<thinks>"))
    with pytest.raises(FingerprintMismatch, match="chat_template"):
        run_prepare(make_run(verifier=other))

    assert run_prepare(make_run(max_length=99), overwrite=True).summary["rows"] == 5


def test_an_interrupted_preparation_starts_anew(make_run: Any) -> None:
    run = make_run([conversation(n) for n in range(5)])
    wanted = run_prepare(run)
    stage = run.folders.prepared / "stage.json"
    stage.write_text(json.dumps({**json.loads(stage.read_text()), "complete": False}))
    shutil.rmtree(run.folders.prepared / "validation")
    (run.folders.prepared / "rows.arrow").write_bytes(b"half")
    again = run_prepare(run)
    assert again.summary == wanted.summary
    assert len(open_prepared(run.folders.prepared).validation) == wanted.summary["validation_rows"]


# --- drawing and splitting --------------------------------------------------------------------------------------


def test_rows_are_drawn_from_all_sources(make_run: Any, tmp_path: Path) -> None:
    write(tmp_path / "first.jsonl", [conversation(n) for n in range(100)])
    write(tmp_path / "second.jsonl", [conversation(n) for n in range(100, 200)])
    run = make_run(sources=["first.jsonl", "second.jsonl"], max_rows=40)
    summary = run_prepare(run).summary
    assert summary["rows"] == 40
    assert summary["not_drawn"] == 160
    assert min(summary["rows_by_source"].values()) >= 8


def conversations(count: int) -> list[Conversation]:
    return [
        Conversation(messages=tuple(conversation(n)["messages"]), tools=None, source="s", line=n, raw=None)
        for n in range(count)
    ]


@given(st.integers(0, 30), st.integers(1, 40), st.integers(0, 3))
def test_a_draw_keeps_the_order_and_does_not_depend_on_it(count: int, wanted: int, seed: int) -> None:
    rows = conversations(count)
    chosen = _draw(rows, wanted, seed)
    assert len(chosen) == min(count, wanted)
    assert [each.line for each in chosen] == sorted(each.line for each in chosen)
    assert {each.line for each in _draw(rows[::-1], wanted, seed)} == {each.line for each in chosen}


@given(st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=60), st.floats(0, 0.99))
def test_a_split_keeps_groups_together_and_leaves_no_side_empty(groups: list[str], share: float) -> None:
    validation = split_by_hash(groups, share)
    sides = {group: {v for g, v in zip(groups, validation, strict=True) if g == group} for group in groups}
    assert all(len(side) == 1 for side in sides.values())
    assert not all(validation)
    if share > 0 and len(sides) > 1:
        assert any(validation)
    if share == 0:
        assert not any(validation)


def test_more_data_moves_no_row_to_the_other_side() -> None:
    groups = [f"group {n}" for n in range(300)]
    assert split_by_hash(groups, 0.2)[:200] == split_by_hash(groups[:200], 0.2)
    assert 0.1 < sum(split_by_hash(groups, 0.2)) / 300 < 0.3


# --- the real model ---------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_real_model_gives_one_row_a_conversation(make_run: Any, smollm2_path: Path) -> None:
    turns = [*conversation(1)["messages"], *conversation(2)["messages"]]
    summary = run_prepare(make_run([{"messages": turns}], verifier=smollm2_path, validation_share=0.0)).summary
    assert (summary["rows"], summary["conversations_in_several_rows"]) == (1, 0)
    assert summary["terminators"] == {"<|im_end|>": 1}
