"""Hidden states that are captured while the draft is trained on them.

Which samples come next is a function of the recipe, the data and the step, so they are asked for before the trainer
needs them, and whatever the order of the answers, they are read in the order of the rows: the trained weights depend
on the states alone. Two bounds make the back-pressure: no more than ``online.ahead`` samples of a stream are asked for
and not yet read, and the pool takes no more requests than its endpoints have slots.

Unless states are kept, every use of a row has a sample id that was never used before. What a killed start left in
flight, or a slow endpoint publishes too late, is then nobody's sample, and is removed with all else at the end.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch
from attrs import define, frozen
from torch import Tensor

from draftsmith.capture.address import open_reader
from draftsmith.capture.endpoints import Answer, CapturePool
from draftsmith.capture.engines import Request
from draftsmith.capture.statistics import Statistics, sample_statistics
from draftsmith.errors import (
    DraftsmithError,
    FingerprintMismatch,
    NumericsError,
    SampleCorrupt,
    SampleError,
    SampleRefused,
    TransportError,
)
from draftsmith.interfaces import HiddenStateReader, HiddenStateSample, HiddenStateTransport, StateLayout
from draftsmith.plugins.results import check_ids, check_sample
from draftsmith.train.distributed import ALONE, Ranks
from draftsmith.train.rows import Bins, RowLoader, Rows, Waits, never

if TYPE_CHECKING:
    from draftsmith.data.dataset import PreparedRow
    from draftsmith.train.online_setup import Place
    from draftsmith.train.rows import Table

__all__ = ["OnlineCapture", "OnlineRowLoader", "OnlineStates", "verdict"]

#: How often a sample is captured for one use before it is given up.
_ATTEMPTS = 4
#: Seconds between two looks at whether to stop.
_POLL = 0.1
#: Seconds that the end waits for requests in flight: what they store is then removed with the rest.
_LAST_ANSWERS = 5.0
#: Who waits for a smaller share of the time than this is as well off as can be.
_WORTH_TELLING = 0.1
#: Where both wait for a larger share than this, neither of the two is what takes the time.
_MUCH = 0.25


class _Closed(Exception):
    """The stream was closed while somebody waited for it."""


@frozen(eq=False)
class _Ticket:
    """A use of a row.

    Attributes:
        sample_id: its sample's, in the transport.
        answer: will say that the sample is there, or why it is not; None: it is.
        attempt: how often the sample was asked for.
    """

    row: PreparedRow
    sample_id: str
    answer: Future[Answer] | None
    attempt: int = 1

    @property
    def stored(self) -> bool:
        """Whether the sample should be in the transport by now."""
        answer = self.answer
        if answer is None:
            return True
        return answer.done() and answer.exception() is None and answer.result().refused is None


@define(eq=False)
class Counts:
    """What a start has done so far.

    Attributes:
        captured: samples that were asked for, each attempt counted.
        reused: samples that were kept from an earlier use.
        regenerated: samples that were lost or damaged, and captured again.
    """

    captured: int = 0
    reused: int = 0
    regenerated: int = 0


class OnlineCapture:
    """The capture of one start of the training: opened before the first row is asked for, closed after the last.

    Args:
        pool: what captures; built when this is opened.
        transport, layout: where states go through.
        place: the run's folders.
        keep, missing, ahead: as in the recipe's ``online``.
        rows: how many there are; of these, *refused_share* may have states that are not finite.
        statistics: the teacher's.
        lasts: what is kept outlives the processes, and stays for good.
        say: takes one line for the user. Called from any thread.
        check: asked, with the ids that are kept already, whether the window fits.
        ranks: the first takes the place and clears it, for all; each captures its own rows.
    """

    def __init__(
        self,
        *,
        pool: Callable[[], CapturePool],
        transport: HiddenStateTransport,
        layout: StateLayout,
        place: Place,
        keep: bool,
        missing: Literal["regenerate", "skip", "stop"],
        ahead: int,
        rows: int,
        refused_share: float,
        statistics: Statistics,
        lasts: bool,
        say: Callable[[str], None],
        check: Callable[[frozenset[str]], None] = lambda stored: None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.layout, self.transport = layout, transport
        self.keep, self.missing, self.ahead = keep, missing, ahead
        self.statistics = statistics
        self.counts = Counts()
        self.refused: dict[str, str] = {}
        self._make_pool = pool
        self._pool: CapturePool | None = None
        self._place, self._lasts, self._ranks = place, lasts, ranks
        self._rows, self._refused_share = rows, refused_share
        self._say, self._check = say, check
        self._token = secrets.token_hex(16)
        self._uses = itertools.count()
        self._lock = threading.Lock()
        self._stored: set[str] = set()
        self._streams: list[_Stream] = []
        self._in_flight: set[Future[Answer]] = set()
        self._unread: set[str] = set()
        self._began = (0.0, 0.0)
        self._lost = 0  # since all was there
        self._lost_unread = 0  # of these, samples that were asked for again and not read since

    # --- opening and closing ------------------------------------------------------------------------------------

    def __enter__(self) -> OnlineCapture:
        """Take the transport's place, find what is kept there or clear it, check that the window fits, and start.

        Raises:
            OutputError: another run is at work in that place.
            FingerprintMismatch: it holds other states. DiskSpaceError: it has no room.
            TransportError: it cannot be reached. ServingError: there is nothing that captures.
        """
        if self._ranks.first:
            self._take_place()
        self._ranks.exchange(None)  # none asks for anything before the place is cleared
        self._stored = self._find_stored()
        try:
            self._check(frozenset(self._stored))
            self._pool = self._make_pool()
            self._pool.open()
        except BaseException:
            self._close_pool()
            self._clear(failed=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            streams, in_flight = list(self._streams), set(self._in_flight)
        for stream in streams:
            stream.close()
        if kind is None or issubclass(kind, DraftsmithError):  # not after a second signal, which does not wait
            concurrent.futures.wait(in_flight, timeout=_LAST_ANSWERS)
        self._close_pool()
        for stream in streams:
            stream.join()
        if self._lost and error is None:
            self._tell_recovered(at_end=True)
        self._clear(failed=error is not None)

    def _take_place(self) -> None:
        """Claim the transport's place, and remove what nobody will read."""
        owner = self._place.take()
        self.transport.claim(self.layout, owner)
        if self._place.overwrite and not self._fits():
            self.transport.remove_all()
            self.transport.claim(self.layout, owner)
        if not self.keep:
            self._find_stored()  # others' states are not removed: finding them is an error
            self.transport.remove_all()  # of a start that was killed: nobody asks for what was published since
            self.transport.claim(self.layout, owner)

    def _find_stored(self) -> set[str]:
        with open_reader(self.transport, self.layout) as reader:
            return set(check_ids(reader.complete_ids, reader.complete_ids()))

    def _fits(self) -> bool:
        try:
            with open_reader(self.transport, self.layout) as reader:
                reader.complete_ids()
        except FingerprintMismatch:
            return False
        return True

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _clear(self, *, failed: bool) -> None:
        """Leave nothing that nobody will read again."""
        if self.keep and (failed or self._lasts):
            return
        try:
            if not self._ranks.first:
                self.transport.remove_all(self._unread)
                return
            self.transport.remove_all()
        except DraftsmithError as error:  # which may not take the place of what ended the run
            self._say(f"what is left of this run in the transport could not be removed: {error.what}")
            return
        self._place.leave()

    # --- asking -------------------------------------------------------------------------------------------------

    @property
    def pool(self) -> CapturePool:
        assert self._pool is not None, "the capture is not open"
        return self._pool

    def ask(self, row: PreparedRow, attempt: int = 1) -> _Ticket:
        """Ask for the states of *row* for one use. Blocks while every slot of the pool is taken."""
        if self.keep and row.sample_id in self._stored:
            with self._lock:
                self.counts.reused += 1
            return _Ticket(row, row.sample_id, None, attempt)
        sample_id = row.sample_id if self.keep else self._new_id(row.sample_id)
        answer = self.pool.submit(Request(sample_id, row.token_ids.tolist()))
        with self._lock:
            self.counts.captured += 1
            self._in_flight.add(answer)
            self._unread.add(sample_id)
        answer.add_done_callback(self._landed)
        return _Ticket(row, sample_id, answer, attempt)

    def _landed(self, answer: Future[Answer]) -> None:
        with self._lock:
            self._in_flight.discard(answer)

    def _new_id(self, row_id: str) -> str:
        """32 hex digits that no use of any row in any start has had, or will have."""
        return hashlib.sha256(f"{self._token}:{row_id}:{next(self._uses)}".encode()).hexdigest()[:32]

    def follow(self, rows: Iterator[PreparedRow]) -> _Stream:
        """Ask for the states of *rows*, in their order, up to ``ahead`` before they are read."""
        stream = _Stream(self, rows)
        with self._lock:
            self._streams = [each for each in self._streams if not each.closed] + [stream]
        return stream

    # --- what becomes of samples --------------------------------------------------------------------------------

    def used(self, ticket: _Ticket) -> None:
        """A sample was read, and is whole."""
        if self.keep:
            self._stored.add(ticket.sample_id)
        self._read_or_refused(ticket)
        if self._lost and ticket.attempt == 1:
            self._tell_recovered()

    def _read_or_refused(self, ticket: _Ticket) -> None:
        if ticket.attempt > 1:
            with self._lock:
                self._lost_unread -= 1

    def deleted(self, sample_id: str) -> None:
        """A sample is no longer in the transport."""
        with self._lock:
            self._unread.discard(sample_id)

    def ask_again(self, ticket: _Ticket, error: SampleError | None = None) -> _Ticket:
        """Ask for a sample that is gone or damaged. One line tells of all that are lost at one time.

        Args:
            error: what was wrong with the first of them.
        """
        self._stored.discard(ticket.sample_id)
        with self._lock:
            self.counts.regenerated += 1
            self._lost += 1
            self._lost_unread += ticket.attempt == 1
            is_first = self._lost == 1
        if is_first and error is not None:
            self._say(f"hidden states were lost ({error.what}); what is lost is captured again")
        return self.ask(ticket.row, ticket.attempt + 1)

    def _tell_recovered(self, *, at_end: bool = False) -> None:
        """Say how many were lost at one time, unless the training's stream or the validation's still lacks some."""
        with self._lock:
            if self._lost_unread and not at_end:
                return
            lost, self._lost = self._lost, 0
        if lost:
            self._say(f"{lost} lost sample{'s were' if lost > 1 else ' was'} captured again")

    def refuse(self, ticket: _Ticket, reason: str) -> SampleRefused:
        """The error to raise for a row whose states are not finite.

        Raises:
            NumericsError: there are more of these than ``capture.refused_share`` allows.
        """
        self._read_or_refused(ticket)
        row = ticket.row
        self.refused[row.sample_id] = reason
        count = len(self.refused)
        if count / self._rows > self._refused_share or count == self._rows:
            raise NumericsError(
                f"the states of {count} of {self._rows} rows are refused: {reason}",
                where=row.sample_id,
                hint="use capture.dtype: float32 (float16 verifiers often overflow in other dtypes), or allow more: "
                f"capture.refused_share is {self._refused_share:g}",
            )
        return SampleRefused(f"its states are refused: {reason}", sample_id=row.sample_id)

    # --- figures ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Count idle time from here on."""
        self._began = (self.pool.idle_seconds, self.pool.busy_seconds)

    @property
    def idle_share(self) -> float:
        """Share of the time in which what captures had nothing to do."""
        idle, busy = self.pool.idle_seconds - self._began[0], self.pool.busy_seconds - self._began[1]
        return idle / max(idle + busy, 1e-9)

    def idle(self, waits: Waits) -> dict[str, float]:
        """Shares of the time that the trainer waited for states, and what captures for the trainer."""
        return {"trainer_idle": waits.share, "capture_idle": self.idle_share}

    def verdict(self, waits: Waits) -> str:
        """One line that says who waited for whom, and what to do about it."""
        return verdict(waits.share, self.idle_share)

    def summary(self, waits: Waits) -> dict[str, Any]:
        """Figures of this start, for the stage's record."""
        return {
            **attrs.asdict(self.counts),
            "refused": len(self.refused),
            **{name: round(share, 4) for name, share in self.idle(waits).items()},
        }


