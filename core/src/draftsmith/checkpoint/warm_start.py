"""Training that begins from an exported checkpoint (``train.warm_start``) instead of fresh weights.

The checkpoint's schema says whether its network is the run's; what holds for every schema is compared here: the type,
the layers that are tapped, the draft's vocabulary. Which tokens that has is known once the data are prepared, and
compared then; all else, how many it has among it, before torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith import api
from draftsmith.checkpoint.exported import (
    CONFIG,
    open_format,
    read_config,
    read_header,
    read_tensor,
    read_tensors,
    unread_files,
    vocabulary_of,
)
from draftsmith.errors import CheckpointError, Problem

if TYPE_CHECKING:
    from torch import Tensor, nn

    from draftsmith.interfaces import CheckpointFormat, VocabularyMap

__all__ = ["begin_from", "check_vocabulary", "checkpoint_digest", "vocabulary_problems", "warm_start_problems"]

_OTHER_TYPE = "name a checkpoint of such a type, or leave train.warm_start out and train this draft from fresh weights"
_MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError)


def warm_start_problems(
    folder: Path,
    schema: api.CheckpointSchema,
    options: Any,
    verifier: api.VerifierFacts,
    requirements: api.CaptureRequirements,
) -> list[Problem]:
    """Why a run with this *schema* and these *options* cannot begin from the checkpoint in *folder*. Torch-free.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    config = read_config(folder)
    read_header(folder)
    kind = config.get("speculators_model_type")
    known = (*schema.speculators_types, *schema.warm_start_types)
    if kind is not None and kind not in known:
        what = f"the checkpoint is of type {kind!r}; a draft of type {schema.name} begins from {' or '.join(known)}"
        return [Problem(what, where=str(folder / CONFIG), hint=_OTHER_TYPE)]
    try:
        return list(_compare(open_format(schema), config, folder, options, verifier, requirements))
    except _MALFORMED as error:
        raise CheckpointError(
            f"the configuration is malformed: {type(error).__name__} {error}", where=str(folder / CONFIG)
        ) from error


def _compare(
    format_: CheckpointFormat,
    config: Mapping[str, Any],
    folder: Path,
    options: Any,
    verifier: api.VerifierFacts,
    requirements: api.CaptureRequirements,
) -> Iterator[Problem]:
    for unread in unread_files(folder, config, format_):
        yield Problem(
            f"{unread}: training would begin from another draft than the one that was trained",
            where=str(folder),
            hint="train this draft from fresh weights",
        )
    yield from format_.warm_start_problems(config, options, verifier)
    tapped = format_.capture(config, verifier).layer_ids
    if tapped != requirements.layer_ids:
        yield Problem(
            f"the checkpoint reads the hidden states of layers {list(tapped)}, this run's draft those of "
            f"{list(requirements.layer_ids)}",
            where=str(folder / CONFIG),
            hint=f"set algorithm.options.layer_ids: {list(tapped)}",
        )


def vocabulary_problems(folder: Path, draft_size: int | None, verifier: api.VerifierFacts) -> list[Problem]:
    """Why a draft of *draft_size* tokens (None: all) cannot begin from the checkpoint in *folder*. Torch-free.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    stored = read_header(folder).get("d2t")
    theirs = verifier.vocab_size if stored is None else stored.spec.shape[0]
    ours = draft_size or verifier.vocab_size
    if theirs == ours:
        return []
    what = f"its draft vocabulary has {theirs} tokens, this run's {ours}"
    return [Problem(what, hint=f"set vocabulary.draft_size to {theirs}")]


def check_vocabulary(folder: Path, vocabulary: VocabularyMap) -> None:
    """Whether a draft of *vocabulary* can begin from the checkpoint in *folder*, of which its map alone is read.

    Raises:
        CheckpointError: it is of another draft vocabulary, or cannot be read.
    """
    import torch

    stored = read_header(folder).get("d2t")
    _check_vocabulary(folder, {} if stored is None else {"d2t": torch.tensor(read_tensor(stored))}, vocabulary)


def begin_from(
    folder: Path, schema: api.CheckpointSchema, model: nn.Module, vocabulary: VocabularyMap
) -> Sequence[str]:
    """Put the weights of the checkpoint in *folder* into a fresh *model*.

    Returns:
        State-dict names of what stays freshly initialised.

    Raises:
        CheckpointError: it cannot be read, is of another draft vocabulary, or its tensors are not the model's.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    _check_vocabulary(folder, tensors, vocabulary)
    with _without_shared(model):
        try:
            return open_format(schema).warm_start(model, tensors, config)
        except (*_MALFORMED, RuntimeError) as error:
            raise CheckpointError(f"the tensors do not fit the draft: {error}", where=str(folder)) from error


@contextmanager
def _without_shared(model: nn.Module) -> Iterator[None]:
    """The verifier's tensors out of reach: copies stand in for them.

    A checkpoint may hold a head of its own, rounded, which is right for drafting. Training shares the verifier's.
    """
    from torch.nn import Parameter

    places = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in _shared(model)}
    originals = {name: getattr(module, attribute) for name, (module, attribute) in places.items()}
    for name, (module, attribute) in places.items():
        copy = originals[name].detach().clone()
        is_parameter = isinstance(originals[name], Parameter)
        setattr(module, attribute, Parameter(copy, requires_grad=False) if is_parameter else copy)
    try:
        yield
    finally:
        for name, (module, attribute) in places.items():
            setattr(module, attribute, originals[name])


def _shared(model: nn.Module) -> list[str]:
    return list(model.shared_tensors())  # type: ignore[operator]  # a DraftArchitecture: checked when built


def _check_vocabulary(folder: Path, tensors: Mapping[str, Tensor], vocabulary: VocabularyMap) -> None:
    import torch

    try:
        theirs = vocabulary_of(tensors, vocabulary.target_size)
    except IndexError:
        raise CheckpointError(
            "its draft vocabulary leads outside the verifier's",
            where=str(folder),
            hint="it was trained for another verifier",
        ) from None
    ours = vocabulary.t2d.cpu()
    if torch.equal(theirs.t2d.cpu(), ours):
        if not torch.equal(theirs.kept_ids().cpu(), vocabulary.kept_ids().cpu()):
            what = "its draft vocabulary is in another order: the rows of its heads are those of other tokens"
            raise CheckpointError(what, where=str(folder), hint="sort d2t, and the rows of all heads with it")
        return
    differing = int((theirs.t2d.cpu() & ~ours).sum())
    raise CheckpointError(
        f"its draft vocabulary has {theirs.draft_size} tokens, {differing} of them not in this run's "
        f"{vocabulary.draft_size}",
        where=str(folder),
        hint=f"set vocabulary.draft_size to {theirs.draft_size}"
        if theirs.draft_size != vocabulary.draft_size
        else "the vocabulary follows from the data: prepare what the checkpoint was trained on, or draft all tokens",
    )


def checkpoint_digest(folder: Path) -> str:
    """32 hex digits over the configuration and the weights in *folder*.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    import xxhash

    hasher = xxhash.xxh3_128()
    files = sorted({tensor.file for tensor in read_header(folder).values()})
    try:
        for path in (folder / CONFIG, *files):
            with open(path, "rb") as file:
                while block := file.read(1 << 22):
                    hasher.update(block)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(folder)) from error
    return hasher.hexdigest()
