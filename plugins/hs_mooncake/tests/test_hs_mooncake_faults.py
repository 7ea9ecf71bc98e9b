"""What dies, hangs or fills up, on a real store: nothing is lost silently, and every failure has a name."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from waiting import wait_until

from draftsmith.errors import SampleError, SampleIncomplete, SampleMissing, TransportError
from draftsmith.interfaces import HiddenStateReader, HiddenStateSample, StateLayout
from draftsmith.testing.transport import assert_same, make_layout, make_sample
from draftsmith_hs_mooncake import wire
from draftsmith_hs_mooncake.errors import StoreFull, StoreUnreachable
from draftsmith_hs_mooncake.processes import is_gone
from draftsmith_hs_mooncake.testing import TestedStore, mooncake_store, running_store
from draftsmith_hs_mooncake.transport import MooncakeTransport

__all__ = ["mooncake_store"]

LAYOUT = make_layout(ids=4, hidden_size=256)  # 2 KiB a token
BYTES_A_TOKEN = 4 * 256 * 2 + 8


@pytest.fixture
def transport(mooncake_store: TestedStore, tmp_path: Path) -> Iterator[MooncakeTransport]:
    transport = MooncakeTransport(mooncake_store.options(), tmp_path / "run")
    yield transport
    transport.remove_all()


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[TestedStore]:
    """A store whose processes the test may kill."""
    with running_store(tmp_path / "store") as store:
        yield store


def sample(number: int, mebibytes: float = 1.0, layout: StateLayout = LAYOUT) -> HiddenStateSample:
    return make_sample(number, layout, tokens=max(1, int(mebibytes * 2**20 / BYTES_A_TOKEN)))


def python(code: str, *values: Any) -> subprocess.Popen[bytes]:
    """A process that runs *code*, with *values* to unpickle from its standard input."""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    pickle.dump(values, process.stdin)
    process.stdin.close()
    return process


# --- producers that die ------------------------------------------------------------------------------------------


_PUT = """
import os, pickle, sys, time
transport, layout, sample, go = pickle.load(sys.stdin.buffer)
with transport.writer(layout) as writer:
    print("ready", flush=True)
    while not os.path.exists(go):
        time.sleep(0.001)
    writer.put(sample)
"""

_PUT_RAW = """
import os, pickle, sys, time
transport, key, go = pickle.load(sys.stdin.buffer)
from draftsmith_hs_mooncake.store import Region
client = transport.place().client
client.connect()
print("ready", flush=True)
while not os.path.exists(go):
    time.sleep(0.001)
