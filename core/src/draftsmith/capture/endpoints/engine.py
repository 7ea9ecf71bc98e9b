"""A capture engine of this process as an endpoint."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from attrs import define, field

from draftsmith.capture.endpoints.base import Answer, Endpoint
from draftsmith.capture.engines import CaptureEngine, Request
from draftsmith.errors import DiskSpaceError, DraftsmithError, EndpointFailed, ServingError, TransportError, UserError
from draftsmith.plugins.blame import plugin_error

__all__ = ["EngineEndpoint"]

#: Seconds that closing waits for a batch under way.
_LEAVING = 30.0


@define(eq=False)
class _Job:
    request: Request
    future: Future[Answer]
    started: float = field(factory=time.monotonic)


@define(eq=False)
class _Session:
    """One life of the engine's thread, from entering the engine to leaving it."""

    jobs: queue.SimpleQueue[_Job | None] = field(factory=queue.SimpleQueue)
    ready: Future[None] = field(factory=Future)
    thread: threading.Thread | None = None


class EngineEndpoint(Endpoint):
    """Batches the requests that wait into *engine*, in one thread of its own.

    The engine is entered, used and left in that thread: the child of the vLLM engine ends with the thread that started
    it. After a failure :meth:`open` starts it anew.
    """

    def __init__(self, engine: CaptureEngine, *, name: str = "the engine of this process", slots: int = 64) -> None:
        self.name = name
        self.slots = slots
        self._engine = engine
        self._session: _Session | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._fault = "it was not started"

    def open(self) -> None:
        """Load the verifier, unless it is loaded.

        Raises:
            DraftsmithError: the engine cannot be started.
        """
        with self._lock:
            if self._closed:
                raise EndpointFailed("it is closed", endpoint=self.name)
            session = self._session
            if session is None:
                session = self._session = _Session()
                session.thread = threading.Thread(
                    target=self._run, args=(session,), name="draftsmith-capture-engine", daemon=True
                )
                session.thread.start()
        session.ready.result()

    def capture(self, request: Request) -> Answer:
        job = _Job(request, Future())
        with self._lock:
            if self._session is None:
                raise EndpointFailed(f"its engine is not running: {self._fault}", endpoint=self.name)
            self._session.jobs.put(job)
        return job.future.result()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            session, self._session = self._session, None
            if session is not None:
                session.jobs.put(None)
        if session is not None and session.thread is not None:
            session.thread.join(_LEAVING)

    def _run(self, session: _Session) -> None:
        under_way: list[_Job] = []
        try:
            with self._engine:
                session.ready.set_result(None)
                while (batch := _waiting(session.jobs, self.slots)) is not None:
                    under_way = batch
                    self._capture(batch)
                    under_way = []
            error: BaseException = EndpointFailed("it is closed", endpoint=self.name)
        except BaseException as caught:
            error = caught
        failure = self._failure(error)
        with self._lock:  # nothing is put into this session's queue from here on
            self._fault = failure.what if isinstance(failure, DraftsmithError) else repr(failure)
            if self._session is session:
                self._session = None
        if not session.ready.done():
            session.ready.set_exception(error)
        for job in [*under_way, *_drain(session.jobs)]:
            if not job.future.done():
                job.future.set_exception(failure)

    def _capture(self, batch: Sequence[_Job]) -> None:
        jobs = {job.request.sample_id: job for job in batch}
        for done in self._engine.capture([job.request for job in jobs.values()]):
            answers = {**dict.fromkeys(done.stored), **done.refused}
            for sample_id, refused in answers.items():
                job = jobs.pop(sample_id)
                job.future.set_result(Answer(sample_id, refused, time.monotonic() - job.started))
            if self._closed and jobs:  # leaving with an error ends the engine without waiting for the rest
                raise EndpointFailed("it is closed", endpoint=self.name)
        if jobs:
            raise ServingError(f"the engine left out {len(jobs)} rows, {next(iter(jobs))} among them", where=self.name)

    def _failure(self, error: BaseException) -> BaseException:
        """What the requests under way are told: an engine that died, or a store that is away, may come back."""
        if isinstance(error, EndpointFailed | UserError | DiskSpaceError):
            return error
        if isinstance(error, ServingError | TransportError):
            return EndpointFailed(error.what, endpoint=self.name, hint=error.hint)
        if isinstance(error, DraftsmithError) or not isinstance(error, Exception):
            return error
        # What a plugin's code raises by mistake, it would raise again.
        return plugin_error(error) or EndpointFailed(f"{type(error).__name__}: {error}", endpoint=self.name)


def _waiting(jobs: queue.SimpleQueue[_Job | None], limit: int) -> list[_Job] | None:
    """Wait for a request, and take those that wait as well; None at the end. An id is taken once."""
    batch: dict[str, _Job] = {}
    job = jobs.get()
    while job is not None:
        batch.setdefault(job.request.sample_id, job)
        if batch[job.request.sample_id] is not job:
            _follow(batch[job.request.sample_id].future, job.future)
        if len(batch) >= limit:
            break
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            break
    else:
        jobs.put(None)  # for the next call, when this batch is done
    return list(batch.values()) if batch else None


def _follow(first: Future[Answer], second: Future[Answer]) -> None:
    """Let *second* become what *first* becomes."""

    def copy(done: Future[Answer]) -> None:
        error = done.exception()
        if error is not None:
            second.set_exception(error)
        else:
            second.set_result(done.result())

    first.add_done_callback(copy)


def _drain(jobs: queue.SimpleQueue[_Job | None]) -> list[_Job]:
    left: list[_Job] = []
    while True:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            return left
        if job is not None:
            left.append(job)
