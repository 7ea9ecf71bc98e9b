"""Endpoints and the pool: a real tiny verifier behind them, and endpoints that fail, hang and come back."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from waiting import wait_until

from draftsmith.api import Transport
from draftsmith.capture.address import open_transport
from draftsmith.capture.endpoints import Answer, CapturePool, Endpoint, EndpointFailed, EngineEndpoint
from draftsmith.capture.engines import CaptureSetup, Request
from draftsmith.capture.engines.transformers import TransformersEngine, hidden_states, load_verifier
from draftsmith.errors import DiskSpaceError, ServingError, UserError
from draftsmith.interfaces import StateLayout
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.verifier import read_verifier

TINY = Path(__file__).parent / "tiny"


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return read_verifier(make_tiny_verifier(tmp_path_factory.mktemp("endpoints") / "verifier", "llama"))


@pytest.fixture
def transport(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TINY))
    from draftsmith_tiny.plugin import draftsmith_transports

    described: Transport = draftsmith_transports()[0]
    return open_transport(described, described.options(), tmp_path / "samples")


@pytest.fixture
def layout(verifier):
    return StateLayout(
        fingerprint="0" * 32, layer_ids=(0, 1, verifier.num_layers), hidden_size=verifier.hidden_size, dtype="float32"
    )


@pytest.fixture
def make_engine(verifier, transport, layout, tmp_path):
    def make(batch_tokens=64):
        setup = CaptureSetup(
            verifier=verifier,
            layout=layout,
            dtype="float32",
            batch_tokens=batch_tokens,
            longest=64,
            work_folder=tmp_path / "work",
        )
        return TransformersEngine(setup, lambda: transport.writer(layout))

    return make


def requests(count: int, tokens: int = 12) -> list[Request]:
    draw = random.Random(7)
    return [
        Request(f"{number:032x}", [draw.randrange(5, 90) for _ in range(draw.randrange(2, tokens + 1))])
        for number in range(count)
    ]


def test_what_the_pool_captures_is_what_the_verifier_computes(make_engine, transport, layout, verifier) -> None:
    """Two engines, answers in whichever order: every row's states are its own."""
    rows = requests(24)
    lines: list[str] = []
    endpoints = [EngineEndpoint(make_engine(), name=name, slots=4) for name in ("first", "second")]
    with CapturePool(endpoints, in_flight=8, patience=10, say=lines.append) as pool:
        assert pool.capacity == 8
        answers = [future.result(60) for future in [pool.submit(row) for row in rows]]
    assert [each.sample_id for each in answers] == [row.sample_id for row in rows]
    assert all(each.refused is None and each.seconds > 0 for each in answers)
    assert not lines
    model = load_verifier(verifier.path, dtype=torch.float32, device=torch.device("cpu"))
    with transport.reader(layout) as reader:
        assert reader.complete_ids() == {row.sample_id for row in rows}
        for row in rows:
            stored = reader.get(row.sample_id, expected_tokens=len(row.token_ids))
            wanted = hidden_states(model, torch.tensor([row.token_ids]), None, layout.layer_ids)[0]
            torch.testing.assert_close(stored.hidden_states, wanted, rtol=1e-5, atol=1e-5)
    assert pool.busy_seconds > 0
    assert pool.retried == 0


class Tampered(Endpoint):
    """A working endpoint that can be told to fail, to hang, or to be slow."""

    def __init__(self, name: str, inner: Endpoint | None = None, *, slots: int = 4) -> None:
        self.name, self.slots, self.inner = name, slots, inner
        self.down = threading.Event()
        self.hang = threading.Event()
        self.release = threading.Event()
        self.wrong: Exception | None = None
        self.delay = 0.0
        self.fail_next = False
        self.asked: list[str] = []
        self.at_once = 0
        self.most_at_once = 0
        self.probed: list[float] = []
        self._lock = threading.Lock()

    def open(self) -> None:
        self.probed.append(time.monotonic())
        if self.down.is_set():
            raise EndpointFailed("cannot be reached", endpoint=self.name)
        if self.wrong is not None:
            raise self.wrong
        if self.inner is not None:
            self.inner.open()

    def capture(self, request: Request) -> Answer:
        hangs = self.hang.is_set()  # whoever sees below that it was asked may end that
        with self._lock:
            self.asked.append(request.sample_id)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if hangs:
                self.release.wait(300)
            time.sleep(random.uniform(0, self.delay))
            failed, self.fail_next = self.fail_next or self.down.is_set(), False
            if failed:
                raise EndpointFailed("the connection broke", endpoint=self.name)
            if self.inner is not None:
                return self.inner.capture(request)
            return Answer(request.sample_id, None, 0.0)
        finally:
            with self._lock:
                self.at_once -= 1

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()


