"""States captured while training: the same weights as offline, in whatever order they come, and nothing left behind."""

from __future__ import annotations

import importlib
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
from pathlib import Path

import pytest
import torch
from rich.console import Console

from draftsmith.capture.endpoints import EndpointFailed, EngineEndpoint
from draftsmith.capture.run import make_engine
from draftsmith.capture.states import run_transport, state_layout
from draftsmith.checkpoint.training import read_newest
from draftsmith.errors import (
    ConfigError,
    DiskSpaceError,
    FingerprintMismatch,
    NumericsError,
    SampleError,
    ServingError,
)
from draftsmith.pipeline import run_all
from draftsmith.testing.training import assert_same_training
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.train import online_setup
from draftsmith.train.online_setup import check_room
from draftsmith.train.run import run_train, train_fingerprint

pytestmark = pytest.mark.slow

TOY = Path(__file__).parent / "toy"
TRAIN = {"epochs": 2, "checkpoint_every": 2, "validate_every": 3, "rows_per_step": 2, "warmup_share": 0.2}
#: One row in a forward pass: what a row's states are depends on nothing else then.
CAPTURE = {"engine": "transformers", "batch_tokens": 1}
ONLINE = ["capture.mode=online", "online.ahead=6", "online.in_flight=3"]


@pytest.fixture(scope="module")
def case():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOY))
        patch.setenv("PYTHONPATH", f"{TOY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield importlib.import_module("draftsmith_toy.case")


@pytest.fixture(scope="module")
def offline(case, tmp_path_factory):
    """The recipe, with a folder ``run`` in which all states were captured before training, and a draft was trained."""
    folder = tmp_path_factory.mktemp("online")
    verifier = make_tiny_verifier(folder / "verifier", "llama")
    recipe = case.write_recipe(folder, verifier, conversations=40, train=TRAIN, capture=CAPTURE)
    case.prepare_and_capture(recipe)
    case.train(recipe)
    return recipe


@pytest.fixture
def make(case, offline, tmp_path):
    """``make(*overrides)``: the same run, online, in a folder of its own that holds the prepared data alone."""
    output = tmp_path / "run"
    shutil.copytree(offline.parent / "run" / "prepared", output / "prepared")

    def build(*overrides):
        return case.resolved(offline, [f"output={output}", *ONLINE, *overrides])

    return build


def same_as_offline(offline, run):
    whole = offline.parent / "run" / "training"
    assert_same_training(whole, run.folders.training)
    assert (whole / "metrics.jsonl").read_bytes() == (run.folders.training / "metrics.jsonl").read_bytes()


def left(run):
    """Files of hidden states that a run left."""
    return [path for path in run.folders.states.rglob("*") if path.is_file()]


def rows_of(run):
    from draftsmith.data.dataset import open_prepared

    data = open_prepared(run.folders.prepared)
    return [*data.train, *data.validation]


def threads():
    return {each.name for each in threading.enumerate() if each.name.startswith("draftsmith")}


def test_the_weights_are_those_of_an_offline_run(offline, make):
    text = io.StringIO()
    run = make()
    record = run_train(run, Console(file=text, width=300))
    same_as_offline(offline, run)
    assert not run.folders.states.exists()
    assert not threads()
    figures = record.summary["online"]
    uses = len([row for row in rows_of(run)])
    assert figures["captured"] > 2 * uses * 0.8  # every use anew
    assert figures["reused"] == figures["regenerated"] == figures["refused"] == 0
    assert 0 <= figures["trainer_idle"] <= 1
    assert 0 <= figures["capture_idle"] <= 1
    assert "the trainer waited" in text.getvalue()
    assert "at most 6 samples ahead" in text.getvalue()


def test_what_is_kept_is_captured_once(offline, make):
    run = make("online.keep=true")
    record = run_train(run)
    same_as_offline(offline, run)
    assert record.summary["online"]["captured"] == len(rows_of(run))
    with run_transport(run).reader(state_layout(run)) as reader:
        assert reader.complete_ids() == {row.sample_id for row in rows_of(run)}
