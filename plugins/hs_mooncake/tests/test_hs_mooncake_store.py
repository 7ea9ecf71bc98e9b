"""The store of a host, its commands, claims, and what is refused with a reason."""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
from packaging.requirements import Requirement
from ports import free_port

from draftsmith.capture.address import TransportAddress
from draftsmith.cli import main
from draftsmith.errors import ConfigError, OutputError, SampleCorrupt, TransportError, UserError
from draftsmith.interfaces import HiddenStateTransport
from draftsmith.testing.transport import assert_same, make_layout, make_sample
from draftsmith_hs_mooncake import buffers, installed, state, wire
from draftsmith_hs_mooncake.buffers import empty
from draftsmith_hs_mooncake.errors import StoreUnreachable
from draftsmith_hs_mooncake.host import to_bytes
from draftsmith_hs_mooncake.options import MooncakeOptions, split_address
from draftsmith_hs_mooncake.plugin import draftsmith_transports
from draftsmith_hs_mooncake.processes import identity, is_gone
from draftsmith_hs_mooncake.store import Region
from draftsmith_hs_mooncake.testing import TestedStore, mooncake_store
from draftsmith_hs_mooncake.transport import MooncakeTransport
from draftsmith_hs_mooncake.trouble import Trouble

__all__ = ["mooncake_store"]

LAYOUT = make_layout()
OTHER_MASTER = os.environ.get("DRAFTSMITH_TEST_OTHER_MASTER")


@pytest.fixture
def transport(mooncake_store: TestedStore, tmp_path: Path) -> Iterator[MooncakeTransport]:
    transport = MooncakeTransport(mooncake_store.options(), tmp_path / "run")
    yield transport
    transport.remove_all()


@pytest.fixture
def store_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No store runs there; one that the test starts is stopped."""
    monkeypatch.setenv(state.FOLDER_VARIABLE, str(tmp_path / "note"))
    yield tmp_path / "note"
    main(["store", "down"])


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    transport = MooncakeTransport(MooncakeOptions(master=address), tmp_path / "run")
    begun = time.monotonic()
    with pytest.raises(StoreUnreachable, match="cannot be reached") as caught:
        transport.reader(LAYOUT)
    assert time.monotonic() - begun < 10
    assert caught.value.where == address
    assert "store up" in str(caught.value.hint)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), StoreUnreachable)


def test_something_else_than_a_master_of_this_version(mooncake_store: TestedStore, tmp_path: Path) -> None:
    """What answers at the master's address does not speak the client's language: here, its own admin server."""
    options = mooncake_store.options(master=mooncake_store.note.admin)
    begun = time.monotonic()
    with pytest.raises(StoreUnreachable, match="no Mooncake master") as caught:
        MooncakeTransport(options, tmp_path / "run").reader(LAYOUT)
    assert time.monotonic() - begun < 30
    assert importlib.metadata.version(installed.installed_build()[0]) in str(caught.value)
    assert caught.value.where == mooncake_store.note.admin


@pytest.mark.skipif(OTHER_MASTER is None, reason="DRAFTSMITH_TEST_OTHER_MASTER names no master of another version")
def test_a_master_of_another_version(tmp_path: Path) -> None:
    """Such as that of 0.3.11, taken out of its wheel: the client sets up, and its health check says 0."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    command = [str(OTHER_MASTER), "--rpc_address=127.0.0.1", f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as master:
        try:
            with pytest.raises(StoreUnreachable, match="a Mooncake master of another version") as caught:
                MooncakeTransport(MooncakeOptions(master=address), tmp_path / "run").reader(LAYOUT)
        finally:
            master.terminate()
    assert caught.value.where == address


