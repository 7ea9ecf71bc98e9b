"""A trained head back into a copy of its model, and the head out of a model.

Each tensor of the head is replaced where it stands: same file, same name, same dtype, same bytes before and after it.
The index then says the truth as it is. A file of its own for the new tensors would not do: vLLM reads the files that
the index names, whole (``filter_duplicate_safetensors_files`` in ``model_loader/weight_utils.py``), and of a tensor
that two of them hold it takes the one of the file that comes last.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from draftsmith.api import PROJECT_NAME as OWN_KEY
from draftsmith.errors import CheckpointError, OutputError, VerifierError
from draftsmith.progress import stage_progress
from draftsmith.stages import write_json_atomically
from draftsmith.stored_tensors import WEIGHTS, StoredTensor, read_file_header, tensor_files
from draftsmith.verifier import read_verifier
from draftsmith_mtp.families import MtpFamily, family_named, family_of, text_config
from draftsmith_mtp.head import HEAD_KEY, head_config, head_tensors, model_config
from draftsmith_mtp.shards import (
    Replacement,
    check_room,
    copy_file,
    file_size,
    reflink,
    refuse_existing,
    rewrite,
    share,
    stored_bytes,
    validate,
    whole_folder,
    write_tensor_file,
)

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from draftsmith.api import VerifierFacts

__all__ = ["Stitched", "stitch", "unstitch"]

_CONFIG = "config.json"
#: Keys of the model's config.json that say how its tensors are quantised, or hold one that does.
_QUANTISED = ("quantization_config", "compression_config", "text_config")
#: dtypes that convert into each other, by safetensors' names and torch's.
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: dtype in which training writes a head.
_USUAL = "BF16"
#: Further dtypes with values that are not finite.
_NARROW_FLOATS = ("F8_E4M3", "F8_E5M2")
#: Elements of a tensor that are looked at at once.
_ELEMENTS = 1 << 20
#: Files that are shared with the model like its weights. Others are copied, since people edit them in place.
_LARGE = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx"}


@frozen(kw_only=True)
class Stitched:
    """What was done.

    Attributes:
        family: of the head.
        tensors: replaced or extracted.
        converted: those among them that had another floating-point dtype than the model's.
        rewritten: files with replaced tensors.
        reflinked, linked, copied: other weight files, by the way in which they came along.
        left_out: what is in the model's folder and not in the copy.
        bytes_written: of all files.
        speculative_tokens: that the head was trained for.
    """

    family: str
    tensors: int
    converted: int = 0
    rewritten: int = 0
    reflinked: int = 0
    linked: int = 0
    copied: int = 0
    left_out: tuple[str, ...] = ()
    bytes_written: int
    speculative_tokens: int
    seconds: float


@frozen
class _Model:
    """A model and the head in it. A tensor that two of the files hold has two places, and vLLM takes the last."""

    facts: VerifierFacts
    config: Mapping[str, Any]
    family: MtpFamily
    files: tuple[Path, ...]
    head: Mapping[str, tuple[StoredTensor, ...]]

    @property
    def folder(self) -> Path:
        return self.facts.path


@frozen
class _Head:
    """A head directory."""

    folder: Path
    config: Mapping[str, Any]
    family: MtpFamily
    tensors: Mapping[str, StoredTensor]


def stitch(
    model: str | os.PathLike[str],
    head: Path,
    target: Path,
    *,
    copy: bool = False,
    ignore_fingerprint: bool = False,
    console: Console | None = None,
) -> Stitched:
    """Write a copy of *model* into the new folder *target*, with its head replaced by that in the folder *head*.

    Args:
        copy: share no file with the model.
        ignore_fingerprint: take a head that was trained on other weights than the model's, if all else fits.

    Raises:
        VerifierError: the model cannot be read, has no head, or is of a family that is not known.
        CheckpointError: the head cannot be read, belongs to another model, or has values that are not finite.
        OutputError: *target* exists, or cannot be written. DiskSpaceError: there is no room.

    Nothing is written into the model's folder, and after an error there is no *target*.
    """
    started = time.monotonic()
    target = Path(os.path.abspath(target))
    refuse_existing(target)
    whole = _read_model(model)
    if target.resolve().is_relative_to(whole.folder.resolve()):
        raise OutputError("the target is in the model's own folder", where=str(target), hint="choose another place")
    given = _read_head(Path(head), whole)
    _refuse_another_models(given, whole, ignore_fingerprint)
    _refuse_not_finite(given)
    replaced, converted = _replacements(given, whole)
    files = _sort_files(whole, replaced)
    with whole_folder(target) as folder:
        ways, written = _write_files(whole.folder, files, replaced, folder, target, copy, console)
    return Stitched(
        family=whole.family.name,
        tensors=len(given.tensors),
        converted=converted,
        rewritten=len(files.rewritten),
        reflinked=ways["reflink"],
        linked=ways["link"],
        copied=ways["copy"],
        left_out=files.left_out,
        bytes_written=written,
        speculative_tokens=_speculative_tokens(given.config, whole),
        seconds=time.monotonic() - started,
    )


def unstitch(
    model: str | os.PathLike[str],
    target: Path,
    *,
    speculative_tokens: int | None = None,
    console: Console | None = None,
) -> Stitched:
    """Write the head of *model* into the new folder *target*: what training begins from, and :func:`stitch` takes.

    Args:
        speculative_tokens: that vLLM drafts a round with this head; None: as many as it has layers.

    Raises:
        VerifierError: the model cannot be read, has no head, is of a family that is not known, or its head does not
            draft so many tokens.
        OutputError: *target* exists, or cannot be written. DiskSpaceError: there is no room.
    """
    started = time.monotonic()
    target = Path(os.path.abspath(target))
    refuse_existing(target)
    whole = _read_model(model)
    layers = whole.family.num_layers(whole.config)
    tokens = speculative_tokens or layers
    if tokens > layers and tokens % layers:
        raise VerifierError(
            f"vLLM drafts by a head of {layers} layers no {tokens} tokens",
            where=str(whole.folder),
            hint=f"choose a multiple of {layers}, or fewer",
        )
    tensors = {name: places[-1] for name, places in whole.head.items()}
    dtypes = {name: str(tensor.spec.dtype) for name, tensor in tensors.items() if tensor.spec.dtype != _USUAL}
    plain = _is_plain(tensors.values())
    config = {
        **head_config(
            whole.config,
            whole.family,
            verifier_name=str(whole.folder.absolute()) if Path(model).expanduser().is_dir() else str(model),
            speculative_tokens=tokens,
            tensors={name: tensor.spec.shape for name, tensor in tensors.items()},
            dtypes=dtypes if plain else None,  # the model's, which lint then expects
        ),
        OWN_KEY: {"verifier_fingerprint": whole.facts.fingerprint},
    }
    if not plain:  # how they are quantised, head_config leaves out
        config.update({key: value for key, value in whole.config.items() if key in _QUANTISED})
    size = sum(tensor.end - tensor.begin for tensor in tensors.values())
    with whole_folder(target) as folder:
        check_room(folder, size, target)
        with stage_progress(console, "unstitch", size, "bytes") as bar:
            written = write_tensor_file(folder / WEIGHTS, tensors, bar.advance)
        write_json_atomically(folder / _CONFIG, config)
        written += (folder / _CONFIG).stat().st_size
    return Stitched(
        family=whole.family.name,
        tensors=len(tensors),
        bytes_written=written,
        speculative_tokens=tokens,
        seconds=time.monotonic() - started,
    )


# --- reading ----------------------------------------------------------------------------------------------------


def _read_model(model: str | os.PathLike[str]) -> _Model:
    facts = read_verifier(model)
    config = model_config(facts.path)
    family, prefix = _family(config, facts.path / _CONFIG)
    files = tuple(tensor_files(facts.path))
    places: dict[str, tuple[StoredTensor, ...]] = {}
    for file in files:
        if file.parent != facts.path:
            raise VerifierError(
                f"the index names a file outside the model's folder: {file}",
                where=str(facts.path),
                hint="vLLM reads none from elsewhere; put all weight files side by side",
            )
        for name, tensor in read_file_header(file).items():
            if family.belongs(name, config) and not family.is_copy(name, config):
                places[name] = (*places.get(name, ()), tensor)
    if not places:
        raise VerifierError(
            f"the model's files hold no multi-token-prediction head: nothing begins with {prefix}",
            where=str(facts.path),
            hint="take the model as its makers published it: transformers' save_pretrained leaves the head out",
        )
    for file in {tensor.file for each in places.values() for tensor in each}:
        validate(file)
    return _Model(facts, config, family, files, places)


def _family(config: Mapping[str, Any], path: Path) -> tuple[MtpFamily, str]:
    """The family of a model that has a head, and what the head's names begin with."""
    family = family_of(config)
    try:
        layers, prefix = family.num_layers(config), family.prefix_of(config)
    except (KeyError, TypeError, ValueError) as error:
        raise VerifierError(
            f"the configuration does not say where the head is: {type(error).__name__}: {error}",
            where=str(path),
            hint="take the model's config.json as its makers published it",
        ) from error
    if layers < 1:
        raise VerifierError(
            f"the model has no multi-token-prediction head: {family.layers_key} is 0 or missing",
            where=str(path),
            hint="name a model that comes with one",
        )
    return family, prefix


