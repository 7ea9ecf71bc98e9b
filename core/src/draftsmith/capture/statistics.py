"""The teacher's full-vocabulary statistics of every captured token: argmax and log-sum-exp of its logits.

They are computed once, from the *stored* last hidden states (so that they belong to exactly what training reads), and
kept as safetensors parts beside the states: ``sample_ids`` uint8 [n, 16], ``lengths`` int32 [n], and, concatenated
over the n samples, ``token`` int32 [N] and ``logsumexp`` float32 [N].
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.errors import OutputError, SampleCorrupt, SampleError, SampleMissing
from draftsmith.interfaces import HiddenStateReader, HiddenStateSample
from draftsmith.stages import write_tensors_atomically

__all__ = ["StatisticsDamaged", "StatisticsTable", "compute_statistics"]

_PART_TOKENS = 1 << 20
_BATCH_TOKENS = 4096


class StatisticsDamaged(OutputError):
    """A part of the stored statistics cannot be used."""


class StatisticsTable:
    """Reads the parts of a folder; constant time for each sample. Picklable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index: dict[str, tuple[Path, int, int]] | None = None
        self._open: dict[Path, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_index": None, "_open": {}}

    def sample_ids(self) -> frozenset[str]:
        return frozenset(self._load())

    def __call__(self, sample_id: str) -> tuple[Tensor, Tensor]:
        """(argmax int64 [T], log-sum-exp float32 [T]) of the teacher's logits at each token of the sample.

        Raises:
            SampleMissing: there are none for it. StatisticsDamaged: a part cannot be read.
        """
        place = self._load().get(sample_id)
        if place is None:
            raise SampleMissing(
                "no statistics of the teacher are stored for it",
                sample_id=sample_id,
                where=str(self._folder),
                hint="run `draftsmith capture`: it computes what is missing",
            )
        path, start, length = place
        file = self._file(path)
        token: Tensor = file.get_slice("token")[start : start + length]
        logsumexp: Tensor = file.get_slice("logsumexp")[start : start + length]
        return token.to(torch.int64), logsumexp

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def _load(self) -> dict[str, tuple[Path, int, int]]:
        if self._index is None:
            index: dict[str, tuple[Path, int, int]] = {}
            for path in sorted(self._folder.glob("part-*.safetensors")):
                index.update(self._read_part(path))
            self._index = index
        return self._index

    def _read_part(self, path: Path) -> Iterable[tuple[str, tuple[Path, int, int]]]:
        try:
            file = self._file(path)
            ids, lengths = file.get_tensor("sample_ids"), file.get_tensor("lengths").tolist()
            total = file.get_slice("token").get_shape()[0]
        except (OSError, SafetensorError) as error:
            raise StatisticsDamaged(
                f"the teacher's statistics cannot be read: {error}",
                where=str(path),
                hint="run `draftsmith capture` again: it computes them anew",
            ) from error
        start = 0
        for row, length in zip(ids.numpy(), lengths, strict=True):
            yield row.tobytes().hex(), (path, start, length)
            start += length
        if start != total:
            raise StatisticsDamaged(
                "the teacher's statistics do not add up",
                where=str(path),
                hint="run `draftsmith capture` again: it computes them anew",
            )


class _PartWriter:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: list[tuple[str, Tensor, Tensor]] = []
        self._tokens = 0
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".part-*.tmp"):
            left.unlink(missing_ok=True)

    def add(self, sample_id: str, token: Tensor, logsumexp: Tensor) -> None:
        self._pending.append((sample_id, token.to(torch.int32).cpu(), logsumexp.float().cpu()))
        self._tokens += len(token)
        if self._tokens >= _PART_TOKENS:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        ids = b"".join(bytes.fromhex(sample_id) for sample_id, _, _ in self._pending)
        write_tensors_atomically(
            self._folder / f"part-{secrets.token_hex(8)}.safetensors",
            {
                "sample_ids": torch.frombuffer(bytearray(ids), dtype=torch.uint8).view(-1, 16),
                "lengths": torch.tensor([len(token) for _, token, _ in self._pending], dtype=torch.int32),
                "token": torch.cat([token for _, token, _ in self._pending]),
                "logsumexp": torch.cat([value for _, _, value in self._pending]),
            },
            metadata={"format": "draftsmith.teacher_statistics", "version": "1"},
        )
        self._pending, self._tokens = [], 0


def compute_statistics(
    folder: Path,
    reader: HiddenStateReader,
    rows: Iterable[tuple[str, Tensor]],
    statistics: Callable[[Tensor], tuple[Tensor, Tensor]],
    advance: Callable[[int], None],
) -> dict[str, str]:
    """Compute and store what is not stored yet.

    Reading every sample once also proves that all of them can be read, and belong to the rows they are named for.

    Args:
        rows: (sample id, token ids int64 [T]) of every sample that should be there.
        statistics: last hidden states [N, H_t] → (argmax [N], log-sum-exp [N]).
        advance: called with the number of tokens done.

    Returns:
        id → reason, for samples that are missing or corrupt, or of other tokens.
    """
    done = StatisticsTable(folder).sample_ids()
    writer = _PartWriter(folder)
    bad: dict[str, str] = {}
    batch: list[HiddenStateSample] = []
    size = 0

    def run_batch() -> None:
        nonlocal batch, size
        if not batch:
            return
        token, logsumexp = statistics(torch.cat([sample.hidden_states[:, -1] for sample in batch]))
        lengths = [len(sample.token_ids) for sample in batch]
        parts = zip(batch, torch.split(token, lengths), torch.split(logsumexp, lengths), strict=True)
        for sample, its_token, its_sum in parts:
            writer.add(sample.sample_id, its_token, its_sum)
        advance(size)
        batch, size = [], 0

    for sample_id, token_ids in rows:
        if sample_id in done:
            advance(len(token_ids))
            continue
        try:
            sample = reader.get(sample_id, expected_tokens=len(token_ids))
            if not torch.equal(sample.token_ids, token_ids):
                raise SampleCorrupt("its states were captured from other tokens", sample_id=sample_id)
        except SampleError as error:
            bad[sample_id] = error.what.removeprefix(f"sample {sample_id}: ")
            continue
        batch.append(sample)
        size += len(token_ids)
        if size >= _BATCH_TOKENS:
            run_batch()
    run_batch()
    writer.flush()
    return bad
