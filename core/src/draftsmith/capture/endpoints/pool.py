"""Many endpoints as one: round robin over those that work, retries, and a bound on what is in flight."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType

from attrs import define

from draftsmith.capture.endpoints.base import Answer, Endpoint
from draftsmith.capture.engines import Request
from draftsmith.capture.plan import human_seconds
from draftsmith.errors import DraftsmithError, EndpointFailed, ServingError

__all__ = ["CapturePool"]

#: Seconds until a failed endpoint is probed again: doubled after each further failure, from the first to the last.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0


@define(eq=False)
class _Task:
    """A request under way, wherever it is tried."""

    request: Request
    future: Future[Answer]
    failed_since: float | None = None


@define(eq=False)
class _Member:
    """An endpoint, as the pool sees it.

    Attributes:
        limit: requests that it is given at once.
        busy: requests that it has.
        failures: since it last captured anything.
        lives: how often it has come back: what an earlier life still had under way says nothing of this one.
        probe_at: when it is probed next; None while it works, or is being probed.
        down_since: when it failed; None while it works.
        clock: since when it has been idle, or busy, as it is now; None while it is down and idle.
    """

    endpoint: Endpoint
    limit: int
    busy: int = 0
    failures: int = 0
    lives: int = 0
    fault: str = ""
    hint: str | None = None
    probe_at: float | None = None
    down_since: float | None = None
    clock: float | None = None
    idle_seconds: float = 0.0
    busy_seconds: float = 0.0

    @property
    def free(self) -> bool:
        return self.down_since is None and self.busy < self.limit

    def tick(self, now: float) -> None:
        """Add the time since the last change to what it was spent on."""
        if self.clock is not None:
            if self.busy:
                self.busy_seconds += now - self.clock
            elif self.down_since is None:
                self.idle_seconds += now - self.clock
        self.clock = now


class CapturePool:
    """Sends requests to endpoints that work; each goes on elsewhere, or later, where one fails.

    :meth:`open` probes all endpoints. One that can only not be reached is tried again later, as long as another one
    works; one that will not do for this run (another model, other layers) is an error at once. An endpoint that fails
    later, in whichever way, is left alone for a while (longer after each failure, with jitter), then probed, and used
    again when it answers as at the start.

    Not more than ``capacity`` requests are under way: :meth:`submit` blocks before it takes another. Answers come in
    any order; each request has a future of its own.

    Args:
        endpoints: at least one. The pool closes them.
        in_flight: requests at one endpoint at once (fewer where it has fewer slots).
        patience: seconds for which a request that failed is tried again, and for which none of the endpoints may work.
        say: takes one line that says what happened and what was done. Called from any thread, one call at a time;
            it must not call the pool, or wait for anything that does.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], *, in_flight: int, patience: float, say: Callable[[str], None]
    ) -> None:
        if not endpoints or in_flight < 1:
            raise ValueError("a pool needs an endpoint, and at least one request in flight")
        self._members = [_Member(each, max(1, min(in_flight, each.slots))) for each in endpoints]
        self._patience = patience
        self._say = say
        self._lock = threading.Condition()
        self._pending: deque[_Task] = deque()
        self._tasks: set[_Task] = set()
        self._next = 0
        self._dark_since: float | None = None
        self._retried = 0
        self._closed = False
        self._threads = _Threads(sum(each.limit for each in self._members) + len(self._members))
        self._nurse: threading.Thread | None = None

    # --- for the caller -----------------------------------------------------------------------------------------

    def open(self) -> None:
        """Probe all endpoints, at once.

        Raises:
            DraftsmithError: an endpoint will not do for this run.
            ServingError: none can be reached.
        """
        probes = [self._threads.run(each.endpoint.open) for each in self._members]
        failed: list[tuple[_Member, EndpointFailed]] = []
        wrong: DraftsmithError | None = None
        for member, probe in zip(self._members, probes, strict=True):
            try:
                probe.result()
            except EndpointFailed as error:
                failed.append((member, error))
            except DraftsmithError as error:
                wrong = wrong or error
        if wrong is not None:
            raise wrong
        with self._lock:
            now = time.monotonic()
            for member in self._members:
                member.clock = now
            if len(failed) == len(self._members):
                for member, fault in failed:
                    member.fault, member.hint = fault.what, fault.hint
                raise self._all_down("none of the capture endpoints works")
            for member, fault in failed:
                self._set_down(member, fault)
        self._nurse = threading.Thread(target=self._watch, name="draftsmith-capture-pool", daemon=True)
        self._nurse.start()

    @property
    def capacity(self) -> int:
        """Requests that can be under way when all endpoints work."""
        return sum(each.limit for each in self._members)

    @property
    def idle_seconds(self) -> float:
        """Seconds for which a working endpoint had no request, on average of all endpoints."""
        return self._clocks()[0]

    @property
    def busy_seconds(self) -> float:
        """Seconds for which an endpoint had at least one request, on average of all endpoints."""
        return self._clocks()[1]

    @property
    def retried(self) -> int:
        """How often a request was given to an endpoint again, after it had failed."""
        return self._retried

    def submit(self, request: Request) -> Future[Answer]:
        """Capture *request*. Blocks while all that works is busy; the future never does.

        The future raises what :meth:`Endpoint.capture` raises, except :class:`EndpointFailed`: then the request is
        tried again, and after ``patience`` the future raises a ServingError that names every endpoint and its last
        fault.

        Raises:
            ServingError: no endpoint has worked for ``patience`` seconds, or the pool is closed.
        """
        task = _Task(request, Future())
        task.future.set_running_or_notify_cancel()
        with self._lock:
            while not self._has_room():
                self._lock.wait()
            self._tasks.add(task)
            self._pending.append(task)
            self._dispatch()
        return task.future

    def close(self) -> None:
        """End everything, promptly, whatever hangs: what is under way fails. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            tasks, self._tasks = self._tasks, set()
            self._pending.clear()
            self._lock.notify_all()
        for task in tasks:
            task.future.set_exception(_closed())
        self._threads.close()
        closing = [threading.Thread(target=each.endpoint.close, daemon=True) for each in self._members]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def __enter__(self) -> CapturePool:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- with the lock held -------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        if self._closed:
            raise _closed()
        if self._is_dark_for_too_long():
            raise self._all_down(f"no capture endpoint has worked for {human_seconds(self._patience)}")
        return len(self._tasks) < sum(each.limit for each in self._members if each.down_since is None)

    def _is_dark_for_too_long(self) -> bool:
        return self._dark_since is not None and time.monotonic() - self._dark_since >= self._patience

    def _dispatch(self) -> None:
        """Give what is pending to endpoints with free slots, in turn."""
        while self._pending:
            member = self._choose()
            if member is None:
                return
            task = self._pending.popleft()
            if task.failed_since is not None:
                self._retried += 1
            member.tick(time.monotonic())
            member.busy += 1
            self._threads.run(self._try, member, task)

    def _choose(self) -> _Member | None:
        """The next working endpoint with a free slot, from where the last search ended."""
        for step in range(len(self._members)):
            place = (self._next + step) % len(self._members)
            if self._members[place].free:
                self._next = place + 1
                return self._members[place]
        return None

    def _finish(self, task: _Task) -> bool:
        """Whether the outcome is still wanted; the caller sets it, without the lock."""
        wanted = task in self._tasks
        self._tasks.discard(task)
        return wanted

    def _set_down(self, member: _Member, error: DraftsmithError) -> None:
        now = time.monotonic()
        member.tick(now)
        member.fault = error.what
        member.hint = error.hint
        if member.down_since is None:
            member.down_since = now
            member.failures += 1
            self._plan_probe(member, now)
            others = sum(each.down_since is None for each in self._members)
            done = f"its requests go to the {others} that work" if others else "waiting for it"
            self._say(f"capture endpoint {member.endpoint.name} failed: {_line(error.what)}; {done}")
        if all(each.down_since is not None for each in self._members) and self._dark_since is None:
            self._dark_since = now
        self._lock.notify_all()

    def _still_down(self, member: _Member, error: Exception) -> None:
        """A probe failed. One that found a server of another kind in its place is told of."""
        known = error if isinstance(error, DraftsmithError) else None
        fault = known.what if known else f"{type(error).__name__}: {error}"
        if not isinstance(error, EndpointFailed) and fault != member.fault and not self._closed:
            self._say(f"capture endpoint {member.endpoint.name} will not do: {_line(fault)}; it is asked again later")
        member.fault, member.hint = fault, known.hint if known else None
        member.failures += 1
        self._plan_probe(member, time.monotonic())
        self._lock.notify_all()

    def _plan_probe(self, member: _Member, now: float) -> None:
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(member.failures - 1, 10))
        member.probe_at = now + pause * random.uniform(0.5, 1.0)

    def _set_up(self, member: _Member) -> None:
        now = time.monotonic()
        member.tick(now)
        assert member.down_since is not None
        self._say(
            f"capture endpoint {member.endpoint.name} works again after {human_seconds(now - member.down_since)}"
        )
        member.down_since = None
        member.lives += 1
        self._dark_since = None
        self._dispatch()
        self._lock.notify_all()

    def _all_down(self, what: str) -> ServingError:
        faults = "".join(f"\n    {each.endpoint.name}: {_line(each.fault) or 'busy'}" for each in self._members)
        hints = [each.hint for each in self._members if each.hint]
        return ServingError(what + faults, where="online.endpoints", hint=hints[0] if hints else None)

    def _clocks(self) -> tuple[float, float]:
        with self._lock:
            now = time.monotonic()
            if not self._closed:
                for each in self._members:
                    if each.clock is not None:
                        each.tick(now)
            count = len(self._members)
            return (
                sum(each.idle_seconds for each in self._members) / count,
                sum(each.busy_seconds for each in self._members) / count,
            )

    # --- in the pool's threads ----------------------------------------------------------------------------------

    def _try(self, member: _Member, task: _Task) -> None:
        """One attempt at *task*."""
        answer, error = None, None
        life = member.lives
        try:
            answer = member.endpoint.capture(task.request)
        except Exception as caught:
            error = caught
        with self._lock:
            member.tick(time.monotonic())
            member.busy -= 1
            wanted = True
            if isinstance(error, EndpointFailed):
                wanted = False
                if member.lives == life:
                    self._set_down(member, error)
                if task in self._tasks:
                    task.failed_since = task.failed_since or time.monotonic()
                    self._pending.appendleft(task)
            else:
                member.failures = 0
                wanted = self._finish(task)
            if not self._closed:
                self._dispatch()
            self._lock.notify_all()
        if wanted and error is not None:
            task.future.set_exception(error)
        elif wanted and answer is not None:
            task.future.set_result(answer)

    def _probe(self, member: _Member) -> None:
        try:
            member.endpoint.open()
        except Exception as error:
            with self._lock:
                self._still_down(member, error)
            return
        with self._lock:
            if not self._closed:
                self._set_up(member)

    def _watch(self) -> None:
        """Probe what is due, and give up what has waited for too long."""
        while True:
            with self._lock:
                if self._closed:
                    return
                now = time.monotonic()
                for member in self._members:
                    if member.probe_at is not None and member.probe_at <= now:
                        member.probe_at = None
                        self._threads.run(self._probe, member)
                given_up = self._overdue(now)
                for task in given_up:
                    self._pending.remove(task)
                    self._finish(task)
                if given_up:
                    error = self._all_down(
                        f"a request was tried for {human_seconds(self._patience)}, and no endpoint could capture it"
                    )
                    self._lock.notify_all()
            for task in given_up:
                task.future.set_exception(error)
            with self._lock:
                if not self._closed:
                    self._lock.wait(self._pause())

    def _overdue(self, now: float) -> list[_Task]:
        dark = self._is_dark_for_too_long()
        return [
            task
            for task in self._pending
            if dark or (task.failed_since is not None and now - task.failed_since >= self._patience)
        ]

    def _pause(self) -> float | None:
        """Seconds until something is due; None: nothing is."""
        due = [each.probe_at for each in self._members if each.probe_at is not None]
        due += [task.failed_since + self._patience for task in self._pending if task.failed_since is not None]
        if self._dark_since is not None and not self._is_dark_for_too_long():
            due.append(self._dark_since + self._patience)
        return max(0.0, min(due) - time.monotonic()) if due else None


class _Threads:
    """Up to *limit* daemon threads, started as they are needed: one that hangs keeps nothing from ending."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0
        self._lock = threading.Lock()

    def run(self, function: Callable[..., None], *arguments: object) -> Future[None]:
        future: Future[None] = Future()

        def work() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._work.put(work)
        if not self._idle.acquire(blocking=False):
            with self._lock:
                if self._count < self._limit:
                    self._count += 1
                    threading.Thread(target=self._loop, name="draftsmith-capture", daemon=True).start()
        return future

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            self._idle.release()

    def close(self) -> None:
        for _ in range(self._count):
            self._work.put(None)


def _closed() -> ServingError:
    return ServingError("the capture pool is closed")


def _line(text: str) -> str:
    """Its first line: logs have one line an event."""
    return text.strip().splitlines()[0] if text.strip() else ""
