"""Events of a run, to the hooks of plugins and to the trackers that a recipe names."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftsmith import api
from draftsmith.observers import open_observers
from draftsmith.plugins import load_plugins

OBSERVERS = """
from draftsmith import api
from draftsmith.hookspecs import hookimpl

seen = []


@hookimpl
def draftsmith_step_finished(event):
    seen.append(("plugin", event.step))


@hookimpl
def draftsmith_run_finished():
    seen.append(("plugin", "end"))


class Tracker:
    def __init__(self, output):
        self.output = output

    @hookimpl
    def draftsmith_step_finished(self, event):
        seen.append(("tracker", event.step, self.output))


class Fragile(Tracker):
    @hookimpl
    def draftsmith_step_finished(self, event):
        seen.append(("fragile", event.step))
        raise RuntimeError("out of paper")


class Unready:
    def __init__(self, output):
        raise ImportError("no tracker here")


class Deaf:
    def __init__(self, output):
        pass


@hookimpl
def draftsmith_observers():
    return [
        api.Observer(name=name, summary="", implementation=f"fake_watch:{name.title()}")
        for name in ("tracker", "fragile", "unready", "deaf")
    ]
"""


def step(number: int) -> api.StepFinished:
    return api.StepFinished(step=number, tokens=10 * number, phase="train", metrics={"loss": 1.0 / number})


def dispatcher(site, tmp_path: Path, *names: str):
    site.install("draftsmith-watch", {"watch": "fake_watch"}, modules={"fake_watch": OBSERVERS})
    run = SimpleNamespace(
        registry=load_plugins(),
        recipe=SimpleNamespace(observers=list(names)),
        folders=SimpleNamespace(output=tmp_path / "out"),
    )
    return open_observers(run), sys.modules["fake_watch"].seen


def test_events_reach_the_plugins_hooks_and_the_named_trackers(site, tmp_path):
    events, seen = dispatcher(site, tmp_path, "tracker")
    events.step_finished(step(1))
    events.run_finished(api.RunFinished(step=1, outcome="completed", seconds=1.0))
    assert seen == [("plugin", 1), ("tracker", 1, tmp_path / "out"), ("plugin", "end")]


def test_a_tracker_that_is_not_named_hears_nothing(site, tmp_path):
    events, seen = dispatcher(site, tmp_path)
    events.step_finished(step(1))
    assert seen == [("plugin", 1)]


def test_an_observer_that_raises_is_logged_once_and_switched_off(site, tmp_path, caplog):
    events, seen = dispatcher(site, tmp_path, "fragile", "tracker")
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            events.step_finished(step(number))
    assert [each for each in seen if each[0] == "fragile"] == [("fragile", 1)]
    assert [each[1] for each in seen if each[0] == "tracker"] == [1, 2, 3]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "observer 'fragile' (draftsmith-watch 1.0) fails in draftsmith_step_finished and is switched off" in message
    assert "out of paper" in message


@pytest.mark.parametrize(("name", "reason"), [("unready", "no tracker here"), ("deaf", "implements no observer hook")])
def test_a_tracker_that_cannot_be_opened_costs_the_run_nothing(site, tmp_path, caplog, name, reason):
    with caplog.at_level(logging.WARNING):
        events, seen = dispatcher(site, tmp_path, name, "tracker")
    assert reason in caplog.text
    events.step_finished(step(1))
    assert ("tracker", 1, tmp_path / "out") in seen


def test_ctrl_c_in_an_observer_is_not_swallowed(site, tmp_path, monkeypatch):
    events, _ = dispatcher(site, tmp_path, "tracker")
    events._observers[-1][1]["draftsmith_step_finished"] = lambda event: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        events.step_finished(step(1))


class TestTensorBoard:
    @staticmethod
    def started(first: int) -> api.RunStarted:
        return api.RunStarted(
            output=Path(),
            recipe={},
            total_steps=6,
            first_step=first,
            trainable_parameters=10,
            frozen_parameters=5,
        )

    @staticmethod
    def scalars(output: Path, tag: str) -> list[tuple[int, float]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        accumulator = EventAccumulator(str(output / "training" / "tensorboard"))
        accumulator.Reload()
        return [(each.step, round(each.value, 4)) for each in accumulator.Scalars(tag)]

    def test_scalars_by_phase_and_step(self, tmp_path):
        from draftsmith.observers.tensorboard import TensorBoard

        board = TensorBoard(tmp_path)
        board.draftsmith_run_started(self.started(0))
        board.draftsmith_step_finished(step(1))
        board.draftsmith_step_finished(
            api.StepFinished(step=1, tokens=10, phase="validation", metrics={"acceptance_length": 1.5})
        )
        board.draftsmith_run_finished(api.RunFinished(step=1, outcome="completed", seconds=1.0))
        assert self.scalars(tmp_path, "train/loss") == [(1, 1.0)]
        assert self.scalars(tmp_path, "validation/acceptance_length") == [(1, 1.5)]
        assert self.scalars(tmp_path, "parameters/trainable") == [(0, 10.0)]

    def test_steps_that_are_repeated_after_a_resume_appear_once(self, tmp_path):
        from draftsmith.observers.tensorboard import TensorBoard

        killed = TensorBoard(tmp_path)
        killed.draftsmith_run_started(self.started(0))
        for number in (1, 2, 3, 4):  # the checkpoint is of step 2; the process dies after step 4
            killed.draftsmith_step_finished(step(number))
        killed._writer.close()

        resumed = TensorBoard(tmp_path)
        resumed.draftsmith_run_started(self.started(2))
        for number in (3, 4, 5):
            resumed.draftsmith_step_finished(
                api.StepFinished(step=number, tokens=0, phase="train", metrics={"loss": 100.0 + number})
            )
        resumed.draftsmith_run_finished(api.RunFinished(step=5, outcome="completed", seconds=1.0))
        assert self.scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 0.5), (3, 103.0), (4, 104.0), (5, 105.0)]

    def test_a_run_that_starts_over_leaves_nothing_of_the_first(self, tmp_path):
        from draftsmith.observers.tensorboard import TensorBoard

        for _ in range(2):
            board = TensorBoard(tmp_path)
            board.draftsmith_run_started(self.started(0))
            board.draftsmith_step_finished(step(1))
            board.draftsmith_run_finished(api.RunFinished(step=1, outcome="stopped", seconds=1.0))
        assert self.scalars(tmp_path, "train/loss") == [(1, 1.0)]
