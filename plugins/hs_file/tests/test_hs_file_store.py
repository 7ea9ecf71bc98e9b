"""The file format, the folder, and what goes wrong with them."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from draftsmith.errors import (
    DiskSpaceError,
    FingerprintMismatch,
    SampleCorrupt,
    SampleIncomplete,
    SampleMissing,
    TransportError,
)
from draftsmith.interfaces import HiddenStateSample
from draftsmith.testing.transport import Fp8TransportTests, assert_same, make_layout, make_sample
from draftsmith_hs_file import producer, wire
from draftsmith_hs_file.options import FileOptions
from draftsmith_hs_file.store import Store
from draftsmith_hs_file.transport import FileTransport

LAYOUT = make_layout()


@pytest.fixture
def transport(tmp_path: Path) -> FileTransport:
    return FileTransport(FileOptions(fsync=False), tmp_path / "run")


def put(transport: FileTransport, *numbers: int, tokens: int | None = None) -> list[str]:
    with transport.writer(LAYOUT) as writer:
        for number in numbers:
            writer.put(make_sample(number, LAYOUT, tokens))
    return [f"{number:032x}" for number in numbers]


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def change(path: Path, offset: int, value: bytes | None = None) -> None:
    """Overwrite bytes, or flip one bit."""
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        place = file.tell()
        data = value if value is not None else bytes([file.read(1)[0] ^ 0x10])
        file.seek(place)
        file.write(data)


@pytest.fixture(params=["loose", "shard"])
def rest(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def settle(transport: FileTransport, rest: str) -> Path:
    """Bring the samples to where the test wants them; the folder with the file."""
    if rest == "loose":
        return transport.folder / "loose"
    transport.compact(LAYOUT)
    return transport.folder / "shards"


# --- the format -------------------------------------------------------------------------------------------------


def test_files_can_be_read_without_this_package(transport: FileTransport, rest: str) -> None:
    (sample_id,) = put(transport, 3)
    with safe_open(only(settle(transport, rest)), framework="pt") as file:
        assert file.metadata()["format"] == "draftsmith.hidden_states"
        assert file.metadata()["version"] == "1"
        sample = make_sample(3, LAYOUT)
        assert torch.equal(file.get_tensor(f"{sample_id}.token_ids"), sample.token_ids)
        assert torch.equal(file.get_tensor(f"{sample_id}.hidden_states"), sample.hidden_states)


def test_eight_bits_can_be_read_without_this_package(tmp_path: Path) -> None:
    transport = FileTransport(FileOptions(encoding="fp8"), tmp_path)
    put(transport, 3, 4)
    transport.compact(LAYOUT)
    with safe_open(only(tmp_path / "shards"), framework="pt") as file:
        assert file.metadata()["version"] == "2"
        for number in (3, 4):
            sample = make_sample(number, LAYOUT)
            values = file.get_tensor(f"{sample.sample_id}.hidden_states")
            assert values.dtype == torch.float8_e4m3fn
            states = values.float() * file.get_tensor(f"{sample.sample_id}.scales")[..., None]
            torch.testing.assert_close(states, sample.hidden_states.float(), rtol=1 / 16, atol=1e-3)
            assert torch.equal(file.get_tensor(f"{sample.sample_id}.token_ids"), sample.token_ids)


def test_plain_files_are_those_of_the_first_version(transport: FileTransport) -> None:
    put(transport, 3)
    with safe_open(only(transport.folder / "loose"), framework="pt") as file:
        assert file.metadata()["version"] == "1"
        assert len(list(file.keys())) == 2


def test_each_sample_is_read_as_it_was_stored(tmp_path: Path) -> None:
    """Whatever the reader's own option says; and compaction keeps each as it is."""
    plain, eight = (FileTransport(FileOptions(encoding=each), tmp_path) for each in ("plain", "fp8"))
    put(plain, 1, 2)
    put(eight, 3, 4)
    exact = [make_sample(number, LAYOUT) for number in (1, 2)]
    coded = [Fp8TransportTests.read_back(make_sample(number, LAYOUT)) for number in (3, 4)]
    for _ in range(2):
        for transport in (plain, eight):
            with transport.reader(LAYOUT) as reader:
                for sample in (*exact, *coded):
                    assert_same(reader.get(sample.sample_id), sample)
        plain.compact(LAYOUT)
    assert len(list((tmp_path / "shards").iterdir())) == 2


