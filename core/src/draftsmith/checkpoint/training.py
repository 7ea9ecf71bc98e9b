"""Training checkpoints: everything that a killed run needs to go on as if it had not been killed.

Layout, below the training folder::

    checkpoints/step-00000120/model.safetensors      trainable weights and buffers, float32
                              optimizer.safetensors  optimiser/parameter/key → state, float32
                              state.json             step, metrics log size, best so far, checksums; written last
    finished/                 model.safetensors, state.json: the best weights after the algorithm's last hand on them

A checkpoint appears under its name only when complete: it is written into a temporary folder, every file and the
folder are synced, and the folder is renamed. A damaged one (wrong checksum, missing file) is passed over for the one
before, with a message. Tensors copied from the verifier are not stored. No pickle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from attrs import asdict, field, frozen
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from draftsmith.errors import CheckpointError, PluginError
from draftsmith.stages import digest, write_error, write_json_atomically, write_tensors

__all__ = [
    "Best",
    "TrainingCheckpoint",
    "TrainingState",
    "checkpoints",
    "load_final_weights",
    "load_training_weights",
    "load_weights_into",
    "prune",
    "random_states",
    "read_checkpoint",
    "read_newest",
    "remove_finished",
    "restore_random_states",
    "trained_tensors",
    "update_state",
    "write_checkpoint",
    "write_finished",
]

FORMAT = 1
_FOLDER, _FINISHED = "checkpoints", "finished"
_NAME = re.compile(r"step-(\d{8,})")
_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"


@frozen(kw_only=True)
class Best:
    """The best validation so far. ``eal`` decides (greedy acceptance length), then the loss."""

    step: int
    eal: float
    loss: float
    metrics: Mapping[str, float] = field(factory=dict)

    def beats(self, other: Best | None) -> bool:
        return other is None or (self.eal, -self.loss) > (other.eal, -other.loss)


@frozen(kw_only=True)
class TrainingState:
    """The plain part of a checkpoint.

    Attributes:
        step: optimiser steps done.
        tokens: real tokens trained.
        validated: step of the last validation, or -1.
        validation: its metrics.
        best: best validation so far.
        log_bytes: size of metrics.jsonl up to this step; a resume cuts the log there.
        skipped: ids of samples left out as bad.
        random_states: ``cpu`` and ``cuda`` → states of torch's generators, hexadecimal; those of other ranks than the
            first as ``rank 1 cpu``.
        environment: what bit-identity depends on beside the recipe (device, threads, torch, processes), to
            explain differences.
    """

    step: int
    tokens: int = 0
    validated: int = -1
    validation: Mapping[str, float] = field(factory=dict)
    best: Best | None = None
    log_bytes: int = 0
    skipped: tuple[str, ...] = ()
    random_states: Mapping[str, str] = field(factory=dict)
    environment: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class TrainingCheckpoint:
    """A checkpoint read back and verified."""

    path: Path
    state: TrainingState
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """State-dict entries that belong to the draft alone: everything but what it shares with the verifier."""
    shared = _shared_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in shared}


def load_weights_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put the tensors of a checkpoint into *model*; the verifier's are already there.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape.
    """
    own = trained_tensors(model)
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    wrong = [name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape]
    if missing or unknown or wrong:
        raise CheckpointError(
            f"the checkpoint is of another network: missing {missing[:4]}, unknown {unknown[:4]}, "
            f"other shape {sorted(wrong)[:4]}",
            hint="take the options that it was trained with, or remove the checkpoints to start training anew",
        )
    model.load_state_dict(dict(tensors), strict=False)


def _shared_names(model: nn.Module) -> frozenset[str]:
    shared = getattr(model, "shared_tensors", None)
    if shared is None:
        raise PluginError(f"{type(model).__name__} is no DraftArchitecture: it has no shared_tensors()")
    return frozenset(shared())


# --- writing -------------------------------------------------------------------------------------------------------


def write_checkpoint(
    folder: Path, state: TrainingState, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
) -> Path:
    """Write a checkpoint of *state* below the training *folder*; returns its path. All or nothing.

    Raises:
        DiskSpaceError: the disk is full; nothing is left of the attempt, earlier checkpoints are untouched.
        OutputError: any other failure to write.
    """

    def fill(temporary: Path) -> None:
        checksums = {
            _MODEL: _write_tensors(temporary / _MODEL, model),
            _OPTIMIZER: _write_tensors(temporary / _OPTIMIZER, optimizer),
        }
        _write_state(temporary / _STATE, state, checksums)

    return _write_folder(_checkpoint_path(folder, state.step), fill)