client.put([key], [Region.of_bytes(bytearray(1000))])
"""


def kill_while_it_puts(store: TestedStore, process: subprocess.Popen[bytes], go: Path, size: int) -> None:
    """Let *process* begin, and kill it while it waits for an owner that hangs, once *size* bytes are taken."""
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    owner, before = store.now.owner_process["pid"], store.usage().used
    os.kill(owner, signal.SIGSTOP)
    try:
        go.touch()
        wait_until(lambda: store.usage().used >= before + size, "room is taken", 20)
        process.kill()
        process.wait()
    finally:
        os.kill(owner, signal.SIGCONT)


@pytest.mark.slow
def test_a_producer_killed_in_the_middle_of_a_put(
    mooncake_store: TestedStore, transport: MooncakeTransport, tmp_path: Path
) -> None:
    large = sample(1, 50)
    small_chunks = MooncakeTransport(mooncake_store.options(chunk_mebibytes=1), transport.location)
    with python(_PUT, small_chunks, LAYOUT, large, tmp_path / "go") as process:
        kill_while_it_puts(mooncake_store, process, tmp_path / "go", 40 << 20)
    with transport.reader(LAYOUT) as reader:
        assert reader.complete_ids() == frozenset()
        with pytest.raises(SampleMissing):
            reader.get(large.sample_id)
        with transport.writer(LAYOUT) as writer:
            writer.put(sample(1, 2))
        assert_same(reader.get(large.sample_id), sample(1, 2))
    transport.remove_all()
    assert no_keys_soon(mooncake_store, transport)


def no_keys_soon(store: TestedStore, transport: MooncakeTransport) -> bool:
    """What is removed does not come back, also what a dead process was writing, which the store keeps for a while."""
    deadline = time.monotonic() + 60
    while store.all_keys() and time.monotonic() < deadline:
        transport.remove_all()
        time.sleep(0.5)
    return store.all_keys() == []


@pytest.mark.parametrize("mebibytes", [1, 40])
def test_a_producer_killed_while_it_commits(
    mooncake_store: TestedStore, transport: MooncakeTransport, tmp_path: Path, mebibytes: int
) -> None:
    """The store takes the key for taken, gives its object to nobody, and ignores what is put there, for 30 s."""
    wanted = sample(2, mebibytes)
    slot = wire.slots_of(wire.manifest_name(transport.run, wanted.sample_id))[0]
    if mebibytes == 1:  # one object
        slot = wire.whole_key(transport.run, wanted.sample_id)
    with transport.reader(LAYOUT) as reader, python(_PUT_RAW, transport, slot, tmp_path / "go") as process:
        kill_while_it_puts(mooncake_store, process, tmp_path / "go", 1000)
        with pytest.raises(SampleIncomplete):
            reader.get(wanted.sample_id)
        assert reader.complete_ids() == frozenset()
        with transport.writer(LAYOUT) as writer:
            writer.put(wanted)
        assert_same(reader.get(wanted.sample_id), wanted)
        assert reader.complete_ids() == {wanted.sample_id}
        reader.delete(wanted.sample_id)
        with pytest.raises(SampleError):
            reader.get(wanted.sample_id)
    assert no_keys_soon(mooncake_store, transport)


def test_the_room_of_what_was_never_finished_is_free_again(tmp_path: Path) -> None:
    """The store lists it nowhere and removes it for nobody; left to itself it keeps it for ten minutes."""
    with running_store(tmp_path / "store", silent_seconds=60, unfinished_seconds=8) as store:
        transport = MooncakeTransport(store.options(chunk_mebibytes=1), tmp_path / "run")
        with python(_PUT, transport, LAYOUT, sample(1, 50), tmp_path / "go") as process:
            kill_while_it_puts(store, process, tmp_path / "go", 49 << 20)
        transport.remove_all()
        assert store.usage().used >= 49 << 20
        wait_until(lambda: store.usage().used == 0, "its room is free", 30)


# --- a store that is full -----------------------------------------------------------------------------------------


def test_a_full_store_loses_nothing_and_says_so(mooncake_store: TestedStore, transport: MooncakeTransport) -> None:
    options = mooncake_store.options(patience=1.5)
    impatient = MooncakeTransport(options, transport.location)
    stored = []
    with impatient.writer(LAYOUT) as writer, transport.reader(LAYOUT) as reader:
        with pytest.raises(StoreFull) as caught:  # noqa: PT012 - how many fit is the store's matter
            for number in range(40):
                writer.put(sample(number, 16))
                stored.append(number)
        assert len(stored) >= 12
        text = str(caught.value)
        assert f"of {256 << 20} bytes are used" in text
        assert str(int(16 * 2**20 / BYTES_A_TOKEN) * BYTES_A_TOKEN) in text
        assert reader.complete_ids() == {f"{number:032x}" for number in stored}
        for number in stored:
            assert_same(reader.get(f"{number:032x}"), sample(number, 16))
        free = transport.free_bytes()
        assert free is not None
        assert free < 32 << 20
        reader.delete(f"{0:032x}")
        writer.put(sample(99, 15.9))
        assert_same(reader.get(f"{99:032x}"), sample(99, 15.9))
        assert mooncake_store.usage().evicted == 0


def test_a_put_waits_for_room(mooncake_store: TestedStore, transport: MooncakeTransport) -> None:
    with transport.writer(LAYOUT) as writer, transport.reader(LAYOUT) as reader:
        for number in range(7):
            writer.put(sample(number, 32))
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(writer.put, sample(7, 48))
            time.sleep(1)
            assert not waiting.done()
            reader.delete(f"{0:032x}")
            reader.delete(f"{1:032x}")
            waiting.result(timeout=60)
        assert_same(reader.get(f"{7:032x}"), sample(7, 48))


@pytest.mark.slow
def test_many_writers_of_parts_do_not_block_each_other(
    mooncake_store: TestedStore, transport: MooncakeTransport
) -> None:
    """Eight samples of 48 MiB wait for 256 MiB at once: those that fit are committed, not parts of all of them."""
    patient = MooncakeTransport(mooncake_store.options(chunk_mebibytes=4, patience=120.0), transport.location)
    with patient.writer(LAYOUT) as writer, patient.reader(LAYOUT) as reader, ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(writer.put, sample(number, 48)) for number in range(8)]
        seen: set[str] = set()
        while len(seen) < 8:
            for sample_id in reader.complete_ids() - seen:
                assert_same(reader.get(sample_id), sample(int(sample_id, 16), 48))
                reader.delete(sample_id)
                seen.add(sample_id)
        for each in pending:
            each.result(timeout=60)


def test_a_sample_larger_than_the_store(mooncake_store: TestedStore, transport: MooncakeTransport) -> None:
    large = sample(1, 300)
    begun = time.monotonic()
    with transport.writer(LAYOUT) as writer, pytest.raises(StoreFull) as caught:
        writer.put(large)
    assert time.monotonic() - begun < 3
    assert f"{len(large.token_ids) * BYTES_A_TOKEN} bytes" in str(caught.value)
    assert f"the whole store {256 << 20}" in str(caught.value)


# --- the store's processes ----------------------------------------------------------------------------------------


def test_the_owner_of_the_memory_is_killed(own_store: TestedStore, tmp_path: Path) -> None:
    transport = MooncakeTransport(own_store.options(), tmp_path / "run")
    with transport.writer(LAYOUT) as writer, transport.reader(LAYOUT) as reader:
        writer.put(sample(1))
        before = own_store.now.owner_process
        os.kill(before["pid"], signal.SIGKILL)
        with pytest.raises(SampleMissing) as caught:
            reader.get(f"{1:032x}")
        assert caught.value.sample_id == f"{1:032x}"
        for number in range(2, 6):
            writer.put(sample(number))
            assert_same(reader.get(f"{number:032x}"), sample(number))
        writer.put(sample(1))  # captured again, under the same id
        assert_same(reader.get(f"{1:032x}"), sample(1))
    assert own_store.now.owner_process != before
    assert own_store.log().count("the segment's owner was ended by SIGKILL: started again") == 1
    transport.remove_all()
    wait_until(lambda: own_store.all_keys() == [], "no key stays", 30)


def test_the_master_is_killed(own_store: TestedStore, tmp_path: Path) -> None:
    transport = MooncakeTransport(own_store.options(patience=60.0), tmp_path / "run")
    with transport.writer(LAYOUT) as writer, transport.reader(LAYOUT) as reader:
        writer.put(sample(1))
        os.kill(own_store.now.master_process["pid"], signal.SIGKILL)
        writer.put(sample(2))
        assert_same(reader.get(f"{2:032x}"), sample(2))
        with pytest.raises(SampleMissing):  # the keys died with the master
            reader.get(f"{1:032x}")
        writer.put(sample(1))
        assert reader.complete_ids() == {f"{1:032x}", f"{2:032x}"}
    assert own_store.log().count("the master was ended by SIGKILL: started again") == 1
    with pytest.raises(Exception, match="captured otherwise"):  # the writer has noted the layout anew
        transport.reader(make_layout())
    transport.remove_all()
    assert own_store.all_keys() == []


@pytest.mark.slow
def test_the_master_hangs_for_a_while(own_store: TestedStore, tmp_path: Path) -> None:
    transport = MooncakeTransport(own_store.options(patience=60.0), tmp_path / "run")
    with transport.writer(LAYOUT) as writer, transport.reader(LAYOUT) as reader, ThreadPoolExecutor() as pool:
        writer.put(sample(1))
        master = own_store.now.master_process["pid"]
        os.kill(master, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            pending = [pool.submit(writer.put, sample(2)), pool.submit(reader.get, f"{1:032x}")]
            time.sleep(8)
            assert not any(each.done() for each in pending)
        finally:
            os.kill(master, signal.SIGCONT)
        pending[0].result(timeout=40)
        assert_same(reader.get(f"{2:032x}"), sample(2))
        try:
            assert_same(pending[1].result(timeout=40), sample(1))
        except SampleMissing:  # silent for longer than the master waits, the owner joined anew, without its keys
            assert time.monotonic() - begun > 3
    transport.remove_all()
    wait_until(lambda: own_store.all_keys() == [], "no key stays", 30)


@pytest.mark.slow
def test_the_master_hangs_for_longer_than_the_patience(own_store: TestedStore, tmp_path: Path) -> None:
    transport = MooncakeTransport(own_store.options(patience=2.0), tmp_path / "run")
    with transport.writer(LAYOUT) as writer, transport.reader(LAYOUT) as reader:
        writer.put(sample(1))
        master = own_store.now.master_process["pid"]
        os.kill(master, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            with pytest.raises(StoreUnreachable, match=own_store.note.master):
                reader.get(f"{1:032x}")
            with pytest.raises(TransportError):
                writer.put(sample(2))
            assert time.monotonic() - begun < 40
        finally:
            os.kill(master, signal.SIGCONT)


# --- readers beside writers ---------------------------------------------------------------------------------------


_REPLACE = """
import pickle, sys
transport, layout, samples = pickle.load(sys.stdin.buffer)
with transport.writer(layout) as writer, transport.reader(layout) as reader:
    print("ready", flush=True)
    while True:
        for sample in samples:
            reader.delete(sample.sample_id)
            writer.put(sample)