def verdict(trainer: float, capture: float) -> str:
    """See :meth:`OnlineCapture.verdict`. Of the shares of the time that each waited."""
    text = f"the trainer waited {trainer:.0%} of the time for states, and capture idled {capture:.0%} of it"
    if min(trainer, capture) > _MUCH:
        return f"{text}: they wait for each other; more at once (online.ahead, online.in_flight) would make it faster"
    if trainer > max(_WORTH_TELLING, capture):
        return f"{text}: more capture endpoints (online.endpoints), or faster ones, would make it faster"
    if capture > max(_WORTH_TELLING, trainer):
        return f"{text}: the trainer is what takes the time; fewer endpoints would do"
    return text


class _Stream:
    """Tickets in the order in which their samples will be read; a thread of its own asks for them."""

    def __init__(self, capture: OnlineCapture, rows: Iterator[PreparedRow]) -> None:
        self._capture = capture
        self._rows = rows
        self._room = threading.Semaphore(capture.ahead)
        self._changed = threading.Condition()
        self._tickets: deque[_Ticket] = deque()
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._feed, name="draftsmith-ask-ahead", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def _feed(self) -> None:
        try:
            for row in self._rows:
                while not self._room.acquire(timeout=_POLL):
                    if self.closed:
                        return
                if self.closed:
                    return
                ticket = self._capture.ask(row)
                with self._changed:
                    self._tickets.append(ticket)
                    self._changed.notify()
        except BaseException as error:  # carried to the thread that can report it
            with self._changed:
                self._error = error
                self._changed.notify()

    def next(self) -> _Ticket:
        """The next ticket.

        Raises:
            DraftsmithError: no more can be asked for.
        """
        with self._changed:
            while not self._tickets:
                if self.closed:
                    raise _Closed
                if self._error is not None:
                    raise self._error
                self._changed.wait(_POLL)
            return self._tickets.popleft()

    def waiting(self) -> list[_Ticket]:
        """The tickets that come next."""
        with self._changed:
            return list(self._tickets)

    def replace(self, old: _Ticket, new: _Ticket) -> None:
        """Put *new* in the place of *old*, which is there: whoever takes tickets calls this."""
        with self._changed:
            self._tickets[self._tickets.index(old)] = new

    def wait(self, answer: Future[Answer]) -> Answer:
        """The answer, when it is there.

        Raises:
            DraftsmithError: there will be none.
        """
        while not concurrent.futures.wait([answer], timeout=_POLL).done:
            if self.closed:
                raise _Closed
        return answer.result()

    def release(self) -> None:
        """A sample was read: one more may be asked for."""
        self._room.release()

    def close(self) -> None:
        """Ask for nothing more. Whoever waits is told."""
        self._closed.set()

    def join(self) -> None:
        """Return when the thread has ended, which the closed pool lets it."""
        self._thread.join(10)


