"""Stages and their folders: what a kill may leave, what two commands may not do at once, what cannot be written."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from draftsmith import stages
from draftsmith.errors import DiskSpaceError, OutputError
from draftsmith.stages import Stage, sole_writer, write_json_atomically


def test_two_commands_do_not_share_an_output(tmp_path: Path) -> None:
    with (
        sole_writer(tmp_path),
        pytest.raises(OutputError, match=f"process {os.getpid()} on ") as caught,
        sole_writer(tmp_path),
    ):
        raise AssertionError("both hold it")
    assert "wait" in str(caught.value.hint)
    with sole_writer(tmp_path):
        pass


def test_what_a_kill_leaves_of_the_first_record_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / "prepared"
    folder.mkdir()
    (folder / ".stage.json.4711.tmp").write_text('{"sta')
    assert Stage("prepare", folder).begin({"a": 1}) == "fresh"


def test_a_kill_while_an_old_output_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "prepared"
    stage = Stage("prepare", folder)
    stage.begin({"a": 1})
    stage.finish({})
    (folder / "rows").write_text("old")

    def killed(path: Path) -> None:
        (Path(path) / "stage.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stages.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            Stage("prepare", folder).begin({"a": 2}, overwrite=True)
    assert Stage("prepare", folder).begin({"a": 2}) == "fresh"
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["prepared", "stage.json"]


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "prepared").write_text("mine")
    with pytest.raises(OutputError):
        Stage("prepare", tmp_path / "prepared").begin({})
    assert (tmp_path / "prepared").read_text() == "mine"


def test_a_damaged_record_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "stage.json").write_text("{")
    with pytest.raises(OutputError) as caught:
        Stage("train", tmp_path).record()
    assert f"remove the folder {tmp_path}" in str(caught.value.hint)


def test_a_reopened_stage_is_resumed(tmp_path: Path) -> None:
    stage = Stage("capture", tmp_path)
    stage.begin({"a": 1})
    stage.finish({"samples": 3})
    Stage("capture", tmp_path).reopen()
    assert Stage("capture", tmp_path).begin({"a": 1}) == "resume"


def test_json_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        write_json_atomically(tmp_path / "file" / "run.json", {})
    write_json_atomically(tmp_path / "run.json", {"old": True})

    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stages.os, "replace", full)
    with pytest.raises(DiskSpaceError):
        write_json_atomically(tmp_path / "run.json", {"old": False})
    assert json.loads((tmp_path / "run.json").read_text()) == {"old": True}
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []
