"""Conversations, from files in the forms that are in use to one form: a list of chat messages.

A row is an object with ``messages`` (``role`` / ``content``) or ShareGPT's ``conversations`` (``from`` / ``value``),
with either spelling of the turns; instruction data (``instruction``, ``input`` or ``context``, ``output`` or
``response``); or ``prompt`` with ``completion`` or ``response``. ``tools`` (or the older ``functions``) may stand
beside them, as a list or as JSON text; so may ``finish_reason``: ``"length"`` marks the last answer as cut at the
length limit.

Nothing is skipped silently: every row of a source is yielded as a :class:`Conversation` or as a :class:`Rejection`
with its line and reason. The module is free of torch; pyarrow and datasets are imported where they are needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from draftsmith.errors import DataError
from draftsmith.stages import digest

__all__ = [
    "SUFFIXES",
    "Conversation",
    "Rejection",
    "RowRejected",
    "count_rows",
    "fingerprint_sources",
    "load_hub_dataset",
    "normalise",
    "read_conversations",
    "read_rows",
]

SUFFIXES = (".jsonl", ".json", ".parquet")
_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
}


class RowRejected(Exception):
    """Why one row cannot be used: *reason* is counted, *detail* is for the reader, *row* is what could be read."""

    def __init__(self, reason: str, detail: str, row: Any = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.row = row


@frozen(kw_only=True)
class Conversation:
    """One row in the common form.

    Attributes:
        messages: chat messages, as a chat template takes them. An assistant message may carry ``finish_reason``.
        tools: the tools on offer, or None.
        source, line: where it stands; lines (rows, in Parquet) count from 1.
        raw: the row as read, for the report of rejected rows.
    """

    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None
    source: str
    line: int
    raw: Any

    @property
    def content_hash(self) -> str:
        """32 hex digits over messages and tools."""
        return digest([self.messages, self.tools])

    @property
    def prompt_hash(self) -> str:
        """32 hex digits over what comes before the first answer: conversations of one prompt are not told apart."""
        roles = [message["role"] for message in self.messages]
        user = next((i for i, role in enumerate(roles) if role not in ("system", "developer", "assistant")), 0)
        answer = next((i for i, role in enumerate(roles) if role == "assistant" and i > user), len(roles))
        return digest([self.messages[:answer], self.tools])


@frozen(kw_only=True)
class Rejection:
    """A row that cannot be used."""

    source: str
    line: int
    reason: str
    detail: str
    row: Any


# --- sources ----------------------------------------------------------------------------------------------------


def read_conversations(
    sources: Sequence[str], base: Path, *, allow_empty_answers: bool = False
) -> Iterator[Conversation | Rejection]:
    """Yield every row of *sources*, in order.

    Args:
        sources: files or folders (``.jsonl``, ``.json``, ``.parquet``), relative to *base*; or hub datasets
            (``owner/name`` or ``owner/name:split``).
        allow_empty_answers: accept answers without content, which are going to be written anew.

    Raises:
        DataError: a source is missing, of an unknown kind, or cannot be read at all.
    """
    for source in sources:
        for name, line, row in read_rows(source, base):
            if isinstance(row, RowRejected):
                yield Rejection(source=name, line=line, reason=row.reason, detail=row.detail, row=row.row)
                continue
            try:
                messages, tools = normalise(row, allow_empty_answers=allow_empty_answers)
            except RowRejected as error:
                yield Rejection(source=name, line=line, reason=error.reason, detail=error.detail, row=row)
                continue
            yield Conversation(messages=tuple(messages), tools=tools, source=name, line=line, raw=row)


def fingerprint_sources(sources: Sequence[str], base: Path) -> list[dict[str, Any]]:
    """Names and content hashes, for the fingerprint of the prepared data."""
    prints: list[dict[str, Any]] = []
    for source in sources:
        files = _files(source, base)
        if files is None:
            prints.append({"source": source, "dataset": str(_load_hub_dataset(source)._fingerprint)})
            continue
        for file in files:
            with open(file, "rb") as handle:
                content = hashlib.file_digest(handle, "sha256").hexdigest()
            prints.append({"source": source, "file": file.name, "sha256": content})
    return prints


def count_rows(sources: Sequence[str], base: Path) -> int:
    """Rows in *sources*, roughly (blank lines count), for a progress bar."""
    total = 0
    for source in sources:
        files = _files(source, base)
        if files is None:
            total += len(_load_hub_dataset(source))
            continue
        for file in files:
            if file.suffix == ".parquet":
                total += _open_parquet(file).metadata.num_rows
            elif file.suffix == ".jsonl":
                end = b"\n"
                with open(file, "rb") as handle:
                    for chunk in iter(lambda: handle.read(1 << 20), b""):
                        total += chunk.count(b"\n")
                        end = chunk[-1:]
                total += end != b"\n"  # the last line need not end
    return total


def _files(source: str, base: Path) -> list[Path] | None:
    """The files that *source* means, or None where it can only be the name of a hub dataset."""
    path = base / Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise DataError(
                "the folder holds no .jsonl, .json or .parquet file", where=str(path), hint="name the files themselves"
            )
        return files
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(
                f"files of the kind {path.suffix or path.name!r} are not read",
                where=str(path),
                hint="convert it to JSONL or Parquet, with that suffix",
            )
        return [path]
    if any(mark in source for mark in "*?["):
        files = sorted(file for file in base.glob(source) if file.is_file() and file.suffix in SUFFIXES)
        if files:
            return files
    looks_like_path = source.startswith((".", "/", "~")) or source.endswith(SUFFIXES)
    if looks_like_path or source.count("/") > 1:
        raise DataError(f"there is no such file: {source}", where=str(path), hint="paths are relative to the recipe")
    return None


def read_rows(source: str, base: Path) -> Iterator[tuple[str, int, Any]]:
    """(file or data set, line, row) of everything in one source; a line that is no JSON comes as a `RowRejected`.

    Raises:
        DataError: as of :func:`read_conversations`.
    """
    files = _files(source, base)
    if files is None:
        for number, row in enumerate(_load_hub_dataset(source), 1):
            yield source, number, _without_none(row)
        return
    for file in files:
        reader = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}[file.suffix]
        for number, row in reader(file):
            yield file.name, number, row


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if not text:
                continue
            try:
                yield number, json.loads(text)
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
                yield number, RowRejected("malformed_json", str(error), text.decode("utf-8", "replace"))


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"cannot be read as JSON: {error}", where=str(path), hint="one row a line belongs into a .jsonl file"
        ) from error
    if not isinstance(rows, list):
        raise DataError("is not a JSON list of rows", where=str(path), hint="write one row a line, as .jsonl")
    yield from enumerate(rows, 1)


def _open_parquet(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot be read as Parquet: {error}", where=str(path), hint="write the file anew") from error


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow

    number = 0
    batches = _open_parquet(path).iter_batches(batch_size=1024)
    while True:
        try:
            batch = next(batches, None)
            rows = [] if batch is None else batch.to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(
                f"cannot be read as Parquet beyond row {number}: {error}", where=str(path), hint="write the file anew"
            ) from error
        if batch is None:
            return
        for row in rows:
            number += 1
            yield number, _without_none(row)


def _load_hub_dataset(source: str) -> Any:
    name, _, split = source.partition(":")
    return load_hub_dataset(
        name,
        split=split or "train",
        what=f"{source!r} is neither a file nor a dataset that can be loaded",
        where="data.sources",
        hint="check the path (relative to the recipe) or, for a hub dataset, the name and the network",
    )


def load_hub_dataset(name: str, config: str | None = None, *, split: str, what: str, where: str, hint: str) -> Any:
    """A data set of the hub, or of the hub's cache on this machine.

    Raises:
        DataError: it cannot be loaded: *what*, with the hub's own reason, *where* and *hint*.
    """
    import datasets

    try:
        return datasets.load_dataset(name, *([config] if config else []), split=split)
    except Exception as error:  # whatever the hub's client raises, from DNS to gated repositories
        reason = str(error).strip().splitlines()
        raise DataError(
            f"{what} ({type(error).__name__}: {reason[0] if reason else 'no reason given'})", where=where, hint=hint
        ) from error


def _without_none(value: Any) -> Any:
    """Columnar files give every message the keys of all messages: those without a value were not there."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    return value