def write_finished(folder: Path, step: int, model: Mapping[str, Tensor]) -> Path:
    """Write what the algorithm made of the weights of *step* after training, for the export. All or nothing.

    Raises:
        DiskSpaceError, OutputError: as :func:`write_checkpoint`.
    """

    def fill(temporary: Path) -> None:
        content = {"format": FORMAT, "checksums": {_MODEL: _write_tensors(temporary / _MODEL, model)}, "step": step}
        write_json_atomically(temporary / _STATE, {**content, "digest": digest(content)})

    return _write_folder(folder / _FINISHED, fill)


def remove_finished(folder: Path) -> None:
    """Remove what :func:`write_finished` left there, which another start of the run wrote.

    Raises:
        OutputError: it cannot be removed.
    """
    path = folder / _FINISHED
    try:
        if path.exists():
            shutil.rmtree(path)
    except OSError as error:
        raise write_error(error, path) from error


def _write_folder(target: Path, fill: Callable[[Path], None]) -> Path:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        fill(temporary)
        _sync(temporary)
        if target.exists():  # a damaged one of the same step, or one of a start that was killed right after it
            shutil.rmtree(target)
        os.replace(temporary, target)
        _sync(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise write_error(error, target) from error
        raise
    return target


def update_state(folder: Path, state: TrainingState) -> Path:
    """Replace the state in the checkpoint of ``state.step`` at once, and keep its tensors; returns its path.

    For what is learnt of a step after it was saved: a validation that a signal had interrupted.

    Raises:
        CheckpointError: there is no such checkpoint.
        DiskSpaceError, OutputError: it cannot be written; the checkpoint is as it was.
    """
    target = _checkpoint_path(folder, state.step)
    try:
        checksums = json.loads((target / _STATE).read_text(encoding="utf-8"))["checksums"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint cannot be read: {error}", where=str(target)) from error
    _write_state(target / _STATE, state, checksums)
    try:
        _sync(target)
    except OSError as error:
        raise write_error(error, target) from error
    return target


def _checkpoint_path(folder: Path, step: int) -> Path:
    return folder / _FOLDER / f"step-{step:08d}"


def _write_state(path: Path, state: TrainingState, checksums: Mapping[str, str]) -> None:
    content = {"format": FORMAT, "checksums": dict(checksums), "state": asdict(state)}
    write_json_atomically(path, {**content, "digest": digest(content)})


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    # Cloning where storage is shared: safetensors refuses tensors that overlap.
    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        plain[name] = own
    write_tensors(path, plain)
    _sync(path)
    return _checksum(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            hasher.update(block)
    return hasher.hexdigest()


# --- reading -------------------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints below the training *folder*, newest first, unread."""
    base = folder / _FOLDER
    found = [path for path in base.iterdir() if _NAME.fullmatch(path.name)] if base.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def read_checkpoint(path: Path) -> TrainingCheckpoint:
    """Read and verify one checkpoint.

    Raises:
        CheckpointError: a file is missing, unreadable or does not match its checksum.
    """
    try:
        content = _read_content(path)
        state = _structured(content["state"])
        model, optimizer = load_file(path / _MODEL), load_file(path / _OPTIMIZER)
    except _UNREADABLE as error:
        raise CheckpointError(f"the checkpoint cannot be read: {error}", where=str(path)) from error
    return TrainingCheckpoint(path=path, state=state, model=model, optimizer=optimizer)


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)


def _read_content(path: Path) -> dict[str, Any]:
    """state.json of the folder *path*, after it and the files that it lists were compared with their checksums."""
    content: dict[str, Any] = json.loads((path / _STATE).read_text(encoding="utf-8"))
    if content.pop("digest") != digest(content):
        raise CheckpointError(f"{_STATE} is damaged: its checksum differs", where=str(path))
    if content["format"] != FORMAT:
        raise CheckpointError(f"the checkpoint has format {content['format']}, not {FORMAT}", where=str(path))
    for name, checksum in content["checksums"].items():
        if _checksum(path / name) != checksum:
            raise CheckpointError(f"{name} is damaged: its checksum differs", where=str(path))
    return content


def _structured(plain: dict[str, Any]) -> TrainingState:
    best = Best(**plain["best"]) if plain["best"] else None
    return TrainingState(**{**plain, "best": best, "skipped": tuple(plain["skipped"])})


def read_newest(folder: Path, warn: Callable[[str], None] = lambda message: None) -> TrainingCheckpoint | None:
    """The newest checkpoint that is whole; damaged ones are reported through *warn* and passed over.

    None where there is none at all.

    Raises:
        CheckpointError: there are checkpoints, and every one of them is damaged.
    """
    found = checkpoints(folder)
    problem: CheckpointError | None = None
    for path in found:
        try:
            return read_checkpoint(path)
        except CheckpointError as error:
            problem = problem or error
            warn(f"{error.where}: {error.what}; trying the checkpoint before it")
    if problem is not None:
        raise CheckpointError(
            "no checkpoint of this run can be read",
            where=str(folder / _FOLDER),
            hint="see the messages above; remove that folder to start training anew",
        ) from problem
    return None


def load_training_weights(
    folder: Path, which: Literal["best", "last"] = "best", warn: Callable[[str], None] = lambda message: None
) -> tuple[dict[str, Tensor], int]:
    """Weights of a finished run, for :func:`load_weights_into`; and the step that they are of.

    Args:
        folder: the training folder.
        which: the best validation's, or the last step's. Without validation, best is last.
        warn: told of damaged checkpoints that are passed over.

    Raises:
        CheckpointError: there is none, or the best one is damaged.
    """
    newest = read_newest(folder, warn)
    if newest is None:
        raise CheckpointError(
            "there is no training checkpoint", where=str(folder), hint="run `draftsmith train` first"
        )
    best = newest.state.best
    if which == "last" or best is None or best.step == newest.state.step:
        return dict(newest.model), newest.state.step
    try:
        chosen = read_checkpoint(_checkpoint_path(folder, best.step))
    except CheckpointError as error:
        raise CheckpointError(
            f"the best checkpoint is not whole: {error.what}",
            where=error.where,
            hint=f"remove {folder} and run `draftsmith train` again, or put the file back from a copy",
        ) from error
    return dict(chosen.model), chosen.state.step


def load_final_weights(
    folder: Path, warn: Callable[[str], None] = lambda message: None
) -> tuple[dict[str, Tensor], int]:
    """Weights to export, and their step: what the algorithm made of the best ones, or else those themselves.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """
    path = folder / _FINISHED
    if not path.is_dir():
        return load_training_weights(folder, "best", warn)
    try:
        content = _read_content(path)
        return load_file(path / _MODEL), int(content["step"])
    except _UNREADABLE as error:
        raise CheckpointError(
            f"the finished weights cannot be read: {error}",
            where=str(path),
            hint=f"remove {folder} and run `draftsmith train` again, or put the file back from a copy",
        ) from error


def prune(folder: Path, *, current: int, keep: int, best: int | None) -> None:
    """Keep the *keep* newest checkpoints up to step *current*, and that of step *best*; remove the rest.

    The rest is older ones, damaged ones of a later step (the run has gone back behind them), and what kills left
    behind. A folder loses its name before its files, so that a kill never leaves half a checkpoint under a good name.
    """
    base = folder / _FOLDER
    steps = {int(path.name.removeprefix("step-")): path for path in checkpoints(folder)}
    kept = set([step for step in steps if step <= current][:keep]) | {best}
    for step, path in steps.items():
        if step not in kept:
            path.rename(base / f".{path.name}.old.tmp")
    for path in base.glob(".step-*.tmp") if base.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


# --- random states -------------------------------------------------------------------------------------------------


def random_states(rank: int = 0) -> dict[str, str]:
    """States of the global generators that this process computes with, for :attr:`TrainingState.random_states`."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {_random_key(name, rank): bytes(state.tolist()).hex() for name, state in states.items()}


def restore_random_states(states: Mapping[str, str], rank: int = 0) -> None:
    """The inverse of :func:`random_states`; a device or a rank that is new keeps its states."""
    setters = {"cpu": torch.set_rng_state}
    if torch.cuda.is_available():
        setters["cuda"] = torch.cuda.set_rng_state
    for name, put in setters.items():
        text = states.get(_random_key(name, rank))
        if text is not None:
            put(torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8))


def _random_key(device: str, rank: int) -> str:
    return f"rank {rank} {device}" if rank else device
