"""Online training as it is used: a real draft, through both transports, with a store that dies in the middle."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml
from rich.console import Console

from draftsmith.checkpoint.training import read_newest
from draftsmith.config.load import load_recipe
from draftsmith.config.resolve import resolve
from draftsmith.pipeline import run_all
from draftsmith.plugins import load_plugins
from draftsmith.testing.training import assert_same_training
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.train.run import run_train, train_fingerprint
from draftsmith_hs_mooncake.testing import running_store

pytestmark = pytest.mark.slow

WORDS = ("the", "grass", "is", "green", "and", "holds", "a", "dye", "that", "eats", "red", "light", "while", "stones")


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A recipe whose draft was trained on states that were captured before, a row in a forward pass."""
    folder = tmp_path_factory.mktemp("online")
    draw = random.Random(0)
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
        for _ in range(40):
            words = [" ".join(draw.choices(WORDS, k=draw.randint(4, 30))) for _ in range(2)]
            messages = [{"role": "user", "content": words[0]}, {"role": "assistant", "content": words[1]}]
            file.write(json.dumps({"messages": messages}) + "\n")
    recipe = {
        "verifier": str(make_tiny_verifier(folder / "verifier", "llama")),
        "output": str(folder / "run"),
        "algorithm": "eagle3",
        "transport": "hs_file",
        "observers": [],
        "data": {"sources": ["chats.jsonl"], "max_length": 96, "validation_share": 0.2},
        "vocabulary": {"draft_size": 128},
        "capture": {"engine": "transformers", "batch_tokens": 1},
        "online": {"ahead": 8, "in_flight": 4},
        "train": {"epochs": 2, "tokens_per_row": 192, "checkpoint_every": 3, "validate_every": 4},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    run_all(resolve(load_recipe(path), load_plugins()), None, stages=["prepare", "capture", "train"])
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with running_store(tmp_path_factory.mktemp("store"), size=64 << 20) as running:
        yield running


@pytest.fixture
def make(offline, tmp_path, store):
    """``make(transport, *overrides)``: the run online, in a folder that holds the prepared data alone."""
    shutil.copytree(offline.parent / "run" / "prepared", tmp_path / "run" / "prepared")
    address = f"{{master: '{store.note.master}', admin: '{store.note.admin}'}}"
    named = {"hs_file": "hs_file", "hs_mooncake": f"{{name: hs_mooncake, options: {address}}}"}

    def overrides(transport, *more):
        return [f"output={tmp_path / 'run'}", "capture.mode=online", f"transport={named[transport]}", *more]

    def build(transport, *more):
        return resolve(load_recipe(offline, overrides(transport, *more)), load_plugins())

    build.overrides = overrides
    return build


def same_as_offline(offline, run):
    assert_same_training(offline.parent / "run" / "training", run.folders.training)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("transport", ["hs_file", "hs_mooncake"])
def test_the_weights_are_those_of_an_offline_run(offline, make, store, transport, keep):
    run = make(transport, f"online.keep={keep}")
    run_train(run)
    same_as_offline(offline, run)
    assert store.all_keys() == []
    files = [each for each in run.folders.states.rglob("*") if each.is_file()]
    assert bool(files) == (keep and transport == "hs_file")


def test_killed_with_a_store_it_ends_in_the_same_bits_and_leaves_no_key(offline, make, store):
    words = [word for each in make.overrides("hs_mooncake") for word in ("--set", each)]
    command = [sys.executable, "-m", "draftsmith", "train", str(offline), *words]
    run = make("hs_mooncake")
    log = run.folders.training / "metrics.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > 5):
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert read_newest(run.folders.training).state.step > 0
    run_train(run)
    same_as_offline(offline, run)
    assert store.all_keys() == []


@pytest.mark.parametrize("victim", ["owner", "master"])
def test_a_store_that_dies_in_the_middle_costs_time_and_no_bit(offline, make, store, victim):
    run, text = make("hs_mooncake"), io.StringIO()
    log = run.folders.training / "metrics.jsonl"

    def kill():
        while not (log.exists() and log.read_bytes().count(b"\n") > 5):
            time.sleep(0.01)
        os.kill(getattr(store.now, f"{victim}_process")["pid"], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    record = run_train(run, Console(file=text, width=300))
    thread.join()
    same_as_offline(offline, run)
    assert store.all_keys() == []
    if record.summary["online"]["regenerated"]:
        assert "captured again" in text.getvalue()


def test_only_what_decides_the_states_makes_another_training(make):
    base = train_fingerprint(make("hs_file"))
    assert train_fingerprint(make("hs_mooncake")) == base
    assert train_fingerprint(make("hs_file", "transport={name: hs_file, options: {shard_mebibytes: 9}}")) == base
    assert train_fingerprint(make("hs_file", "transport={name: hs_file, options: {encoding: fp8}}")) != base