def test_an_admin_address_where_nothing_is(mooncake_store: TestedStore, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    transport = MooncakeTransport(mooncake_store.options(admin=address), tmp_path / "run")
    with transport.reader(LAYOUT) as reader, pytest.raises(StoreUnreachable, match=address):
        reader.complete_ids()
    with pytest.raises(StoreUnreachable, match=address):
        transport.free_bytes()


def test_an_admin_address_of_something_else(tmp_path: Path) -> None:
    """A mistaken port may belong to anything: here, to what greets as a remote shell does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            caller, _ = listener.accept()
            with caller:
                caller.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                caller.recv(1024)

        greeter = threading.Thread(target=greet)
        greeter.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        transport = MooncakeTransport(MooncakeOptions(master="127.0.0.1:1", admin=address), tmp_path / "run")
        with pytest.raises(StoreUnreachable, match=address):
            transport.free_bytes()
        greeter.join()


def test_a_store_that_was_stopped_is_waited_for_where_it_was(store_folder: Path, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    transport = MooncakeTransport(MooncakeOptions(), tmp_path / "run")
    with subprocess.Popen(["sleep", "60"]) as store:
        here = identity(store.pid)
        state.write(
            state.RunningStore(
                master=address,
                admin=address,
                protocol="tcp",
                device="",
                size=1,
                log="",
                supervisor=here,
                master_process=here,
                owner_process=here,
            )
        )
        assert transport.address().master == address
        state.remove()
        store.terminate()
    with pytest.raises(StoreUnreachable, match=address):
        transport.free_bytes()
    with pytest.raises(UserError, match="none was started on this host"):
        MooncakeTransport(MooncakeOptions(), tmp_path / "run").address()


def test_no_store_is_named(store_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none was started on this host") as caught:
        MooncakeTransport(MooncakeOptions(), tmp_path / "run").reader(LAYOUT)
    assert "draftsmith store up" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["", "here", "host:", ":1", "host:0", "host:70000", "host:ten"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        MooncakeOptions(master=text)


def test_addresses() -> None:
    assert split_address("10.0.0.5:50051") == ("10.0.0.5", 50051)
    assert split_address("[fe80::1]:7") == ("fe80::1", 7)
    with pytest.raises(ValueError, match="'run' must match"):
        MooncakeOptions(run="a/b")


@pytest.mark.parametrize(
    ("names", "text"),
    [([], "is not installed"), (["mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"], "several builds")],
)
def test_the_store_must_be_installed_once(
    names: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.3.13"

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError, match=text) as caught:
        installed.installed_build()
    for extra in ("cpu", "cuda12", "cuda13"):
        assert f'pip install "draftsmith-hs-mooncake[{extra}]"' in str(caught.value.hint)


def test_the_extras_are_the_builds() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert {extra: Requirement(only).name for extra, (only,) in extras.items()} == installed.BUILDS


def test_a_record_is_known_by_its_checksum_and_its_name() -> None:
    name = wire.manifest_name("run", "a" * 32)
    data = wire.encode(name, {})
    assert data != wire.encode(name, {})
    assert wire.decode(name, data)["name"] == name
    with pytest.raises(wire.FormatError, match="checksum"):
        wire.decode(name, data[:-1] + b" ")
    with pytest.raises(wire.FormatError, match="is that of"):
        wire.decode(name + "x", data)


def whole_sample(run: str, number: int) -> tuple[str, wire.Manifest, bytearray]:
    """Key, manifest and bytes of a sample of 3 tokens."""
    key = wire.whole_key(run, f"{number:032x}")
    size = wire.state_bytes(LAYOUT, 3, "plain")
    manifest = wire.Manifest(
        sample_id=f"{number:032x}", attempt="0" * 16, layout=LAYOUT, tokens=3, sizes=(24, size), sums=("0" * 16,) * 2
    )
    return key, manifest, bytearray(size + 24) + wire.end_of_whole(key, manifest)


def test_a_whole_sample_is_known_by_its_end() -> None:
    key, manifest, data = whole_sample("run", 1)
    assert wire.manifest_of_whole(key, memoryview(data)) == manifest
    assert wire.committed_sample("run", key) == manifest.sample_id
    assert not wire.is_chunk(key)
    _, _, other = whole_sample("run", 2)
    for torn in (data[:-1], data[1:], data[:-200] + other[-200:], data[-8:], bytearray(), other):
        with pytest.raises(wire.FormatError):
            wire.manifest_of_whole(key, memoryview(torn))


# --- plain values -------------------------------------------------------------------------------------------------


def test_the_name_of_a_run_follows_from_its_path(tmp_path: Path) -> None:
    def run(location: Path, **options: str) -> str:
        return MooncakeTransport(MooncakeOptions(**options), location).run

    first = run(tmp_path / "my run" / "states" / "samples")
    assert first == run(tmp_path / "my run" / "states" / "samples")
    assert first.startswith("my-run-states-")
    assert first != run(tmp_path / "other" / "my run" / "states" / "samples")
    assert run(tmp_path, run="chosen") == "chosen"
    assert wire.run_of(wire.run_prefix("a.b") + "s/x") == "a.b"
    assert re.match(wire.run_regex("a.b"), wire.run_prefix("a.b"))
    assert not re.match(wire.run_regex("a.b"), wire.run_prefix("axb"))


def test_an_address_opens_the_same_place(mooncake_store: TestedStore, transport: MooncakeTransport) -> None:
    (item,) = draftsmith_transports()
    address = TransportAddress.of(item, transport.options, transport.location, LAYOUT)
    opened: HiddenStateTransport = TransportAddress.from_json(address.to_json()).open()
    with opened.writer(LAYOUT) as writer:
        writer.put(make_sample(1, LAYOUT))
    with transport.reader(LAYOUT) as reader:
        assert reader.complete_ids() == {f"{1:032x}"}


def test_the_estimate_covers_what_the_store_uses(mooncake_store: TestedStore, transport: MooncakeTransport) -> None:
    before = mooncake_store.usage().used
    samples = [make_sample(number, LAYOUT) for number in range(50)]
    with transport.writer(LAYOUT) as writer:
        for sample in samples:
            writer.put(sample)
    used = mooncake_store.usage().used - before
    tokens = sum(len(each.token_ids) for each in samples)
    assert used <= transport.bytes_for(LAYOUT, tokens, 50) + 1024  # the layout's record
    assert used > transport.bytes_for(LAYOUT, tokens, 0)


def test_the_memory_of_a_sample_is_used_again_when_nothing_refers_to_it() -> None:
    buffers._spare.clear()  # of tests before
    first = empty((4, 1 << 20), torch.bfloat16)
    place, part = first.data_ptr(), first[1]
    del first
    other = empty((4, 1 << 20), torch.bfloat16)
    assert other.data_ptr() != place
    del part
    larger = empty((8, 1 << 20), torch.bfloat16)
    again = empty((3, 1 << 20), torch.bfloat16)
    assert larger.data_ptr() != place
    assert again.data_ptr() == place


# --- samples in one object ----------------------------------------------------------------------------------------


def keys_of(store: TestedStore, transport: MooncakeTransport) -> list[str]:
    """Of samples; what follows the sample's id, without the names of attempts."""
    prefix = wire.run_prefix(transport.run) + "s/"
    found = [each[len(prefix) + 33 :] for each in store.all_keys() if each.startswith(prefix)]
    return sorted(re.sub(r"^[0-9a-f]{16}/", "", each) for each in found)


def test_a_small_sample_is_one_object_and_a_large_one_is_not(
    mooncake_store: TestedStore, transport: MooncakeTransport
) -> None:
    small_chunks = MooncakeTransport(mooncake_store.options(chunk_mebibytes=1), transport.location)
    layout = make_layout(hidden_size=256)
    small, large = make_sample(1, layout, tokens=400), make_sample(2, layout, tokens=1000)
    with small_chunks.writer(layout) as writer, transport.reader(layout) as reader:
        writer.put(small)
        assert keys_of(mooncake_store, transport) == ["w"]
        writer.put(large)
        assert keys_of(mooncake_store, transport) == ["0000", "0001", "0002", "m0", "w"]
        for sample in (small, large):
            for tokens in (None, len(sample.token_ids)):
                assert_same(reader.get(sample.sample_id, expected_tokens=tokens), sample)
            with pytest.raises(SampleCorrupt, match="tokens"):
                reader.get(sample.sample_id, expected_tokens=len(sample.token_ids) - 1)
            reader.delete(sample.sample_id)
        assert keys_of(mooncake_store, transport) == []


def test_a_sample_that_is_put_again_replaces_the_one_that_is_there(
    mooncake_store: TestedStore, transport: MooncakeTransport
) -> None:
    versions = [attrs.evolve(make_sample(number, LAYOUT), sample_id="a" * 32) for number in (1, 2, 3)]
    with transport.writer(LAYOUT) as writer, transport.reader(LAYOUT) as reader:
        for version, keys in zip(versions, (["w"], ["0000", "0001", "m0"], ["0000", "0001", "m1"]), strict=True):
            writer.put(version)
            assert keys_of(mooncake_store, transport) == keys
            assert_same(reader.get("a" * 32), version)


@pytest.mark.parametrize("place", [0, 1000, -1, -200])
def test_a_damaged_sample_is_found_out(transport: MooncakeTransport, place: int) -> None:
    """One byte of the states, the token ids, the length or the manifest, as a mixture would have it."""
    client = transport.place().client
    layout = make_layout(hidden_size=256)
    sample = make_sample(1, layout, tokens=10)
    key = wire.whole_key(transport.run, sample.sample_id)
    with transport.writer(layout) as writer, transport.reader(layout) as reader:
        writer.put(sample)
        stored = bytearray(client.size(key, 5.0))
        assert client.get([key], [Region.of_bytes(stored)], 5.0) == [len(stored)]
        client.remove([key], 5.0)
        stored[place] ^= 1
        assert client.put([key], [Region.of_bytes(stored)]) == [0]
        for tokens in (None, 10):
            with pytest.raises(SampleCorrupt) as caught:
                reader.get(sample.sample_id, expected_tokens=tokens)
            assert caught.value.sample_id == sample.sample_id


def test_an_object_that_does_not_fit_the_registered_buffer(
    mooncake_store: TestedStore, transport: MooncakeTransport
) -> None:
    """It was put with larger chunks than this reader is told of."""
    options = mooncake_store.options(staging=True, chunk_mebibytes=1)
    layout = make_layout(hidden_size=256)
    with transport.writer(layout) as writer:
        writer.put(make_sample(1, layout, tokens=1000))
    with (
        MooncakeTransport(options, transport.location).reader(layout) as reader,
        pytest.raises(TransportError, match="the registered buffer 1048576"),
    ):
        reader.get(f"{1:032x}")


# --- claims -------------------------------------------------------------------------------------------------------


_CLAIM = """
import pickle, sys
transport, layout, owner = pickle.load(sys.stdin.buffer)
transport.claim(layout, owner)
"""


def claim_elsewhere(transport: MooncakeTransport, owner: str) -> None:
    """Claim in a process that then ends."""
    values = pickle.dumps((transport, LAYOUT, owner))
    subprocess.run([sys.executable, "-c", _CLAIM], input=values, check=True)


def test_a_place_belongs_to_one_run(transport: MooncakeTransport) -> None:
    transport.claim(LAYOUT, "/runs/first")
    transport.claim(LAYOUT, "/runs/first")
    with pytest.raises(OutputError, match="/runs/first") as caught:
        transport.claim(LAYOUT, "/runs/second")
    text = str(caught.value)
    assert f"process {os.getpid()} on {socket.gethostname()}" in text
    assert time.strftime("%Y-%m-%d") in text
    assert "option `run`" in text
    transport.remove_all()
    transport.claim(LAYOUT, "/runs/second")


def test_a_run_that_is_resumed_claims_again(mooncake_store: TestedStore, transport: MooncakeTransport) -> None:
    claim_elsewhere(transport, "/runs/first")
    with pytest.raises(OutputError, match="which has ended"):
        transport.claim(LAYOUT, "/runs/second")
    transport.claim(LAYOUT, "/runs/first")
    (claim,) = [each for each in mooncake_store.all_keys() if "/claim/" in each]
    assert claim.startswith(wire.run_prefix(transport.run))
    with pytest.raises(OutputError) as caught:
        transport.claim(LAYOUT, "/runs/second")
    assert "has ended" not in str(caught.value)


@pytest.mark.slow
def test_of_several_that_claim_at_once_one_gets_it(transport: MooncakeTransport) -> None:
    values = [pickle.dumps((transport, LAYOUT, f"/runs/{number}")) for number in range(4)]
    processes = [
        subprocess.Popen([sys.executable, "-c", _CLAIM], stdin=subprocess.PIPE, stderr=subprocess.PIPE) for _ in values
    ]
    for process, each in zip(processes, values, strict=True):
        assert process.stdin is not None
        process.stdin.write(each)
        process.stdin.flush()
    results = [process.communicate() for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1, 1, 1]
    refused = [text for _, text in results if b"OutputError" in text]
    assert len(refused) == 3


# --- the commands -------------------------------------------------------------------------------------------------


def test_sizes() -> None:
    assert to_bytes("256M") == to_bytes("256MiB") == to_bytes("0.25g") == 256 << 20
    assert to_bytes("1") == 16 << 20
    for text in ("", "much", "-1G", "0", "4X"):
        with pytest.raises(ConfigError):
            to_bytes(text)


def test_up_status_and_down(store_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "up", "--size", "64M"]) == 0
    said = capsys.readouterr()
    assert "warning" not in said.err
    found = re.search(r'options: \{master: "(127\.0\.0\.1:\d+)", admin: "(127\.0\.0\.1:\d+)"\}', said.out)
    assert found
    note = state.here()
    assert found.groups() == (note.master, note.admin)

    assert main(["store", "up"]) == 2
    assert "runs here already" in capsys.readouterr().err

    transport = MooncakeTransport(MooncakeOptions(run="mine"), tmp_path / "run")  # finds the store of this host
    transport.claim(LAYOUT, "/runs/mine")
    with transport.writer(LAYOUT) as writer:
        writer.put(make_sample(1, LAYOUT))
    assert main(["store", "status"]) == 0
    said = capsys.readouterr()
    assert "64.0 MiB used" in said.out
    assert re.search(r"mine: 3 keys; /runs/mine \(process \d+ on .*, since", said.out)

    assert main(["store", "down"]) == 0
    assert note.master in capsys.readouterr().out
    for process in (note.supervisor, note.master_process, note.owner_process):
        assert is_gone(process)
    assert state.read() is None
    assert main(["store", "down"]) == 0
    assert "no store runs" in capsys.readouterr().out
    assert main(["store", "status"]) == 2
    assert "store up" in capsys.readouterr().err


