"""The order of the stages, what a run leaves in its output, and what is shown meanwhile."""

from __future__ import annotations

import contextlib
import io
import json

import attrs
import pytest
from rich.console import Console

from draftsmith import api, pipeline
from draftsmith.config.load import load_recipe
from draftsmith.config.resolve import resolve
from draftsmith.errors import ConfigError, DataError, FingerprintMismatch, OutputError, Problem
from draftsmith.plugins import load_plugins, load_reference
from draftsmith.progress import format_count, format_seconds, stage_progress
from draftsmith.stages import STAGES, Stage, StageRecord

calls: list[tuple[str, bool]] = []


def _stage(name: str):
    """A stage that does nothing but keep its record, as all do."""

    def run_it(run, console=None, *, overwrite: bool = False) -> StageRecord:
        calls.append((name, overwrite))
        stage = Stage(name, getattr(run.folders, pipeline._FOLDERS[name]))
        if stage.begin({"epochs": run.recipe.train.epochs}, overwrite=overwrite) == "complete":
            return stage.record()
        return stage.finish({"figure": 1.5})

    return run_it


run_prepare, run_capture, run_train, run_export, run_verify = (_stage(name) for name in STAGES)


def run_failing(run, console=None, *, overwrite: bool = False) -> StageRecord:
    raise DataError("no supervised token")


def print_verification(console: Console, record: StageRecord) -> None:
    console.print(f"THE TABLE {record.summary['figure']}")


@pytest.fixture
def run(tinker, recipe):
    return resolve(load_recipe(recipe), load_plugins())


@pytest.fixture
def stages(monkeypatch):
    calls.clear()
    here = {name: f"{__name__}:run_{name}" for name in STAGES}
    monkeypatch.setattr(pipeline, "_FUNCTIONS", here)
    monkeypatch.setattr(pipeline, "_VERIFICATION", f"{__name__}:print_verification")
    return here


def test_every_stage_has_a_function_that_takes_a_run():
    import inspect

    assert tuple(pipeline._FUNCTIONS) == STAGES
    for reference in pipeline._FUNCTIONS.values():
        assert list(inspect.signature(load_reference(reference)).parameters) == ["run", "console", "overwrite"]
    assert callable(load_reference(pipeline._VERIFICATION))


def test_stages_run_in_order_and_the_table_comes_last(run, stages):
    out = io.StringIO()
    records = pipeline.run_all(run, Console(file=out, width=80))
    assert [name for name, _ in calls] == list(STAGES)
    assert list(records) == list(STAGES)
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert lines[-1] == "THE TABLE 1.5"
    assert any("total" in line for line in lines)


def test_only_some_stages_in_their_order(run, stages):
    pipeline.run_all(run, None, stages=["train", "prepare"], overwrite=True)
    assert calls == [("prepare", True), ("train", True)]


@pytest.mark.parametrize("first", ["prepare", "capture", "train"])
def test_data_that_the_algorithm_cannot_use_are_found_before_they_are_captured(run, stages, monkeypatch, first):
    class Prepared:
        def facts(self, tokens_per_row):
            assert tokens_per_row == run.recipe.train.tokens_per_row
            return api.DataFacts(token_ids=frozenset({3, 5}), longest_row=9, longest_answer=4)

    def check(options, verifier, data):
        assert options == run.algorithm_options
        assert verifier is run.verifier
        return [Problem("too short", where="algorithm.options.steps")] if data.longest_answer < 5 else ()

    pipeline.run_all(run, None, stages=["prepare"])
    calls.clear()
    monkeypatch.setattr("draftsmith.data.dataset.open_prepared", lambda folder: Prepared())
    picky = attrs.evolve(run, algorithm=attrs.evolve(run.algorithm, check_data=check))
    with pytest.raises(ConfigError, match=r"algorithm\.options\.steps: too short"):
        pipeline.run_all(picky, None, stages=STAGES[STAGES.index(first) :])
    assert [name for name, _ in calls] == (["prepare"] if first == "prepare" else [])
    pipeline.run_all(picky, None, stages=["export"])  # what is trained is trained


def test_a_stage_that_fails_ends_the_run(run, stages):
    stages["capture"] = f"{__name__}:run_failing"
    with pytest.raises(DataError):
        pipeline.run_all(run, None)
    assert [name for name, _ in calls] == ["prepare"]


def test_the_output_says_what_was_resolved(run, stages):
    pipeline.run_all(run, None, stages=["prepare"])
    record = json.loads((run.folders.output / "run.json").read_text())
    assert record["recipe"]["algorithm"] == {
        "name": "tinker",
        "options": {"steps": 3, "layer_ids": [1, 2], "flavour": "plain", "scale": None},
    }
    assert {"plugin": "tinker", "distribution": "draftsmith-tinker", "version": "2.5"} in record["plugins"]
    assert record["verifier"]["fingerprint"] == run.verifier.fingerprint
    pipeline.run_all(run, None, stages=["prepare"])  # its own output is no obstacle