"""


@pytest.mark.slow
def test_a_read_is_never_a_mixture(transport: MooncakeTransport) -> None:
    """One id is removed and put anew with other states, while it is read: one sample or the other, or an error."""
    versions = [sample(number, 24) for number in (1, 2)]
    both = [
        HiddenStateSample(sample_id="a" * 32, token_ids=each.token_ids, hidden_states=each.hidden_states)
        for each in versions
    ]
    sums = {int(each.hidden_states.view(torch.int16).long().sum()) for each in both}
    read, failed = set(), 0
    with python(_REPLACE, transport, LAYOUT, both) as process, transport.reader(LAYOUT) as reader:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not (len(read) == 2 and failed >= 3):
            try:
                read.add(int(reader.get("a" * 32).hidden_states.view(torch.int16).long().sum()))
            except SampleError:
                failed += 1
        process.kill()
    assert read == sums
    transport.remove_all()


# --- processes of the reader's side -------------------------------------------------------------------------------


def _get_in_child(reader: HiddenStateReader, results: Any) -> None:
    try:
        reader.get(f"{1:032x}")
        results.send("read it")
    except TransportError as error:
        results.send(str(error))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused(transport: MooncakeTransport) -> None:
    with transport.writer(LAYOUT) as writer, transport.reader(LAYOUT) as reader:
        writer.put(sample(1))
        context = multiprocessing.get_context("fork")
        for each in (reader, pickle.loads(pickle.dumps(reader))):  # also one that the child would open anew
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=_get_in_child, args=(each, sender))
            child.start()
            assert receiver.poll(30), "the child hangs"
            text = receiver.recv()
            child.join(timeout=10)
            child.kill()
            assert f"was forked from process {os.getpid()}" in text
            assert "spawn" in text
        assert_same(reader.get(f"{1:032x}"), sample(1))  # and the parent is none the worse


class _Samples(Dataset[tuple[int, int]]):
    def __init__(self, reader: HiddenStateReader, count: int) -> None:
        self.reader = reader
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[int, int]:
        assert_same(self.reader.get(f"{number:032x}"), sample(number))
        return number, os.getpid()


def test_data_loader_workers_open_their_own(transport: MooncakeTransport) -> None:
    with transport.writer(LAYOUT) as writer, transport.reader(LAYOUT) as reader:
        for number in range(8):
            writer.put(sample(number))
        reader.get(f"{0:032x}")
        loader: Any = DataLoader(_Samples(reader, 8), batch_size=None, num_workers=2, multiprocessing_context="spawn")
        read = list(loader)
    assert [int(number) for number, _ in read] == list(range(8))
    assert len({int(pid) for _, pid in read} - {os.getpid()}) == 2


# --- soak ---------------------------------------------------------------------------------------------------------


_SOAK = """
import pickle, sys, time
import torch
from draftsmith.errors import SampleIncomplete, SampleMissing
from draftsmith.interfaces import HiddenStateSample
from draftsmith.testing.transport import make_sample

