"""The teacher's full-vocabulary statistics of every captured token: argmax and log-sum-exp of its logits.

They are computed once, from the *stored* last hidden states (so that they belong to exactly what training reads), and
kept as safetensors parts beside the states: ``sample_ids`` uint8 [n, 16], ``lengths`` int32 [n], and, concatenated
over the n samples, ``token`` int32 [N] and ``logsumexp`` float32 [N]. A part's metadata holds a checksum of them all,
since a wrong argmax would be noticed nowhere, and make every metric wrong.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.errors import OutputError, SampleCorrupt, SampleError, SampleMissing
from draftsmith.interfaces import HiddenStateReader, HiddenStateSample, StateLayout
from draftsmith.plugins.results import check_sample
from draftsmith.stages import write_tensors_atomically

__all__ = ["StatisticsDamaged", "StatisticsTable", "compute_statistics", "sample_statistics"]

_TENSORS = ("sample_ids", "lengths", "token", "logsumexp")
_PART_TOKENS = 1 << 20

#: Last hidden states [N, H_t] → (argmax [N], log-sum-exp [N]).
Statistics = Callable[[Tensor], tuple[Tensor, Tensor]]


class StatisticsDamaged(OutputError):
    """A part of the stored statistics cannot be used."""


class StatisticsTable:
    """Reads the parts of a folder; constant time for each sample. Picklable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index: dict[str, _Place] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_index": None}

    def __call__(self, sample_id: str) -> tuple[Tensor, Tensor]:
        """(argmax int64 [T], log-sum-exp float32 [T]) of the teacher's logits at each token of the sample.

        Raises:
            SampleMissing: there are none for it. StatisticsDamaged: a part is not what was written (on first use).
        """
        if self._index is None:
            self._index = {}
            for path in _parts(self._folder):
                self._index.update(_Part(path).places())
        place = self._index.get(sample_id)
        if place is None:
            raise SampleMissing(
                "no statistics of the teacher are stored for it",
                sample_id=sample_id,
                where=str(self._folder),
                hint="run `draftsmith capture`: it computes what is missing",
            )
        return place.read()


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.safetensors"))


class _Place(NamedTuple):
    """Where the statistics of one sample are: tokens [start, start + length) of a part."""

    part: _Part
    start: int
    length: int

    def read(self) -> tuple[Tensor, Tensor]:
        token, logsumexp = (self.part.slice(name, self.start, self.length) for name in ("token", "logsumexp"))
        return token.to(torch.int64), logsumexp


class _Part:
    """One file, open and found to be what was written.

    Raises:
        StatisticsDamaged: it is not, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = file = _open(path)
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
            checksum = (file.metadata() or {}).get("checksum")
        except (OSError, SafetensorError) as error:
            raise _damaged(path, f"cannot be read: {error}") from error
        if checksum != _checksum(tensors):
            raise _damaged(path, "are not what was written: their checksum differs")
        self._ids, self._lengths = tensors["sample_ids"], tensors["lengths"]

    def sample_ids(self) -> list[str]:
        return [row.tobytes().hex() for row in self._ids.numpy()]

    def places(self) -> Iterator[tuple[str, _Place]]:
        start = 0
        for sample_id, length in zip(self.sample_ids(), self._lengths.tolist(), strict=True):
            yield sample_id, _Place(self, start, length)
            start += length

    def slice(self, name: str, start: int, length: int) -> Tensor:
        found: Tensor = self._file.get_slice(name)[start : start + length]
        return found


def _open(path: Path) -> Any:  # safetensors has no types
    return safe_open(path, framework="pt")


def _damaged(path: Path, why: str) -> StatisticsDamaged:
    return StatisticsDamaged(
        f"the teacher's statistics {why}",
        where=str(path),
        hint="run `draftsmith capture` again: it computes them anew",
    )


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """32 hex digits over the tensors' bytes."""
    hasher = xxhash.xxh3_128()
    for name in _TENSORS:
        array: Any = tensors[name].contiguous().view(torch.uint8).numpy()
        hasher.update(array)
    return hasher.hexdigest()