def test_of_several_processes_of_a_run_the_first_alone_says_what_was_resolved(run, stages, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    pipeline.run_all(run, None, stages=["prepare"])
    assert calls == [("prepare", False)]
    assert not (run.folders.output / "run.json").exists()
    monkeypatch.setenv("RANK", "0")
    pipeline.run_all(run, None, stages=["prepare"])
    assert (run.folders.output / "run.json").exists()


def test_what_is_complete_is_said_to_be(run, stages):
    out = io.StringIO()
    pipeline.run_all(run, Console(file=out, width=80), stages=["prepare"])
    assert "not run again" not in out.getvalue()
    pipeline.run_all(run, Console(file=out, width=80), stages=["prepare", "capture"])
    assert "prepare: complete, with the same inputs; not run again" in out.getvalue()
    assert "capture: complete" not in out.getvalue()


def test_a_stage_that_refuses_other_inputs_leaves_the_record_of_the_run(run, stages, recipe):
    pipeline.run_all(run, None, stages=["prepare"])
    before = (run.folders.output / "run.json").read_text()
    other = resolve(load_recipe(recipe, ["train.epochs=9"]), run.registry)
    with pytest.raises(FingerprintMismatch):
        pipeline.run_all(other, None, stages=["prepare"])
    assert (run.folders.output / "run.json").read_text() == before
    pipeline.run_all(other, None, stages=["prepare"], overwrite=True)
    assert json.loads((run.folders.output / "run.json").read_text())["recipe"]["train"]["epochs"] == 9


def test_a_folder_with_something_else_is_refused_untouched(run, stages):
    run.folders.output.mkdir()
    (run.folders.output / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"not empty \(notes\.txt"):
        pipeline.run_all(run, None)
    assert calls == []
    assert [each.name for each in run.folders.output.iterdir()] == ["notes.txt"]


def test_a_second_command_is_told_of_the_first(run, stages, monkeypatch):
    def second(first, console=None, *, overwrite=False):
        with pytest.raises(OutputError, match="at work"):
            pipeline.run_all(run, None, stages=["prepare"])
        return run_prepare(first, console, overwrite=overwrite)

    monkeypatch.setattr(pipeline, "load_reference", lambda reference: second)
    pipeline.run_all(run, None, stages=["prepare"])


def test_a_hidden_file_and_an_empty_folder_are_no_obstacle(run, stages):
    run.folders.output.mkdir()
    (run.folders.output / ".gitkeep").write_text("")
    pipeline.run_all(run, None, stages=["prepare"])


class TestProgress:
    def test_lines_in_a_log(self, monkeypatch):
        monkeypatch.setattr("draftsmith.progress.LINE_EVERY", 0.0)
        out = io.StringIO()
        with stage_progress(Console(file=out, width=40), "train", 1000, "tokens") as bar:
            bar.advance(250, loss=1.23456)
            bar.advance(750)
        lines = out.getvalue().splitlines()
        assert lines[0].startswith("train: 250/1000 tokens, ")
        assert "tokens/s" in lines[0]
        assert "left" in lines[0]
        assert lines[0].endswith("loss=1.235")
        assert lines[-1].startswith("train: 1000/1000 tokens")
        assert "left" not in lines[-1]

    def test_a_line_now_and_then_only(self):
        out = io.StringIO()
        with stage_progress(Console(file=out), "train", None, "steps") as bar:
            for _ in range(100):
                bar.advance()
        assert len(out.getvalue().splitlines()) == 1

    def test_a_bar_on_a_terminal(self):
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=120)
        with stage_progress(console, "capture", 10, "rows") as bar:
            bar.advance(10, loss=0.5)
        assert "capture" in out.getvalue()
        assert "100%" in out.getvalue()
        assert "loss=0.5" in out.getvalue()

    def test_silent_without_a_console(self, capsys):
        with stage_progress(None, "train", 10, "steps") as bar:
            bar.advance(3, loss=1.0)
        assert capsys.readouterr() == ("", "")

    def test_the_last_line_comes_after_an_error_too(self):
        out = io.StringIO()
        with contextlib.suppress(ZeroDivisionError), stage_progress(Console(file=out), "train", 10, "steps") as bar:
            bar.advance(3)
            raise ZeroDivisionError
        assert "3/10 steps" in out.getvalue()

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0, "0"), (0.5, "0.5"), (999, "999"), (12345, "12.3k"), (1234567, "1.23M"), (2.5e9, "2.5G")],
    )
    def test_counts(self, value, text):
        assert format_count(value) == text

    @pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3725, "1:02:05")])
    def test_seconds(self, seconds, text):
        assert format_seconds(seconds) == text
