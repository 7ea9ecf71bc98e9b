"""The prompts of a verification: from a file of conversations, or from the validation rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen

from draftsmith.errors import DataError

if TYPE_CHECKING:
    from draftsmith.config.resolve import ResolvedRun

__all__ = ["Prompt", "load_prompts", "spread"]

T = TypeVar("T")


@frozen(kw_only=True)
class Prompt:
    """One serving prompt: its token ids, and the name of where it comes from."""

    token_ids: tuple[int, ...]
    source: str


def load_prompts(run: ResolvedRun) -> list[Prompt]:
    """The run's prompts, at most ``verify.max_prompts``, spread evenly over all there are.

    Raises:
        DataError: there are none, a line cannot be used, or all are too long for the verifier.
    """
    config = run.recipe.verify
    found = _from_file(run, config.prompts) if config.prompts else _from_validation(run)
    longest = run.verifier.max_position_embeddings - config.max_tokens - 2 * run.speculative_tokens - 1
    fitting = [prompt for prompt in found if 1 <= len(prompt.token_ids) <= longest]
    if not fitting:
        where = config.prompts or str(run.folders.prepared)
        raise DataError(
            "there is no prompt to verify with" if not found else "every prompt is too long for the verifier",
            where=where,
            hint="name a JSONL file of conversations in verify.prompts, or raise data.validation_share",
        )
    return spread(fitting, config.max_prompts)


def spread(items: Sequence[T], count: int) -> list[T]:
    """*count* of the items at even distances, in order; all where there are no more."""
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def _from_file(run: ResolvedRun, name: str) -> list[Prompt]:
    from draftsmith.data.conversations import Rejection, read_conversations
    from draftsmith.data.template import load_tokenizer, render_prompt

    tokenizer = load_tokenizer(run.verifier.path, trust_remote_code=run.recipe.trust_remote_code)
    prompts: list[Prompt] = []
    for each in read_conversations([name], run.base, allow_empty_answers=True):
        if isinstance(each, Rejection):
            raise DataError(f"{each.reason}: {each.detail}", where=f"{name}:{each.line}", hint="mend or remove it")
        messages = list(each.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise DataError("no message comes before the answer", where=f"{name}:{each.line}")
        ids = render_prompt(tokenizer, messages, run.recipe.data.template_arguments, each.tools)
        prompts.append(Prompt(token_ids=tuple(ids), source=_source(each.raw, name)))
    return prompts


def _source(raw: Any, name: str) -> str:
    source = raw.get("source") if isinstance(raw, dict) else None
    return source if isinstance(source, str) and source else Path(name).stem


def _from_validation(run: ResolvedRun) -> list[Prompt]:
    from draftsmith.data.dataset import open_prepared

    prompts: list[Prompt] = []
    seen: set[tuple[int, ...]] = set()
    for row in open_prepared(run.folders.prepared).validation:
        ids = tuple(row.prompt_ids.tolist())
        if ids and ids not in seen:
            seen.add(ids)
            prompts.append(Prompt(token_ids=ids, source=Path(row.source).stem))
    return prompts