def _read_head(folder: Path, whole: _Model) -> _Head:
    config = _head_json(folder)
    own = config.get(HEAD_KEY)
    name = own.get("family") if isinstance(own, Mapping) else None
    try:
        family = family_of(config) if name is None else family_named(str(name))
    except VerifierError as error:
        raise CheckpointError(error.what, where=str(folder / _CONFIG), hint=error.hint) from error
    files = tensor_files(folder)
    tensors = {
        name: tensor
        for file in files
        for name, tensor in read_file_header(file).items()
        if not whole.family.is_copy(name, whole.config)
    }
    for file in files:
        validate(file)
    return _Head(folder, config, family, tensors)


def _head_json(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    hint = "name a folder that `draftsmith export` or `draftsmith unstitch` wrote"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"is no head: {_CONFIG} cannot be read: {error}", where=str(folder), hint=hint
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError("no head: not a JSON object", where=str(path), hint=hint)
    return config


def _speculative_tokens(config: Mapping[str, Any], whole: _Model) -> int:
    try:
        return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
    except (KeyError, TypeError, ValueError, IndexError):  # a head of somebody else's
        return whole.family.num_layers(whole.config)


# --- whether they belong together -------------------------------------------------------------------------------


def _refuse_another_models(head: _Head, whole: _Model, ignore_fingerprint: bool) -> None:
    """Raises:
    CheckpointError: the head is not this model's.
    """
    where = str(head.folder)
    if head.family.name != whole.family.name:
        raise CheckpointError(
            f"the head belongs to another model: its family is {head.family.name}, the model's {whole.family.name}",
            where=where,
            hint="name the model that the head was trained for",
        )
    theirs, ours = (text_config(each.config).get("hidden_size") for each in (head, whole))
    if theirs is not None and theirs != ours:
        raise CheckpointError(
            f"the head belongs to another model: its hidden size is {theirs}, the model's {ours}",
            where=where,
            hint="name the model that the head was trained for",
        )
    _refuse_other_tensors(head, whole)
    own = head.config.get(OWN_KEY)
    recorded = own.get("verifier_fingerprint") if isinstance(own, Mapping) else None
    if recorded is not None and recorded != whole.facts.fingerprint and not ignore_fingerprint:
        raise CheckpointError(
            f"the head was trained on another model, or on other weights of this one (its verifier's fingerprint is "
            f"{recorded}, this model's {whole.facts.fingerprint})",
            where=where,
            hint="name the model that it was trained on, not a copy with another head stitched in; "
            "--ignore-fingerprint if you know that the weights are the same, such as in other files",
        )


def _refuse_other_tensors(head: _Head, whole: _Model) -> None:
    where = str(head.folder)
    hint = "name the model that the head was trained for"
    if not _is_plain(tensor for places in whole.head.values() for tensor in places):
        hint = (
            "the model's head is quantised and takes back only what unstitch took from it: stitch into the model "
            "before quantisation, or serve the head from its own folder ({'method': 'mtp', 'model': HEAD})"
        )
    # Of a head with several layers training knows the first; the others may stay as they are.
    needed = head_tensors(whole.family, whole.config, {name: places[-1].spec for name, places in whole.head.items()})
    missing, unknown = sorted(needed.keys() - head.tensors.keys()), sorted(head.tensors.keys() - whole.head.keys())
    if missing or unknown:
        parts = [f"it lacks {_some(missing)}"] if missing else []
        parts += [f"the model's head has no {_some(unknown)}"] if unknown else []
        raise CheckpointError(f"the head is not this model's: {', and '.join(parts)}", where=where, hint=hint)
    for name, tensor in head.tensors.items():
        theirs = tensor.spec
        for ours in (place.spec for place in whole.head[name]):
            if theirs.shape != ours.shape:
                raise CheckpointError(
                    f"the head is not this model's: {name} has shape {list(theirs.shape)}, "
                    f"the model's {list(ours.shape)}",
                    where=where,
                    hint=hint,
                )
            if theirs.dtype != ours.dtype and not {theirs.dtype, ours.dtype} <= _FLOATS.keys():
                raise CheckpointError(
                    f"{name} is {theirs.dtype}, the model's is {ours.dtype}, and one does not convert to the other",
                    where=where,
                    hint=hint,
                )


def _refuse_not_finite(head: _Head) -> None:
    """Raises:
    CheckpointError: a tensor of the head has values that are NaN or infinite, of which vLLM says nothing.
    """
    import torch

    for name, tensor in head.tensors.items():
        if tensor.spec.dtype not in (*_FLOATS, *_NARROW_FLOATS):
            continue
        values = _stored_tensor(tensor, name).reshape(-1)
        count = sum(int((~torch.isfinite(part.float())).sum()) for part in torch.split(values, _ELEMENTS))
        if count:
            raise CheckpointError(
                f"{count} of the {values.numel()} values of {name} are not finite: a head with them drafts nonsense",
                where=str(tensor.file),
                hint="train the head again, with a lower rate, or take one that is whole",
            )


def _is_plain(tensors: Iterable[StoredTensor]) -> bool:
    return all(tensor.spec.dtype in _FLOATS for tensor in tensors)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# --- writing ----------------------------------------------------------------------------------------------------


def _replacements(head: _Head, whole: _Model) -> tuple[dict[Path, list[Replacement]], int]:
    """What is replaced in each file, and how many tensors are converted for it."""
    found: dict[Path, list[Replacement]] = {}
    converted = set()
    for name, new in head.tensors.items():
        for place in whole.head[name]:
            dtype = place.spec.dtype
            if new.spec.dtype != dtype:
                converted.add(name)
            found.setdefault(place.file, []).append(
                Replacement(place.begin, place.end, partial(_pieces, new, name, dtype))
            )
    return found, len(converted)


def _pieces(tensor: StoredTensor, name: str, dtype: str | None) -> Iterable[memoryview]:
    if dtype is None or tensor.spec.dtype == dtype:
        return stored_bytes(tensor)
    return _converted(tensor, name, dtype)


def _converted(tensor: StoredTensor, name: str, dtype: str) -> Iterator[memoryview]:
    import torch

    stored = _stored_tensor(tensor, name)
    value = stored.to(getattr(torch, _FLOATS[dtype]))
    if bool((torch.isfinite(stored) & ~torch.isfinite(value)).any()):
        raise CheckpointError(
            f"{name} holds values too large for the model's {dtype}",
            where=str(tensor.file),
            hint="serve the head from its own folder, or stitch it into a model stored in BF16",
        )
    yield value.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _stored_tensor(tensor: StoredTensor, name: str) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(tensor.file, framework="pt") as file:
            found: Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{name} cannot be read: {error}", where=str(tensor.file)) from error
    return found


@frozen
class _Files:
    """The model's files, by what becomes of them. Paths are the model's."""

    rewritten: tuple[Path, ...]
    shared: tuple[Path, ...]
    copied: tuple[Path, ...]
    left_out: tuple[str, ...]


def _sort_files(whole: _Model, replaced: Mapping[Path, object]) -> _Files:
    shared: list[Path] = []
    copied: list[Path] = []
    left_out: list[str] = []
    for path in _walk(whole.folder):
        if path in replaced:
            continue
        if path in whole.files or (path.suffix in _LARGE and not _holds_old_weights(path, whole)):
            shared.append(path)
        elif path.is_dir() or path.suffix in _LARGE:
            left_out.append(str(path.relative_to(whole.folder)))
        else:
            copied.append(path)
    return _Files(tuple(sorted(replaced)), tuple(shared), tuple(copied), tuple(left_out))


def _holds_old_weights(path: Path, whole: _Model) -> bool:
    """Whether a loader could take the old head from there: the model once more, in files that the index leaves out."""
    if path.parent != whole.folder:
        return False
    return path.suffix in (".safetensors", ".gguf") or path.name.startswith(("pytorch_model", "consolidated"))


def _walk(folder: Path) -> Iterator[Path]:
    """All files, and links to folders, which are not followed. Hidden ones belong to git and to the hub's client."""

    def fail(error: OSError) -> None:
        raise VerifierError(f"cannot be read: {error.strerror}", where=str(error.filename)) from error

    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (path for name in folders if (path := Path(parent, name)).is_symlink())
        yield from (Path(parent, name) for name in sorted(files) if not name.startswith("."))


def _write_files(
    source: Path,
    files: _Files,
    replaced: Mapping[Path, list[Replacement]],
    folder: Path,
    target: Path,
    copy: bool,
    console: Console | None,
) -> tuple[Counter[str], int]:
    """Fill *folder*; returns how often each way was taken for unchanged weights, and the bytes written."""
    place = {path: folder / path.relative_to(source) for path in (*files.shared, *files.copied, *files.rewritten)}
    for path in place.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    ways = {path: (None if copy else share(path, place[path])) or "copy" for path in files.shared}
    cloned = {path: not copy and reflink(path, place[path]) for path in files.rewritten}
    copies = [*files.copied, *(path for path, way in ways.items() if way == "copy")]
    needed = sum(map(file_size, copies))
    for path, is_cloned in cloned.items():
        needed += sum(each.end - each.begin for each in replaced[path]) if is_cloned else file_size(path)
    check_room(folder, needed, target)
    with stage_progress(console, "stitch", needed, "bytes") as bar:
        written = sum(copy_file(path, place[path], bar.advance) for path in copies)
        for path in files.rewritten:
            written += rewrite(path, place[path], replaced[path], bar.advance, cloned=cloned[path])
    return Counter(ways.values()), written