class OnlineStates:
    """What a loader reads from: the States of ``train.rows``. Used by one thread at a time."""

    def __init__(self, capture: OnlineCapture) -> None:
        self.layout = capture.layout
        self._capture = capture
        self._reader: HiddenStateReader | None = None
        self._stream: _Stream | None = None
        self._sample: HiddenStateSample | None = None
        self._undeleted: list[str] = []

    @property
    def reader(self) -> OnlineStates:
        return self

    def follow(self, stream: _Stream) -> None:
        """Read from *stream* from here on."""
        self._stream = stream

    def get(self, sample_id: str, *, expected_tokens: int | None = None) -> HiddenStateSample:
        """The states of the row *sample_id*, which is the next of the stream.

        Raises:
            SampleRefused: the verifier has no finite states for it.
            SampleError: they are missing or damaged, and the policy is not to capture them again, or that did not
                help.
            NumericsError: too many rows are refused. DraftsmithError: capture cannot go on.
        """
        assert self._stream is not None, "rows are read by OnlineRowLoader.rows"
        ticket = self._stream.next()
        assert ticket.row.sample_id == sample_id
        try:
            self._sample = self._obtain(ticket, self._stream)
        finally:
            self._stream.release()
        return self._sample

    def teacher(self, sample_id: str) -> tuple[Tensor, Tensor]:
        """The teacher's statistics of the sample that was read last."""
        assert self._sample is not None
        assert self._sample.sample_id == sample_id
        return sample_statistics(self._capture.statistics, self._sample)

    def _obtain(self, ticket: _Ticket, stream: _Stream) -> HiddenStateSample:
        capture = self._capture
        while True:
            if ticket.answer is not None and (reason := stream.wait(ticket.answer).refused) is not None:
                raise capture.refuse(ticket, reason)
            try:
                sample = self._read(ticket)
            except SampleError as error:
                self._delete(ticket.sample_id)
                found = _of_row(error, ticket.row, ticket.attempt)
                if capture.missing != "regenerate" or ticket.attempt == _ATTEMPTS:
                    raise found from error
                ticket = capture.ask_again(ticket, found)
                self._look_for_others(stream)
                continue
            capture.used(ticket)
            return sample

    def _look_for_others(self, stream: _Stream) -> None:
        """Ask at once for all samples that went with one: a store that lost one has often lost many."""
        assert self._reader is not None
        waiting = [ticket for ticket in stream.waiting() if ticket.stored]
        if not waiting:
            return
        there = check_ids(self._reader.complete_ids, self._reader.complete_ids())
        for ticket in waiting:
            if ticket.sample_id not in there:
                self._delete(ticket.sample_id)  # a list may be older than the sample
                stream.replace(ticket, self._capture.ask_again(ticket))

    def _read(self, ticket: _Ticket) -> HiddenStateSample:
        row = ticket.row
        if self._reader is None:
            self._reader = open_reader(self._capture.transport, self.layout)
        tokens = len(row.token_ids)
        found = self._reader.get(ticket.sample_id, expected_tokens=tokens)
        sample = check_sample(self._reader.get, found, tokens, self.layout)
        if not torch.equal(sample.token_ids, row.token_ids):
            raise SampleCorrupt("its states were captured from other tokens", sample_id=ticket.sample_id)
        if not self._capture.keep:
            self._delete(ticket.sample_id)
        return attrs.evolve(sample, sample_id=row.sample_id)

    def _delete(self, sample_id: str) -> None:
        """Remove what was used. A store that is away is not waited for: what stays there is tried with the next."""
        assert self._reader is not None
        self._undeleted.append(sample_id)
        with contextlib.suppress(TransportError):
            while self._undeleted:
                self._reader.delete(self._undeleted[-1])
                self._capture.deleted(self._undeleted.pop())

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class OnlineRowLoader(RowLoader):
    """A loader whose samples are asked for ahead of it.

    Args:
        table: prepared rows, read by the thread that loads.
        ahead_table: the same, read by the thread that asks.
        capture: where their states come from.
    """

    def __init__(self, table: Table, ahead_table: Table, *, capture: OnlineCapture, **settings: Any) -> None:
        self._online = OnlineStates(capture)
        super().__init__(table, self._online, **settings)
        self._ahead_table = ahead_table
        self._capture = capture

    def rows(self, bins: Bins, *, stopped: Callable[[], bool] = never, waits: Waits | None = None) -> Rows:
        stream = self._capture.follow(self._ahead_table[index] for bin_ in bins() for index in bin_)
        self._online.follow(stream)

        def closing() -> bool:
            if not stopped():
                return False
            stream.close()  # before the rows end, whose thread waits for the stream
            return True

        rows = super().rows(bins, stopped=closing, waits=waits)
        try:
            for row in rows:  # noqa: UP028 - `yield from` would end the rows first, which wait for the stream
                yield row
        finally:
            stream.close()
            rows.close()
            self._online.close()


def _of_row(error: SampleError, row: PreparedRow, attempts: int) -> SampleError:
    """*error*, of one use's sample, as an error of the row."""
    what = error.what.removeprefix(f"sample {error.sample_id}: ")
    times = f" (captured {attempts} times)" if attempts > 1 else ""
    return type(error)(
        f"{what}{times}",
        sample_id=row.sample_id,
        where=error.where,
        hint="online.missing says whether such a sample is captured again, left out, or stops the run",
    )
