"""Reading conversations: forms, roles, tools, files, and rows that cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from draftsmith.data.conversations import (
    Conversation,
    Rejection,
    RowRejected,
    count_rows,
    fingerprint_sources,
    normalise,
    read_conversations,
)
from draftsmith.errors import DataError

ASKED = {"role": "user", "content": "2+2?"}
ANSWERED = {"role": "assistant", "content": "4"}


def messages(row: Any, **options: Any) -> list[dict[str, Any]]:
    return normalise(row, **options)[0]


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


# --- forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWERED]},
        {"conversations": [ASKED, ANSWERED]},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"messages": [{"from": "user", "value": "2+2?"}, {"from": "model", "value": "4"}]},
        {"messages": json.dumps([ASKED, ANSWERED])},
        {"instruction": "2+2?", "output": "4"},
        {"instruction": "2+2?", "input": "", "output": "4"},
        {"instruction": "2+2?", "context": "", "response": "4", "category": "sums"},
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": "2+2?", "response": "4"},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}, ANSWERED]},
    ],
)
def test_every_form_gives_the_same_messages(row: dict[str, Any]) -> None:
    assert messages(row) == [ASKED, ANSWERED]


def test_the_input_field_of_instructions_is_not_dropped() -> None:
    asked = messages({"instruction": "Translate.", "input": "chat", "output": "cat", "system": "You translate."})
    assert [each["role"] for each in asked] == ["system", "user", "assistant"]
    assert asked[1]["content"] == "Translate.\n\nchat"


def test_the_context_of_instructions_is_not_dropped() -> None:
    asked = messages({"instruction": "Who won?", "context": "Ann won.", "response": "Ann"})
    assert [each["content"] for each in asked] == ["Who won?\n\nAnn won.", "Ann"]


def test_an_instruction_without_an_output_is_a_prompt() -> None:
    assert messages({"instruction": "2+2?"}) == [ASKED]


@pytest.mark.parametrize(
    ("named", "role"),
    [("human", "user"), ("GPT", "assistant"), ("model", "assistant"), ("System", "system"), ("observation", "tool")],
)
def test_roles_are_mapped(named: str, role: str) -> None:
    assert messages({"conversations": [{"from": named, "value": "x"}]})[0]["role"] == role


def test_an_unknown_role_is_rejected_by_name() -> None:
    with pytest.raises(RowRejected, match="message 2 has the role 'Mixtral-8x7B'") as raised:
        normalise({"messages": [ASKED, {"role": "Mixtral-8x7B", "content": "4"}]})
    assert raised.value.reason == "unknown_role:Mixtral-8x7B"


def test_the_system_prompt_is_not_doubled() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert messages({"system": "Be brief.", "messages": [system, ASKED, ANSWERED]}) == [system, ASKED, ANSWERED]
    assert messages({"messages": [system, system, ASKED, ANSWERED]}) == [system, ASKED, ANSWERED]
    assert messages({"system": "Be brief.", "messages": [ASKED, ANSWERED]}) == [system, ASKED, ANSWERED]


def test_a_tool_dialogue_survives() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    row = {
        "messages": [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "4"},
            {"role": "assistant", "content": "It is 4.", "reasoning_content": "the tool said so"},
            {"role": "user", "content": "Thanks"},
            {"role": "assistant", "content": "Bye"},
        ],
        "tools": json.dumps([{"type": "function", "function": {"name": "add"}}]),
    }
    read, tools = normalise(row)
    assert [each["role"] for each in read] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert read[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 2}
    assert read[1]["tool_calls"][0]["id"] == "c1"
    assert read[1]["content"] == ""
    assert read[2] == {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "4"}
    assert read[3]["reasoning"] == read[3]["reasoning_content"] == "the tool said so"
    assert tools == [{"type": "function", "function": {"name": "add"}}]


def test_tools_as_list_and_as_text_are_the_same() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"messages": [ASKED, ANSWERED], "tools": each} for each in (tools, json.dumps(tools), tools[0])]
    assert [normalise(row)[1] for row in rows] == [tools] * 3
    assert normalise({"messages": [ASKED, ANSWERED], "tools": "[]"})[1] is None


def test_functions_of_the_older_interface_become_tools() -> None:
    function = {"name": "f", "parameters": {}}
    tools = [{"type": "function", "function": function}]
    for given in ([function], json.dumps([function]), function, tools):
        assert normalise({"messages": [ASKED, ANSWERED], "functions": given})[1] == tools
    assert normalise({"messages": [ASKED, ANSWERED], "tools": tools, "functions": [{"name": "g"}]})[1] == tools


def test_sharegpt_function_calls_become_tool_calls() -> None:
    called = messages({"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]})
    assert called[0]["role"] == "assistant"
    assert called[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


def test_a_rows_finish_reason_belongs_to_its_last_answer() -> None:
    read = messages({"messages": [ASKED, ANSWERED, ASKED, ANSWERED], "finish_reason": "length"})
    assert [each.get("finish_reason") for each in read] == [None, None, None, "length"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "not_an_object"),
        ({"text": "x"}, "unknown_form"),
        ({"messages": "not json"}, "malformed_json"),
        ({"messages": {"role": "user"}}, "unknown_form"),
        ({"messages": ["x"]}, "unknown_form"),
        ({"messages": []}, "no_messages"),
        ({"messages": [ASKED, {"role": "assistant", "content": " "}]}, "empty_assistant_turn"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "empty_assistant_turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content_is_not_text"),
        ({"messages": [{"role": "user", "content": 7}]}, "content_is_not_text"),
        ({"messages": [ASKED, ANSWERED], "tools": "{"}, "malformed_json"),
        ({"messages": [ASKED, ANSWERED], "tools": 3}, "malformed_tools"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": 3}]}, "malformed_tool_calls"),
    ],
)
def test_unusable_rows_have_a_reason(row: Any, reason: str) -> None:
    with pytest.raises(RowRejected) as raised:
        normalise(row)
    assert raised.value.reason == reason


def test_empty_answers_are_fine_where_they_will_be_written_anew() -> None:
    assert messages({"messages": [ASKED, {"role": "assistant", "content": ""}]}, allow_empty_answers=True)[1] == {
        "role": "assistant",
        "content": "",
    }


# --- files ------------------------------------------------------------------------------------------------------


def test_a_malformed_line_is_rejected_with_its_number_and_the_rest_is_read(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "a.jsonl",
        {"messages": [ASKED, ANSWERED]},
        '{"messages": [\n',
        "\n",
        {"messages": [ASKED, ANSWERED]},
    )
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.write(b'{"messages": "\xff"}\n')
    found = list(read_conversations(["a.jsonl"], tmp_path))
    assert [type(each) for each in found] == [Conversation, Rejection, Conversation, Rejection]
    assert [each.line for each in found] == [1, 2, 4, 5]
    broken = found[1]
    assert isinstance(broken, Rejection)
    assert (broken.source, broken.reason, broken.row) == ("a.jsonl", "malformed_json", '{"messages": [')


def test_parquet_and_jsonl_give_the_same(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": None},
        {"messages": [{**ASKED, "name": "Ann"}, ANSWERED], "tools": json.dumps([{"type": "function"}])},
    ]
    write_jsonl(tmp_path / "a.jsonl", *rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    first, second = (list(read_conversations([name], tmp_path)) for name in ("a.jsonl", "b.parquet"))
    for a, b in zip(first, second, strict=True):
        assert isinstance(a, Conversation)
        assert isinstance(b, Conversation)
        assert a.messages == b.messages
        assert a.tools == b.tools
    assert count_rows(["a.jsonl", "b.parquet"], tmp_path) == 4
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().rstrip("\n"))
    assert count_rows(["a.jsonl", "b.parquet"], tmp_path) == 4


def test_json_lists_folders_and_globs(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", {"messages": [ASKED, ANSWERED]})
    (folder / "a.json").write_text(json.dumps([{"messages": [ASKED, ANSWERED]}] * 2))
    (folder / "readme.md").write_text("not data")
    for source in ("data", "data/*.json*"):
        found = list(read_conversations([source], tmp_path))
        assert [(each.source, each.line) for each in found] == [("a.json", 1), ("a.json", 2), ("b.jsonl", 1)]


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("missing.jsonl", "no such file"),
        ("./missing", "no such file"),
        ("notes.txt", "'.txt' are not read"),
        ("empty", "no .jsonl"),
        ("bad.json", "cannot be read as JSON"),
        ("object.json", "not a JSON list"),
        ("bad.parquet", "cannot be read as Parquet"),
        ("nobody/such-dataset", "neither a file nor a dataset"),
    ],
)
def test_unreadable_sources_stop_with_a_reason(tmp_path: Path, source: str, what: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("[")
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "bad.parquet").write_text("x")
    with pytest.raises(DataError, match=what) as raised:
        list(read_conversations([source], tmp_path))
    assert raised.value.hint


def test_a_fingerprint_follows_content_not_path(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"messages": [ASKED, ANSWERED]})
    before = fingerprint_sources(["a.jsonl"], tmp_path)
    assert before == fingerprint_sources(["a.jsonl"], tmp_path)
    write_jsonl(tmp_path / "a.jsonl", {"messages": [ASKED, {**ANSWERED, "content": "5"}]})
    assert fingerprint_sources(["a.jsonl"], tmp_path) != before


def test_conversations_of_one_prompt_share_a_hash() -> None:
    def conversation(*turns: dict[str, Any]) -> Conversation:
        return Conversation(messages=turns, tools=None, source="s", line=1, raw=None)

    one, other = conversation(ASKED, ANSWERED), conversation(ASKED, {**ANSWERED, "content": "four"})
    opened = conversation({**ANSWERED, "content": "Hello"}, {**ASKED, "content": "3+3?"}, ANSWERED)
    assert one.prompt_hash == other.prompt_hash
    assert one.content_hash != other.content_hash
    assert opened.prompt_hash != one.prompt_hash


def test_importing_the_module_does_not_import_torch() -> None:
    code = (
        "import draftsmith.data.conversations, sys; print(sorted({'torch', 'pyarrow', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- what no tokenizer and no hash can take ---------------------------------------------------------------------


def test_half_of_a_surrogate_pair_is_a_reason_to_reject(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "c.jsonl", '{"messages": [{"role": "user", "content": "\\ud800"}]}\n')
    (row,) = read_conversations(["c.jsonl"], tmp_path)
    assert isinstance(row, Rejection)
    assert row.reason == "not_unicode"


@pytest.mark.parametrize("history", [5, [None], [["a", "b"], 3]])
def test_a_history_that_is_none(history: Any) -> None:
    with pytest.raises(RowRejected, match="must be a list"):
        normalise({"instruction": "x", "history": history, "output": "y"})


def test_parquet_that_is_damaged_in_the_middle(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": [f"question {n}" * 9 for n in range(500)], "completion": ["x"] * 500})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", compression="zstd")
    content = bytearray((tmp_path / "c.parquet").read_bytes())
    content[4:600] = b"\xff" * 596  # the footer, which is read first, stays whole
    (tmp_path / "c.parquet").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        list(read_conversations(["c.parquet"], tmp_path))
