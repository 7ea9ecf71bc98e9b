"""Whole online trainings through a real store, from this process's engine and from real vLLM servers, and what befalls
them: each ends in the bits of one that nothing befell, leaves nothing behind, and says what happened.

Every test prints a line of JSON with the seconds to recover; ``benchmarks/online_faults.py`` collects them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from command_line import draftsmith
from online_runs import (
    TWO_RANKS,
    CaptureServer,
    Networks,
    Run,
    Started,
    assert_like,
    keys,
    networks,
    workers,
)
from ports import free_port
from tiny_runs import write_chats, write_recipe
from waiting import wait_until

from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith_hs_mooncake.options import MooncakeOptions
from draftsmith_hs_mooncake.store import Code, Region
from draftsmith_hs_mooncake.testing import TestedStore, running_store
from draftsmith_hs_mooncake.transport import MooncakeTransport

pytestmark = [pytest.mark.slow, pytest.mark.alone]

#: The step at which something happens, of 104.
MIDDLE = 30
NAME = "faults"


# --- what all tests share ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def net() -> Iterator[Networks]:
    with networks() as made:
        yield made


@pytest.fixture(scope="module")
def store(net: Networks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestedStore]:
    with running_store(tmp_path_factory.mktemp("store"), 64 << 20, net.here) as running:
        yield running


@pytest.fixture(scope="module")
def recipe(store: TestedStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a run whose data are prepared. The draft has more layers than it needs, so that capture is ahead of it."""
    home = tmp_path_factory.mktemp("online")
    make_tiny_verifier(home / "verifier", "llama", num_layers=6)
    write_chats(home, words=(14, 26), count=120)
    options = {"master": store.note.master, "admin": store.note.admin, "run": NAME, "chunk_mebibytes": 1}
    path = write_recipe(
        home,
        home / "run",
        "eagle3",
        {"num_layers": 3},
        vocabulary={"draft_size": 128},
        data={"sources": [str(home / "chats.jsonl")], "max_length": 160, "validation_share": 0.1},
        transport={"name": "hs_mooncake", "options": options},
        # a row in a forward pass: its states are the same in every run
        capture={
            "mode": "online",
            "engine": "transformers",
            "batch_tokens": 1,
            "dtype": "float32",
            "store_dtype": "float32",
        },
        online={"ahead": 8, "in_flight": 4},
        train={
            "epochs": 2,
            "tokens_per_row": 160,
            "rows_per_step": 2,
            "learning_rate": 2e-3,
            "compute_dtype": "float32",
            "checkpoint_every": 20,
        },
        observers=[],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        draftsmith("prepare", path)
        yield path


@pytest.fixture
def make(recipe: Path, store: TestedStore, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """``make(*settings)``: a run of its own. What one leaves that failed is out of the way of the next."""
    yield lambda *settings, **named: Run(recipe, tmp_path / "run", *settings, **named)
    if keys(store.note):
        draftsmith("store", "gc", "--run", NAME, "--master", store.note.master, "--admin", store.note.admin)


@pytest.fixture(scope="module")
def calm(recipe: Path) -> Run:
    """The run that nothing befalls."""
    return Run(recipe, recipe.parent / "calm").whole()


class Fault:
    """What happens in the middle of a run: its step, and when."""

    def __init__(self, name: str, started: Started) -> None:
        self.name = name
        self.step = started.run.step()
        self.time = time.monotonic()

    def tell(self, started: Started) -> None:
        following, pause = started.pauses_from(self.time, self.step)
        figures = {"fault": self.name, "next_step_s": round(following, 2), "longest_pause_s": round(pause, 2)}
        print(json.dumps(figures))


@contextmanager
def befallen(name: str, run: Run, *, step: int = MIDDLE) -> Iterator[Started]:
    """A run that is in the middle; after the block it goes on to its end, and the seconds to recover are told."""
    with run.start() as started:
        started.wait_for_step(step)
        fault = Fault(name, started)
        yield started
        started.finish()
        fault.tell(started)


def assert_nothing_is_left(store: TestedStore) -> None:
    assert keys(store.note) == []
    told = draftsmith("store", "status", "--master", store.note.master, "--admin", store.note.admin)
    assert NAME not in told


def assert_told(text: str, *lines: str) -> None:
    """Each of *lines* begins one line of the log, and no more than one."""
    for line in lines:
        assert sum(each.startswith(line) for each in text.splitlines()) == 1, (line, text)


def assert_losses_are_told(text: str, count: int) -> None:
    """A line when samples are found to be lost, one when all are captured again. What is written while the master does
    not know yet that the memory is gone may be lost a moment later."""
    lost = re.findall(r"^hidden states were lost \(.*\); what is lost is captured again$", text, re.MULTILINE)
    again = re.findall(r"^(\d+) lost samples? w(?:as|ere) captured again$", text, re.MULTILINE)
    assert 1 <= len(lost) == len(again) <= 3, text
    assert sum(map(int, again)) == count


def samples(store: TestedStore) -> set[str]:
    """Samples in the store, also such as are being written."""
    return {parts[3] for each in keys(store.note) if (parts := each.split("/"))[2] == "s"}


# --- the store, and the trainer that runs the verifier itself ------------------------------------------------------


def test_nothing_befalls_it(calm: Run, store: TestedStore) -> None:
    assert calm.samples() == {0: calm.rows(), 1: calm.rows()}
    assert max(each["step"] for each in calm.lines()) > 2 * MIDDLE
    assert calm.figures()["regenerated"] == 0
    assert_nothing_is_left(store)


def test_the_owner_of_the_memory_is_killed(make: Callable[..., Run], calm: Run, store: TestedStore) -> None:
    run = make()
    with befallen("segment owner killed", run) as started:
        wait_until(lambda: len(samples(store)) > 2, "samples wait to be read")
        os.kill(store.now.owner_process["pid"], signal.SIGKILL)
    assert_like(run, calm)
    assert_losses_are_told(started.log(), run.figures()["regenerated"])
    assert_nothing_is_left(store)


def test_the_master_is_killed_and_started_again(make: Callable[..., Run], calm: Run, store: TestedStore) -> None:
    run = make()
    with befallen("master killed", run) as started:
        os.kill(store.now.master_process["pid"], signal.SIGKILL)
    assert_like(run, calm)
    where = f"the store at {store.note.master}"
    assert_told(started.log(), f"{where} does not answer; it is waited for", f"{where} answers again after")
    assert_losses_are_told(started.log(), run.figures()["regenerated"])
    assert_nothing_is_left(store)


def test_the_master_is_frozen(make: Callable[..., Run], calm: Run, store: TestedStore) -> None:
    """For longer than a call of the store's takes to give up, and than the master waits for a sign of the owner."""
    run = make()
    with befallen("master frozen for 8 s", run) as started:
        master = store.now.master_process["pid"]
        os.kill(master, signal.SIGSTOP)
        try:
            time.sleep(8)
        finally:
            os.kill(master, signal.SIGCONT)
    assert_like(run, calm)
    where = f"the store at {store.note.master}"
    assert_told(started.log(), f"{where} does not answer; it is waited for", f"{where} answers again after")
    assert_nothing_is_left(store)


def test_the_store_is_full(make: Callable[..., Run], calm: Run, store: TestedStore, tmp_path: Path) -> None:
    """Somebody else fills it, until the training stands still, and makes room again."""
    options = MooncakeOptions(master=store.note.master, admin=store.note.admin)
    client = MooncakeTransport(options, tmp_path).place().client
    client.connect()
    run = make()
    with befallen("store full for 4 s", run) as started:
        filled: list[str] = []
        still_since, step = time.monotonic(), -1
        while time.monotonic() - still_since < 4:
            filled += fill(lambda key, size: client.put([key], [Region.of_bytes(bytes(size))])[0], len(filled))
            if step != run.step():
                still_since, step = time.monotonic(), run.step()
            time.sleep(0.05)
        assert started.process.poll() is None
        client.remove(filled, patience=20)
    assert_like(run, calm)
    where = f"the store at {store.note.master}"
    text = started.log()  # what is read while the rest is filled makes room for a moment
    told = text.count(f"{where} is full; samples wait for room\n")
    assert 1 <= told == text.count(f"{where} has room again after ") <= 3, text
    assert store.usage().evicted == 0
    assert_nothing_is_left(store)


def fill(put: Callable[[str, int], int], start: int) -> list[str]:
    """Put objects that get smaller until not even a small one fits; their keys."""
    put_so_far: list[str] = []
    for size in (4 << 20, 256 << 10, 16 << 10, 1 << 10):
        for number in itertools.count(start + len(put_so_far)):
            key = f"filling-{number}-{time.monotonic_ns()}"
            code = put(key, size)
            if code == Code.FULL:
                break
            assert code == 0
            put_so_far.append(key)
    return put_so_far


def test_the_trainer_is_killed(make: Callable[..., Run], calm: Run, store: TestedStore) -> None:
    run = make()
    with run.start() as started:
        started.wait_for_step(MIDDLE)
        fault = Fault("trainer killed, same command again", started)
        started.signal(signal.SIGKILL)
        started.process.wait()
    assert keys(store.note), "what it had asked for is there"
    with run.start() as again:
        again.finish()
        fault.tell(again)
    assert_like(run, calm)
    last = fault.step - fault.step % 20
    assert_told(again.log(), f"going on after step {last} of ")
    assert_nothing_is_left(store)


def test_one_of_two_ranks_is_killed(
    make: Callable[..., Run], recipe: Path, store: TestedStore, tmp_path: Path
) -> None:
    """The same command again: each sample is one rank's, and the weights are those of two that were left alone."""
    whole = Run(recipe, tmp_path / "whole").whole(TWO_RANKS)
    assert whole.samples() == {0: whole.rows(), 1: whole.rows()}
    run = make()
    with run.start(TWO_RANKS) as started:
        started.wait_for_step(MIDDLE)
        fault = Fault("one of two ranks killed, same command again", started)
        os.kill(workers(started.process.pid)[1], signal.SIGKILL)
        assert started.process.wait(120) != 0
    with run.start(TWO_RANKS) as again:
        again.finish()
        fault.tell(again)
    assert_like(run, whole)
    assert_told(again.log(), f"going on after step {fault.step - fault.step % 20} of ")
    assert_nothing_is_left(store)


# --- vLLM servers, and one that trains on what they capture --------------------------------------------------------


@pytest.fixture(scope="module")
def servers(recipe: Path, net: Networks) -> Iterator[list[CaptureServer]]:
    """Two, the first of which runs in another network where there is one. Tests find and leave both at work."""
    places = [(net.there, net.capture), (net.here, ())]
    with ExitStack() as stack:
        made = []
        for number, (host, inside) in enumerate(places):
            log = recipe.parent / f"server-{number}.log"
            made.append(CaptureServer(recipe, log, host, free_port(net.here), inside))
            stack.callback(made[-1].stop)
        for each in made:
            each.wait()
        yield made


def asking(*servers: CaptureServer) -> str:
    return f"online.endpoints=[{', '.join(each.url for each in servers)}]"


@pytest.fixture(scope="module")
def calm_served(recipe: Path, servers: list[CaptureServer]) -> Run:
    """The run that nothing befalls, on what both capture."""
    return Run(recipe, recipe.parent / "calm-served", asking(*servers)).whole()


@pytest.mark.vllm
def test_capture_and_training_in_two_networks(
    make: Callable[..., Run], calm_served: Run, servers: list[CaptureServer], net: Networks, store: TestedStore
) -> None:
    """The server in one, the trainer in the other, the store in a third; neither sees the others' loopback."""
    if net.problem:
        pytest.skip(net.problem)
    outside = subprocess.run([*net.train, "ip", "-br", "address"], capture_output=True, text=True, check=True).stdout
    assert net.here not in outside
    assert net.there not in outside
    run = make(asking(servers[0]), inside=net.train).whole()
    assert_like(run, calm_served)
    assert_nothing_is_left(store)


@pytest.mark.vllm
def test_an_endpoint_is_frozen(
    make: Callable[..., Run], calm_served: Run, servers: list[CaptureServer], store: TestedStore
) -> None:
    """What it captures late is nobody's; it is used again."""
    run = make(asking(*servers), "online.request_timeout=5")
    with befallen("one of two endpoints frozen for 10 s", run) as started:
        servers[0].signal(signal.SIGSTOP)
        try:
            time.sleep(10)
        finally:
            servers[0].signal(signal.SIGCONT)
    assert_like(run, calm_served)
    url, text = servers[0].url, started.log()  # on a busy machine a server may be slow without being frozen
    assert f"capture endpoint {url} failed: no answer within 5 s; its requests go to the 1 that work\n" in text
    assert f"capture endpoint {url} works again after " in text
    assert_nothing_is_left(store)


@pytest.mark.vllm
def test_an_endpoint_is_killed_with_requests_in_flight(
    make: Callable[..., Run], calm_served: Run, servers: list[CaptureServer], store: TestedStore
) -> None:
    """Requests that it does not answer any more, since it is frozen for a second before: the other has their rows."""
    run = make(asking(*servers))
    with befallen("one of two endpoints killed", run) as started:
        servers[0].signal(signal.SIGSTOP)
        try:
            time.sleep(1)
        finally:
            servers[0].kill()
            servers[0].start()
    assert_like(run, calm_served)
    told = f"capture endpoint {servers[0].url} failed: the connection broke"
    assert_told(started.log(), told)
    assert re.search(re.escape(told) + r".*; its requests go to the 1 that work$", started.log(), re.MULTILINE)
    assert_nothing_is_left(store)


@pytest.mark.vllm
def test_the_only_endpoint_is_killed_in_the_middle_of_a_put(
    make: Callable[..., Run], calm_served: Run, servers: list[CaptureServer], store: TestedStore
) -> None:
    """Its puts hang while the owner of the memory is frozen, and it dies in them; the run waits until it is back."""
    for each in servers:  # one was started again, and is not to take the machine from the other
        each.wait()
    run, server, before = make(asking(servers[1])), servers[1], unfinished(store)
    with befallen("only endpoint killed in the middle of a put, and started again", run) as started:
        with frozen(lambda: store.now.owner_process["pid"], until=lambda: unfinished(store) > before):
            server.kill()
        server.start()
        server.wait()
    assert_like(run, calm_served)
    assert_told(
        started.log(),
        f"capture endpoint {server.url} failed: the connection broke",
        f"capture endpoint {server.url} works again after ",
    )
    assert_nothing_is_left(store)


def unfinished(store: TestedStore) -> int:
    """Objects that were begun and not finished: counted, but not listed."""
    return store.usage().keys - len(store.all_keys())


@contextmanager
def frozen(process: Callable[[], int], until: Callable[[], bool]) -> Iterator[None]:
    """A moment in which *process* is frozen, and *until* holds: where it does not come true, there is another one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        number = process()
        os.kill(number, signal.SIGSTOP)
        try:
            come_true = time.monotonic() + 1
            while time.monotonic() < come_true:
                if until():
                    yield
                    return
                time.sleep(0.005)
        finally:
            os.kill(number, signal.SIGCONT)
        time.sleep(0.2)
    pytest.fail("it did not come true")