def captured(pool: CapturePool, rows: list[Request]) -> list[str]:
    return [future.result(60).sample_id for future in [pool.submit(row) for row in rows]]


def test_requests_go_round_and_never_more_than_its_slots_to_one(make_engine) -> None:
    three = [Tampered("a"), Tampered("b"), Tampered("c", slots=2)]
    for each in three:
        each.delay = 0.004
        each.hang.set()
    rows = requests(300, 3)
    with CapturePool(three, in_flight=3, patience=5, say=print) as pool, ThreadPoolExecutor(1) as other:
        answers = other.submit(captured, pool, rows)
        wait_until(lambda: [each.at_once for each in three] == [3, 3, 2], "all slots are taken")
        for each in three:
            each.hang.clear()
            each.release.set()
        assert answers.result() == [row.sample_id for row in rows]
    assert [each.most_at_once for each in three] == [3, 3, 2]
    assert sorted(name for each in three for name in each.asked) == [row.sample_id for row in rows]
    assert min(len(each.asked) for each in three) > 40


def test_submit_blocks_when_all_slots_are_busy() -> None:
    slow = Tampered("slow", slots=2)
    slow.hang.set()
    rows = requests(3)
    with CapturePool([slow], in_flight=8, patience=5, say=print) as pool, ThreadPoolExecutor(1) as other:
        futures = [pool.submit(row) for row in rows[:2]]
        third = other.submit(pool.submit, rows[2])
        wait_until(lambda: len(slow.asked) == 2, "both slots are taken")
        time.sleep(0.2)
        assert not third.done()
        assert len(slow.asked) == 2
        slow.release.set()
        assert third.result(60).result(60).sample_id == rows[2].sample_id
        assert all(each.result(60) for each in futures)


def test_what_fails_at_one_endpoint_is_captured_by_another(make_engine, transport, layout) -> None:
    """Every row is stored, and asked for again only where it failed."""
    bad, good = (Tampered(name, EngineEndpoint(make_engine(), name=name)) for name in ("bad", "good"))
    bad.delay = 0.02
    lines: list[str] = []
    rows = requests(60)
    with CapturePool([bad, good], in_flight=4, patience=60, say=lines.append) as pool:
        first = captured(pool, rows[:20])
        bad.down.set()
        second = captured(pool, rows[20:])
        assert [*first, *second] == [row.sample_id for row in rows]
        assert 1 <= pool.retried <= 4
        assert len(bad.asked) + len(good.asked) == len(rows) + pool.retried
    assert lines[0] == "capture endpoint bad failed: the connection broke; its requests go to the 1 that work"
    with transport.reader(layout) as reader:
        assert reader.complete_ids() == {row.sample_id for row in rows}


def test_a_lone_endpoint_that_comes_back_gets_its_requests_again() -> None:
    only = Tampered("only")
    lines: list[str] = []
    with CapturePool([only], in_flight=2, patience=120, say=lines.append) as pool:
        only.hang.set()
        futures = [pool.submit(row) for row in requests(2)]
        wait_until(lambda: len(only.asked) == 2, "both are under way")
        only.hang.clear()
        only.down.set()
        only.release.set()
        wait_until(lambda: len(only.probed) == 2, "it is asked whether it is back")
        assert not any(each.done() for each in futures)
        only.down.clear()
        assert [each.result(60).sample_id for each in futures] == [row.sample_id for row in requests(2)]
        assert pool.retried == 2
    assert len(lines) == 2
    assert lines[0] == "capture endpoint only failed: the connection broke; waiting for it"
    assert lines[1].startswith("capture endpoint only works again after ")