def test_a_port_that_is_taken(store_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["store", "up", "--size", "16M", "--port", str(port), "--admin-port", str(free_port())]) == 1
    said = capsys.readouterr().err
    assert "the store did not start" in said
    assert "is a port taken?" in said
    assert state.read() is None


def test_another_address_is_warned_of(store_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "up", "--size", "16M", "--host", "0.0.0.0"]) == 0
    assert "no authentication" in capsys.readouterr().err


def test_gc_removes_what_ended_runs_left(
    mooncake_store: TestedStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("ended", "working", "unclaimed")
    runs = {name: MooncakeTransport(mooncake_store.options(run=name), tmp_path / "run") for name in names}
    claim_elsewhere(runs["ended"], "/runs/ended")
    runs["working"].claim(LAYOUT, "/runs/working")
    for transport in runs.values():
        with transport.writer(LAYOUT) as writer:
            writer.put(make_sample(1, LAYOUT))
    where = ["--master", mooncake_store.note.master, "--admin", mooncake_store.note.admin]

    assert main(["store", "gc", *where]) == 0
    said = capsys.readouterr().out
    assert "ended: 3 keys removed" in said
    assert re.search(r"working: 3 keys kept: .* is at work", said)
    assert "unclaimed: 2 keys kept: nobody has claimed them" in said
    assert {wire.run_of(each) for each in mooncake_store.all_keys()} == {"working", "unclaimed"}

    assert main(["store", "gc", "--run", "unclaimed", *where]) == 0
    assert {wire.run_of(each) for each in mooncake_store.all_keys()} == {"working"}
    assert main(["store", "gc", "--all", *where]) == 0
    assert mooncake_store.all_keys() == []


def test_a_process_is_known_by_more_than_its_number() -> None:
    assert is_gone(identity()) is False
    assert is_gone({**identity(), "start": "1"}) is True
    assert is_gone({**identity(), "boot": "another"}) is True
    assert is_gone({**identity(), "host": "another"}) is None
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert is_gone({**identity(), "pid": process.pid}) is True


# --- two hosts ----------------------------------------------------------------------------------------------------


_READ_ALL = """
import pickle, sys
from draftsmith.testing.transport import assert_same, make_sample
transport, layout, count = pickle.load(sys.stdin.buffer)
with transport.reader(layout) as reader:
    assert len(reader.complete_ids()) == count
    for number in range(count):
        assert_same(reader.get(f"{number:032x}"), make_sample(number, layout, tokens=20_000))
        reader.delete(f"{number:032x}")
    assert reader.complete_ids() == frozenset()
transport.remove_all()
print("read all")
"""

_PUT_ALL = """
import pickle, sys
from draftsmith.testing.transport import make_sample
transport, layout, count = pickle.load(sys.stdin.buffer)
with transport.writer(layout) as writer:
    for number in range(count):
        writer.put(make_sample(number, layout, tokens=20_000))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces, joined by a cable: 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed (Debian: apt-get install iproute2)")
    token = secrets.token_hex(3)
    names = (f"ds-{token}-a", f"ds-{token}-b")
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", f"v{token}a", "netns", names[0], "type", "veth", "peer", f"v{token}b", "netns", names[1])
        for name, side in zip(names, "ab", strict=True):
            ip("-n", name, "address", "add", f"10.77.0.{'ab'.index(side) + 1}/24", "dev", f"v{token}{side}")
            ip("-n", name, "link", "set", f"v{token}{side}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.slow
def test_from_one_host_to_another(two_hosts: tuple[str, str], tmp_path: Path) -> None:
    """The store and the trainer's side in one network, the producer in another."""
    environment = {**os.environ, state.FOLDER_VARIABLE: str(tmp_path / "note")}

    def on(host: int, code: str, *values: object) -> subprocess.CompletedProcess[bytes]:
        command = ["ip", "netns", "exec", two_hosts[host], sys.executable, "-c", code]
        return subprocess.run(
            command, input=pickle.dumps(values), env=environment, capture_output=True, check=False, timeout=120
        )

    def store(*words: str) -> subprocess.CompletedProcess[bytes]:
        return on(0, f"import sys; from draftsmith.cli import main; sys.exit(main({['store', *words]!r}))")

    up = store("up", "--size", "128M", "--host", "10.77.0.1", "--port", "50051", "--admin-port", "9003")
    try:
        assert up.returncode == 0, up.stderr.decode()
        assert b"no authentication" in up.stderr
        transport = MooncakeTransport(MooncakeOptions(master="10.77.0.1:50051"), tmp_path / "run")
        put = on(1, _PUT_ALL, transport, LAYOUT, 12)
        assert put.returncode == 0, put.stderr.decode()
        for host in (0, 1):
            if host == 1:
                assert on(0, _PUT_ALL, transport, LAYOUT, 12).returncode == 0
            read = on(host, _READ_ALL, transport, LAYOUT, 12)
            assert read.stdout == b"read all\n", read.stderr.decode()
    finally:
        store("down")


# --- trouble that passes -----------------------------------------------------------------------------------------


def test_trouble_is_told_when_it_begins_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    """In one line each, whatever many threads meet; a call that was made before it says nothing of it."""
    trouble = Trouble("10.0.0.5:1", "is full", "has room again")
    before = time.monotonic() - 5
    trouble.over(before)
    assert not caplog.messages
    for begun in (before + 1, before, before + 2):
        trouble.met(begun)
    trouble.over(before)
    assert caplog.messages == ["the store at 10.0.0.5:1 is full"]
    trouble.over(before + 3)
    trouble.over(before + 4)
    assert caplog.messages[1:] == ["the store at 10.0.0.5:1 has room again after 4 s"]
    trouble.met(before + 5)
    assert len(caplog.messages) == 3


def test_trouble_that_is_over_soon_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    trouble = Trouble("10.0.0.5:1", "is full", "has room again", tell_after=2.0)
    now = time.monotonic()
    trouble.met(now)
    trouble.over(now + 0.1)
    assert not caplog.messages
    trouble.met(now - 3)
    trouble.met(now)
    trouble.over(now)
    assert len(caplog.messages) == 2
