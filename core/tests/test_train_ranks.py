"""Several processes train one draft: real torchrun, two processes, gloo."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ports import free_port
from waiting import wait_until

from draftsmith.checkpoint.training import checkpoints, read_newest
from draftsmith.errors import NumericsError
from draftsmith.testing import training
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.train.distributed import ALONE, Ranks, _buckets, join
from draftsmith.train.loop import _check_same_weights, weight_checksums

#: Seconds for what two processes do on a busy machine.
LONGEST = 300.0
TRAIN = {
    "epochs": 2,
    "tokens_per_row": 128,
    "rows_per_step": 3,
    "checkpoint_every": 2,
    "validate_every": 3,
    "compute_dtype": "float32",
    "rank_timeout": LONGEST,
}
#: A port of this process's own: another run of the tests on this machine may be using torchrun's default.
PORT = ("--master-port", str(free_port()))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *PORT]
COMMAND = [*TORCHRUN, "-m", "draftsmith", "train"]


@pytest.fixture(scope="module")
def captured(case, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    verifier = make_tiny_verifier(folder / "verifier", "llama")
    recipe = case.write_recipe(folder, verifier, conversations=40, train=TRAIN)
    case.prepare_and_capture(recipe)
    return recipe


class Copy:
    """A run of its own from the same prepared data and states."""

    def __init__(self, recipe, folder, **settings):
        self.recipe, self.output = recipe, folder / "run"
        shutil.copytree(recipe.parent / "run", self.output)
        self.overrides = [f"output={self.output}", *(f"{key}={value}" for key, value in settings.items())]

    @property
    def training(self):
        return self.output / "training"

    def arguments(self):
        return [str(self.recipe), *(word for override in self.overrides for word in ("--set", override))]

    def start(self, command=COMMAND, **environment):
        return subprocess.Popen(
            [*command, *self.arguments()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=lambda: os.nice(10),  # whoever waits for one of its steps is not to be late
        )

    def finish(self, command=COMMAND, **environment):
        process = self.start(command, **environment)
        output, errors = process.communicate(timeout=LONGEST)
        assert process.returncode == 0, errors
        return output

    def fail(self, command=COMMAND, **environment):
        """What is said in the end."""
        process = self.start(command, **environment)
        output, errors = process.communicate(timeout=LONGEST)
        assert process.returncode != 0, output
        assert errors.count("Traceback") <= 1  # the launcher's own
        return errors

    def wait_for_steps(self, process, count):
        path = self.training / "metrics.jsonl"

        def done():
            assert process.poll() is None, process.communicate()
            return path.exists() and path.read_bytes().count(b'"train"') >= count

        wait_until(done, f"step {count}", LONGEST)

    def metrics(self):
        return [json.loads(line) for line in (self.training / "metrics.jsonl").read_text().splitlines()]


def workers(process):
    """Process ids of the ranks, in order."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = {}
    for child in map(int, children):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks.update({int(each[5:]): child for each in variables if each.startswith(b"RANK=")})
    return [ranks[rank] for rank in sorted(ranks)]


def assert_same_training(first, second):
    training.assert_same_training(first.training, second.training)
    assert (first.training / "metrics.jsonl").read_bytes() == (second.training / "metrics.jsonl").read_bytes()


def assert_close(ours, theirs):
    """Two lines of metrics."""
    assert ours.pop("phase") == theirs.pop("phase")
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


#: Writes down which samples this rank trained on at which step. Its last argument is a folder.
RECORDED = """
import json, os, sys
from draftsmith.cli import main
from draftsmith.train import loop

folder = sys.argv.pop(1)
one_step, train_step = loop._one_step, loop.train_step
now = []

def noted_step(job, state, *rest):
    now[:] = [state.step]
    return one_step(job, state, *rest)

def noted(objective, optimizers, rows, generators, **more):
    result = train_step(objective, optimizers, rows, generators, **more)
    with open(f"{folder}/{os.environ['RANK']}.jsonl", "a") as file:
        file.write(json.dumps([now[0], [row.sample_ids for row in rows]]) + "\\n")
    return result

loop._one_step, loop.train_step = noted_step, noted
main(["train", *sys.argv[1:]]) and sys.exit(1)
"""


def recorded_command(folder):
    script = folder / "recorded.py"
    script.write_text(RECORDED)
    return [*TORCHRUN, str(script), str(folder)]


@pytest.fixture(scope="module")
def uninterrupted(captured, tmp_path_factory):
    run = Copy(captured, tmp_path_factory.mktemp("whole"))
    run.finish()
    return run