def test_when_all_stay_down_the_error_names_each_and_its_fault() -> None:
    ends = [Tampered("http://a:1"), Tampered("http://b:2")]
    with CapturePool(ends, in_flight=1, patience=0.5, say=print) as pool:
        for each in ends:
            each.down.set()
        with pytest.raises(ServingError, match=r"(?s)http://a:1: .*(broke|reached).*http://b:2: .*(broke|reached)"):
            pool.submit(requests(1)[0]).result(60)
        with pytest.raises(ServingError, match="no capture endpoint has worked"):
            pool.submit(requests(1)[0])


def test_probes_of_a_dead_endpoint_become_rare() -> None:
    dead, good = Tampered("dead"), Tampered("good")
    dead.down.set()
    with CapturePool([dead, good], in_flight=1, patience=30, say=print) as pool:
        wait_until(lambda: len(dead.probed) == 5, "the fifth probe")
        pauses = [later - earlier for earlier, later in itertools.pairwise(dead.probed)]
        assert all(pause >= 0.25 * 2**number for number, pause in enumerate(pauses)), pauses
        assert not dead.asked
        assert captured(pool, requests(3)) == [row.sample_id for row in requests(3)]


def test_at_the_start_what_will_not_do_is_an_error_and_what_is_down_is_not() -> None:
    wrong, good, down = Tampered("wrong"), Tampered("good"), Tampered("down")
    lines: list[str] = []
    down.down.set()
    wrong.wrong = UserError("it serves another model", where="wrong")
    with pytest.raises(UserError, match="another model"):
        CapturePool([good, wrong], in_flight=1, patience=1, say=print).open()
    with pytest.raises(ServingError, match=r"none of the capture endpoints works.*\n.*down: cannot be reached"):
        CapturePool([down], in_flight=1, patience=60, say=lines.append).open()
    assert not lines, "nothing is waited for: the error says it all"
    with CapturePool([down, good], in_flight=1, patience=1, say=lines.append) as pool:
        assert captured(pool, requests(4)) == [row.sample_id for row in requests(4)]
    assert lines == ["capture endpoint down failed: cannot be reached; its requests go to the 1 that work"]


def test_an_error_that_no_endpoint_would_spare_is_not_tried_again(make_engine, monkeypatch) -> None:
    one, two = Tampered("one"), Tampered("two")

    def full(request: Request) -> Answer:
        raise DiskSpaceError("the store is full")

    one.capture = two.capture = full  # type: ignore[method-assign]
    with CapturePool([one, two], in_flight=1, patience=5, say=print) as pool:
        with pytest.raises(DiskSpaceError):
            pool.submit(requests(1)[0]).result(10)
        assert pool.retried == 0


def test_closing_is_prompt_with_an_endpoint_that_hangs() -> None:
    hung = Tampered("hung")
    hung.hang.set()
    pool = CapturePool([hung], in_flight=2, patience=60, say=print)
    pool.open()
    futures = [pool.submit(row) for row in requests(2)]
    waiting: Future[object] = Future()

    def blocked() -> None:
        try:
            waiting.set_result(pool.submit(requests(3)[2]))
        except ServingError as error:
            waiting.set_exception(error)

    threading.Thread(target=blocked, daemon=True).start()
    wait_until(lambda: len(hung.asked) == 2, "both are under way")
    time.sleep(0.2)
    pool.close()
    assert hung.at_once == 2, "it was waited for"
    for each in (*futures, waiting):
        with pytest.raises(ServingError, match="closed"):
            each.result(60)
    pool.close()
    hung.release.set()


def test_idle_and_busy_time_are_told_apart() -> None:
    one, two = Tampered("one", slots=1), Tampered("two", slots=1)
    one.hang.set()
    moments: list[tuple[float, float]] = []  # each happened between two readings of the clock

    def at(event: Callable[[], Any]) -> Any:
        before = time.monotonic()
        result = event()
        moments.append((before, time.monotonic()))
        return result

    pool = CapturePool([one, two], in_flight=1, patience=5, say=print)
    try:
        at(pool.open)
        time.sleep(0.5)
        future = at(lambda: pool.submit(requests(1)[0]))  # `one` is busy with it, `two` has nothing to do
        time.sleep(1.0)
        at(lambda: (one.release.set(), future.result(60)))
        busy, idle = at(lambda: (pool.busy_seconds, pool.idle_seconds))
    finally:
        pool.close()
    opened, asked, answered, read = moments
    assert (answered[0] - asked[1]) / 2 <= busy <= (answered[1] - asked[0]) / 2  # one of two
    assert read[0] - opened[1] <= busy + idle <= read[1] - opened[0]


