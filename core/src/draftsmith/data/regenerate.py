"""Answers written by the verifier itself, as it will be served: the largest single lever on a draft's acceptance.

Conversations are answered in rounds, one assistant turn of each in a round, so that a later turn follows the answers
that the verifier really gave. Rows are the very tokens of serving prompt and answer; nothing is tokenised again.

Every finished answer is appended to ``answers.jsonl`` under a hash of all that it depends on (prompt tokens, sampling,
verifier). A killed run goes on where it stopped; other data or options reuse whatever is the same, and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, define, field, frozen

from draftsmith.data.conversations import Conversation, Rejection, RowRejected
from draftsmith.data.generators import Answer, AnswerRequest, Generator, Sampling
from draftsmith.data.template import EncodedRow, fold, render_prompt
from draftsmith.errors import DataError, OutputError
from draftsmith.stages import digest

__all__ = ["AnswerStore", "Answered", "RegenerationPlan", "answer_key", "regenerate"]


class AnswerStore:
    """An append-only JSONL of finished answers. A line that a kill left half written is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._answers: dict[str, Answer] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        complete = self._read()
        try:
            self._file = open(path, "ab")  # noqa: SIM115 - open as long as the store
            if self._file.tell() > complete:
                self._file.truncate(complete)
        except OSError as error:
            raise OutputError(
                f"cannot write: {error.strerror}", where=str(path), hint="choose an output folder you can write to"
            ) from error

    def _read(self) -> int:
        """Read what is there; return where the last complete line ends."""
        end = 0
        try:
            with open(self.path, "rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    try:
                        value = json.loads(line)
                        answer = Answer(
                            key=value["key"],
                            token_ids=tuple(value["token_ids"]),
                            finish_reason=value["finish_reason"],
                        )
                    except (ValueError, KeyError, TypeError) as error:
                        raise DataError(
                            f"the stored answers are damaged: {error}",
                            where=f"{self.path}, byte {end}",
                            hint="remove that line (its answer will be written again)",
                        ) from error
                    self._answers[answer.key] = answer
                    end += len(line)
        except FileNotFoundError:
            return 0
        return end

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, key: str) -> bool:
        return key in self._answers

    def __getitem__(self, key: str) -> Answer:
        return self._answers[key]

    def add(self, answer: Answer, engine: str) -> None:
        """Keep *answer*; it survives a kill from here on."""
        line = {
            "key": answer.key,
            "token_ids": list(answer.token_ids),
            "finish_reason": answer.finish_reason,
            "engine": engine,
        }
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self._answers[answer.key] = answer

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> AnswerStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@frozen(kw_only=True)
class RegenerationPlan:
    """What an answer depends on beside its prompt.

    Attributes:
        verifier: fingerprint of the verifier.
        sampling: temperature, top_p, top_k.
        max_tokens: longest answer.
        max_length: longest row, prompt and answer together.
        engine, dtype: what runs the verifier, as the recipe names them: rounding alone can change an answer.
        seed: from which each answer's own seed derives.
        keep_cut_answers: keep rows whose answer was cut at a limit.
    """

    verifier: str
    sampling: Sampling
    max_tokens: int
    max_length: int
    engine: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    keep_cut_answers: bool = False


@frozen(kw_only=True)
class Answered:
    """A conversation answered anew.

    Attributes:
        rows: as of :func:`draftsmith.data.template.fold`.
        messages: the conversation with the verifier's answers.
        answers: answers in it.
        cut_turns: of these, cut at a limit.
    """

    conversation: Conversation
    rows: list[EncodedRow]
    messages: list[dict[str, Any]]
    answers: int
    cut_turns: int


def answer_key(prompt_ids: Sequence[int], max_tokens: int, plan: RegenerationPlan) -> str:
    """32 hex digits over everything that decides an answer.

    The prompt's tokens stand for messages, tools, template and template arguments: whatever changes them changes the
    tokens, and what does not change the tokens does not change the answer.
    """
    return digest(
        [list(prompt_ids), max_tokens, asdict(plan.sampling), plan.seed, plan.verifier, plan.engine, plan.dtype]
    )


@define
class _Pending:
    """A conversation on its way through the rounds."""

    conversation: Conversation
    messages: list[dict[str, Any]] = field(factory=list)
    rest: list[dict[str, Any]] = field(factory=list)
    rows: list[EncodedRow] = field(factory=list)
    answers: int = 0
    cut: int = 0
    asked: bool = False
    request: AnswerRequest | None = None
    reason: RowRejected | None = None

    def advance(self) -> bool:
        """Move on to the next answer to write; False where there is none."""
        while self.rest:
            message = self.rest.pop(0)
            is_answer = message["role"] == "assistant"
            if is_answer and self.asked and not message.get("tool_calls"):
                return True
            # Kept as context: questions, tools' results, calls (whose results are given), and an opening answer.
            self.messages.append({key: value for key, value in message.items() if key != "finish_reason"})
            self.asked = self.asked or message["role"] not in ("system", "developer", "assistant")
        return self.asked and self.messages[-1]["role"] != "assistant"


