"""The folder transport against the disk it writes to: GB/s both ways, one JSON line a case.

    python benchmarks/hs_file.py [--folder /a/disk] [--mebibytes 256]

`disk` writes (and reads) the same bytes as one file, with one fsync; `put` publishes samples one by one, each synced;
`compact` moves them into shards; `get` reads and checks every sample (checksum, finite values). Reads are given warm,
from the page cache, and cold, after the files' pages were dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from draftsmith.interfaces import HiddenStateSample, StateLayout
from draftsmith_hs_file.options import FileOptions
from draftsmith_hs_file.transport import FileTransport


def timed(work: Callable[[], object]) -> float:
    """Seconds that *work* takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def drop_pages(folder: Path) -> None:
    """Ask the kernel to forget the cached pages of all files of *folder*."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def raw_disk(folder: Path, size: int) -> dict[str, float]:
    """Seconds to write and sync, and to read, *size* bytes as one file."""
    data = os.urandom(1 << 24) * -(-size // (1 << 24))
    path = folder / "raw"

    def write() -> None:
        with open(path, "wb") as file:
            file.write(data[:size])
            file.flush()
            os.fsync(file.fileno())

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass

    seconds = {"disk write": timed(write), "disk read warm": timed(read)}
    drop_pages(folder)
    seconds["disk read cold"] = timed(read)
    path.unlink()
    return seconds


def transport_times(folder: Path, size: int, tokens: int, hidden_size: int) -> tuple[dict[str, float], int]:
    """Seconds of each operation on samples of *tokens* tokens, and the bytes of all samples."""
    layout = StateLayout(fingerprint="0" * 32, layer_ids=(2, 15, 27, 30), hidden_size=hidden_size, dtype="bfloat16")
    states = torch.randn(tokens, 4, hidden_size).to(torch.bfloat16)
    token_ids = torch.arange(tokens)
    count = max(1, size // (states.nbytes + token_ids.nbytes))
    ids = [f"{number:032x}" for number in range(count)]
    transport = FileTransport(FileOptions(loose_samples=1 << 30, shard_mebibytes=1 << 20), folder)
    sharded = FileTransport(FileOptions(), folder)

    def put() -> None:
        with transport.writer(layout) as writer:
            for each in ids:
                writer.put(HiddenStateSample(sample_id=each, token_ids=token_ids, hidden_states=states))

    def get() -> None:
        with transport.reader(layout) as reader:
            for each in ids:
                reader.get(each, expected_tokens=tokens)

    seconds = {"put": timed(put), "compact": timed(lambda: sharded.compact(layout)), "get warm": timed(get)}
    drop_pages(folder)
    seconds["get cold"] = timed(get)
    transport.remove_all()
    return seconds, count * (states.nbytes + token_ids.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder's")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 1024, 8192], help="tokens of a sample")
    parser.add_argument("--hidden-size", type=int, default=576)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hs-file-", dir=arguments.folder))
    size = arguments.mebibytes << 20
    try:
        for case, seconds in raw_disk(folder, size).items():
            print(json.dumps({"case": case, "bytes": size, "gb_per_s": round(size / seconds / 1e9, 2)}), flush=True)
        for tokens in arguments.tokens:
            measured, total = transport_times(folder / "run", size, tokens, arguments.hidden_size)
            for case, seconds in measured.items():
                row = {"case": case, "tokens": tokens, "bytes": total, "gb_per_s": round(total / seconds / 1e9, 2)}
                print(json.dumps(row), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
