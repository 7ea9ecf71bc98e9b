"""The store's transport against the store itself and against the folder transport: GB/s, one JSON line a case.

    python benchmarks/hs_mooncake.py [--mebibytes 1024] [--tokens 128 1024 8192 32768] [--folder /a/disk] [--no-faults]

`raw` puts and gets the same bytes by the store's own put_from and get_into, in objects of the size of the transport's
chunks, without checksums or a check of the values; `hs_mooncake` is the transport; `hs_file` the folder transport,
synced and not. They take turns in rounds, in one process; the medians are compared. Then the time from a fault until
the next sample is stored, and read back.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from draftsmith.interfaces import HiddenStateSample, HiddenStateTransport, StateLayout
from draftsmith_hs_file.options import FileOptions
from draftsmith_hs_file.transport import FileTransport
from draftsmith_hs_mooncake.buffers import region_of, tensor_bytes
from draftsmith_hs_mooncake.store import StoreClient
from draftsmith_hs_mooncake.testing import TestedStore, running_store
from draftsmith_hs_mooncake.transport import MooncakeTransport

CHUNK = 32 << 20
ROUNDS = 5


def timed(work: Callable[[], object]) -> float:
    """Seconds that *work* takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def make(tokens: int, hidden_size: int, number: int = 0) -> HiddenStateSample:
    states = torch.randn(tokens, 4, hidden_size).to(torch.bfloat16)
    return HiddenStateSample(sample_id=f"{number:032x}", token_ids=torch.arange(tokens), hidden_states=states)


def raw_round(client: StoreClient, sample: HiddenStateSample, keys: list[str]) -> tuple[float, float]:
    """Seconds to put and to get the states of *sample* once for each key, and nothing else."""
    pieces = torch.split(tensor_bytes(sample.hidden_states), CHUNK)
    target = torch.empty_like(tensor_bytes(sample.hidden_states))
    names = [[f"{key}/{place}" for place in range(len(pieces))] for key in keys]

    def put() -> None:
        for each in names:
            assert client.put(each, [region_of(piece) for piece in pieces]) == [0] * len(pieces)

    def get() -> None:
        for each in names:
            assert min(client.get(each, [region_of(piece) for piece in torch.split(target, CHUNK)], 5.0)) > 0

    seconds = timed(put), timed(get)
    client.remove([name for each in names for name in each], 5.0)
    return seconds


def transport_round(
    transport: HiddenStateTransport, layout: StateLayout, sample: HiddenStateSample, count: int
) -> tuple[float, float]:
    """Seconds to put and to get *count* samples."""
    ids = [f"{number:032x}" for number in range(count)]
    with transport.writer(layout) as writer, transport.reader(layout) as reader:

        def put() -> None:
            for each in ids:
                writer.put(
                    HiddenStateSample(sample_id=each, token_ids=sample.token_ids, hidden_states=sample.hidden_states)
                )

        def get() -> None:
            for each in ids:
                reader.get(each, expected_tokens=len(sample.token_ids))

        seconds = timed(put), timed(get)
    transport.remove_all()
    return seconds


def throughput(store: TestedStore, folder: Path, tokens: int, hidden_size: int, size: int) -> None:
    layout = StateLayout(fingerprint="0" * 32, layer_ids=(2, 15, 27, 30), hidden_size=hidden_size, dtype="bfloat16")
    sample = make(tokens, hidden_size)
    count = max(1, min(size // sample.hidden_states.nbytes, 400))
    total = count * sample.hidden_states.nbytes
    mooncake = MooncakeTransport(store.options(), folder / "mooncake")
    synced = FileTransport(FileOptions(loose_samples=1 << 30, shard_mebibytes=1 << 20), folder / "file")
    unsynced = FileTransport(FileOptions(loose_samples=1 << 30, shard_mebibytes=1 << 20, fsync=False), folder / "file")
    cases: dict[str, Callable[[], tuple[float, float]]] = {
        "raw": lambda: raw_round(mooncake.place().client, sample, [f"raw/{number}" for number in range(count)]),
        "hs_mooncake": lambda: transport_round(mooncake, layout, sample, count),
        "hs_file": lambda: transport_round(synced, layout, sample, count),
        "hs_file without fsync": lambda: transport_round(unsynced, layout, sample, count),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for number in range(ROUNDS + 1):
        for name, case in cases.items():
            measured = case()
            if number:  # the first round warms up
                seconds[name].append(measured)
    speeds = {
        name: [total / statistics.median(each) / 1e9 for each in zip(*rounds, strict=True)]
        for name, rounds in seconds.items()
    }
    for name, (put, get) in speeds.items():
        row = {
            "case": name, "tokens": tokens, "sample_bytes": sample.hidden_states.nbytes, "samples": count,
            "put_gb_per_s": round(put, 2), "get_gb_per_s": round(get, 2),
            "put_of_raw": round(put / speeds["raw"][0], 2), "get_of_raw": round(get / speeds["raw"][1], 2),
        }  # fmt: skip
        print(json.dumps(row), flush=True)


def recovery(store: TestedStore, folder: Path, fault: str) -> None:
    """Seconds from a fault until a sample is stored and read back."""
    layout = StateLayout(fingerprint="0" * 32, layer_ids=(2, 15, 27, 30), hidden_size=576, dtype="bfloat16")
    transport = MooncakeTransport(store.options(patience=60.0), folder / "faults")
    with transport.writer(layout) as writer, transport.reader(layout) as reader:
        writer.put(make(512, 576, 1))
        note = store.now
        process = note.master_process if "master" in fault else note.owner_process
        begun = time.perf_counter()
        os.kill(process["pid"], signal.SIGKILL if "killed" in fault else signal.SIGSTOP)
        if "stopped" in fault:
            time.sleep(2)
            os.kill(process["pid"], signal.SIGCONT)
            begun = time.perf_counter()
        writer.put(make(512, 576, 2))
        reader.get(f"{2:032x}")
        seconds = time.perf_counter() - begun
    transport.remove_all()
    print(json.dumps({"case": fault, "seconds_until_the_next_sample": round(seconds, 2)}), flush=True)
    time.sleep(5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for hs_file, on the disk to measure; default: the temporary one")
    parser.add_argument("--mebibytes", type=int, default=512, help="of each round")
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 1024, 8192, 32768], help="tokens of a sample")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--no-faults", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mooncake-", dir=arguments.folder) as name:
        folder = Path(name)
        with running_store(folder / "store", size=(2 * arguments.mebibytes + 512) << 20) as store:
            for tokens in arguments.tokens:
                throughput(store, folder, tokens, arguments.hidden_size, arguments.mebibytes << 20)
            if not arguments.no_faults:
                for fault in ("owner killed", "master killed", "master stopped for 2 s"):
                    recovery(store, folder, fault)


if __name__ == "__main__":
    main()
