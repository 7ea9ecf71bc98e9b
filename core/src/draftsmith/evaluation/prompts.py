"""Prompts of an evaluation: a registered set by name, a file of any known form, or a data set of the hub.

Nothing here imports torch or a tokenizer but :func:`encode`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from draftsmith.data.conversations import SUFFIXES, RowRejected, check_text, normalise, read_rows
from draftsmith.errors import DataError, DraftsmithError, PluginError, UnknownNameError
from draftsmith.plugins import load_reference
from draftsmith.serving.prompts import spread

if TYPE_CHECKING:
    from draftsmith.plugins import PluginRegistry

__all__ = ["ChatPrompt", "encode", "load_prompts", "prompt_of", "without_long_ones"]

#: Keys that hold a prompt as text, or as the turns of a user.
_KEYS = ("turns", "prompt", "question", "instruction")


#: In place of the texts that SPEED-Bench may not pass on (494 of its 880 qualitative rows).
_NOT_PASSED_ON = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@frozen(kw_only=True)
class ChatPrompt:
    """What is sent to the verifier.

    Attributes:
        set: what ``--prompts`` named it.
        category: within the set; the set's own name where it has none.
        messages: chat messages, the last of them not the assistant's.
        tools: the tools on offer, or None.
        later: what the user says in the turns after this one, whatever the answers are.
        turn: which of the user's turns *messages* end with, counted from 1.
    """

    set: str
    category: str
    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None = None
    later: tuple[str, ...] = ()
    turn: int = 1

    def answered(self, answer: str) -> ChatPrompt:
        """The next turn, after *answer* to this one."""
        said = ({"role": "assistant", "content": answer}, {"role": "user", "content": self.later[0]})
        return evolve(self, messages=(*self.messages, *said), later=self.later[1:], turn=self.turn + 1)


def load_prompts(
    names: Sequence[str], registry: PluginRegistry, base: Path, *, at_most: int | None = None
) -> list[ChatPrompt]:
    """The prompts of all sets, in order.

    Args:
        names: registered sets, files (JSONL, JSON, Parquet) or folders of them, or ``owner/name[:config][:split]``.
        base: what the paths are relative to.
        at_most: of each set, chosen at even distances; None: all.

    Raises:
        DataError: a set is missing or holds no prompt, or a row of it cannot be used.
        UnknownNameError: nothing is named so.
    """
    found: list[ChatPrompt] = []
    for name in names:
        label, rows = _open(name, registry, base)
        prompts = [prompt_of(row, label, where) for where, row in rows]
        if not prompts:
            raise DataError("there is no prompt", where=name, hint="name another set or file with --prompts")
        found += prompts if at_most is None else spread(prompts, at_most)
    if not found:
        raise DataError("no prompts are named", where="--prompts", hint="such as --prompts humaneval")
    return found


def _open(name: str, registry: PluginRegistry, base: Path) -> tuple[str, Iterator[tuple[str, Any]]]:
    """What the set is called in tables, and (where, row) of each of its rows."""
    if name in registry.prompt_sets:
        return name, _registered(name, registry)
    path = base / Path(name).expanduser()
    if path.exists() or name.endswith(SUFFIXES):
        return path.stem, ((f"{file}:{line}", row) for file, line, row in read_rows(name, base))
    owner, _, rest = name.partition("/")
    if owner and rest and "/" not in rest and not name.startswith((".", "~")):
        return rest.partition(":")[0], _of_hub(name)
    raise UnknownNameError(
        "prompt set",
        name,
        registry.prompt_sets.names(),
        where="--prompts",
        hint="or name a file (.jsonl, .json, .parquet), or a data set as owner/name",
    )


def _registered(name: str, registry: PluginRegistry) -> Iterator[tuple[str, Any]]:
    item, provider = registry.prompt_sets.get(name), registry.prompt_sets.provider(name)
    try:
        for number, row in enumerate(load_reference(item.implementation)(), 1):
            yield f"{name}:{number}", row
    except DraftsmithError:
        raise
    except Exception as error:
        raise PluginError(
            f"prompt set {name!r} of {provider} failed: {type(error).__name__}: {error}",
            hint=f"report it to the authors of {provider.distribution}",
        ) from error


def _of_hub(name: str) -> Iterator[tuple[str, Any]]:
    from draftsmith.evaluation.prompt_sets import hub_rows

    dataset, *further = name.split(":")
    if len(further) > 2:
        raise DataError(f"cannot be read: {name!r}", where="--prompts", hint="owner/name, :split or :config:split")
    config = further[0] if len(further) == 2 else None
    split = further[-1] if further else "test"
    for number, row in enumerate(hub_rows(dataset, config, split), 1):
        yield f"{name}:{number}", row


# --- one row ----------------------------------------------------------------------------------------------------


def prompt_of(row: Any, label: str, where: str) -> ChatPrompt:
    """The prompt in one row: its conversation without the answers at its end, or its text as a user's message; of
    several turns of a user the first, the others being *later*.

    Raises:
        DataError: there is none.
    """
    if isinstance(row, RowRejected):
        raise DataError(f"{row.reason}: {row.detail}", where=where, hint="mend or remove it")
    category = (row.get("category") or row.get("source")) if isinstance(row, Mapping) else None
    texts = _texts(row) if isinstance(row, Mapping) and not _has_conversation(row) else ()
    try:
        if texts:
            row = {**row, "messages": [{"role": "user", "content": text} for text in texts]}
        messages, tools = normalise(dict(row) if isinstance(row, Mapping) else row, allow_empty_answers=True)
        check_text(category)
    except RowRejected as error:
        raise DataError(f"{error.reason}: {error.detail}", where=where, hint="mend or remove it") from error
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError("no message comes before the answer", where=where, hint="mend or remove it")
    if any(_NOT_PASSED_ON in str(each["content"]) for each in messages):
        raise DataError(
            "the row has no prompt but the notice that it must be fetched from its source",
            where=where,
            hint="fetch it with NVIDIA's prepare.py for SPEED-Bench, and name the file that it writes",
        )
    messages, later = _split_turns(messages)
    return ChatPrompt(
        set=label,
        category=category if isinstance(category, str) else label,
        messages=tuple(messages),
        tools=tools,
        later=later,
    )


def _split_turns(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The first of a user's turns with what comes before it, and the later ones; where others speak too, all of it."""
    first = next((place for place, each in enumerate(messages) if each["role"] == "user"), len(messages))
    after = messages[first + 1 :]
    if all(each["role"] == "user" for each in after):
        return messages[: first + 1], tuple(str(each["content"]) for each in after)
    return messages, ()