def regenerate(
    conversations: Iterable[Conversation],
    tokenizer: Any,
    template_arguments: Mapping[str, Any],
    plan: RegenerationPlan,
    store: AnswerStore,
    open_engine: Callable[[], Generator],
    *,
    on_answer: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Answered | Rejection]:
    """Let the verifier write every answer; yields each conversation, in order, with its rows or why it has none.

    Args:
        store: answers that are there are not written again.
        open_engine: called only when an answer is missing.
        on_answer: told the answers finished and wanted so far.

    Raises:
        ServingError: the engine failed. What it had finished is in the store.
    """
    pending = [_Pending(each, rest=[dict(message) for message in each.messages]) for each in conversations]
    active = [each for each in pending if each.advance()]
    engine: Generator | None = None
    done = 0
    try:
        while active:
            for each in active:
                _ask(each, tokenizer, template_arguments, plan)
            active = [each for each in active if each.request is not None]
            missing = _missing(active, store)
            total = done + len(active)
            done += len(active) - len(missing)
            on_answer(done, total)
            if missing and engine is None:
                engine = open_engine()
            if engine is not None:
                for answer in engine.generate(missing):
                    store.add(answer, engine.name)
                    done += 1
                    on_answer(done, total)
            active = [each for each in active if _take(each, store, tokenizer, plan) and each.advance()]
    finally:
        if engine is not None:
            engine.close()
    for each in pending:
        yield _result(each)


def _ask(pending: _Pending, tokenizer: Any, template_arguments: Mapping[str, Any], plan: RegenerationPlan) -> None:
    pending.request = None
    conversation = pending.conversation
    try:
        prompt_ids = render_prompt(tokenizer, pending.messages, template_arguments, conversation.tools)
    except DataError as error:
        pending.reason = RowRejected("template_error", error.what)
        return
    room = min(plan.max_tokens, plan.max_length - len(prompt_ids))
    if room < 1:
        pending.reason = RowRejected(
            "prompt_too_long", f"the prompt has {len(prompt_ids)} tokens, a row holds {plan.max_length}"
        )
        return
    key = answer_key(prompt_ids, room, plan)
    seed = int(key[:8], 16) & 0x7FFFFFFF
    pending.request = AnswerRequest(key=key, prompt_ids=prompt_ids, max_tokens=room, seed=seed)


def _missing(active: Sequence[_Pending], store: AnswerStore) -> list[AnswerRequest]:
    """Requests without a stored answer, each once."""
    wanted = {each.request.key: each.request for each in active if each.request is not None}
    return [request for key, request in wanted.items() if key not in store]


def _take(pending: _Pending, store: AnswerStore, tokenizer: Any, plan: RegenerationPlan) -> bool:
    """Add the answer to the conversation; False where the conversation ends with it."""
    request = pending.request
    assert request is not None
    answer = store[request.key]
    cut = answer.finish_reason != "stop"
    pending.answers += 1
    pending.cut += cut
    written = answer.token_ids if cut else answer.token_ids[:-1]
    if not written:
        pending.reason = RowRejected("empty_answer", "the verifier ended its turn at once")
        return False
    if cut and not plan.keep_cut_answers:
        pending.reason = RowRejected("cut_answer", f"the answer was cut after {len(written)} tokens")
        return False
    pending.rows.append(
        EncodedRow(
            token_ids=[*request.prompt_ids, *answer.token_ids],
            loss_mask=[False] * len(request.prompt_ids) + [True] * len(answer.token_ids),
        )
    )
    message: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(written, skip_special_tokens=True)}
    pending.messages.append({**message, "finish_reason": "length"} if cut else message)
    return not cut


def _result(pending: _Pending) -> Answered | Rejection:
    conversation = pending.conversation
    if pending.rows:
        return Answered(
            conversation=conversation,
            rows=fold(pending.rows),
            messages=pending.messages,
            answers=pending.answers,
            cut_turns=pending.cut,
        )
    reason = pending.reason or RowRejected("no_question", "no message asks the verifier for an answer")
    return Rejection(
        source=conversation.source,
        line=conversation.line,
        reason=reason.reason,
        detail=reason.detail,
        row=conversation.raw,
    )