transport, layout, numbers, tokens = pickle.load(sys.stdin.buffer)
bases = [make_sample(number, layout, tokens=tokens) for number in range(8)]

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(each for each in lines if each.startswith("VmRSS")).split()[1]) // 1024

def expected(number):
    base = bases[number % 8]
    return HiddenStateSample(
        sample_id=f"{number:032x}", token_ids=base.token_ids + number, hidden_states=base.hidden_states
    )

sizes = []
"""

_PRODUCE = (
    _SOAK
    + """
with transport.writer(layout) as writer:
    for number in numbers:
        writer.put(expected(number))
        sizes.append(resident())
print(pickle.dumps((0, sizes)).hex(), flush=True)
"""
)

_CONSUME = (
    _SOAK
    + """
from draftsmith.testing.transport import assert_same

def wait_for(reader, number):
    deadline = time.monotonic() + 60
    while True:
        try:
            return reader.get(f"{number:032x}")
        except (SampleMissing, SampleIncomplete):
            assert time.monotonic() < deadline, f"sample {number} never came"
            time.sleep(0.01)

size = 0
with transport.reader(layout) as reader:
    for number in numbers:
        got = wait_for(reader, number)
        assert_same(got, expected(number))
        size += got.token_ids.nbytes + got.hidden_states.nbytes
        reader.delete(got.sample_id)
        sizes.append(resident())
