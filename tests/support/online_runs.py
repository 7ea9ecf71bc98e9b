"""Trainings that go through a real store, each in processes of its own, and what happens to them while they run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import field, frozen
from waiting import wait_until

from draftsmith.testing.training import assert_same_training
from draftsmith_hs_mooncake import admin, wire
from draftsmith_hs_mooncake.state import RunningStore

__all__ = [
    "TRAIN",
    "TWO_RANKS",
    "CaptureServer",
    "Networks",
    "Run",
    "Started",
    "assert_like",
    "keys",
    "networks",
    "workers",
]

TRAIN = ("-m", "draftsmith", "train")
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *TRAIN)
#: Seconds for a run on a busy machine.
_LONGEST = 300.0


def keys(store: RunningStore) -> list[str]:
    """All keys in the store, also of samples that are being written; without those of filling."""
    return [each for each in admin.keys(store.admin) if wire.run_of(each) is not None]


# --- runs ----------------------------------------------------------------------------------------------------------


class Run:
    """A training of its own from *recipe*, whose data are prepared, in the folder *output*.

    Args:
        inside: what a command is to be started with, so that it runs in another network.
    """

    def __init__(self, recipe: Path, output: Path, *settings: str, inside: Sequence[str] = ()) -> None:
        self.recipe, self.output, self.inside = recipe, output, tuple(inside)
        self.settings = (f"output={output}", *settings)
        self.log = output.with_suffix(".log")
        shutil.copytree(recipe.with_suffix("") / "prepared", output / "prepared")

    @property
    def training(self) -> Path:
        return self.output / "training"

    def start(self, command: Sequence[str] = TRAIN) -> Started:
        words = [word for each in self.settings for word in ("--set", each)]
        with open(self.log, "ab") as log:
            begun = log.tell()
            process = subprocess.Popen(
                [*self.inside, sys.executable, *command, str(self.recipe), *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return Started(self, process, begun)

    def whole(self, command: Sequence[str] = TRAIN) -> Run:
        """Train from the beginning to the end, with nothing in the way."""
        with self.start(command) as started:
            started.finish()
        return self

    def lines(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            text = (self.training / "metrics.jsonl").read_text(encoding="utf-8")
            return [json.loads(each) for each in text.splitlines(keepends=True) if each.endswith("\n")]
        return []

    def step(self) -> int:
        """The last one that is finished."""
        return max((each["step"] for each in self.lines()), default=0)

    def samples(self) -> Counter[int]:
        """Epoch → samples that were trained in it."""
        count: Counter[int] = Counter()
        for each in self.lines():
            if each["phase"] == "train":
                count[each["epoch"]] += each["samples"]
        return count

    def figures(self) -> dict[str, Any]:
        """Of the capture, of the last start."""
        found: dict[str, Any] = json.loads((self.training / "stage.json").read_text())["summary"]["online"]
        return found

    def rows(self) -> int:
        """How many there are to train on."""
        from draftsmith.data.dataset import open_prepared

        return len(open_prepared(self.output / "prepared").train)


class Started:
    """A run's process, and when each step was finished."""

    def __init__(self, run: Run, process: subprocess.Popen[bytes], begun: int) -> None:
        self.run, self.process = run, process
        self._begun = begun
        self._seen: list[tuple[float, int]] = []
        self._leaving = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._leaving.wait(0.01):
            self._look()

    def _look(self) -> None:
        step = self.run.step()
        if not self._seen or step != self._seen[-1][1]:
            self._seen.append((time.monotonic(), step))

    def log(self) -> str:
        return self.run.log.read_bytes()[self._begun :].decode("utf-8", "replace")

    def wait_for_step(self, step: int) -> None:
        def finished() -> bool:
            assert self.process.poll() is None, f"it ended at step {self.run.step()}:\n{self.log()[-3000:]}"
            return self.run.step() >= step

        wait_until(finished, f"step {step}", _LONGEST)

    def finish(self) -> None:
        """Wait for the end of the run, which must be a good one."""
        try:
            code = self.process.wait(_LONGEST)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it hangs at step {self.run.step()}:\n{self.log()[-3000:]}")
        assert code == 0, self.log()[-4000:]

    def pauses_from(self, injected: float, step: int) -> tuple[float, float]:
        """Seconds from *injected* to the next step after *step*, and the longest wait for a step from then on."""
        self._look()
        after = [time for time, seen in self._seen if seen > step and time > injected]
        times = [injected, *after]
        return after[0] - injected, max(later - earlier for earlier, later in zip(times, after, strict=False))

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()
        self._leaving.set()
        self._watcher.join()