# --- one row ----------------------------------------------------------------------------------------------------


def normalise(
    row: Any, *, allow_empty_answers: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools of one row.

    Raises:
        RowRejected: the row is in none of the known forms, or a message of it cannot be used.
    """
    if not isinstance(row, dict):
        raise RowRejected("not_an_object", f"a row must be a JSON object, this is a {type(row).__name__}")
    turns = _turns(row)
    messages = [_message(turn, number) for number, turn in enumerate(turns, 1)]
    system = row.get("system") or row.get("system_prompt")
    if isinstance(system, str) and system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system})
    messages = _without_repeated_system(messages)
    if not messages:
        raise RowRejected("no_messages", "the conversation is empty")
    answers = [message for message in messages if message["role"] == "assistant"]
    if answers and row.get("finish_reason") is not None:
        answers[-1].setdefault("finish_reason", row["finish_reason"])
    if not allow_empty_answers:
        for message in answers:
            if not str(message["content"]).strip() and not (message.get("tool_calls") or message.get("reasoning")):
                raise RowRejected("empty_assistant_turn", "an assistant turn has neither content nor tool calls")
    tools = _tools(row.get("tools")) or _as_tools(_tools(row.get("functions")))
    check_text([messages, tools])
    return messages, tools


def check_text(value: Any) -> None:
    """Refuse what JSON can spell and no tokenizer, hash or file can take.

    Raises:
        RowRejected: it holds half of a surrogate pair, or values within values without end.
    """
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise RowRejected("not_unicode", f"half of a surrogate pair stands alone ({error.reason})") from error
    except RecursionError as error:
        raise RowRejected("nested_too_deeply", "a message holds values within values without end") from error


def _turns(row: Mapping[str, Any]) -> list[Any]:
    for key in ("messages", "conversations", "conversation"):
        value = row.get(key)
        if isinstance(value, str):
            value = _from_json(value, key)
        if value is not None:
            return _as_list(value, key)
    if "instruction" in row:
        asked = [str(row[key]) for key in ("instruction", "input", "context") if row.get(key)]
        history = [
            {"role": role, "content": text}
            for pair in _as_list(row.get("history") or [], "history")
            for role, text in zip(("user", "assistant"), _as_list(pair, "a pair of history"), strict=False)
        ]
        return [*history, {"role": "user", "content": "\n\n".join(asked)}, *_answer(row, "output", "response")]
    if "prompt" in row:
        prompt = row["prompt"]
        asked_turns = _as_list(prompt, "prompt") if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return [*asked_turns, *_answer(row, "completion", "response", "output")]
    raise RowRejected(
        "unknown_form", f"none of messages, conversations, instruction, prompt among its keys: {', '.join(row)[:200]}"
    )


def _answer(row: Mapping[str, Any], *keys: str) -> list[Any]:
    """The answer under the first of *keys* that has a value, as messages."""
    value = next((row[key] for key in keys if row.get(key) is not None), None)
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else [{"role": "assistant", "content": value}]


def _as_list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise RowRejected("unknown_form", f"{key} must be a list, this is a {type(value).__name__}")
    return value


def _from_json(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowRejected("malformed_json", f"{key} is text, and not JSON: {error}") from error


def _message(turn: Any, number: int) -> dict[str, Any]:
    """One message with ``role`` and ``content``; every other key of it survives."""
    if not isinstance(turn, dict):
        raise RowRejected("unknown_form", f"message {number} is not an object")
    message = {key: value for key, value in turn.items() if value is not None and key not in ("from", "value")}
    named = turn.get("role") if turn.get("role") is not None else turn.get("from")
    role = _ROLES.get(str(named).strip().lower())
    if role is None:
        raise RowRejected(f"unknown_role:{named}", f"message {number} has the role {named!r}")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    message["role"], message["content"] = role, _content(content, number)
    if str(named).strip().lower() == "function_call":
        message["tool_calls"] = [{"type": "function", "function": _from_json(message["content"], "function_call")}]
        message["content"] = ""
    if role == "assistant":
        _read_tool_calls(message, number)
        _read_reasoning(message)
    return message


def _content(content: Any, number: int) -> str:
    """Text, or the text parts joined as vLLM joins them for templates that take text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in content]
        other = next((part for part in parts if not isinstance(part.get("text"), str)), None)
        if other is not None:
            raise RowRejected("content_is_not_text", f"message {number} has a part of type {other.get('type')!r}")
        return "\n".join(part["text"] for part in parts)
    raise RowRejected("content_is_not_text", f"the content of message {number} is a {type(content).__name__}")