@pytest.mark.parametrize("part", ["scales", "hidden_states"])
def test_a_changed_bit_of_what_is_coded_is_found(tmp_path: Path, part: str) -> None:
    transport = FileTransport(FileOptions(encoding="fp8"), tmp_path)
    (sample_id,) = put(transport, 3)
    path = only(tmp_path / "loose")
    (entry,) = wire.WireFile(path).entries.values()
    offset = {"scales": entry.scale_offset, "hidden_states": entry.state_offset}[part]
    assert offset is not None
    change(path, offset + 1)
    with transport.reader(LAYOUT) as reader, pytest.raises(SampleCorrupt, match="does not match its checksum"):
        reader.get(sample_id)


def test_another_version_of_the_format_says_so(transport: FileTransport) -> None:
    (sample_id,) = put(transport, 3)
    path = transport.folder / "loose" / f"{sample_id}.hs"
    path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"3"'))
    with (
        transport.reader(LAYOUT) as reader,
        pytest.raises(SampleCorrupt, match="is 3; this release reads versions 1 and 2"),
    ):
        reader.get(sample_id)


def test_every_flipped_bit_of_a_file_is_noticed(transport: FileTransport) -> None:
    (sample_id,) = put(transport, 1, tokens=2)
    path = transport.folder / "loose" / f"{sample_id}.hs"
    intact = path.read_bytes()
    reader = transport.reader(LAYOUT)
    for offset in range(0, len(intact), 7):
        path.write_bytes(intact)
        change(path, offset)
        with pytest.raises((SampleCorrupt, FingerprintMismatch)) as caught:
            reader.get(sample_id)
        assert sample_id in str(caught.value), offset


def test_tensors_are_aligned_to_their_elements(tmp_path: Path) -> None:
    layout = make_layout("float32", ids=3, hidden_size=5)
    transport = FileTransport(FileOptions(fsync=False), tmp_path)
    with transport.writer(layout) as writer:
        for number in range(5):
            writer.put(make_sample(number, layout, tokens=1 + number))
    transport.compact(layout)
    file = wire.WireFile(only(tmp_path / "shards"))
    assert all(entry.token_offset % 8 == 0 and entry.state_offset % 4 == 0 for entry in file.entries.values())


def test_what_a_reader_returns_may_be_written_to(transport: FileTransport, rest: str) -> None:
    """The views are private: changing them changes neither the file nor what is read next."""
    (sample_id,) = put(transport, 3)
    settle(transport, rest)
    with transport.reader(LAYOUT) as reader:
        reader.get(sample_id).hidden_states.zero_()
    with transport.reader(LAYOUT) as reader:
        assert_same(reader.get(sample_id), make_sample(3, LAYOUT))


# --- faults -----------------------------------------------------------------------------------------------------


def test_cut_off(transport: FileTransport, rest: str) -> None:
    ids = put(transport, 1, 2, 3, tokens=40)
    folder = settle(transport, rest)
    path = folder / f"{ids[1]}.hs" if rest == "loose" else only(folder)
    os.truncate(path, path.stat().st_size - 40 * 4 * 24 * 2)  # the last sample's states in the shard
    victim = ids[1] if rest == "loose" else ids[2]
    with transport.reader(LAYOUT) as reader:
        with pytest.raises(SampleCorrupt, match="cut off") as caught:
            reader.get(victim)
        assert caught.value.sample_id == victim
        assert caught.value.where == str(path)
        for other in set(ids) - {victim}:
            reader.get(other)


@pytest.mark.parametrize("size", [0, 5, 8, 60])
def test_cut_off_in_the_header(transport: FileTransport, size: int) -> None:
    (sample_id,) = put(transport, 1)
    os.truncate(transport.folder / "loose" / f"{sample_id}.hs", size)
    with transport.reader(LAYOUT) as reader, pytest.raises(SampleCorrupt) as caught:
        reader.get(sample_id)
    assert caught.value.sample_id == sample_id


