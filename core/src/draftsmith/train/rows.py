"""Packed rows: which samples go into which row, in which order, and reading them ahead of the step that uses them.

Bins are made once per run from the lengths alone; an epoch's order is a shuffle of the bins from the seed. So the
rows of optimiser step s are a function of (data, recipe, s), and a resumed run needs no stored data position.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch
from attrs import frozen
from torch import Tensor

from draftsmith.data.packing import pack, shuffle_bins
from draftsmith.errors import DataError, SampleCorrupt, SampleError, SampleRefused
from draftsmith.interfaces import HiddenStateSample, PackedRow, StateLayout
from draftsmith.plugins.results import check_sample

if TYPE_CHECKING:
    from draftsmith.data.dataset import PreparedRow

__all__ = [
    "Document",
    "Interrupted",
    "LoadedRow",
    "Order",
    "RowLoader",
    "RowPlan",
    "Waits",
    "assemble",
    "derived_seed",
    "padding_row",
    "plan_rows",
    "read_ahead",
    "to_device",
]

Item = TypeVar("Item")
Result = TypeVar("Result")


class Table(Protocol):
    """What is needed of a table of prepared rows (``data.dataset.RowTable``)."""

    @property
    def sample_ids(self) -> Sequence[str]: ...
    @property
    def lengths(self) -> Sequence[int]: ...
    @property
    def supervised(self) -> Sequence[int]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> PreparedRow: ...


class Reader(Protocol):
    """What is needed of a reader of hidden states (``interfaces.HiddenStateReader``)."""

    def get(self, sample_id: str, *, expected_tokens: int | None = None) -> HiddenStateSample: ...


class States(Protocol):
    """What is needed of a capture (``capture.states.CapturedStates``)."""

    layout: StateLayout

    @property
    def reader(self) -> Reader: ...
    def teacher(self, sample_id: str) -> tuple[Tensor, Tensor]: ...


def derived_seed(seed: int, *what: object) -> int:
    """A seed for one purpose (an epoch, a step, a row of it), independent of all others; in [0, 2**63)."""
    text = ":".join(str(part) for part in (seed, *what))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# --- which samples, in which order ---------------------------------------------------------------------------------


@frozen(kw_only=True)
class RowPlan:
    """The bins of one table.

    Attributes:
        bins: row → indices into the table.
        capacity: tokens that a row holds.
        tokens: real tokens in all bins.
        truncated: samples longer than a row, cut at the tail.
        dropped: samples without a supervised token (or with none left after the cut), or without states.
    """

    bins: tuple[tuple[int, ...], ...]
    capacity: int
    tokens: int
    truncated: int
    dropped: int

    @property
    def fill(self) -> float:
        """Share of the rows' capacity that holds tokens."""
        return self.tokens / (len(self.bins) * self.capacity) if self.bins else 0.0


def plan_rows(table: Table, capacity: int, refused: Container[str] = ()) -> RowPlan:
    """Pack the samples of *table* into rows of at most *capacity* tokens; those *refused* at capture have no states.

    A sample longer than a row is cut here too, not only at capture: a long row would exhaust the memory that was
    chosen by ``tokens_per_row``. Whether the cut leaves anything supervised is checked for those samples only.
    """
    kept: list[int] = []
    truncated = dropped = 0
    columns = zip(table.sample_ids, table.lengths, table.supervised, strict=True)
    for index, (sample_id, length, supervised) in enumerate(columns):
        useful = supervised > 0 and sample_id not in refused
        if length > capacity:
            truncated += 1
            useful = useful and bool(table[index].loss_mask[:capacity].any())
        if useful:
            kept.append(index)
        else:
            dropped += 1
    all_lengths = table.lengths
    lengths = [min(all_lengths[index], capacity) for index in kept]
    bins = tuple(tuple(kept[place] for place in bin_) for bin_ in pack(lengths, capacity))
    return RowPlan(bins=bins, capacity=capacity, tokens=sum(lengths), truncated=truncated, dropped=dropped)


@frozen(kw_only=True)
class Order:
    """Which bins optimiser step s trains on. The last step of an epoch may have fewer rows.

    Attributes:
        bins: of a :class:`RowPlan`.
        rows_per_step: bins per optimiser step.
    """

    bins: tuple[tuple[int, ...], ...]
    rows_per_step: int
    epochs: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.bins) // self.rows_per_step)

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def epoch_of(self, step: int) -> int:
        """0-based epoch of the 0-based *step*."""
        return step // self.steps_per_epoch

    def steps_from(self, first: int) -> Iterator[list[Sequence[int]]]:
        """The bins of the steps *first*, first + 1, … to the end of the run."""
        for epoch in range(self.epoch_of(first), self.epochs):
            order = shuffle_bins(self.bins, self.seed, epoch)
            for place in range(self.steps_per_epoch):
                if epoch * self.steps_per_epoch + place >= first:
                    start = place * self.rows_per_step
                    yield list(order[start : start + self.rows_per_step])


# --- reading -------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Document:
    """One sample on its way into a row: its tokens, its states, and the teacher's statistics of them."""

    row: PreparedRow
    sample: HiddenStateSample
    teacher: tuple[Tensor, Tensor] | None = None