def _read_tool_calls(message: dict[str, Any], number: int) -> None:
    """Arguments as objects, which is what templates expect and what vLLM's server makes of JSON text."""
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        calls = _from_json(calls, "tool_calls")
    if calls is None and isinstance(message.get("function_call"), dict):
        calls = [{"type": "function", "function": message.pop("function_call")}]
    if not calls:
        message.pop("tool_calls", None)
        return
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowRejected("malformed_tool_calls", f"the tool calls of message {number} are not a list of objects")
    read = []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict):
            read.append(call)
            continue
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _from_json(arguments, "arguments") if arguments.strip() else {}
        read.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    message["tool_calls"] = read


def _read_reasoning(message: dict[str, Any]) -> None:
    """Both names that templates use for a turn's thinking, as vLLM passes them."""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        message["reasoning"] = message["reasoning_content"] = reasoning


def _without_repeated_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for message in messages:
        if kept and message["role"] == "system" and message == kept[-1]:
            continue
        kept.append(message)
    return kept


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        tools = _from_json(tools, "tools") if tools.strip() else None
    if isinstance(tools, dict):
        tools = [tools]
    if not tools:
        return None
    if isinstance(tools, list):
        tools = [_from_json(tool, "tools") if isinstance(tool, str) else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowRejected("malformed_tools", "tools must be a list of objects, or the same as JSON text")
    return tools


def _as_tools(functions: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The functions of the older interface, each in its wrapping."""
    if functions is None:
        return None
    return [each if "function" in each else {"type": "function", "function": each} for each in functions]
