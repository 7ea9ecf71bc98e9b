"""The token that stands for what is to be drafted, in drafts that read several positions at once. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from draftsmith.api import DataFacts, Problem, VerifierFacts
from draftsmith.errors import ConfigError

__all__ = ["choose_mask_token", "mask_token_data_problems", "mask_token_problems"]

_WHERE = "algorithm.options.mask_token_id"
#: Parts of the names that tokenizers give to tokens of no use.
_RESERVED = ("reserved_special_token", "<unused", "[unused", "extra_id_")


def choose_mask_token(given: int | None, verifier: VerifierFacts) -> int:
    """The mask token, whose embedding nothing else uses.

    As *given* (the option ``mask_token_id``); else the tokenizer's mask token; else the first row of the embedding
    that has no token; else a token that is reserved by its name; else the padding or unknown token, where it has no
    other use.

    Raises:
        ConfigError: there is none.
    """
    if given is not None:
        return given
    found = next(_free_tokens(verifier), None)
    if found is None:
        raise ConfigError([_no_free_token()])
    return found


def mask_token_problems(given: int | None, verifier: VerifierFacts) -> Iterator[Problem]:
    """What is wrong with the option ``mask_token_id``; None chooses one, which may fail."""
    if given is None:
        if next(_free_tokens(verifier), None) is None:
            yield _no_free_token()
    elif given >= verifier.vocab_size:
        what = f"{given} is outside the verifier's vocabulary of {verifier.vocab_size}, so that it has no embedding"
        yield Problem(what, where=_WHERE, hint="null chooses one")
    elif given in verifier.eos_token_ids or given == verifier.bos_token_id:
        what = f"{given} begins or ends texts, so that a draft could not tell it from what it must fill"
        yield Problem(what, where=_WHERE, hint="null chooses one")


def mask_token_data_problems(token: int, data: DataFacts) -> Iterator[Problem]:
    """Whether the mask token is one that does not occur."""
    if token in data.token_ids:
        yield Problem(
            f"the mask token {token} occurs in the prepared data, so that the draft could not tell it from a word",
            where=_WHERE,
            hint="name one that does not occur",
        )


def _no_free_token() -> Problem:
    return Problem(
        "the tokenizer has no mask token, no token without use, and the embedding no row without a token",
        where=_WHERE,
        hint="name a token that occurs in no text, such as one for another modality",
    )


def _free_tokens(verifier: VerifierFacts) -> Iterator[int]:
    tokens = _tokens(verifier.path)
    taken = {verifier.bos_token_id, *verifier.eos_token_ids}

    def usable(token: int | None) -> bool:
        return token is not None and 0 <= token < verifier.vocab_size and token not in taken

    spare = tokens.size if tokens.size else None
    reserved = sorted(token for name, token in tokens.added.items() if any(word in name for word in _RESERVED))
    named = (tokens.roles.get("pad_token"), tokens.roles.get("unk_token"))
    yield from (token for token in (tokens.roles.get("mask_token"), spare, *reserved, *named) if usable(token))  # type: ignore[misc]


class _Tokens(NamedTuple):
    """What a tokenizer's files say: the highest id + 1 (0: unknown), ids of added tokens, and of the special roles."""

    size: int
    added: Mapping[str, int]
    roles: Mapping[str, int]


def _tokens(folder: Path) -> _Tokens:
    path = folder / "tokenizer.json"
    try:
        return _read_tokens(folder, path.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _Tokens(0, {}, {})  # another kind of tokenizer: the token must be named


@lru_cache(maxsize=8)
def _read_tokens(folder: Path, changed: int) -> _Tokens:
    content = json.loads((folder / "tokenizer.json").read_bytes())
    vocabulary = content["model"]["vocab"]
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {each[0]: i for i, each in enumerate(vocabulary)}
    added = {each["content"]: int(each["id"]) for each in content.get("added_tokens") or ()}
    ids.update(added)
    config = folder / "tokenizer_config.json"
    named = json.loads(config.read_bytes()) if config.is_file() else {}
    roles = {}
    for role in ("mask_token", "pad_token", "unk_token"):
        value = named.get(role)
        name = value.get("content") if isinstance(value, dict) else value
        if name in ids:
            roles[role] = int(ids[name])
    return _Tokens(max(ids.values(), default=-1) + 1, added, roles)
