"""Training checkpoints: all or nothing on disk, damage found, the right ones kept."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from draftsmith.checkpoint.training import (
    Best,
    TrainingState,
    checkpoints,
    load_training_weights,
    load_weights_into,
    prune,
    random_states,
    read_newest,
    restore_random_states,
    trained_tensors,
    write_checkpoint,
)
from draftsmith.errors import CheckpointError


def tensors(step):
    generator = torch.Generator().manual_seed(step)
    return {"a": torch.randn(16, 4, generator=generator), "b": torch.randn(3, generator=generator)}


def write(folder, step, **state):
    return write_checkpoint(folder, TrainingState(step=step, **state), tensors(step), {"x/a/m": tensors(step)["a"]})


def steps(folder):
    return [int(path.name.removeprefix("step-")) for path in checkpoints(folder)]


def test_everything_comes_back(tmp_path):
    state = TrainingState(
        step=7,
        tokens=123,
        validated=6,
        validation={"eal": 2.5},
        best=Best(step=6, eal=2.5, loss=0.1, metrics={"eal": 2.5}),
        log_bytes=99,
        skipped=("0" * 32,),
        random_states=random_states(),
        environment={"threads": "2"},
    )
    write_checkpoint(tmp_path, state, tensors(7), {"x/a/m": tensors(8)["a"]})
    found = read_newest(tmp_path)
    assert found.state == state
    assert torch.equal(found.model["a"], tensors(7)["a"])
    assert torch.equal(found.optimizer["x/a/m"], tensors(8)["a"])


def test_its_files_are_as_readable_as_others(tmp_path):
    (tmp_path / "made.txt").touch()
    modes = {path.stat().st_mode for path in write(tmp_path, 5).iterdir()}
    assert modes == {(tmp_path / "made.txt").stat().st_mode}


def test_nothing_there_is_none(tmp_path):
    assert read_newest(tmp_path) is None
    with pytest.raises(CheckpointError, match="no training checkpoint"):
        load_training_weights(tmp_path)


def truncate(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path):
    data = path.read_bytes()
    if path.suffix == ".json":
        changed = data.replace(b'"step": 10', b'"step": 11')
    else:
        changed = data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
    assert changed != data
    path.write_bytes(changed)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", [truncate, flip, lambda path: path.unlink()], ids=["cut", "flipped", "gone"])
def test_a_damaged_newest_one_falls_back_with_a_message(tmp_path, file, damage):
    write(tmp_path, 5)
    damage(write(tmp_path, 10) / file)
    messages = []
    found = read_newest(tmp_path, messages.append)
    assert found.state.step == 5
    assert len(messages) == 1
    assert "step-00000010" in messages[0]


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path):
    truncate(write(tmp_path, 5) / "model.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint of this run can be read"):
        read_newest(tmp_path)


def test_a_half_written_one_is_never_seen(tmp_path):
    write(tmp_path, 5)
    torn = tmp_path / "checkpoints" / ".step-00000010.77.tmp"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    assert read_newest(tmp_path).state.step == 5
    prune(tmp_path, current=5, keep=2, best=None)
    assert not torn.exists()


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step in (2, 4, 6, 8, 10):
        write(tmp_path, step)
    prune(tmp_path, current=10, keep=2, best=4)
    assert steps(tmp_path) == [10, 8, 4]


def test_damaged_ones_ahead_of_the_run_do_not_count(tmp_path):
    for step in (2, 4, 6):
        write(tmp_path, step)
    prune(tmp_path, current=4, keep=2, best=None)
    assert steps(tmp_path) == [4, 2]


def test_weights_of_the_best_or_of_the_last(tmp_path):
    write(tmp_path, 4)
    write(tmp_path, 8, best=Best(step=4, eal=2.0, loss=1.0))
    best, step = load_training_weights(tmp_path)
    assert (step, torch.equal(best["a"], tensors(4)["a"])) == (4, True)
    last, step = load_training_weights(tmp_path, "last")
    assert (step, torch.equal(last["a"], tensors(8)["a"])) == (8, True)


def test_damaged_ones_are_told_of_when_weights_are_taken(tmp_path):
    best = Best(step=4, eal=3.0, loss=1.0)
    write(tmp_path, 4, best=best)
    write(tmp_path, 8, best=best)
    truncate(write(tmp_path, 12, best=best) / "model.safetensors")
    messages = []
    assert load_training_weights(tmp_path, "best", messages.append)[1] == 4
    assert "step-00000012" in messages[0]
    truncate(tmp_path / "checkpoints" / "step-00000004" / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match="the best checkpoint is not whole") as caught:
        load_training_weights(tmp_path)
    assert "draftsmith train" in caught.value.hint


def test_acceptance_decides_the_best_then_the_loss():
    old = Best(step=1, eal=2.0, loss=1.0)
    assert old.beats(None)
    assert Best(step=2, eal=2.1, loss=3.0).beats(old)
    assert Best(step=2, eal=2.0, loss=0.9).beats(old)
    assert not Best(step=2, eal=2.0, loss=1.0).beats(old)
    assert not Best(step=2, eal=float("nan"), loss=0.0).beats(old)


_LITTLE_ROOM = """
import pathlib, resource, sys, torch
from draftsmith.checkpoint.training import TrainingState, write_checkpoint
from draftsmith.errors import DiskSpaceError
# The kernel refuses to let any file grow beyond the limit, in the middle of a write, as on a full disk.
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_checkpoint(pathlib.Path(sys.argv[1]), TrainingState(step=10), {"a": torch.zeros(64, 1024)}, {})
except DiskSpaceError as error:
    print(error)
"""


def test_no_room_leaves_the_old_one_usable_and_no_debris(tmp_path):
    write(tmp_path, 5)
    done = subprocess.run([sys.executable, "-c", _LITTLE_ROOM, str(tmp_path)], capture_output=True, text=True)
    assert "the disk is full" in done.stdout, done.stderr
    assert "goes on where it stopped" in done.stdout
    assert read_newest(tmp_path).state.step == 5
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


def test_nothing_is_pickled(tmp_path):
    path = write(tmp_path, 5)
    assert sorted(each.name for each in path.iterdir()) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    json.loads((path / "state.json").read_text())


def test_generators_go_on_where_they_were():
    torch.manual_seed(3)
    torch.rand(5)
    states = json.loads(json.dumps(random_states()))
    expected = torch.rand(4)
    torch.manual_seed(99)
    restore_random_states(states)
    assert torch.equal(torch.rand(4), expected)


class Draft(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(3, 3)
        self.theirs = nn.Linear(3, 3, bias=False)

    def shared_tensors(self):
        return {"theirs.weight": self.theirs.weight}


def test_the_verifiers_tensors_are_not_stored():
    draft, other = Draft(), Draft()
    saved = trained_tensors(draft)
    assert set(saved) == {"own.weight", "own.bias"}
    load_weights_into(other, saved)
    assert torch.equal(other.own.weight, draft.own.weight)
    assert not torch.equal(other.theirs.weight, draft.theirs.weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("own.bias"),
        lambda t: t.update(more=torch.zeros(1)),
        lambda t: t.update({"own.bias": torch.zeros(9)}),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_weights_of_another_network_are_refused(change):
    saved = trained_tensors(Draft())
    change(saved)
    with pytest.raises(CheckpointError, match="another network"):
        load_weights_into(Draft(), saved)