print(pickle.dumps((size, sizes)).hex(), flush=True)
"""
)


@pytest.mark.slow
def test_five_gigabytes_through_256_mebibytes(mooncake_store: TestedStore, transport: MooncakeTransport) -> None:
    """Two producers, two consumers that remove what they have read: nothing lost or changed, memory flat."""
    mebibytes, count = 20, 264
    tokens = int(mebibytes * 2**20 / BYTES_A_TOKEN)
    patient = MooncakeTransport(mooncake_store.options(chunk_mebibytes=8, patience=60.0), transport.location)
    parts = [range(start, count, 2) for start in (0, 1)]
    producers = [python(_PRODUCE, patient, LAYOUT, part, tokens) for part in parts]
    consumers = [python(_CONSUME, patient, LAYOUT, part, tokens) for part in parts]

    def result(process: subprocess.Popen[bytes]) -> Any:
        with process:
            assert process.stdout is not None
            text = process.stdout.read()
        assert process.returncode == 0
        return pickle.loads(bytes.fromhex(text.decode()))

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(result, [*producers, *consumers]))
    assert sum(size for size, _ in results) >= 5e9
    print([sizes for _, sizes in results])
    for _, sizes in results:  # MiB after each sample; a few buffers of failed transfers may be kept for a while
        quarter = len(sizes) // 4
        grown = statistics.median(sizes[-quarter:]) - statistics.median(sizes[quarter : 2 * quarter])
        assert grown < 4 * mebibytes, str(sizes)
        assert max(sizes) - min(sizes) < 20 * mebibytes, str(sizes)
    assert mooncake_store.usage().evicted == 0
    left = mooncake_store.all_keys()
    assert not [each for each in left if "/s/" in each]


# --- what is left of a store ---------------------------------------------------------------------------------------


def test_the_store_ends_with_its_supervisor(tmp_path: Path) -> None:
    with running_store(tmp_path / "store") as store:
        note = store.now
        os.kill(note.supervisor["pid"], signal.SIGKILL)
        wait_until(lambda: is_gone(note.master_process) is True, "the master's end", 30)
        wait_until(lambda: is_gone(note.owner_process) is True, "the owner's end", 30)