@frozen(kw_only=True)
class LoadedRow:
    """A packed row as read.

    Attributes:
        row: one token of padding where no sample of it could be used: whoever trains with others takes part in every
            step, and so has a row for it.
        tokens: real tokens in the row.
        skipped: (sample id, reason) of samples left out.
    """

    row: PackedRow
    tokens: int
    skipped: tuple[tuple[str, str], ...] = ()


def assemble(
    documents: Sequence[Document], *, capacity: int, last_hidden: bool = True, pad_to: int | None = None
) -> PackedRow:
    """Concatenate *documents* into one row; positions restart in each.

    Args:
        documents: not empty.
        capacity: a document longer than this is cut at its tail.
        last_hidden: the last captured layer is id n (and not a tap).
        pad_to: fill up to so many tokens with padding (document id -1, zero states); for forms of attention and
            compiled graphs that want one shape. None: no padding, which is what costs least.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in _FIELDS}
    for number, document in enumerate(documents):
        length = min(len(document.row.token_ids), capacity)
        states = document.sample.hidden_states[:length]
        taps = states[:, :-1] if last_hidden else states
        parts["input_ids"].append(document.row.token_ids[:length])
        parts["position_ids"].append(torch.arange(length))
        parts["document_ids"].append(torch.full((length,), number))
        parts["loss_mask"].append(document.row.loss_mask[:length])
        parts["taps"].append(taps.reshape(length, -1))
        parts["last_hidden"].append(states[:, -1])
        if document.teacher is not None:
            parts["teacher_token"].append(document.teacher[0][:length])
            parts["teacher_logsumexp"].append(document.teacher[1][:length])
    joined = {name: torch.cat(values) for name, values in parts.items() if len(values) == len(documents)}
    if pad_to is not None:
        joined = {name: _padded(name, value, pad_to) for name, value in joined.items()}
    sample_ids = tuple(document.row.sample_id for document in documents)
    return PackedRow(
        input_ids=joined["input_ids"],
        position_ids=joined["position_ids"],
        document_ids=joined["document_ids"],
        loss_mask=joined["loss_mask"],
        taps=joined["taps"],
        last_hidden=joined["last_hidden"],
        teacher_token=joined.get("teacher_token"),
        teacher_logsumexp=joined.get("teacher_logsumexp"),
        sample_ids=sample_ids,
    )


_FIELDS = (
    "input_ids",
    "position_ids",
    "document_ids",
    "loss_mask",
    "taps",
    "last_hidden",
    "teacher_token",
    "teacher_logsumexp",
)


def _padded(name: str, value: Tensor, length: int) -> Tensor:
    missing = length - value.shape[0]
    if missing < 0:
        raise ValueError(f"a row of {value.shape[0]} tokens cannot be padded to {length}")
    fill = value.new_full((missing, *value.shape[1:]), -1 if name == "document_ids" else 0)
    return torch.cat([value, fill])


def padding_row(layout: StateLayout, *, last_hidden: bool = True, statistics: bool = True) -> PackedRow:
    """A row of one token of padding, which trains nothing, with the fields and dtypes of rows of a capture."""
    taps = len(layout.layer_ids) - last_hidden
    dtype = getattr(torch, layout.dtype)
    return PackedRow(
        input_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        document_ids=torch.full((1,), -1),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        taps=torch.zeros(1, taps * layout.hidden_size, dtype=dtype),
        last_hidden=torch.zeros(1, layout.hidden_size, dtype=dtype),
        teacher_token=torch.zeros(1, dtype=torch.int64) if statistics else None,
        teacher_logsumexp=torch.zeros(1) if statistics else None,
    )


class Waits:
    """How long whoever takes rows has waited for them.

    Attributes:
        seconds: spent waiting.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = time.monotonic()

    @property
    def share(self) -> float:
        """Of the time since this was made."""
        return self.seconds / max(time.monotonic() - self._started, 1e-9)


class Interrupted(Exception):
    """Whoever waited for a row was told to stop."""


def never() -> bool:
    return False


#: Gives the bins that rows are read of, from the first, as often as it is called.
Bins = Callable[[], Iterator[Sequence[int]]]
Rows = Generator[LoadedRow, None, None]


