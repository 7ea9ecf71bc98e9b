"""A report: one file that holds all it shows, loads nothing, and says what the figures say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import attrs
import pytest
from evaluations import sample_evaluation
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.cli import main
from draftsmith.errors import DataError
from draftsmith.evaluation.results import read_evaluation, write_evaluation
from draftsmith.report.build import build_report
from draftsmith.report.charts import Bar, Series, bars, lines, thinned, ticks
from draftsmith.stages import RunFolders, Stage

HOSTILE = "<script>alert('x')</script> & \"quotes\""
VOID = {"meta", "link", "br", "img", "input", "line", "rect", "circle", "polyline"}


class Reader(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.style = ""
        self._open: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_data(self, data):
        if self._open and self._open[-1] == "style":
            self.style += data
        else:
            self.texts.append(data)

    def of_class(self, name: str) -> list[str]:
        return [tag for tag, attributes in self.tags if name in (attributes.get("class") or "").split()]


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


@pytest.fixture
def evaluation_folder(tmp_path) -> Path:
    folder = tmp_path / "draft-evaluation"
    write_evaluation(folder, sample_evaluation(category=HOSTILE))
    return folder


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """A run as its stages leave it, with a metrics log whose last line is being written."""
    return make_run(tmp_path / "my-run")


def make_run(folder: Path) -> Path:
    folders = RunFolders(folder)
    for name, place in (("prepare", folders.prepared), ("train", folders.training)):
        stage = Stage(name, place)
        stage.begin({"of": name})
        stage.finish({"figure": 1})
    Stage("export", folders.checkpoint).begin({})
    stage = Stage("verify", folders.verification)
    stage.begin({})
    counted = {"all": {"acceptance_per_position": [0.5, 0.25, 0.125]}}
    stage.finish({"served": {}, "simulated": counted})
    (folder / "run.json").write_text(json.dumps({"draftsmith": "0.1.0", "recipe": {"algorithm": HOSTILE}}))
    rows = []
    for step in range(1, 601):
        rows.append({"step": step, "phase": "train", "tokens": step * 100, "loss": 5 / step, "position_0_acc": 0.1})
        if step % 200 == 0:
            values = {"loss": 4 / step, "eal": 1 + step / 600, "position_0_acc": step / 1000, "position_1_acc": 0.2}
            rows.append({"step": step, "phase": "validation", "tokens": step * 100, **values})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folders.training / "metrics.jsonl").write_text(text + '{"step": 601, "ph')
    return folder


def test_nothing_is_loaded_from_anywhere(evaluation_folder, run_folder):
    page = build_report([evaluation_folder, run_folder])
    reader = read(page)
    for tag, attributes in reader.tags:
        assert tag not in ("script", "img", "iframe", "object", "embed"), tag
        for name in ("src", "srcset", "data", "xlink:href", "action"):
            assert name not in attributes, (tag, attributes)
        assert attributes.get("href", "data:,") == "data:,"
        assert not any(name.startswith("on") for name in attributes)
    assert "url(" not in reader.style
    assert "@import" not in reader.style
    assert not re.search(r"https?://", page)


def test_what_comes_from_outside_is_text(evaluation_folder, run_folder):
    page = build_report([evaluation_folder, run_folder])
    assert "<script" not in page
    assert HOSTILE in read(page).texts
    assert " <b>bold</b>" in read(page).texts


def test_light_and_dark_and_small(evaluation_folder):
    reader = read(build_report([evaluation_folder]))
    assert "prefers-color-scheme:dark" in reader.style
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in reader.tags
    assert all("viewbox" in attributes for tag, attributes in reader.tags if tag == "svg")
    # Every colour that is used is there in both.
    used = set(re.findall(r"var\((--\w+)\)", reader.style)) - {"--c"}
    light, dark = reader.style.split("@media (prefers-color-scheme:dark)")
    assert used <= set(re.findall(r"(--\w+):", light.split("*{")[0]))
    assert used <= set(re.findall(r"(--\w+):", dark.split("*{")[0]))


def test_an_evaluation_is_told(evaluation_folder):
    page = build_report([evaluation_folder])
    reader = read(page)
    text = " ".join(reader.texts)
    assert "Evaluation: draft-evaluation" in text
    assert "suffix: not measured: arctic-inference is not installed" in text
    assert "2.250" in text
    assert "2.75" in text
    # Two figures of two positions each; the conditional one at both as well.
    assert reader.of_class("dot") == ["circle"] * 4
    assert reader.of_class("bar") == ["rect"] * 2
    assert len(reader.of_class("answer")) == 2
    assert reader.of_class("rejected") == ["span"] * 3  # one in the legend
    assert len(reader.of_class("accepted")) == 1 + 5
    assert "Prompt 0, coding: acceptance length 2.50" in text
    assert read(build_report([evaluation_folder], worst=1)).of_class("answer") == ["div"]


def test_a_run_is_told(run_folder):
    page = build_report([run_folder])
    reader = read(page)
    text = " ".join(reader.texts)
    for title in ("Loss", "Expected acceptance length", "my-run: right at each position, validation rows"):
        assert title in text
    assert "export (not complete)" in text
    assert "position 1: tokens 20k, % 20" in text
    assert "my-run, simulator: position 3, % 12.5" in text
    assert "my-run, vLLM" not in text  # it was verified without one
    assert reader.of_class("bar") == ["rect"] * 4
    (train,) = [
        attributes["points"]
        for tag, attributes in reader.tags
        if tag == "polyline" and len((attributes["points"] or "").split()) > 3
    ]
    assert len(train.split()) == 300  # of 600 steps


def test_several_are_compared(tmp_path, evaluation_folder):
    first, second = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")
    text = " ".join(read(build_report([first, second, evaluation_folder])).texts)
    assert f"{first}, train" in text
    assert f"{second}, train" in text
    assert f"prepare, {second}" in text


def test_a_bare_evaluation_leaves_out_what_it_lacks(tmp_path):
    whole = sample_evaluation()
    write_evaluation(tmp_path, attrs.evolve(whole, methods=(whole.methods[2],), complete=False))
    text = " ".join(read(build_report([tmp_path])).texts)
    assert "Speed" not in text
    assert "Acceptance by position" not in text
    assert "incomplete" in text


def test_what_is_no_source_is_refused(tmp_path, run_folder):
    with pytest.raises(DataError, match="neither a run nor an evaluation"):
        build_report([tmp_path / "gone"])
    (run_folder / "training" / "stage.json").write_text("{")
    with pytest.raises(DataError, match="train stage cannot be read"):
        build_report([run_folder])
    for damaged in ("{", "[]"):
        (run_folder / "run.json").write_text(damaged)
        with pytest.raises(DataError, match="cannot be read"):
            build_report([run_folder])


def test_a_damaged_line_of_metrics_is_passed_over(run_folder):
    whole = build_report([run_folder])
    with open(run_folder / "training" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('\n{"phase": "train", "loss": 1.0, "tokens": null}\n{"phase": "train", "loss": "x", "tokens": 5}\n')
    assert build_report([run_folder]) == whole


def test_the_working_directory_has_a_name(evaluation_folder, monkeypatch):
    monkeypatch.chdir(evaluation_folder)
    assert build_report([Path()]) == build_report([evaluation_folder])


def test_half_of_a_surrogate_pair_is_shown_as_its_escape(tmp_path):
    evaluation = sample_evaluation("\ud83d chat")
    write_evaluation(tmp_path / "it", evaluation)
    assert read_evaluation(tmp_path / "it") == evaluation
    assert main(["report", str(tmp_path / "it"), "--output", str(tmp_path / "it.html")]) == 0
    assert "\\ud83d chat" in (tmp_path / "it.html").read_text(encoding="utf-8")
    assert "\\ud83d chat" in (tmp_path / "it" / "evaluation.csv").read_text(encoding="utf-8")


def test_the_command_writes_it(evaluation_folder, tmp_path, capsys):
    target = tmp_path / "out" / "it.html"
    assert main(["report", str(evaluation_folder), "--output", str(target)]) == 0
    assert target.read_text(encoding="utf-8") == build_report([evaluation_folder])
    assert f"written: {target}" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "gone")]) == 2


# --- charts -----------------------------------------------------------------------------------------------------


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_span_what_is_drawn(low, span):
    marks = ticks(low, low + span)
    if len(marks) > 1:
        assert marks[0] <= low + span * 1e-6 + abs(low) * 1e-9
        assert marks[-1] >= low + span - span * 1e-6 - abs(low) * 1e-9
        assert len(marks) <= 8


def test_ticks_are_round():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0, 73) == [0, 20, 40, 60, 80]
    assert ticks(3, 3) == [3]
    assert ticks(1, 2) == [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    assert ticks(1, 2, whole=True) == [1, 2]
    assert ticks(1, 8, whole=True) == [0, 2, 4, 6, 8]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-10, 10)), max_size=50), st.integers(1, 20))
def test_thinning_keeps_what_is_there_on_average(points, most):
    found = thinned(points, most)
    assert len(found) <= max(most, 1)
    if points:
        assert min(y for _, y in points) - 1e-9 <= min(y for _, y in found)
        assert max(y for _, y in found) <= max(y for _, y in points) + 1e-9


def test_charts_without_anything_say_so():
    assert "nothing was recorded" in (lines([], x="x", y="y", title="T").text or "")
    assert "nothing was measured" in (bars([], title="T").text or "")
    assert lines([Series(name="n", points=[(float("nan"), 1.0)])], x="x", y="y", title="T").tag == "p"


def test_bars_of_nothing_have_a_width():
    figure = bars([Bar(name="zero", value=0.0), Bar(name="x" * 80, value=2.0, low=1.0, high=3.0)], title="T", mark=1.0)
    widths = [float(each.get("width")) for each in figure.iter("rect")]
    assert 0 < widths[0] < widths[1] <= 360
    assert len(list(figure.iter("line"))) == 2  # the spread of one, and the mark
    assert all(len(each.text or "") <= 52 for each in figure.iter("text"))


def test_the_mark_does_not_go_through_a_value():
    values = [Bar(name=str(value), value=value) for value in (0.1, 0.8, 0.9, 0.974, 1.0, 1.5)]
    figure = bars(values, title="T", unit="×", mark=1.0)
    (mark,) = (float(each.get("x1")) for each in figure.iter("line"))
    places = [float(each.get("x")) for each in figure.iter("text") if (each.text or "").endswith(" ×")]
    assert [place < mark - 50 or place > mark for place in places] == [True] * 6
    assert places == sorted(places)


# --- a real browser ---------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
#: Written behind the page to learn its width; the report itself has no script.
PROBE = "<script>document.title = `${document.documentElement.scrollWidth} ${innerWidth}`</script>"


def browse(page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open *page* in a headless Chromium on a telephone's screen."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-component-update", "--disable-sync",
        "--window-size=500,900", f"--user-data-dir={profile}", "--enable-logging=stderr", *options, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "HOME": str(profile)}
    )


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)")
def test_in_a_real_browser(tmp_path, evaluation_folder, run_folder):
    page = tmp_path / "report.html"
    page.write_text(build_report([evaluation_folder, run_folder]), encoding="utf-8")
    picture, log = tmp_path / "report.png", tmp_path / "net.json"
    done = browse(page, tmp_path / "profile", f"--screenshot={picture}", f"--log-net-log={log}")
    assert "CONSOLE" not in done.stderr
    assert picture.stat().st_size > 10_000
    # Chromium's own services aside, which have nothing to do with the page, only the file itself was asked for.
    asked = set(re.findall(r'"url":"((?:https?|file):[^"]*)"', log.read_text(errors="replace")))
    assert not {url for url in asked if not re.match(r"file:|https?://[\w.-]*\.(google|googleapis|gvt1)\.com/", url)}
    page.write_text(page.read_text(encoding="utf-8") + PROBE, encoding="utf-8")
    shown = browse(page, tmp_path / "profile", "--dump-dom").stdout
    width, screen = map(int, re.search(r"<title>(\d+) (\d+)</title>", shown).groups())
    assert width <= screen
