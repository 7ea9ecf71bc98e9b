"""Prepared rows on disk: Arrow tables of the ``datasets`` library, memory-mapped, with exact lengths.

A prepared folder holds ``train/`` and ``validation/`` (``datasets.Dataset.save_to_disk``), ``vocabulary.safetensors``,
``rejected.jsonl`` and the stage's ``stage.json``.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen

from draftsmith.api import DataFacts
from draftsmith.data.vocabulary import load_occurring, load_vocabulary
from draftsmith.errors import DataError
from draftsmith.interfaces import VocabularyMap
from draftsmith.stages import Stage

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PreparedData", "PreparedRow", "RowTable", "RowWriter", "open_prepared", "sample_id"]

TRAIN, VALIDATION, VOCABULARY, REJECTED = "train", "validation", "vocabulary.safetensors", "rejected.jsonl"


def sample_id(token_ids: Sequence[int], loss_mask: Sequence[bool]) -> str:
    """32 hex digits over the content of a row: the same row has the same id in every run and on every machine."""
    hasher = hashlib.sha256(len(token_ids).to_bytes(8, "little"))
    hasher.update(np.asarray(token_ids, dtype="<i4").tobytes())
    hasher.update(np.packbits(np.asarray(loss_mask, dtype=bool), bitorder="little").tobytes())
    return hasher.hexdigest()[:32]


@frozen(kw_only=True)
class PreparedRow:
    """One document.

    Attributes:
        sample_id: see :func:`sample_id`.
        token_ids: int64 [T].
        loss_mask: bool [T], True where the verifier wrote the token.
        source: name of the file or dataset that it came from.
    """

    sample_id: str
    token_ids: Tensor = field(repr=False)
    loss_mask: Tensor = field(repr=False)
    source: str

    @property
    def prompt_ids(self) -> Tensor:
        """int64: the tokens before the first supervised one, which are the serving prompt of the first answer."""
        return self.token_ids[: int(self.loss_mask.int().argmax())]


class RowTable(Sequence[PreparedRow]):
    """Rows of one split. Reads from the memory map; can be pickled (it is by path)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._table = self._open()

    def _open(self) -> Any:
        import datasets

        try:
            return datasets.load_from_disk(str(self._folder), keep_in_memory=False).with_format("arrow")
        except (OSError, ValueError) as error:
            raise DataError(
                f"the prepared rows cannot be read: {error}",
                where=str(self._folder),
                hint=f"remove {self._folder.parent}, and run `draftsmith prepare` again: it makes the same rows",
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._folder = state["_folder"]
        self._table = self._open()

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> PreparedRow:  # type: ignore[override]
        import torch

        if not -len(self) <= index < len(self):
            raise IndexError(index)
        row = self._table[index % len(self)]
        ids = row["token_ids"].combine_chunks().flatten().to_numpy()
        mask = row["loss_mask"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return PreparedRow(
            sample_id=row["sample_id"][0].as_py(),
            token_ids=torch.from_numpy(ids.astype(np.int64)),
            loss_mask=torch.from_numpy(mask.astype(bool)),
            source=row["source"][0].as_py(),
        )

    def __iter__(self) -> Iterator[PreparedRow]:
        return (self[index] for index in range(len(self)))

    def _column(self, name: str) -> list[Any]:
        return self._table[name].to_pylist() if len(self) else []

    @cached_property
    def sample_ids(self) -> list[str]:
        return self._column("sample_id")

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self._column("length")

    @cached_property
    def supervised(self) -> list[int]:
        """Supervised tokens of each row."""
        return self._column("supervised")

    def longest_answer(self, cut: int) -> int:
        """The most supervised tokens that follow one another in a row, of which the first *cut* tokens are kept."""
        longest = 0
        for batch in self._table.iter(batch_size=1000):
            masks = batch["loss_mask"].combine_chunks()
            lengths = np.diff(masks.offsets.to_numpy())
            row = np.repeat(np.arange(len(lengths)), lengths)
            place = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            # All rows in one line, each after a gap, which ends what is supervised at the end of the row before.
            line = np.zeros(len(row) + len(lengths) + 1, dtype=np.int8)
            line[np.arange(len(row)) + row + 1] = masks.flatten().to_numpy(zero_copy_only=False) & (place < cut)
            edges = np.flatnonzero(np.diff(line))
            longest = max(longest, int((edges[1::2] - edges[::2]).max(initial=0)))
        return longest


@frozen(kw_only=True)
class PreparedData:
    """What the prepare stage made."""

    folder: Path
    train: RowTable
    validation: RowTable
    summary: Mapping[str, Any]

    def vocabulary(self) -> VocabularyMap:
        """The draft vocabulary, taken from the training rows."""
        return load_vocabulary(self.folder / VOCABULARY)

    def facts(self, tokens_per_row: int) -> DataFacts:
        """What the rows are like, where training cuts them at *tokens_per_row*."""
        longest, answer = self.summary["longest"], self.summary["longest_answer"]
        if longest > tokens_per_row:  # the cut may go through the longest answer, or leave nothing of it
            longest = tokens_per_row
            answer = max(table.longest_answer(tokens_per_row) for table in (self.train, self.validation))
        token_ids = load_occurring(self.folder / VOCABULARY)
        return DataFacts(token_ids=token_ids, longest_row=longest, longest_answer=answer)


def open_prepared(folder: Path) -> PreparedData:
    """Open the output of a complete prepare stage.

    Raises:
        DataError: there is none, or it is not complete.
    """
    record = Stage("prepare", folder).record()
    if record is None or not record.complete:
        raise DataError("there is no complete prepared data", where=str(folder), hint="run `draftsmith prepare` first")
    return PreparedData(
        folder=folder,
        train=RowTable(folder / TRAIN),
        validation=RowTable(folder / VALIDATION),
        summary=record.summary,
    )


class RowWriter:
    """Streams rows to a scratch file, so that no more than a batch is in memory, then splits them.

    The split is known only at the end: it must leave no side empty, and a row may still prove to be a duplicate.
    """

    def __init__(self, folder: Path, *, batch_rows: int = 512) -> None:
        import pyarrow

        self._folder = folder
        self._scratch = folder / "rows.arrow"
        self._batch_rows = batch_rows
        self._pending: list[dict[str, Any]] = []
        self._schema = pyarrow.schema(
            [
                ("sample_id", pyarrow.string()),
                ("token_ids", pyarrow.list_(pyarrow.int32())),
                ("loss_mask", pyarrow.list_(pyarrow.bool_())),
                ("length", pyarrow.int32()),
                ("supervised", pyarrow.int32()),
                ("source", pyarrow.string()),
            ]
        )
        self._sink = pyarrow.ipc.new_stream(str(self._scratch), self._schema)
        self.rows = 0

    def add(self, identity: str, token_ids: Sequence[int], loss_mask: Sequence[bool], source: str) -> None:
        self._pending.append(
            {
                "sample_id": identity,
                "token_ids": token_ids,
                "loss_mask": loss_mask,
                "length": len(token_ids),
                "supervised": sum(loss_mask),
                "source": source,
            }
        )
        self.rows += 1
        if len(self._pending) >= self._batch_rows:
            self._write()

    def _write(self) -> None:
        import pyarrow

        if self._pending:
            self._sink.write_batch(pyarrow.RecordBatch.from_pylist(self._pending, schema=self._schema))
            self._pending = []

    def close(self) -> None:
        """End the scratch file."""
        self._write()
        self._sink.close()

    def split(self, validation: Sequence[bool]) -> None:
        """Write ``train/`` and ``validation/`` (rows where *validation* is True), and remove the scratch file."""
        import datasets

        self.close()
        rows = datasets.Dataset.from_file(str(self._scratch))
        had_bars = datasets.are_progress_bars_disabled() is False
        datasets.disable_progress_bars()  # the stage has a bar of its own
        try:
            for name, wanted in ((TRAIN, False), (VALIDATION, True)):
                chosen = [index for index, each in enumerate(validation) if each is wanted]
                target = self._folder / name
                shutil.rmtree(target, ignore_errors=True)
                # Without rows the library would write no file at all, and could not read that again.
                shards = None if chosen else 1
                rows.select(chosen, keep_in_memory=True).save_to_disk(str(target), num_shards=shards)
        finally:
            if had_bars:
                datasets.enable_progress_bars()
        del rows
        self._scratch.unlink()