@pytest.mark.slow
def test_two_processes_train_what_one_does(case, captured, tmp_path):
    settings = {"algorithm.options.dropout": 0.0}  # whose draws are a process's own
    one, two = (Copy(captured, tmp_path / name, **settings) for name in ("one", "two"))
    case.train(one.recipe, one.overrides)
    output = two.finish()
    assert output.count("by 2 processes") == 1
    alone, together = read_newest(one.training), read_newest(two.training)
    assert alone.state.step == together.state.step > 4
    assert alone.state.tokens == together.state.tokens
    for name, tensor in alone.model.items():
        torch.testing.assert_close(together.model[name], tensor, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(one.metrics(), two.metrics(), strict=True):
        assert_close(ours, theirs)
    first, second = one.metrics()[0], two.metrics()[0]  # of the same weights
    assert {**first, "gradient_norm": 0} == {**second, "gradient_norm": 0}


@pytest.mark.slow
def test_two_runs_of_two_processes_are_bit_identical(captured, uninterrupted, tmp_path):
    run = Copy(captured, tmp_path)
    run.finish()
    assert_same_training(uninterrupted, run)
    assert "rank 1 cpu" in read_newest(run.training).state.random_states


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_nothing_is_lost_or_doubled(case, captured, uninterrupted, tmp_path):
    run = Copy(captured, tmp_path)
    command = recorded_command(tmp_path)
    process = run.start(command)
    run.wait_for_steps(process, 5)
    os.kill(workers(process)[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=LONGEST / 2)  # sooner than the others would give up waiting
    assert process.returncode == 1
    assert "another process of this training has ended" in errors
    assert "start the same command again" in errors
    run.finish(command)
    assert_same_training(uninterrupted, run)
    used = {}
    for rank in (0, 1):
        for line in (tmp_path / f"{rank}.jsonl").read_text().splitlines():
            step, rows = json.loads(line)
            used[step, rank] = rows  # of the attempt that counted, which is the last
    steps = sorted({step for step, _ in used})
    assert steps == list(range(read_newest(run.training).state.step))
    table = case.resolved(captured).folders.prepared
    wanted = sorted(importlib.import_module("draftsmith.data.dataset").open_prepared(table).train.sample_ids)
    for epoch in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
        trained = [name for step in epoch for rank in (0, 1) for row in used[step, rank] for name in row]
        assert sorted(trained) == wanted


@pytest.mark.slow
def test_the_launcher_starts_all_again_after_a_kill(captured, uninterrupted, tmp_path):
    run = Copy(captured, tmp_path)
    process = run.start([*TORCHRUN, "--max-restarts", "1", "-m", "draftsmith", "train"])
    run.wait_for_steps(process, 5)
    os.kill(workers(process)[1], signal.SIGKILL)
    output, errors = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, errors
    assert "going on after step" in output
    assert_same_training(uninterrupted, run)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "rank 0", "rank 1"])
def test_a_signal_to_any_stops_all_at_one_step(captured, uninterrupted, tmp_path, whom):
    run = Copy(captured, tmp_path, **{"train.checkpoint_every": 1000, "train.validate_every": 1000})
    process = run.start()
    run.wait_for_steps(process, 2)
    os.kill(process.pid if whom == "launcher" else workers(process)[int(whom[-1])], signal.SIGTERM)
    _, errors = process.communicate(timeout=LONGEST)
    assert errors.count("it is saved") == 1, errors
    if whom != "launcher":  # it tells how its processes ended
        assert "exitcode  : 143" in errors
    stopped = read_newest(run.training)
    assert stopped.state.step == run.metrics()[-1]["step"] >= 2
    assert [path.name for path in (run.training / "checkpoints").iterdir()] == [stopped.path.name]
    run.finish()
    assert torch.equal(
        read_newest(run.training).model["fc.weight"], read_newest(uninterrupted.training).model["fc.weight"]
    )


@pytest.mark.slow
def test_a_bad_sample_of_one_rank_ends_all_with_one_message(captured, tmp_path):
    run = Copy(captured, tmp_path, **{"train.rank_timeout": 2 * LONGEST})  # nobody waits for so long
    command = recorded_command(tmp_path)
    run.finish(command)
    step, rows = json.loads((tmp_path / "1.jsonl").read_text().splitlines()[1])
    bad = rows[0][0]
    damaged = [path for path in (run.output / "states" / "samples").rglob(f"*{bad}*") if path.is_file()]
    assert damaged
    for path in damaged:
        path.unlink()
    shutil.rmtree(run.training)
    errors = run.fail()
    assert errors.count(f"sample {bad}") == 1
    assert "ended, or does not answer" not in errors
    assert read_newest(run.training) is None or read_newest(run.training).state.step <= step
    assert (run.output / "states" / "suspect").exists()


