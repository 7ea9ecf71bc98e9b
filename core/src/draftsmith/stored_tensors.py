"""Which tensors lie where in a folder's safetensors files, from their headers alone. Torch-free; no data is read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from attrs import frozen

from draftsmith.errors import CheckpointError
from draftsmith.interfaces import TensorSpec

__all__ = ["INDEX", "WEIGHTS", "StoredTensor", "read_file_header", "tensor_files", "unindexed_files"]

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


@frozen
class StoredTensor:
    """Where a tensor lies: its file, and its bytes [begin, end) there."""

    spec: TensorSpec
    file: Path
    begin: int
    end: int


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files that vLLM reads of *folder*: those of the index, or all that lie there; sorted by name.

    Raises:
        CheckpointError: there are none, or the index cannot be read. A file that it names may be missing.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the index cannot be read: {error}", where=str(index)) from error
        files = [folder / name for name in names]
    else:
        files = unindexed_files(folder)
    if not files:
        raise CheckpointError(f"there is no {WEIGHTS}", where=str(folder), hint="export again")
    return files


def unindexed_files(folder: Path) -> list[Path]:
    """The safetensors files that vLLM reads of a folder without an index, sorted by name: all of them.

    Beside others, ``consolidated*`` are left out: the same weights once more under Mistral's names, of which a loader
    reads either the ones or the others (vLLM's ``DefaultModelLoader._prepare_weights``).
    """
    files = sorted(folder.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("consolidated")] or files


def read_file_header(path: Path) -> dict[str, StoredTensor]:
    """Name → place, shape and dtype of every tensor of one safetensors file.

    Raises:
        CheckpointError: it is missing, cut or damaged.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError("the header is cut")
            entries = json.loads(file.read(length))
        tensors = {
            name: StoredTensor(
                TensorSpec(shape=tuple(entry["shape"]), dtype=entry["dtype"]),
                path,
                8 + length + entry["data_offsets"][0],
                8 + length + entry["data_offsets"][1],
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
        if max((tensor.end for tensor in tensors.values()), default=8 + length) != size:
            raise ValueError("the file is cut, or has bytes that belong to no tensor")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise CheckpointError(
            f"the weights are cut or damaged: {error}", where=str(path), hint="export again, or copy them again"
        ) from error
    return tensors