def _has_conversation(row: Mapping[str, Any]) -> bool:
    return any(row.get(key) for key in ("messages", "conversations"))


def _texts(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A user's turns in a row that is no conversation; none: leave it to what reads training data."""
    if row.get("input") or ("instruction" in row and row.get("context")):
        return ()  # instruction data with an input of its own
    for key in _KEYS:
        value = row.get(key)
        turns = value if isinstance(value, list) else [value]
        if turns and all(isinstance(turn, str) and turn.strip() for turn in turns):
            return tuple(turns)
    return ()


# --- token ids --------------------------------------------------------------------------------------------------


def encode(
    prompts: Iterable[ChatPrompt], tokenizer: Any, template_arguments: Mapping[str, Any] | None = None
) -> list[tuple[int, ...]]:
    """Token ids of each prompt as the verifier's chat template renders it, the generation prompt included.

    Raises:
        DataError: the template refuses one.
    """
    from draftsmith.data.template import render_prompt

    return [tuple(render_prompt(tokenizer, list(each.messages), template_arguments, each.tools)) for each in prompts]


def without_long_ones(
    prompts: Sequence[ChatPrompt], token_ids: Sequence[tuple[int, ...]], longest: int, *, skip: bool
) -> tuple[list[ChatPrompt], list[tuple[int, ...]]]:
    """Those of at most *longest* tokens.

    Args:
        skip: leave longer ones out; False: they are an error.

    Raises:
        DataError: a prompt is too long and *skip* is False, or all are.
    """
    fitting = [index for index, ids in enumerate(token_ids) if len(ids) <= longest]
    if len(fitting) < len(prompts) and (not skip or not fitting):
        over = Counter(each.set for each, ids in zip(prompts, token_ids, strict=True) if len(ids) > longest)
        listed = ", ".join(f"{count} of {name}" for name, count in over.items())
        raise DataError(
            f"prompts are longer than the context leaves room for, {max(longest, 0)} tokens: {listed}, the longest of "
            f"{max(map(len, token_ids))}",
            where="--prompts",
            hint="lower --max-tokens" + (", or leave them out with --skip-long-prompts" if fitting else ""),
        )
    return [prompts[index] for index in fitting], [token_ids[index] for index in fitting]
