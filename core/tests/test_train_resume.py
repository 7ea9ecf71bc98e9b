"""Killed at any moment and started again, training ends in the same bits. Real processes, real SIGKILL, real files."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.checkpoint.training import checkpoints, read_newest
from draftsmith.testing import training
from draftsmith.testing.verifiers import make_tiny_verifier

pytestmark = pytest.mark.slow

# Small and frequent: many steps, and a large share of the time inside checkpoints and validations.
TRAIN = {"epochs": 2, "checkpoint_every": 2, "validate_every": 3, "rows_per_step": 2, "warmup_share": 0.2}


@pytest.fixture(scope="module")
def processes(case):
    """Children of a server that has imported everything, and nothing more: a start costs a moment."""
    context = multiprocessing.get_context("forkserver")
    models = ["transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"]
    context.set_forkserver_preload(["draftsmith.train.run", "draftsmith_tiny.case", "datasets", *models])
    return context


@pytest.fixture(scope="module")
def captured(case, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    verifier = make_tiny_verifier(folder / "verifier", "llama")
    recipe = case.write_recipe(folder, verifier, conversations=40, train=TRAIN)
    case.prepare_and_capture(recipe)
    return recipe


class Copy:
    """A run of its own from the same prepared data and states."""

    def __init__(self, recipe, folder, optimizer="adamw", **settings):
        self.recipe = recipe
        self.output = folder / "run"
        shutil.copytree(recipe.parent / "run", self.output)
        settings = {"optimizer": optimizer, **settings}
        self.overrides = [f"output={self.output}", *(f"train.{key}={value}" for key, value in settings.items())]

    @property
    def training(self):
        return self.output / "training"

    def start(self, processes, case):
        process = processes.Process(target=case.train, args=(self.recipe, self.overrides))
        process.start()
        os.setpriority(os.PRIO_PROCESS, process.pid, 10)  # whoever waits for its steps is not to be late
        return process

    def finish(self, processes, case):
        process = self.start(processes, case)
        process.join(300)
        assert process.exitcode == 0
        assert json.loads((self.training / "stage.json").read_text())["complete"]

    def lines(self):
        path = self.training / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for(self, process, condition):
        deadline = time.monotonic() + 300
        while not condition() and process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def command(self, *more):
        sets = [word for override in self.overrides for word in ("--set", override)]
        return [sys.executable, "-m", "draftsmith", "train", str(self.recipe), *sets, *more]


def assert_same_training(first, second):
    """Weights, moments, generators, best, metrics: bit by bit."""
    training.assert_same_training(first.training, second.training)
    assert (first.training / "metrics.jsonl").read_bytes() == (second.training / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(case, processes, captured, tmp_path_factory):
    runs = {}

    def get(optimizer):
        if optimizer not in runs:
            runs[optimizer] = Copy(captured, tmp_path_factory.mktemp(optimizer), optimizer)
            runs[optimizer].finish(processes, case)
        return runs[optimizer]

    return get


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_killed_at_random_moments(case, processes, captured, uninterrupted, tmp_path, optimizer):
    whole = uninterrupted(optimizer)
    killed = Copy(captured, tmp_path, optimizer)
    draw = random.Random(optimizer)
    kills = 0
    for _ in range(5):
        process = killed.start(processes, case)
        # Some steps further, then some milliseconds into whatever comes then.
        target = killed.lines() + draw.randint(0, 4)
        killed.wait_for(process, lambda target=target: killed.lines() > target)
        time.sleep(draw.uniform(0, 0.06))
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        if process.exitcode == 0:
            break
    killed.finish(processes, case)
    assert kills >= 3
    assert_same_training(whole, killed)
    leftovers = [path.name for path in (killed.training / "checkpoints").glob(".*")]
    assert not leftovers


def test_a_damaged_newest_checkpoint_costs_its_steps_and_no_bit(case, processes, captured, uninterrupted, tmp_path):
    run = Copy(captured, tmp_path)
    process = run.start(processes, case)
    run.wait_for(process, lambda: len(checkpoints(run.training)) >= 2)
    process.kill()
    process.join()
    newest = checkpoints(run.training)[0]
    with open(newest / "optimizer.safetensors", "r+b") as file:
        file.truncate(100)
    run.finish(processes, case)
    assert_same_training(uninterrupted("adamw"), run)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_next_start_goes_on(case, processes, captured, uninterrupted, tmp_path, number, code):
    run = Copy(captured, tmp_path, checkpoint_every=1000)
    command = subprocess.Popen(run.command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while run.lines() < 2 and command.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    command.send_signal(number)
    output, errors = command.communicate(timeout=300)
    assert command.returncode == code, (output, errors)
    assert "Traceback" not in errors
    assert "start the same command again" in errors
    stopped = read_newest(run.training).state.step
    last = json.loads((run.training / "metrics.jsonl").read_text().splitlines()[-1])
    assert stopped == last["step"] > 0  # nothing that was done is lost
    assert not json.loads((run.training / "stage.json").read_text())["complete"]
    run.finish(processes, case)
    whole = uninterrupted("adamw")
    assert (run.training / "metrics.jsonl").read_bytes() == (whole.training / "metrics.jsonl").read_bytes()
    first, second = (load_file(checkpoints(each.training)[0] / "model.safetensors") for each in (whole, run))
    assert all(torch.equal(first[name], second[name]) for name in first)


_FULL = """
import resource, sys
from draftsmith_tiny import case
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
import pathlib
from draftsmith.errors import DiskSpaceError
try:
    case.train(pathlib.Path(sys.argv[2]), sys.argv[3:])
except DiskSpaceError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_no_room_for_a_checkpoint_leaves_the_one_before(case, processes, captured, uninterrupted, tmp_path):
    run = Copy(captured, tmp_path)
    process = run.start(processes, case)
    run.wait_for(process, lambda: len(checkpoints(run.training)) >= 1)
    process.kill()
    process.join()
    before = read_newest(run.training).state.step
    command = [sys.executable, "-c", _FULL, str(2**15), str(run.recipe), *run.overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "the disk is full" in done.stdout
    assert read_newest(run.training).state.step == before
    run.finish(processes, case)
    assert_same_training(uninterrupted("adamw"), run)