def test_an_old_failure_says_nothing_of_an_endpoint_that_came_back() -> None:
    end = Tampered("end", slots=2)
    lines: list[str] = []
    with CapturePool([end], in_flight=2, patience=30, say=lines.append) as pool:
        end.hang.set()
        old = pool.submit(requests(1)[0])  # hangs in the endpoint's first life
        wait_until(lambda: end.asked, "it is under way")
        end.hang.clear()
        end.down.set()
        new = pool.submit(requests(2)[1])  # fails, and ends that life
        wait_until(lambda: lines, "it has failed")
        end.down.clear()
        assert new.result(60)
        end.fail_next = True
        end.release.set()  # the first one fails only now
        assert old.result(60).sample_id == requests(1)[0].sample_id
    assert lines[0].startswith("capture endpoint end failed")
    assert lines[1].startswith("capture endpoint end works again")
    assert len(lines) == 2
    assert pool.retried == 2


def test_an_engine_that_dies_is_started_again(make_engine) -> None:
    class Dying(TransformersEngine):
        lives = 0

        def __enter__(self) -> TransformersEngine:
            Dying.lives += 1
            return super().__enter__()

        def _capture_batch(self, batch):
            if Dying.lives == 1:
                raise ServingError("the engine died")
            return super()._capture_batch(batch)

    engine = make_engine()
    engine.__class__ = Dying
    rows = requests(5)
    lines: list[str] = []
    with CapturePool([EngineEndpoint(engine)], in_flight=8, patience=30, say=lines.append) as pool:
        assert captured(pool, rows) == [row.sample_id for row in rows]
    assert Dying.lives == 2
    assert "the engine died" in lines[0]


def test_an_engine_that_cannot_be_loaded_says_so_at_once(make_engine, tmp_path) -> None:
    engine = make_engine()
    engine._setup = attrs.evolve(engine._setup, verifier=attrs.evolve(engine._setup.verifier, path=tmp_path))
    with pytest.raises(UserError, match="cannot load the verifier"):
        CapturePool([EngineEndpoint(engine)], in_flight=1, patience=30, say=print).open()


def test_a_row_asked_for_twice_at_once_is_captured_once_and_answered_twice(make_engine) -> None:
    row = requests(1)[0]
    with CapturePool([EngineEndpoint(make_engine())], in_flight=4, patience=30, say=print) as pool:
        first, second = pool.submit(row), pool.submit(row)
        assert first.result(60).sample_id == second.result(60).sample_id == row.sample_id


def test_an_endpoint_that_comes_back_as_something_else_is_left_alone_and_told_of() -> None:
    changed, good = Tampered("changed"), Tampered("good")
    lines: list[str] = []
    with CapturePool([changed, good], in_flight=1, patience=30, say=lines.append) as pool:
        changed.wrong = UserError("it serves another model", where="changed")
        changed.fail_next = True
        assert captured(pool, requests(6)) == [row.sample_id for row in requests(6)]
        wait_until(lambda: len(changed.probed) == 4, "it is asked again and again")
        asked = len(changed.asked)
        assert captured(pool, requests(6)) == [row.sample_id for row in requests(6)]
        assert len(changed.asked) == asked
    assert lines[1:] == ["capture endpoint changed will not do: it serves another model; it is asked again later"]


def test_closing_does_not_wait_for_the_rest_of_a_batch(make_engine) -> None:
    class Slow(TransformersEngine):
        batches = 0

        def _capture_batch(self, batch):
            Slow.batches += 1
            time.sleep(0.3)
            return super()._capture_batch(batch)

    engine = make_engine(batch_tokens=1)  # a row at a time
    engine.__class__ = Slow
    pool = CapturePool([EngineEndpoint(engine)], in_flight=32, patience=30, say=print)
    pool.open()
    futures = [pool.submit(row) for row in requests(32)]
    wait_until(lambda: Slow.batches > 0, "the first batch is under way")
    pool.close()
    assert Slow.batches < 10
    assert any(isinstance(each.exception(60), ServingError) for each in futures)
