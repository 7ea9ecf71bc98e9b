"""The chat template: from messages to token ids, and the mask of what the verifier itself would have written.

The mask comes from rendering, never from a pattern. For the assistant turn at index i, the *serving prompt* is the
template's rendering of ``messages[:i]`` with the generation prompt; the rendering of ``messages[:i + 1]`` must begin
with it, and what follows, up to and including the turn's terminator, is what the verifier writes. What the template
adds behind an answer is found by rendering another answer in its place; the terminator is the beginning of that, up to
the end of the first special token: the template's own, whatever the tokenizer's eos is. Where a template marks
``{% generation %}``, only what it marks (and the terminator) is supervised.

Each turn makes a row. A row that the next one continues token by token is absorbed by it, so that a conversation is
one row with a template that only appends, and one row a turn with a template that rewrites its history (dropping
earlier thinking): what is trained is always a prompt that will be served.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from draftsmith.data.conversations import RowRejected
from draftsmith.errors import ConfigError, DataError, Problem, VerifierError, did_you_mean

__all__ = [
    "EncodedRow",
    "Encoding",
    "check_template_arguments",
    "encode",
    "fold",
    "is_cut",
    "load_tokenizer",
    "render_prompt",
    "template_variables",
    "tokenize",
]

Messages = Sequence[Mapping[str, Any]]
#: Stands for an answer while looking for what the template puts behind one.
_SENTINEL = "draftsmith sentinel answer"
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
    }
)


@frozen(kw_only=True)
class EncodedRow:
    """Token ids [T] and, of the same length, the mask that is True where the verifier wrote the token."""

    token_ids: list[int]
    loss_mask: list[bool]


@frozen(kw_only=True)
class Encoding:
    """What :func:`encode` makes of a conversation.

    Attributes:
        rows: at least one.
        cut_turns: answers cut at the length limit (dropped, or kept without their terminator).
        leading_answers: assistant turns before the first user: context, not supervised.
        differing_marks: turns where ``{% generation %}`` marks less than the verifier would have written.
        rewrites_history: the template changed earlier turns, which made several rows of one conversation.
        terminators: what the template puts behind answers (``""``: nothing), cut ones left aside: they have none.
    """

    rows: list[EncodedRow]
    cut_turns: int = 0
    leading_answers: int = 0
    differing_marks: int = 0
    rewrites_history: bool = False
    terminators: frozenset[str] = field(factory=frozenset)


# --- the tokenizer ----------------------------------------------------------------------------------------------


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The verifier's tokenizer (not its processor, which vision-language models have beside it).

    Raises:
        VerifierError: it cannot be loaded, or has no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise VerifierError(
            f"the tokenizer cannot be loaded: {error}",
            where=str(folder),
            hint="put the tokenizer's files (tokenizer.json, tokenizer_config.json) into the verifier's folder",
        ) from error
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _processor_template(folder)
    if tokenizer.chat_template is None:
        raise VerifierError(
            "the verifier has no chat template, so that no conversation can be rendered as it will be served",
            where=str(folder),
            hint="use the instruction-tuned model, or put its chat_template.jinja into the folder",
        )
    return tokenizer


def _processor_template(folder: Path) -> str | None:
    """Older vision-language models keep the template in their processor's file."""
    try:
        template = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return template if isinstance(template, str) else None


def _template_text(tokenizer: Any, tools: Sequence[Any] | None = None) -> str:
    return str(tokenizer.get_chat_template(None, list(tools) if tools else None))


def template_variables(template: str) -> frozenset[str]:
    """Names that the template takes from outside.

    Raises:
        VerifierError: it is not a Jinja template.
    """
    import jinja2
    import jinja2.ext
    import jinja2.meta

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2's interface

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.Environment(extensions=[Generation, jinja2.ext.loopcontrols])
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
    except jinja2.TemplateError as error:
        raise VerifierError(
            f"the chat template cannot be parsed: {error}", where="chat template", hint="mend the template"
        ) from error