class RowLoader:
    """From a bin to a :class:`LoadedRow`. Holds a table and a capture; used by one thread at a time.

    Args:
        table: prepared rows.
        states: the capture.
        capacity: tokens per row.
        last_hidden: the capture's last layer is id n.
        bad_samples: ``stop`` raises at the first bad sample; ``skip`` leaves it out and says so. What the verifier has
            no finite states for is left out either way.
        statistics: read the teacher's statistics; without, training computes them with every row.
    """

    def __init__(
        self,
        table: Table,
        states: States,
        *,
        capacity: int,
        last_hidden: bool = True,
        bad_samples: Literal["stop", "skip"] = "stop",
        statistics: bool = True,
    ) -> None:
        self._table = table
        self._states = states
        self._capacity = capacity
        self._last_hidden = last_hidden
        self._bad_samples = bad_samples
        self._statistics = statistics

    @property
    def lengths(self) -> list[int]:
        """Tokens that each sample of the table takes in a row."""
        return [min(length, self._capacity) for length in self._table.lengths]

    def rows(self, bins: Bins, *, stopped: Callable[[], bool] = never, waits: Waits | None = None) -> Rows:
        """The rows of *bins*, read ahead; as :func:`read_ahead`."""
        return read_ahead(self, bins(), stopped=stopped, waits=waits)

    def __call__(self, bin_: Sequence[int]) -> LoadedRow:
        """Read every sample of *bin_*.

        Raises:
            SampleError: a sample is bad and the policy is ``stop``.
        """
        documents: list[Document] = []
        skipped: list[tuple[str, str]] = []
        for index in bin_:
            prepared = self._table[index]
            try:
                documents.append(self._read(prepared))
            except SampleError as error:
                if self._bad_samples == "stop" and not isinstance(error, SampleRefused):
                    raise
                skipped.append((prepared.sample_id, error.what))
        if not documents:
            row = padding_row(self._states.layout, last_hidden=self._last_hidden, statistics=self._statistics)
            return LoadedRow(row=row, tokens=0, skipped=tuple(skipped))
        packed = assemble(documents, capacity=self._capacity, last_hidden=self._last_hidden)
        return LoadedRow(row=packed, tokens=packed.input_ids.shape[0], skipped=tuple(skipped))

    def _read(self, row: PreparedRow) -> Document:
        reader, tokens = self._states.reader, len(row.token_ids)
        found = reader.get(row.sample_id, expected_tokens=tokens)
        sample = check_sample(reader.get, found, tokens, self._states.layout)
        if not torch.equal(sample.token_ids, row.token_ids):
            raise SampleCorrupt(
                "its states were captured from other tokens",
                sample_id=row.sample_id,
                hint="run `draftsmith capture` again: it captures anew what is bad",
            )
        teacher = self._states.teacher(row.sample_id) if self._statistics else None
        return Document(row=row, sample=sample, teacher=teacher)


def to_device(row: PackedRow, device: torch.device, dtype: torch.dtype) -> PackedRow:
    """*row* on *device*, the features in *dtype*. Copies to a GPU overlap with its work.

    The last hidden state keeps the dtype it was stored in: the teacher norms it in float32.
    """

    def move(value: Tensor) -> Tensor:
        if device.type == "cuda" and value.device.type == "cpu":
            value = value.pin_memory()
        return value.to(device, non_blocking=True)

    statistics = (row.teacher_token, row.teacher_logsumexp)
    token, logsumexp = (None if value is None else move(value) for value in statistics)
    return PackedRow(
        input_ids=move(row.input_ids),
        position_ids=move(row.position_ids),
        document_ids=move(row.document_ids),
        loss_mask=move(row.loss_mask),
        taps=move(row.taps).to(dtype),
        last_hidden=move(row.last_hidden),
        teacher_token=token,
        teacher_logsumexp=logsumexp,
        sample_ids=row.sample_ids,
    )


# --- ahead of the step ---------------------------------------------------------------------------------------------


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


_END = object()
#: Seconds between two looks at whether to stop.
_POLL = 0.1


def read_ahead(
    load: Callable[[Item], Result],
    items: Iterator[Item],
    *,
    depth: int = 2,
    stopped: Callable[[], bool] = never,
    waits: Waits | None = None,
) -> Generator[Result, None, None]:
    """``map(load, items)``, in order, with up to *depth* results made ahead by one background thread.

    A thread, not processes: reading, checksums and copies release the interpreter's lock, states stay in one
    address space, and there is nothing to fork after torch has started its own threads. An error of *load* is raised
    where its result would have been. Closing the iterator ends the thread.

    Args:
        stopped: asked while there is no result yet. What is there is given, whatever it says.
        waits: told how long was waited.

    Raises:
        Interrupted: it was asked to stop, and the next result was not there.
    """
    results: queue.Queue[object] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(value: object) -> bool:
        while not stop.is_set():
            try:
                results.put(value, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def next_result() -> object:
        began = time.monotonic()
        try:
            while True:
                try:
                    return results.get(timeout=_POLL)
                except queue.Empty:
                    if stopped():
                        raise Interrupted from None
        finally:
            if waits is not None:
                waits.seconds += time.monotonic() - began

    def work() -> None:
        try:
            for item in items:
                if not put(load(item)):
                    return
        except BaseException as error:  # carried to the thread that can report it
            put(_Failure(error))
            return
        put(_END)

    thread = threading.Thread(target=work, name="draftsmith-rows", daemon=True)
    thread.start()
    try:
        while (value := next_result()) is not _END:
            if isinstance(value, _Failure):
                raise value.error
            yield value  # type: ignore[misc]
    finally:
        stop.set()
        thread.join(timeout=10)


def check_plan(plan: RowPlan) -> None:
    """Raises:
    DataError: there is nothing to train on.
    """
    if not plan.bins:
        raise DataError(
            f"no training row has a supervised token ({plan.dropped} samples were left out)",
            hint="see rejected.jsonl of the prepared data, or raise data.max_length and train.tokens_per_row",
        )
