"""States captured while training: the weights of an offline run, whatever order they come in, and nothing left."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console
from waiting import wait_until

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
    Stopped,
    TransportError,
    UserError,
)
from draftsmith.pipeline import run_all
from draftsmith.testing.training import assert_same_training
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.train import online, online_setup
from draftsmith.train.online import verdict
from draftsmith.train.online_setup import check_room
from draftsmith.train.run import run_train, train_fingerprint

pytestmark = pytest.mark.slow

TRAIN = {"epochs": 2, "checkpoint_every": 2, "validate_every": 3, "rows_per_step": 2, "warmup_share": 0.2}
#: One row in a forward pass: what a row's states are depends on nothing else then.
CAPTURE = {"engine": "transformers", "batch_tokens": 1}
ONLINE = ["capture.mode=online", "online.ahead=6", "online.in_flight=3"]


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
    """Ours that are still there after a moment: at the end they are told to go, and not all are waited for."""
    deadline = time.monotonic() + 60
    while found := {each.name for each in threading.enumerate() if each.name.startswith("draftsmith")}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return found


def test_the_weights_are_those_of_an_offline_run(offline, make):
    text = io.StringIO()
    run = make()
    record = run_train(run, Console(file=text, width=300))
    same_as_offline(offline, run)
    assert not run.folders.states.exists()
    assert not threads()
    figures = record.summary["online"]
    assert figures["captured"] > 2 * len(rows_of(run)) * 0.8  # every use anew
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


def test_a_window_of_one_sample_is_enough_for_rows_of_several(offline, make):
    """Each is read before the next is asked for, so that a row never waits for itself."""
    run = make("online.ahead=1", "train.tokens_per_row=256")
    assert max(len(bin_) for bin_ in _bins(run)) > 1
    run_train(run)
    same_as_offline(offline, run)


def _bins(run):
    from draftsmith.data.dataset import open_prepared
    from draftsmith.train.rows import plan_rows

    return plan_rows(open_prepared(run.folders.prepared).train, run.recipe.train.tokens_per_row).bins


class Endpoint(EngineEndpoint):
    """An engine of this process that answers late, fails now and then, refuses rows, dies, or hangs."""

    def __init__(
        self, engine, name, *, slow=0.0, failing=0.0, refused=frozenset(), dies_after=10**9, hangs_after=10**9
    ):
        super().__init__(engine, name=name, slots=4)
        self.slow, self.failing, self.refused = slow, failing, refused
        self.dies_after, self.hangs_after = dies_after, hangs_after
        self.draw = random.Random(name)
        self.seen = 0
        self.hangs = threading.Event()
        self.freed = threading.Event()

    def open(self):
        if self.seen >= self.dies_after:
            raise EndpointFailed("it is gone", endpoint=self.name)
        super().open()

    def close(self):
        self.freed.set()
        super().close()

    def capture(self, request):
        time.sleep(self.draw.uniform(0, self.slow))
        if self.seen >= self.hangs_after:
            self.hangs.set()
            self.freed.wait()
            raise EndpointFailed("it was closed", endpoint=self.name)
        if self.seen >= self.dies_after:
            raise EndpointFailed("it is gone", endpoint=self.name)
        if self.draw.random() < self.failing:
            raise EndpointFailed("it was told to", endpoint=self.name)
        self.seen += 1
        if tuple(request.token_ids) in self.refused:
            from draftsmith.capture.endpoints import Answer

            return Answer(request.sample_id, "7 of 9 values are not finite", 0.0)
        return super().capture(request)


@pytest.fixture
def endpoints(monkeypatch):
    """``endpoints(count, **faults)``: what captures from then on; returns the list that they are put into."""

    def use(count=1, **faults):
        made = []

        def several(run, transport, layout, *, longest):
            engines = (make_engine("transformers", run, transport, layout, longest=longest) for _ in range(count))
            made.extend(Endpoint(engine, f"endpoint {number}", **faults) for number, engine in enumerate(engines))
            return made[-count:]

        monkeypatch.setattr(online_setup, "capture_endpoints", several)
        return made

    return use


@pytest.mark.parametrize("keep", [False, True])
def test_endpoints_may_answer_in_any_order_and_fail(offline, make, endpoints, keep):
    made = endpoints(3, slow=0.03, failing=0.02)
    run = make(f"online.keep={keep}", "online.ahead=12")
    run_train(run)
    same_as_offline(offline, run)
    assert all(each.seen for each in made)
    assert keep == bool(left(run))


def test_a_slow_trainer_finds_no_more_than_the_window(make, monkeypatch):
    """Back-pressure: what is asked for waits until something was read."""
    from draftsmith.train import loop

    run = make("train.epochs=1", "train.validate_every=1000", "train.checkpoint_every=1000")
    most, train_step = [], loop.train_step

    def unread():
        return len([path for path in left(run) if path.suffix == ".safetensors"])

    def slow(*arguments, **named):
        if not most:
            wait_until(lambda: unread() >= 6, "the window is full")
        time.sleep(0.2)
        most.append(unread())
        return train_step(*arguments, **named)

    monkeypatch.setattr(loop, "train_step", slow)
    record = run_train(run)
    assert max(most) == 6
    assert record.summary["online"]["capture_idle"] > record.summary["online"]["trainer_idle"]


def losing(monkeypatch, every, *, times=10**9):
    """Every so many samples are gone when they are to be read."""
    from draftsmith_tiny import transport

    get, count = transport.FilesReader.get, iter(range(10**9))
    left = iter(range(times))

    def lossy(self, sample_id, **named):
        if next(count) % every == every - 1 and next(left, None) is not None:
            self.delete(sample_id)
        return get(self, sample_id, **named)

    monkeypatch.setattr(transport.FilesReader, "get", lossy)


@pytest.mark.parametrize("keep", [False, True])
def test_lost_samples_are_captured_again(offline, make, monkeypatch, keep):
    losing(monkeypatch, 5)
    run, text = make(f"online.keep={keep}"), io.StringIO()
    record = run_train(run, Console(file=text, width=300))
    same_as_offline(offline, run)
    lost = record.summary["online"]["regenerated"]
    assert lost > 3
    lines = [line for line in text.getvalue().splitlines() if "what is lost is captured again" in line]
    assert 0 < len(lines) <= lost


def test_what_stays_lost_is_not_said_to_be_captured_again(make, monkeypatch):
    losing(monkeypatch, 1)
    text = io.StringIO()
    with pytest.raises(SampleError, match="captured 4 times"):
        run_train(make(), Console(file=text, width=300))
    assert "what is lost is captured again" in text.getvalue()
    assert "captured again\n" not in text.getvalue().replace("what is lost is captured again", "")


def test_a_store_that_is_away_is_found_before_data_are_prepared(make, monkeypatch):
    from draftsmith_tiny import transport

    def away(self):
        raise TransportError("the store cannot be reached")

    monkeypatch.setattr(transport.Files, "free_bytes", away)
    run = make()
    shutil.rmtree(run.folders.prepared)
    with pytest.raises(TransportError, match="cannot be reached"):
        run_all(run, None, stages=("prepare", "train"))
    assert not run.folders.prepared.exists()


def test_what_cannot_be_removed_does_not_hide_what_ended_the_run(make, endpoints, monkeypatch):
    from draftsmith_tiny import transport

    remove_all = transport.Files.remove_all

    def gone(self, sample_ids=None):
        if endpoint_list:
            raise UserError("no store is named")
        remove_all(self, sample_ids)

    endpoint_list = endpoints(1, dies_after=25)
    monkeypatch.setattr(transport.Files, "remove_all", gone)
    text = io.StringIO()
    with pytest.raises(ServingError, match="endpoint 0"):
        run_train(make("online.patience=0.5"), Console(file=text, width=300))
    assert "could not be removed: no store is named" in text.getvalue()


@pytest.mark.parametrize(
    ("trainer", "capture", "advice"),
    [
        (0.5, 0.1, "more capture endpoints"),
        (0.1, 0.5, "fewer endpoints would do"),
        (0.5, 0.56, "online.ahead"),
        (0.05, 0.02, "idled 2% of it"),
    ],
)
def test_the_last_line_says_what_would_make_it_faster(trainer, capture, advice):
    assert advice in verdict(trainer, capture)


def reading():
    return sum(each.name == "draftsmith-rows" for each in threading.enumerate())


def calm(reader):
    """The complete samples, when no more come and none goes: everything that was asked for is there, and no validation
    is under way, which would have a thread that reads."""
    deadline = time.monotonic() + 120
    before = None
    while (names := set(reader.complete_ids())) != before or reading() > 1:
        assert time.monotonic() < deadline
        before = names
        time.sleep(0.5)
    return names


@pytest.mark.parametrize("read_meanwhile", [False, True])
def test_a_store_that_loses_all_is_told_once_and_filled_at_once(offline, make, monkeypatch, read_meanwhile):
    """As one that was started anew: whatever waited there is gone. The other stream may read what it has by then."""
    from draftsmith_tiny import transport

    run, text = make("online.ahead=12", "online.in_flight=12"), io.StringIO()
    get, reads, lost, readers = transport.FilesReader.get, iter(range(10**9)), [], []
    look_for_others = online.OnlineStates._look_for_others

    def losing_all(self, sample_id, **named):
        readers.append(self)
        if self is readers[0] and next(reads) in (15, 45):  # of the training's stream, which is the first to read
            names = calm(self)
            lost.append(len(names))
            for name in names:
                self.delete(name)
        return get(self, sample_id, **named)

    def look_while_the_other_stream_reads(self, stream):
        if read_meanwhile:
            self._capture.used(online._Ticket(rows_of(run)[0], "of the other stream", None))
        look_for_others(self, stream)

    monkeypatch.setattr(transport.FilesReader, "get", losing_all)
    monkeypatch.setattr(online.OnlineStates, "_look_for_others", look_while_the_other_stream_reads)
    record = run_train(run, Console(file=text, width=300))
    same_as_offline(offline, run)
    assert sum(lost) > 4
    assert record.summary["online"]["regenerated"] == sum(lost)
    told = text.getvalue()
    assert told.count("what is lost is captured again") == 2
    assert [int(each) for each in re.findall(r"(\d+) lost samples? w", told)] == lost


def test_lost_samples_are_left_out_and_counted_or_stop_the_run(make, monkeypatch):
    losing(monkeypatch, 9, times=2)
    record = run_train(make("online.missing=skip", "train.epochs=1"))
    assert len(record.summary["skipped"]) == 2
    losing(monkeypatch, 20, times=1)
    run = make("online.missing=stop", "train.seed=3")
    with pytest.raises(SampleError, match="no file") as caught:
        run_train(run, overwrite=True)
    assert caught.value.sample_id in {row.sample_id for row in rows_of(run)}
    assert not left(run)
    assert not threads()


def test_a_sample_that_is_lost_again_and_again_is_given_up(make, monkeypatch):
    losing(monkeypatch, 1)
    with pytest.raises(SampleError, match="captured 4 times"):
        run_train(make())


def test_refused_rows_are_left_out_and_too_many_stop_the_run(make, endpoints):
    run = make("train.epochs=2")
    victims = rows_of(run)[:3]
    endpoints(2, refused={tuple(row.token_ids.tolist()) for row in victims})
    record = run_train(run)
    assert sorted(record.summary["skipped"]) == sorted(row.sample_id for row in victims)
    assert record.summary["online"]["refused"] == 3
    assert record.summary["online"]["regenerated"] == 0
    run = make("capture.refused_share=0.01", "train.seed=1")
    with pytest.raises(NumericsError, match="refused"):
        run_train(run, overwrite=True)
    assert not left(run)


def test_endpoints_that_are_all_down_stop_the_run_and_it_goes_on(offline, make, endpoints):
    endpoints(2, dies_after=25)
    run = make("online.patience=0.5", "train.checkpoint_every=1000")
    with pytest.raises(ServingError, match="endpoint 0"):
        run_train(run)
    assert read_newest(run.folders.training).state.step > 0  # what was trained is saved, checkpoint due or not
    assert not left(run)
    endpoints(1)
    run_train(make("train.checkpoint_every=2"))
    same_as_offline(offline, run)


# --- kills and signals ----------------------------------------------------------------------------------------------


def start(offline, run, *more):
    sets = [f"output={run.folders.output}", *ONLINE, *more]
    words = [word for each in sets for word in ("--set", each)]
    command = [sys.executable, "-m", "draftsmith", "train", str(offline), *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.nice(10),  # whoever waits for one of its steps is not to be late
    )


def wait_for_lines(run, process, count):
    path, deadline = run.folders.training / "metrics.jsonl", time.monotonic() + 200
    while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("keep", [False, True])
def test_killed_and_started_again_it_ends_in_the_same_bits(offline, make, keep):
    run = make(f"online.keep={keep}")
    for lines in (3, 9):
        process = start(offline, run, f"online.keep={keep}")
        wait_for_lines(run, process, lines)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert left(run)  # of the killed start, which the next one removes, or takes
    if not keep:  # what it may have been at when it was killed
        (run.folders.states / "samples" / f".{17:032x}.safetensors.17").touch()
    record = run_train(run)
    same_as_offline(offline, run)
    assert keep == bool(left(run))
    assert bool(record.summary["online"]["reused"]) == keep


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_next_start_goes_on(offline, make, number, code):
    run = make()
    process = start(offline, run, "train.checkpoint_every=1000")
    wait_for_lines(run, process, 4)
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == code, (output, errors)
    assert "start the same command again" in errors
    assert "Traceback" not in errors
    assert not left(run)
    stopped = read_newest(run.folders.training).state.step
    assert stopped == json.loads((run.folders.training / "metrics.jsonl").read_text().splitlines()[-1])["step"] > 0
    run_train(make("train.checkpoint_every=2"))
    same_as_offline(offline, run)


def test_a_signal_that_comes_while_the_trainer_waits_stops_it_at_once(offline, make, endpoints):
    made = endpoints(1, hangs_after=20)
    run = make("train.checkpoint_every=1000")

    def signal_when_it_hangs():
        while not (made and made[0].hangs.is_set()):
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=signal_when_it_hangs, name="signals")
    thread.start()
    with pytest.raises(Stopped):  # the endpoint hangs until it is closed
        run_train(run)
    thread.join()
    assert read_newest(run.folders.training).state.step > 0
    assert not left(run)
    endpoints(1)
    run_train(make("train.checkpoint_every=2"))
    same_as_offline(offline, run)


def test_each_rank_captures_its_own_rows(offline, make, tmp_path):
    """Two ranks online end in the bits of two ranks offline; no sample is captured by both."""
    run, whole = make(), tmp_path / "offline"
    shutil.copytree(offline.parent / "run" / "prepared", whole / "prepared")
    shutil.copytree(offline.parent / "run" / "states", whole / "states")
    for sets in ([f"output={run.folders.output}", *ONLINE], [f"output={whole}"]):
        words = [word for each in sets for word in ("--set", each)]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, "-m", "draftsmith", "train", str(offline), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (done.stdout, done.stderr)
    assert_same_training(whole / "training", run.folders.training)
    assert not left(run)
    record = json.loads((run.folders.training / "stage.json").read_text())
    rows = rows_of(run)
    assert record["summary"]["online"]["captured"] < 2 * len(rows)


# --- what stands in the way -----------------------------------------------------------------------------------------


def test_an_offline_training_is_another_one(make, case, offline, tmp_path):
    run = make()
    run_train(run)
    shutil.copytree(offline.parent / "run" / "states", run.folders.states)
    with pytest.raises(FingerprintMismatch, match="capture"):
        run_train(case.resolved(offline, [f"output={run.folders.output}"]))


def test_states_of_a_stage_of_its_own_are_not_removed(offline, make):
    run = make()
    shutil.copytree(offline.parent / "run" / "states", run.folders.states)
    before = left(run)
    with pytest.raises(FingerprintMismatch, match="stage of its own"):
        run_train(run)
    assert left(run) == before
    run_train(run, overwrite=True)
    same_as_offline(offline, run)
    assert not run.folders.states.exists()


def test_kept_states_are_not_removed_by_a_run_that_keeps_none(make):
    kept = make("online.keep=true", "train.epochs=1")
    run_train(kept)
    before = left(kept)
    shutil.rmtree(kept.folders.training)
    with pytest.raises(FingerprintMismatch):
        run_train(make("train.epochs=1"))
    assert left(kept) == before


def test_where_states_go_through_decides_no_weight(make):
    base = train_fingerprint(make())
    for harmless in ("online.keep=true", "online.ahead=3", "online.missing=skip", "online.patience=3"):
        assert train_fingerprint(make(harmless)) == base
    assert train_fingerprint(make("capture.store_dtype=float32")) != base
    assert train_fingerprint(make("online.endpoints=[http://a:1]")) != base  # vLLM's states, not transformers'
    assert train_fingerprint(make("online.endpoints=[http://a:1]")) == train_fingerprint(
        make("online.endpoints=[http://b:1, http://c:2]")
    )


def test_capture_is_no_stage_of_its_own(make):
    run, text = make("train.epochs=1"), io.StringIO()
    with pytest.raises(ConfigError, match="while the draft is trained"):
        run_all(run, None, stages=["capture"])
    records = run_all(run, Console(file=text, width=300), stages=["capture", "train"])
    assert list(records) == ["train"]
    assert text.getvalue().count("capture: no stage of this run") == 1


class Room:
    def __init__(self, free):
        self.free = free

    def free_bytes(self):
        return self.free

    def bytes_for(self, layout, tokens, samples):
        return tokens * 1024

    def peak_bytes_for(self, layout, tokens, samples, *, longest):
        return self.bytes_for(layout, tokens, samples) + longest * 1024


@pytest.mark.parametrize(
    ("free", "keep", "what"),
    [
        (79, False, "the longest row .80 tokens. take 80.0 KiB, and the transport has room for 79.0 KiB"),
        (309, False, "5 samples may wait to be read, which take up to 310.0 KiB"),
        (310, False, None),
        (429, True, "keeping the states of 6 rows takes 430.0 KiB"),
        (430, True, None),
    ],
)
def test_a_store_that_is_too_small_is_refused_before_the_start(free, keep, what):
    settings = {"streams": [[40, 80, 50, 40], [70, 70]], "ahead": 3, "keep": keep, "where": "store"}
    if what is None:
        check_room(Room(free * 1024), None, **settings)
        return
    with pytest.raises(DiskSpaceError, match=what):
        check_room(Room(free * 1024), None, **settings)