def check_template_arguments(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the template never looks at: a typo there would train what is not served.

    Raises:
        ConfigError: with all of them.
    """
    known: set[str] = set()
    templates = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        known |= template_variables(template)
    problems = []
    for name in arguments:
        where = f"data.template_arguments.{name}"
        if name in _RESERVED:
            problems.append(Problem("draftsmith sets this itself", where=where, hint="leave it out"))
        elif name not in known:
            near = did_you_mean(name, known)
            problems.append(Problem("the chat template takes no such argument", where=where, hint=near))
    if problems:
        raise ConfigError(problems)


# --- rendering --------------------------------------------------------------------------------------------------


def _render(
    tokenizer: Any,
    messages: Messages,
    tools: Sequence[Any] | None,
    arguments: Mapping[str, Any],
    *,
    add_generation_prompt: bool = False,
) -> str:
    import jinja2

    plain = [{key: value for key, value in each.items() if key != "finish_reason"} for each in messages]
    try:
        text = tokenizer.apply_chat_template(
            plain,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **arguments,
        )
    except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise RowRejected("template_error", f"the chat template says: {error}") from error
    return str(text)


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Token ids of rendered text. The template has written the special tokens already; none are added."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def render_prompt(
    tokenizer: Any,
    messages: Messages,
    template_arguments: Mapping[str, Any] | None = None,
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Token ids of the serving prompt: *messages* and the generation prompt.

    Raises:
        DataError: the template refuses the messages.
    """
    try:
        text = _render(tokenizer, messages, tools, template_arguments or {}, add_generation_prompt=True)
    except RowRejected as error:
        raise DataError(
            error.detail, where="chat template", hint="the conversation must be one that the verifier can be sent"
        ) from error
    return tokenize(tokenizer, text)


def is_cut(message: Mapping[str, Any]) -> bool:
    """Whether an answer ended at a length limit, so that no end of turn follows it."""
    return message.get("finish_reason") == "length"


# --- encoding ---------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class _Turn:
    row: EncodedRow
    terminator: str | None  # None: the answer was cut, and none was written
    differing_marks: bool


def encode(
    tokenizer: Any,
    messages: Messages,
    tools: Sequence[Any] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    *,
    keep_cut_answers: bool = False,
) -> Encoding:
    """Token ids and loss mask of a conversation.

    Args:
        tokenizer: with a chat template.
        messages: ``role`` and ``content`` and whatever else the template reads; ``finish_reason: "length"`` marks a
            cut answer.
        tools: passed to the template.
        template_arguments: passed to the template, such as ``{"enable_thinking": False}``.
        keep_cut_answers: supervise cut answers, without their terminator; else the conversation ends before the
            first of them.

    Raises:
        RowRejected: the template refuses the conversation, no turn of it can be supervised, or an answer would not
            follow its serving prompt.
    """
    arguments = template_arguments or {}
    turns: list[_Turn] = []
    cut = leading = 0
    asked = False
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            asked = asked or message["role"] not in ("system", "developer")
            continue
        if not asked:
            leading += 1
            continue
        if is_cut(message):
            cut += 1
            if not keep_cut_answers:
                break
        turns.append(_encode_turn(tokenizer, messages[: index + 1], tools, arguments))
    if not turns:
        if cut:
            raise RowRejected("cut_answer", "the answer was cut at the length limit")
        raise RowRejected("no_assistant_turn", "no assistant turn follows a user's")
    rows = fold([turn.row for turn in turns])
    return Encoding(
        rows=rows,
        cut_turns=cut,
        leading_answers=leading,
        differing_marks=sum(turn.differing_marks for turn in turns),
        rewrites_history=len(rows) > 1,
        terminators=frozenset(turn.terminator for turn in turns if turn.terminator is not None),
    )


def fold(rows: Sequence[EncodedRow]) -> list[EncodedRow]:
    """Merge each row into the next one where that one begins with it, token by token."""
    folded: list[EncodedRow] = []
    for row in rows:
        if folded and row.token_ids[: len(folded[-1].token_ids)] == folded[-1].token_ids:
            earlier = folded.pop()
            length = len(earlier.token_ids)
            merged = [a or b for a, b in zip(earlier.loss_mask, row.loss_mask[:length], strict=True)]
            row = EncodedRow(token_ids=row.token_ids, loss_mask=merged + row.loss_mask[length:])
        folded.append(row)
    return folded


def _encode_turn(
    tokenizer: Any, messages: Messages, tools: Sequence[Any] | None, arguments: Mapping[str, Any]
) -> _Turn:
    """The row of the last message: its serving prompt, masked out, and its answer."""
    prompt = _render(tokenizer, messages[:-1], tools, arguments, add_generation_prompt=True)
    full = _render(tokenizer, messages, tools, arguments)
    if not full.startswith(prompt):
        raise RowRejected(
            "answer_does_not_follow_prompt",
            f"as rendered, the answer does not continue the serving prompt, which ends in {prompt[-40:]!r}"
            f" where the conversation reads {_where_they_part(prompt, full)!r};"
            " set template_arguments as in serving, or let the verifier write the answers (responses: regenerate)",
        )
    body, end = _end_of_answer(tokenizer, messages, full, tools, arguments)
    if is_cut(messages[-1]):
        end = body
    if not full[len(prompt) : body].strip():
        raise RowRejected("empty_assistant_turn", "the template renders nothing of an assistant turn")
    prompt_ids = tokenize(tokenizer, prompt)
    token_ids = _continue_ids(tokenizer, prompt_ids, full[len(prompt) : end], full[:end])
    mask = [False] * len(prompt_ids) + [True] * (len(token_ids) - len(prompt_ids))
    terminator = full[body:end]
    marked = _marked_by_template(tokenizer, messages, tools, arguments, token_ids)
    differing = False
    if marked is not None:
        tail = len(tokenize(tokenizer, terminator)) if terminator else 0
        # The terminator is the verifier's too, though few templates mark it; alone it teaches nothing.
        answer = any(marked[len(prompt_ids) : len(mask) - tail])
        allowed = [each or (answer and place >= len(mask) - tail) for place, each in enumerate(marked)]
        narrowed = [a and b for a, b in zip(mask, allowed, strict=True)]
        differing = narrowed != mask
        mask = narrowed
    return _Turn(
        row=EncodedRow(token_ids=token_ids, loss_mask=mask),
        terminator=None if is_cut(messages[-1]) else terminator.strip(),
        differing_marks=differing,
    )


def _where_they_part(prompt: str, full: str) -> str:
    place = next(
        (i for i, (a, b) in enumerate(zip(prompt, full, strict=False)) if a != b), min(len(prompt), len(full))
    )
    return full[max(0, place - 20) : place + 20]


def _end_of_answer(
    tokenizer: Any, messages: Messages, full: str, tools: Sequence[Any] | None, arguments: Mapping[str, Any]
) -> tuple[int, int]:
    """Where in *full* the last message's own text ends, and where its terminator does."""
    try:
        probe = _render(tokenizer, [*messages[:-1], {"role": "assistant", "content": _SENTINEL}], tools, arguments)
    except RowRejected:
        probe = ""
    place = probe.rfind(_SENTINEL)
    tail = probe[place + len(_SENTINEL) :] if place >= 0 else ""
    terminator = _terminator(tokenizer, tail)
    if full.endswith(tail):
        body = len(full) - len(tail)
        return body, body + len(terminator)
    # A turn that ends otherwise than plain text (a tool call with its own terminator): only what follows the
    # terminator can be taken off.
    closing = tail[len(terminator) :]
    end = len(full) - len(closing) if closing and full.endswith(closing) else len(full)
    end = len(full[:end].rstrip())
    return end, end


def _terminator(tokenizer: Any, tail: str) -> str:
    """The part of what follows an answer that the verifier itself writes: up to the end of the first special token,
    or, in a template without one, all but the space at its end."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()] or list(tokenizer.all_special_tokens)
    found = [(tail.find(token), -len(token)) for token in added if token.strip() and token in tail]
    if not found:
        return tail.rstrip()
    begin, length = min(found)
    return tail[: begin - length]


def _continue_ids(tokenizer: Any, prompt_ids: list[int], answer: str, text: str) -> list[int]:
    """Ids of *text* that begin with exactly those of the serving prompt."""
    whole = tokenize(tokenizer, text)
    if whole[: len(prompt_ids)] == prompt_ids and len(whole) > len(prompt_ids):
        return whole
    # A token reaches across the boundary. In serving the prompt is tokenised alone, and the answer follows it.
    parted = prompt_ids + tokenize(tokenizer, answer)
    if tokenizer.decode(parted) != tokenizer.decode(whole):
        raise RowRejected("token_boundary", "prompt and answer cannot be told apart in tokens")
    return parted


def _marked_by_template(
    tokenizer: Any,
    messages: Messages,
    tools: Sequence[Any] | None,
    arguments: Mapping[str, Any],
    token_ids: Collection[int],
) -> list[bool] | None:
    """What ``{% generation %}`` marks; None where the template has none, or its marks cannot be laid on the row."""
    if "endgeneration" not in _template_text(tokenizer, tools):
        return None
    plain = [{key: value for key, value in each.items() if key != "finish_reason"} for each in messages]
    marked = tokenizer.apply_chat_template(
        plain,
        tools=list(tools) if tools else None,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
        **arguments,
    )
    ids, mask = list(marked["input_ids"]), [bool(each) for each in marked["assistant_masks"]]
    # Of a last character that takes several tokens, transformers marks only the first one.
    spans = marked["offset_mapping"]
    for place in range(1, len(mask)):
        mask[place] |= mask[place - 1] and spans[place][0] < spans[place - 1][1]
    if ids[: len(token_ids)] != list(token_ids):
        return None
    return mask[: len(token_ids)]
