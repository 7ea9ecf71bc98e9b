"""What publishing states adds to vLLM's prefill, over HTTP: one JSON line a case.

    python benchmarks/online.py --verifier models/SmolLM2-135M-Instruct [--transport hs_file] [--tokens 256]

Three cases, with the same rows in turn, `--repeat` times after a first pass: `plain` is a vLLM server without any
extraction, `extract` the server of `draftsmith capture serve` asked for no capture, `publish` the same server asked to
capture, which answers when the states are committed in the transport. `--options` are the transport's, as JSON.

Of each case: median over the repeats of a row's latency and of the tokens per second; `added` compares with `extract`
repeat by repeat (median), `added_to_plain` with `plain`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from draftsmith.capture.engines.messages import REQUEST_KEY, capture_parameters, token_digest
from draftsmith.capture.server.middleware import FACTS_PATH

#: Options of the capture server that make it one; the plain server has all others.
EXTRACTION = ("--speculative-config", "--kv-transfer-config", "--middleware")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def capture_command(recipe: Path, port: int) -> list[str]:
    printed = subprocess.run(
        [sys.executable, "-m", "draftsmith", "capture", "serve", str(recipe), "--port", str(port), "--dry-run"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return shlex.split(printed.replace("\\\n", " "))


def plain_command(recipe: Path, port: int) -> list[str]:
    words = capture_command(recipe, port)
    return [word for place, word in enumerate(words) if word not in EXTRACTION and words[place - 1] not in EXTRACTION]


@contextlib.contextmanager
def served(command: Sequence[str], url: str, path: str, log: Path) -> Iterator[str]:
    with open(log, "wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while True:
            if child.poll() is not None:
                sys.exit(f"the server ended, see {log}:\n{log.read_text()[-2000:]}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url + path, timeout=5).status_code == 200:
                    break
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


class Client:
    def __init__(self, at_once: int, draw: random.Random) -> None:
        self._threads = ThreadPoolExecutor(at_once)
        self._http = httpx.Client(timeout=300)
        self._draw = draw

    def run(self, url: str, rows: Sequence[Sequence[int]], *, publish: bool) -> tuple[float, float]:
        """(median seconds of a row, seconds of all)."""
        started = time.perf_counter()
        seconds = list(self._threads.map(lambda row: self._ask(url, row, publish), rows))
        return statistics.median(seconds), time.perf_counter() - started

    def _ask(self, url: str, row: Sequence[int], publish: bool) -> float:
        order: dict[str, object] = {"prompt": list(row), "max_tokens": 1, "temperature": 0.0}
        if publish:
            order["kv_transfer_params"] = capture_parameters(f"{self._draw.getrandbits(128):032x}", token_digest(row))
        started = time.perf_counter()
        reply = self._http.post(url + "/v1/completions", json=order)
        seconds = time.perf_counter() - started
        reply.raise_for_status()
        if publish and reply.json()[REQUEST_KEY]["status"] != "stored":
            sys.exit(f"not stored: {reply.json()[REQUEST_KEY]}")
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--algorithm", default="eagle3")
    parser.add_argument("--transport", default="hs_file")
    parser.add_argument("--options", type=json.loads, default={}, help="the transport's, as JSON")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the servers end with this process
    folder = Path(tempfile.mkdtemp(prefix="online-"))
    recipe = folder / "recipe.yaml"
    # JSON is YAML.
    recipe.write_text(
        json.dumps(
            {
                "verifier": str(Path(arguments.verifier).absolute()),
                "algorithm": arguments.algorithm,
                "output": str(folder / "out"),
                "transport": {"name": arguments.transport, "options": arguments.options},
                "data": {"sources": ["none.jsonl"], "max_length": arguments.tokens},
                "capture": {"mode": "online", "dtype": arguments.dtype},
            }
        )
    )
    draw = random.Random(0)
    rows = [[draw.randrange(5, 40000) for _ in range(arguments.tokens)] for _ in range(arguments.rows)]
    ports = free_port(), free_port()
    plain_url, capture_url = (f"http://127.0.0.1:{port}" for port in ports)
    cases: Mapping[str, tuple[str, bool]] = {
        "plain": (plain_url, False),
        "extract": (capture_url, False),
        "publish": (capture_url, True),
    }
    try:
        with (
            served(plain_command(recipe, ports[0]), plain_url, "/health", folder / "plain.log"),
            served(capture_command(recipe, ports[1]), capture_url, FACTS_PATH, folder / "capture.log"),
        ):
            for at_once in arguments.at_once:
                measure(Client(at_once, draw), cases, rows, arguments, at_once)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(
    client: Client,
    cases: Mapping[str, tuple[str, bool]],
    rows: Sequence[Sequence[int]],
    arguments: argparse.Namespace,
    at_once: int,
) -> None:
    for url, publish in cases.values():
        client.run(url, rows[:8], publish=publish)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for number in range(arguments.repeat):
        turn = list(cases.items())
        for name, (url, publish) in turn[number % 3 :] + turn[: number % 3]:
            found[name].append(client.run(url, rows, publish=publish))
    place = 0 if at_once == 1 else 1  # one row at a time: its latency; several: the time of all

    def added(name: str, to: str) -> float:
        pairs = zip(found[name], found[to], strict=True)
        return round(statistics.median(mine[place] / theirs[place] for mine, theirs in pairs) - 1, 4)

    for name, repeats in found.items():
        row = {
            "case": name,
            "transport": arguments.transport,
            "at_once": at_once,
            "tokens": arguments.tokens,
            "row_ms": round(1e3 * statistics.median(each[0] for each in repeats), 1),
            "tokens_per_s": round(len(rows) * arguments.tokens / statistics.median(each[1] for each in repeats), 1),
            "added": added(name, "extract"),
            "added_to_plain": added(name, "plain"),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