#: Changes what the first argument says, on rank 1 alone where it matters.
CHANGED = """
import contextlib, os, sys, time
from pathlib import Path
import attrs, torch
from draftsmith.cli import main
from draftsmith.train import loop, rows
from draftsmith_tiny.algorithm import Tiny

def gloo_threads():
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            names.append(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    return [name for name in names if "gloo" in name]

what, second = sys.argv.pop(1), os.environ.get("RANK") == "1"
if what == "nan" and second:
    inner = loop.to_device
    loop.to_device = lambda row, *more: attrs.evolve(inner(row, *more), taps=inner(row, *more).taps * torch.nan)
if what == "recipe" and second:
    sys.argv += ["--set", "train.seed=7"]
if what == "drift" and second:
    step = loop.train_step
    def drifting(objective, *rest, **more):
        result = step(objective, *rest, **more)
        with torch.no_grad():
            objective.model.fc.weight[0, 0] += 1e-3
        return result
    loop.train_step = drifting
if what == "bug" and second:
    Tiny.make_batch = lambda *_: {}["no such key"]
if what == "finish":
    def finish(self, model, validation):
        with torch.no_grad():
            mean = torch.cat([scored.acceptance for _, scored in validation]).mean()
            model.fc.weight.mul_(0.5)
        return {"mean": mean, "rows": len(list(validation))}
    Tiny.finish = finish
code = main(["train", *sys.argv[1:]])
if what == "threads":
    deadline = time.monotonic() + 60
    while (left := gloo_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that was joined is listed for another moment
    code = code or ", ".join(left) or 0
sys.exit(code)
"""


def changed_command(folder, what, launcher=TORCHRUN):
    script = folder / "changed.py"
    script.write_text(CHANGED)
    return [*launcher, str(script), what]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nan", "the loss is not finite"),
        ("recipe", "rank 0 → rank 1: train.seed: 0 → 7"),
        ("drift", "the weights of rank 1 are not those of rank 0: fc.weight"),
        ("bug", "rank 1: KeyError: 'no such key'"),
    ],
)
def test_what_fails_on_one_rank_ends_all_with_one_message(captured, tmp_path, what, message):
    run = Copy(captured, tmp_path)
    errors = run.fail(changed_command(tmp_path, what))
    assert errors.count(message) == 1, errors
    assert errors.count("error: ") == 1, errors
    assert read_newest(run.training) is None


@pytest.mark.slow
def test_no_thread_of_the_process_group_outlives_it(captured, tmp_path):
    # One that does may abort the process while the interpreter ends, after a training that went well.
    Copy(captured, tmp_path).finish(changed_command(tmp_path, "threads"))


@pytest.mark.slow
def test_the_last_hand_sees_all_validation_rows(captured, tmp_path):
    settings = {"algorithm.options.dropout": 0.0}
    one, two = (Copy(captured, tmp_path / name, **settings) for name in ("one", "two"))
    one.finish(changed_command(tmp_path, "finish", [sys.executable]))
    two.finish(changed_command(tmp_path, "finish"))
    ours, theirs = (run.metrics()[-1] for run in (one, two))
    assert ours["phase"] == "finish"
    assert ours["rows"] > 2
    assert_close(ours, theirs)
    assert (two.training / "finished" / "model.safetensors").exists()


def as_one_of_two(*arguments, rank=0):
    return subprocess.run(
        [sys.executable, "-m", "draftsmith", *arguments],
        env={**os.environ, "WORLD_SIZE": "2", "RANK": str(rank)},
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )


@pytest.mark.parametrize("command", ["prepare", "capture", "run", "export", "verify"])
def test_training_alone_is_done_by_several_processes(captured, command):
    done = as_one_of_two(command, str(captured))
    assert done.returncode == 2
    assert "one of 2 processes" in done.stderr
    assert "run this command once, without torchrun" in done.stderr
    other = as_one_of_two(command, str(captured), rank=1)
    assert other.returncode == 2
    assert not other.stderr  # the first one has said it


def test_more_processes_than_rows_are_refused(captured):
    done = as_one_of_two("train", str(captured), "--set", "train.rows_per_step=1")
    assert done.returncode == 2
    assert "train.rows_per_step: 2 processes cannot share the 1 row of a step" in done.stderr
    assert "a multiple of 2" in done.stderr


def test_a_process_that_cannot_find_the_others_says_so(captured, tmp_path):
    run = Copy(captured, tmp_path)
    done = as_one_of_two("train", *run.arguments())
    assert done.returncode == 2
    assert "cannot find the others" in done.stderr
    assert "unset WORLD_SIZE" in done.stderr