def workers(launcher: int) -> list[int]:
    """Process ids of the ranks that torchrun has started, in order."""
    ranks = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        for each in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if each.startswith(b"RANK="):
                ranks[int(each[5:])] = int(child)
    return [ranks[rank] for rank in sorted(ranks)]


def assert_like(run: Run, calm: Run) -> None:
    """Every step once, on the same samples, each row once an epoch; and the same weights, to the last bit."""
    lines = run.lines()
    trained = [each["step"] for each in lines if each["phase"] == "train"]
    assert trained == list(range(1, len(trained) + 1))
    assert run.samples() == {epoch: run.rows() for epoch in run.samples()}
    assert lines == calm.lines()
    assert_same_training(calm.training, run.training)


# --- what captures -------------------------------------------------------------------------------------------------


class CaptureServer:
    """``draftsmith capture serve`` of *recipe* at *host*, with one row in a forward pass: the same states always."""

    def __init__(self, recipe: Path, log: Path, host: str, port: int, inside: Sequence[str] = ()) -> None:
        self.url = f"http://{host}:{port}"
        self._log = log
        self._command = [
            *inside, sys.executable, "-m", "draftsmith", "capture", "serve", str(recipe),
            "--host", host, "--port", str(port), "--vllm=--max-num-seqs 1",
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait(self, seconds: float = _LONGEST) -> CaptureServer:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + "/draftsmith/capture", timeout=5, trust_env=False).status_code == 200:
                    return self
            time.sleep(0.2)
        pytest.fail(f"the server does not answer:\n{self._log.read_text()[-3000:]}")

    def signal(self, number: int) -> None:
        """To all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()


# --- networks ------------------------------------------------------------------------------------------------------


@frozen
class Networks:
    """Addresses of this network, and of two others that reach it and each other by it alone.

    Attributes:
        problem: why there is this network only; None: there are three.
        capture, train: what to start a command with that is to run in the network of that name.
    """

    here: str = "127.0.0.1"
    there: str = "127.0.0.1"
    problem: str | None = None
    capture: tuple[str, ...] = field(default=())
    train: tuple[str, ...] = field(default=())


@contextmanager
def networks() -> Iterator[Networks]:
    """Two network namespaces and a bridge between them and this one, where this process may make them."""
    number = os.getpid() % 250 + 1
    bridge, names = f"ds{number}br", (f"ds{number}capture", f"ds{number}train")
    undo: list[str] = []
    try:
        _ip(f"link add {bridge} type bridge")
        undo.append(f"link del {bridge}")
        _ip(f"address add 10.77.{number}.1/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        for host, name in enumerate(names, start=2):
            _ip(f"netns add {name}")
            undo.append(f"netns del {name}")
            _ip(f"link add ds{number}v{host} type veth peer name eth0 netns {name}")
            _ip(f"link set ds{number}v{host} master {bridge} up")
            _ip(f"-n {name} address add 10.77.{number}.{host}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")
        inside = [("ip", "netns", "exec", name) for name in names]
        made = Networks(f"10.77.{number}.1", f"10.77.{number}.2", None, *inside)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        made = Networks(problem=f"this process may make no networks: {told.strip()}")
    try:
        yield made
    finally:
        for each in reversed(undo):
            _ip(each)


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, check=True)
