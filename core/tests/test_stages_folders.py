"""Stages and their folders: what a kill may leave, what two commands may not do at once, what cannot be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftsmith import stages
from draftsmith.errors import DiskSpaceError, OutputError, SampleMissing
from draftsmith.stages import (
    Stage,
    atomically,
    sole_writer,
    write_json_atomically,
    write_tensors_atomically,
    write_text_atomically,
)


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


def test_of_several_processes_of_a_run_the_first_holds_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with sole_writer(tmp_path):
        monkeypatch.setenv("RANK", "3")
        with sole_writer(tmp_path):
            pass
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(OutputError, match="at work"), sole_writer(tmp_path):
            raise AssertionError("both hold it")


def test_a_process_group_knows_better_than_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher of another kind may set no RANK at all."""
    ranks = """
import os, sys, torch.distributed as dist
from draftsmith.stages import is_first_rank
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
assert is_first_rank() == (rank == 0)
dist.barrier()  # the other one may still be connecting
dist.destroy_process_group()
assert is_first_rank()
"""
    monkeypatch.delenv("RANK", raising=False)
    command = [sys.executable, "-c", ranks]
    started = [subprocess.Popen([*command, str(rank), str(tmp_path / "meeting")]) for rank in range(2)]
    assert [process.wait(timeout=300) for process in started] == [0, 0]


WRITERS = {
    "json": lambda path, value: write_json_atomically(path, value),
    "text": lambda path, value: write_text_atomically(path, str(value)),
    "tensors": lambda path, value: write_tensors_atomically(path, {"x": torch.full((4,), value)}),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, place: str
) -> None:
    write, path = WRITERS[writer], tmp_path / "run"
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        write(tmp_path / "file" / "run", 1)
    write(path, 1)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stages.os, place, full)
    with pytest.raises(DiskSpaceError) as caught:
        write(path, 2)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "run"]
    monkeypatch.undo()
    write(path, 2)
    assert path.read_bytes() != before


_LITTLE_ROOM = """
import pathlib, resource, sys, torch
from draftsmith.errors import DiskSpaceError
from draftsmith.stages import write_tensors_atomically

# The kernel refuses to let any file grow beyond the limit, in the middle of a write, as on a full disk.
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_tensors_atomically(pathlib.Path(sys.argv[1]), {"a": torch.zeros(64, 1024)})
except DiskSpaceError as error:
    print(error)
"""


def test_a_disk_that_fills_while_tensors_are_written_is_named_so(tmp_path: Path) -> None:
    """safetensors writes by itself, and tells what the system said in the text of an error of its own."""
    command = [sys.executable, "-c", _LITTLE_ROOM, str(tmp_path / "x.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "the disk is full" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())


def test_an_error_of_ones_own_passes_through_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SampleMissing), atomically(tmp_path / "run") as temporary:
        raise SampleMissing(f"{temporary.write_text('half')} bytes are written", sample_id="x")
    assert not list(tmp_path.iterdir())


def test_tensors_are_as_readable_as_other_files(tmp_path: Path) -> None:
    """A server in a container often runs as somebody else."""
    old = os.umask(0o027)
    try:
        write_tensors_atomically(tmp_path / "tensors", {"x": torch.zeros(4)})
        write_text_atomically(tmp_path / "text", "x")
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