#: What two ranks do with one another.
TOGETHER = """
import sys
import torch, torch.distributed as dist
from draftsmith.errors import DataError, RanksLost, is_shared
from draftsmith.train.distributed import join

with join("cpu", timeout=120) as ranks:
    assert ranks.world == 2
    assert ranks.exchange(f"of {ranks.rank}") == ["of 0", "of 1"]
    assert ranks.share(ranks.rank + 5) == 5
    with join("cpu") as again:
        assert again == ranks
    shapes = [(3,), (1 << 23,), (2, 3), (1,), (4, 5)]
    mine = [torch.randn(shape, generator=torch.Generator().manual_seed(ranks.rank)) for shape in shapes]
    mine[2] = mine[2].t()
    both = [[torch.randn(s, generator=torch.Generator().manual_seed(r)) for s in shapes] for r in (0, 1)]
    ranks.exchange(None)
    ranks.sum_(mine)
    for place, tensor in enumerate(mine):
        wanted = both[0][place] + both[1][place]
        assert torch.equal(tensor, wanted.t() if place == 2 else wanted)
    sent = {"a": torch.arange(6).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(True),
            "d": torch.empty(0, 4)}
    got = ranks.share_tensors(sent if ranks.first else None)
    assert list(got) == list(sent)
    assert all(torch.equal(got[name], sent[name]) and got[name].dtype == sent[name].dtype for name in sent)
assert not dist.is_initialized()
"""

LOST = """
from draftsmith.errors import DataError, RanksLost, is_shared
from draftsmith.train.distributed import join

try:
    with join("cpu", timeout=120) as ranks:
        if ranks.rank == 1:
            raise DataError("nothing there", where="rank 1's disk", hint="look")
        ranks.exchange(None)
except DataError as error:
    assert is_shared(error) and error.where == "rank 1's disk", error
else:
    raise AssertionError
"""

SLOW = """
import os
from pathlib import Path
from draftsmith.errors import RanksLost
from draftsmith.train.distributed import join
from waiting import wait_until

here = Path(__file__).parent
(here / os.environ["RANK"]).touch()
wait_until(lambda: (here / "0").exists() and (here / "1").exists(), "both have imported everything")
with join("cpu", timeout=4) as ranks:
    ranks.exchange(None)
    if ranks.rank == 1:
        wait_until((here / "told").exists, "the other one gives up")
    else:
        try:
            ranks.exchange(None)
        except RanksLost as error:
            assert "does not answer" in str(error) and "train.rank_timeout" in str(error)
            (here / "told").touch()
        else:
            raise AssertionError
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [TOGETHER, LOST, SLOW], ids=["together", "lost", "slow"])
def test_two_ranks(case, repository, tmp_path, monkeypatch, script):
    monkeypatch.setenv("PYTHONPATH", str(repository / "tests" / "support"), prepend=os.pathsep)
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run([*TORCHRUN, str(path)], capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0, done.stderr


def test_alone_there_is_nobody_to_wait_for():
    with join() as ranks:
        assert ranks is ALONE
        assert not torch.distributed.is_initialized()
        assert ranks.exchange("x") == ["x"]
        tensor = torch.ones(3)
        ranks.sum_([tensor])
        assert torch.equal(tensor, torch.ones(3))
        assert ranks.mine(range(5)) == range(5)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 7])
def test_every_place_belongs_to_one_rank(world, count):
    parts = [Ranks(rank, world).mine(range(count)) for rank in range(world)]
    assert Ranks(0, world).in_order(parts) == list(range(count))


def test_buckets_are_bounded_and_keep_the_order():
    sizes = [1 << 20, 7 << 20, 1, 9 << 20, 3, 2]
    tensors = [torch.empty(size, dtype=torch.float32) for size in sizes]
    tensors.insert(4, torch.empty(8, dtype=torch.float64))
    found = list(_buckets(tensors))
    assert [each for bucket in found for each in bucket] == tensors
    assert all(len(bucket) == 1 or sum(each.nbytes for each in bucket) <= 32 << 20 for bucket in found)
    assert all(len({each.dtype for each in bucket}) == 1 for bucket in found)


def test_weights_that_drift_apart_are_found(case, tmp_path):
    model = case.objective(case.setup(make_tiny_verifier(tmp_path / "verifier", "llama"))).model
    before = weight_checksums(model)
    _check_same_weights([before, weight_checksums(model)])
    with torch.no_grad():
        model.norm.weight[3] = torch.nextafter(model.norm.weight[3], torch.tensor(9.0))
    with pytest.raises(NumericsError, match=r"rank 1 are not those of rank 0: norm\.weight"):
        _check_same_weights([before, weight_checksums(model)])
    assert checkpoints(tmp_path) == []