class _PartWriter:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: list[tuple[str, Tensor, Tensor]] = []
        self._tokens = 0
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".part-*.tmp"):
            left.unlink(missing_ok=True)

    def add(self, sample_id: str, token: Tensor, logsumexp: Tensor) -> None:
        self._pending.append((sample_id, token.to(torch.int32), logsumexp))
        self._tokens += len(token)
        if self._tokens >= _PART_TOKENS:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        ids = b"".join(bytes.fromhex(sample_id) for sample_id, _, _ in self._pending)
        tensors = {
            "sample_ids": torch.frombuffer(bytearray(ids), dtype=torch.uint8).view(-1, 16),
            "lengths": torch.tensor([len(token) for _, token, _ in self._pending], dtype=torch.int32),
            "token": torch.cat([token for _, token, _ in self._pending]),
            "logsumexp": torch.cat([value for _, _, value in self._pending]),
        }
        write_tensors_atomically(
            self._folder / f"part-{secrets.token_hex(8)}.safetensors",
            tensors,
            metadata={"format": "draftsmith.teacher_statistics", "version": "2", "checksum": _checksum(tensors)},
        )
        self._pending, self._tokens = [], 0


def _sound_ids(folder: Path, say: Callable[[str], None]) -> frozenset[str]:
    """Ids of the samples that have statistics. Parts that are damaged are removed."""
    found: set[str] = set()
    for path in _parts(folder):
        try:
            found.update(_Part(path).sample_ids())
        except StatisticsDamaged as error:
            say(f"{error.what} ({path.name}); computing them anew")
            path.unlink()
    return frozenset(found)


def sample_statistics(statistics: Statistics, sample: HiddenStateSample) -> tuple[Tensor, Tensor]:
    """Argmax (int64 [T]) and log-sum-exp (float32 [T]) of the teacher's logits at each token of *sample*, on the CPU.

    Sample by sample, whoever asks: the shape of a matrix product decides its last bits, and a training that captures
    while it trains is to end in the same bits as one whose states were captured before.
    """
    token, logsumexp = statistics(sample.hidden_states[:, -1])
    return token.to("cpu", torch.int64), logsumexp.to("cpu", torch.float32)


def compute_statistics(
    folder: Path,
    reader: HiddenStateReader,
    layout: StateLayout,
    rows: Iterable[tuple[str, Tensor]],
    statistics: Statistics,
    advance: Callable[[int], None],
    say: Callable[[str], None],
) -> dict[str, str]:
    """Compute and store what is not stored yet, and anew what is damaged.

    Reading every sample once also proves that all of them can be read, and belong to the rows they are named for.

    Args:
        layout: what all samples have in common.
        rows: (sample id, token ids int64 [T]) of every sample that should be there.
        statistics: the teacher's.
        advance: called with the number of tokens done.
        say: called with a line for the log.

    Returns:
        id → reason, for samples that are missing or corrupt, or of other tokens.
    """
    done = _sound_ids(folder, say)
    writer = _PartWriter(folder)
    bad: dict[str, str] = {}
    for sample_id, token_ids in rows:
        if sample_id in done:
            advance(len(token_ids))
            continue
        try:
            found = reader.get(sample_id, expected_tokens=len(token_ids))
            sample = check_sample(reader.get, found, len(token_ids), layout)
            if not torch.equal(sample.token_ids, token_ids):
                raise SampleCorrupt("its states were captured from other tokens", sample_id=sample_id)
        except SampleError as error:
            bad[sample_id] = error.what.removeprefix(f"sample {sample_id}: ")
            continue
        writer.add(sample_id, *sample_statistics(statistics, sample))
        advance(len(token_ids))
    writer.flush()
    return bad