def test_a_flipped_bit_names_the_sample(transport: FileTransport, rest: str) -> None:
    ids = put(transport, 1, 2, 3)
    folder = settle(transport, rest)
    path = folder / f"{ids[2]}.hs" if rest == "loose" else only(folder)
    change(path, -1)
    with transport.reader(LAYOUT) as reader:
        with pytest.raises(SampleCorrupt, match=f"{ids[2]}: the data does not match its checksum"):
            reader.get(ids[2])
        assert_same(reader.get(ids[1]), make_sample(2, LAYOUT))


def test_nan_with_a_right_checksum_is_refused_by_the_reader(
    transport: FileTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer that does not check: the reader does."""
    bad = make_sample(4, LAYOUT)
    bad.hidden_states[0, 0, 0] = float("nan")
    with monkeypatch.context() as patch, transport.writer(LAYOUT) as writer:
        patch.setattr(HiddenStateSample, "problem", lambda self, layout: None)
        writer.put(bad)
    with transport.reader(LAYOUT) as reader, pytest.raises(SampleCorrupt, match=r"1 of .* values are not finite"):
        reader.get(bad.sample_id)


def test_states_of_another_verifier_or_other_layers(transport: FileTransport, rest: str) -> None:
    put(transport, 1)
    settle(transport, rest)
    for other in (make_layout(fingerprint="a" * 32), make_layout(ids=5), make_layout(hidden_size=32)):
        with pytest.raises(FingerprintMismatch) as caught:
            transport.reader(other)
        assert "→" in str(caught.value)


def test_a_file_moved_in_from_another_run(transport: FileTransport, tmp_path: Path) -> None:
    """The folder's layout is right, one file's is not."""
    other = FileTransport(FileOptions(fsync=False), tmp_path / "other")
    foreign = make_layout(fingerprint="0" * 32)
    with other.writer(foreign) as writer:
        writer.put(make_sample(2, foreign))
    put(transport, 1)
    os.rename(other.folder / "loose" / f"{2:032x}.hs", transport.folder / "loose" / f"{2:032x}.hs")
    with transport.reader(LAYOUT) as reader:
        with pytest.raises(FingerprintMismatch, match="captured otherwise"):
            reader.get(f"{2:032x}")
        reader.get(f"{1:032x}")
    transport.compact(LAYOUT)  # leaves the foreign file alone
    assert (transport.folder / "loose" / f"{2:032x}.hs").exists()


def test_a_file_under_another_samples_name(transport: FileTransport) -> None:
    put(transport, 1)
    loose = transport.folder / "loose"
    os.rename(loose / f"{1:032x}.hs", loose / f"{2:032x}.hs")
    with transport.reader(LAYOUT) as reader, pytest.raises(SampleCorrupt, match="does not hold the sample"):
        reader.get(f"{2:032x}")


def test_a_damaged_layout_file(transport: FileTransport) -> None:
    put(transport, 1)
    (transport.folder / "layout.json").write_text('{"fingerprint": ')
    with pytest.raises(TransportError, match="layout of the hidden states cannot be read"):
        transport.reader(LAYOUT)


def test_a_shard_with_a_damaged_header(transport: FileTransport) -> None:
    """Which samples it held cannot be known; that one of them may be the one asked for can be said."""
    ids = put(transport, 1, 2)
    change(only(settle(transport, "shard")), 30)
    put(transport, 3)
    with transport.reader(LAYOUT) as reader:
        assert reader.complete_ids() == {f"{3:032x}"}
        with pytest.raises(SampleCorrupt, match="a shard that may hold it cannot be read"):
            reader.get(ids[0])
    put(transport, 1, 2)  # captured again
    transport.compact(LAYOUT)
    with transport.reader(LAYOUT) as reader:
        assert_same(reader.get(ids[0]), make_sample(1, LAYOUT))


def test_begun_and_not_finished(transport: FileTransport) -> None:
    put(transport, 1)
    (transport.folder / "loose" / f".{2:032x}.elsewhere.17.00ff.tmp").write_bytes(b"DS")
    with transport.reader(LAYOUT) as reader:
        assert reader.complete_ids() == {f"{1:032x}"}
        with pytest.raises(SampleIncomplete) as caught:
            reader.get(f"{2:032x}")
        assert caught.value.sample_id == f"{2:032x}"
        with pytest.raises(SampleMissing):
            reader.get(f"{3:032x}")


def test_what_dead_writers_left_is_cleaned_up(transport: FileTransport) -> None:
    put(transport, 1)
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    host = os.uname().nodename.replace(".", "_")
    loose = transport.folder / "loose"
    left = loose / f".{2:032x}.{host}.{int(dead.stdout)}.00ff.tmp"
    busy = loose / f".{3:032x}.{host}.{os.getpid()}.00ff.tmp"
    for path in (left, busy):
        path.write_bytes(b"x")
    transport.compact(LAYOUT)
    assert not left.exists()
    assert busy.exists()


def test_a_damaged_copy_in_a_shard_is_replaced_by_putting_again(transport: FileTransport) -> None:
    ids = put(transport, 1, 2)
    change(only(settle(transport, "shard")), -1)
    put(transport, 2)
    transport.compact(LAYOUT)
    with transport.reader(LAYOUT) as reader:
        assert_same(reader.get(ids[1]), make_sample(2, LAYOUT))
        assert_same(reader.get(ids[0]), make_sample(1, LAYOUT))


# --- disk full --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one mebibyte where we may mount one; else a limit on the size of files, which ends writes alike."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = os.geteuid() == 0 and (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode == 0
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    yield folder
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if mounted:
        subprocess.run(["umount", folder], check=True)


def test_disk_full_leaves_nothing_partial(small_disk: Path) -> None:
    transport = FileTransport(FileOptions(), small_disk / "run")
    big = 2000  # 384 kB of states
    stored = []

    def fill() -> None:
        with transport.writer(LAYOUT) as writer:
            for number in range(4):
                writer.put(make_sample(number, LAYOUT, tokens=big))
                stored.append(f"{number:032x}")

    with pytest.raises(DiskSpaceError) as caught:
        fill()
    assert "no room" in str(caught.value)
    with transport.reader(LAYOUT) as reader:
        assert reader.complete_ids() == set(stored)
        for sample_id in stored:
            assert_same(reader.get(sample_id), make_sample(int(sample_id, 16), LAYOUT, tokens=big))
    assert {path.name for path in (transport.folder / "loose").iterdir()} == {f"{each}.hs" for each in stored}


def test_disk_full_while_compacting_loses_nothing(tmp_path: Path) -> None:
    transport = FileTransport(FileOptions(fsync=False), tmp_path)
    ids = put(transport, 1, 2, 3, tokens=500)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
    try:
        with pytest.raises(DiskSpaceError):
            transport.compact(LAYOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "shards").iterdir()) == []
    transport.compact(LAYOUT)
    with transport.reader(LAYOUT) as reader:
        assert reader.complete_ids() == set(ids)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TransportError, match="cannot make the folder"):
        FileTransport(FileOptions(), tmp_path / "file").writer(LAYOUT)


# --- shards -----------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 9)),
            st.tuples(st.just("delete"), st.integers(0, 9)),
            st.tuples(st.just("compact"), st.just(0)),
            st.tuples(st.just("reopen"), st.just(0)),
        ),
        max_size=40,
    ),
    limit=st.integers(1, 5),
)
def test_any_order_of_actions_leaves_what_was_put(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]], limit: int
) -> None:
    """Puts, deletions, compactions and restarts in any order: a dictionary says what must be there."""
    options = FileOptions(fsync=False, loose_samples=limit)
    transport = FileTransport(options, tmp_path_factory.mktemp("shards"))
    writer, reader = transport.writer(LAYOUT), transport.reader(LAYOUT)
    there: set[int] = set()
    for action, number in actions:
        if action == "put":
            writer.put(make_sample(number, LAYOUT))
            there.add(number)
        elif action == "delete":
            reader.delete(f"{number:032x}")
            there.discard(number)
        elif action == "compact":
            transport.compact(LAYOUT)
            assert list((transport.folder / "loose").iterdir()) == []
        else:
            writer, reader = transport.writer(LAYOUT), transport.reader(LAYOUT)
        assert reader.complete_ids() == {f"{each:032x}" for each in there}
        for each in range(10):
            if each in there:
                assert_same(reader.get(f"{each:032x}"), make_sample(each, LAYOUT))
            else:
                with pytest.raises(SampleMissing):
                    reader.get(f"{each:032x}")


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), mebibyte_tokens=st.sampled_from([30, 200, 10**6])
)
def test_shards_hold_every_sample_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], mebibyte_tokens: int
) -> None:
    folder = tmp_path_factory.mktemp("sizes")
    hidden = (1 << 20) // (mebibyte_tokens * 4 * 2) or 1
    layout = make_layout(hidden_size=hidden)
    transport = FileTransport(FileOptions(fsync=False, shard_mebibytes=1), folder)
    samples = [make_sample(number, layout, tokens=length) for number, length in enumerate(lengths)]
    with transport.writer(layout) as writer:
        for sample in samples:
            writer.put(sample)
    transport.compact(layout)
    assert list((folder / "loose").iterdir()) == []
    held = [each for path in (folder / "shards").iterdir() for each in wire.WireFile(path).entries]
    assert sorted(held) == [sample.sample_id for sample in samples]
    with transport.reader(layout) as reader:
        for sample in samples:
            assert_same(reader.get(sample.sample_id, expected_tokens=len(sample.token_ids)), sample)
    size = sum(path.stat().st_size for path in (folder / "shards").iterdir())
    assert size <= transport.bytes_for(layout, sum(lengths), len(lengths)) + 1024 * len(
        list((folder / "shards").iterdir())
    )


@pytest.mark.parametrize(
    ("options", "samples", "tokens"),
    [
        ({"shard_mebibytes": 1}, 40, 500),  # several shards, each as large as one may be
        ({"shard_mebibytes": 64}, 40, 500),  # one shard, of all samples
        ({"shard_mebibytes": 64, "loose_samples": 7}, 40, 500),
        ({"shard_mebibytes": 1}, 3, 8000),  # every sample is larger than a shard
        ({"loose_samples": 50}, 200, 3),
    ],
)
def test_the_most_that_is_stored_at_once_is_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], samples: int, tokens: int
) -> None:
    transport = FileTransport(FileOptions(fsync=False, **options), tmp_path)
    most = 0

    def measured(source: Path, target: Path) -> None:
        """A file is complete just before it gets its name: the most that there is at once is there now."""
        nonlocal most
        most = max(most, sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr(os, "replace", measured)
    with transport.writer(LAYOUT) as writer:
        for number in range(samples):
            writer.put(make_sample(number, LAYOUT, tokens=tokens))
    transport.compact(LAYOUT)
    at_rest = transport.bytes_for(LAYOUT, samples * tokens, samples)
    foreseen = transport.peak_bytes_for(LAYOUT, samples * tokens, samples, longest=tokens)
    assert 1.02 * at_rest < most <= foreseen
    assert foreseen <= 2 * at_rest + 1024 * samples


def test_a_hundred_thousand_samples_are_not_a_hundred_thousand_files(tmp_path: Path) -> None:
    """Scaled down a hundredfold: the number of files stays bounded while capture goes on, not only at its end."""
    transport = FileTransport(FileOptions(fsync=False, loose_samples=64), tmp_path)
    most = 0
    with transport.writer(LAYOUT) as writer:
        for number in range(1000):
            writer.put(make_sample(number, LAYOUT, tokens=2))
            most = max(most, sum(len(files) for _, _, files in os.walk(tmp_path)) if number % 50 == 0 else 0)
    assert most < 64 + 1000 // 64 + 2
    transport.compact(LAYOUT)
    assert sum(len(files) for _, _, files in os.walk(tmp_path)) <= 1000 // 64 + 3
    with transport.reader(LAYOUT) as reader:
        assert len(reader.complete_ids()) == 1000


def compact_and_die(transport: FileTransport, steps: int) -> int:
    """Compact in a forked process that kills itself before its call number *steps* of those that change the folder.

    The process's return code: 0 where the compaction ended before.
    """
    pid = os.fork()
    if pid == 0:
        left = steps

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **keywords: object) -> object:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return function(*arguments, **keywords)

            return call

        for name in ("open", "replace", "unlink", "fsync", "rename"):
            setattr(os, name, counted(getattr(os, name)))
        code = 1
        try:
            transport.compact(LAYOUT)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_compaction_can_be_killed_at_every_step(tmp_path: Path) -> None:
    """A kill before each call that changes the folder; nothing is lost, and the next compaction finishes the work."""
    for steps in range(40):
        transport = FileTransport(FileOptions(fsync=False, shard_mebibytes=1), tmp_path / str(steps))
        ids = put(transport, *range(4), tokens=3)
        transport.compact(LAYOUT)
        put(transport, *range(2, 8), tokens=3)
        with transport.reader(LAYOUT) as reader:
            reader.delete(ids[0])
            reader.delete(ids[1])
            reader.delete(ids[2])
        put(transport, 2, tokens=3)
        code = compact_and_die(transport, steps)
        assert code in (0, -signal.SIGKILL)
        for _ in range(2):
            with transport.reader(LAYOUT) as reader:
                assert reader.complete_ids() == {f"{number:032x}" for number in range(2, 8)}
                for number in range(2, 8):
                    assert_same(reader.get(f"{number:032x}"), make_sample(number, LAYOUT, tokens=3))
            transport.compact(LAYOUT)
        assert list((transport.folder / "loose").iterdir()) == []
        if code == 0:
            assert steps > 5
            return
    raise AssertionError("the compaction never came to its end")


def test_two_compactions_at_once(tmp_path: Path) -> None:
    transport = FileTransport(FileOptions(fsync=False, shard_mebibytes=1), tmp_path)
    put(transport, *range(60))
    threads = [threading.Thread(target=transport.compact, args=(LAYOUT,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with transport.reader(LAYOUT) as reader:
        assert reader.complete_ids() == {f"{number:032x}" for number in range(60)}
        for number in range(60):
            assert_same(reader.get(f"{number:032x}"), make_sample(number, LAYOUT))


def test_a_sample_deleted_during_a_compaction_stays_deleted(
    transport: FileTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = put(transport, 1, 2, 3)
    write_shard = producer._write_shard

    def meanwhile(*arguments: object) -> None:
        with transport.reader(LAYOUT) as reader:
            reader.delete(ids[1])
        write_shard(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(producer, "_write_shard", meanwhile)
    transport.compact(LAYOUT)
    with transport.reader(LAYOUT) as reader:
        assert reader.complete_ids() == {ids[0], ids[2]}


def test_a_reader_follows_samples_that_a_compaction_moves(transport: FileTransport) -> None:
    """Reading all the while, from loose files into shards into rewritten shards: never a miss."""
    put(transport, *range(30))
    reader = transport.reader(LAYOUT)
    failures: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                for number in range(20, 30):
                    assert_same(reader.get(f"{number:032x}"), make_sample(number, LAYOUT))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    other = transport.reader(LAYOUT)
    transport.compact(LAYOUT)
    for number in range(20):
        other.delete(f"{number:032x}")
    transport.compact(LAYOUT)  # two thirds of the shard are dead: it is rewritten
    stop.set()
    thread.join()
    assert failures == []
    assert other.complete_ids() == {f"{number:032x}" for number in range(20, 30)}
    assert len(list((transport.folder / "removed").iterdir())) == 0


def test_shards_that_are_all_deleted_are_removed(transport: FileTransport) -> None:
    ids = put(transport, 1, 2)
    transport.compact(LAYOUT)
    with transport.reader(LAYOUT) as reader:
        for sample_id in ids:
            reader.delete(sample_id)
    transport.compact(LAYOUT)
    assert list((transport.folder / "shards").iterdir()) == []


def test_deleting_one_by_one_reads_no_note_twice(transport: FileTransport) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    ids = put(transport, *range(1, 301), tokens=1)
    with transport.reader(LAYOUT) as reader:
        before = bytes_read()
        for sample_id in ids:
            reader.delete(sample_id)
        assert reader.complete_ids() == frozenset()
        notes = sum(path.stat().st_size for path in (transport.folder / "removed").iterdir())
        assert bytes_read() - before < 3 * notes


def test_notes_are_read_to_their_last_whole_line(transport: FileTransport) -> None:
    ids = put(transport, 1, 2, 3)
    transport.compact(LAYOUT)
    shard = only(transport.folder / "shards").name
    notes = transport.folder / "removed" / f"{'ab' * 16}.txt"
    notes.parent.mkdir(exist_ok=True)
    with transport.reader(LAYOUT) as reader:
        notes.write_text(f"{shard} {ids[0]}\n{shard} {ids[1][:20]}")
        assert reader.complete_ids() == {ids[1], ids[2]}
        with open(notes, "a") as file:
            file.write(f"{ids[1][20:]}\n")
        assert reader.complete_ids() == {ids[2]}
        notes.unlink()
        notes.write_text(f"{shard} {ids[2]}\n")  # shorter than the one before
        assert reader.complete_ids() == frozenset()


def test_remove_all_leaves_nothing_of_ours(transport: FileTransport) -> None:
    put(transport, 1, 2)
    transport.compact(LAYOUT)
    (transport.folder / "somebody-elses").write_text("kept")
    transport.remove_all()
    assert [path.name for path in transport.folder.iterdir()] == ["somebody-elses"]
    transport.remove_all()
    transport.remove_all(["ab" * 16])


def test_free_bytes_are_those_of_the_disk(transport: FileTransport) -> None:
    status = os.statvfs(transport.folder.parent)
    free = transport.free_bytes()
    assert free is not None
    assert abs(free - status.f_bavail * status.f_frsize) < 1 << 30


def test_another_folder_by_option(tmp_path: Path) -> None:
    transport = FileTransport(FileOptions(folder=str(tmp_path / "scratch")), tmp_path / "run")
    put(transport, 1)
    assert not (tmp_path / "run").exists()
    assert json.loads((tmp_path / "scratch" / "layout.json").read_text())["dtype"] == "bfloat16"


def test_the_index_is_read_once_and_then_in_constant_time(transport: FileTransport) -> None:
    put(transport, *range(50))
    transport.compact(LAYOUT)
    store = Store(transport.folder, LAYOUT)
    store.refresh()
    (shard,) = store.shard_contents()
    os.rename(transport.folder / "shards" / shard, transport.folder / "shards" / "moved")  # nothing is read any more
    place = store.find(f"{49:032x}")
    assert place is not None
    assert place.shard == shard


def test_errors_of_the_disk_other_than_space_are_transport_errors(
    transport: FileTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with transport.writer(LAYOUT) as writer:
        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(TransportError, match="Input/output error"):
            writer.put(make_sample(1, LAYOUT))
    assert list((transport.folder / "loose").iterdir()) == []


def test_samples_may_come_from_threads(transport: FileTransport) -> None:
    writer = FileTransport(FileOptions(fsync=False, loose_samples=5), transport.folder).writer(LAYOUT)
    samples = [make_sample(number, LAYOUT) for number in range(40)]
    threads = [
        threading.Thread(target=lambda part=samples[i::4]: [writer.put(each) for each in part]) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with transport.reader(LAYOUT) as reader:
        assert reader.complete_ids() == {sample.sample_id for sample in samples}


def test_sample_tensors_on_any_layout_are_copied_out(transport: FileTransport) -> None:
    sample = make_sample(1, LAYOUT)
    grad = HiddenStateSample(
        sample_id=sample.sample_id,
        token_ids=sample.token_ids,
        hidden_states=sample.hidden_states.clone().requires_grad_(True),
    )
    with transport.writer(LAYOUT) as writer:
        writer.put(grad)
    with transport.reader(LAYOUT) as reader:
        assert_same(reader.get(sample.sample_id), sample)


def test_the_places_name_is_the_folder_that_both_sides_see(tmp_path) -> None:
    assert FileTransport(FileOptions(), tmp_path / "run").place_name() == str(tmp_path / "run")
    assert FileTransport(FileOptions(folder="/scratch/states"), tmp_path).place_name() == "/scratch/states"
