"""Third parties' code that fails inside vLLM's processes: whichever of them it is, the message says whose it is."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from chats import write_chats
from outsider import Outsider

from draftsmith.testing.verifiers import make_tiny_verifier

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

EXAMPLES = Path(__file__).parent.parent / "examples"

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "draftsmith-NAME"
version = "0.2"

[project.entry-points."draftsmith.v1"]
NAME = "draftsmith_NAME"

[tool.hatch.build.targets.wheel]
packages = ["src/draftsmith_NAME"]
"""
#: A transport whose writer fails, in whichever of vLLM's processes it is opened.
LEAKY = {
    "src/draftsmith_leaky/__init__.py": """
from attrs import evolve
from draftsmith.hookspecs import hookimpl
from draftsmith_hs_file import plugin

@hookimpl
def draftsmith_transports():
    (files,) = plugin.draftsmith_transports()
    return [evolve(files, name="leaky", implementation="draftsmith_leaky.transport:Leaky")]
""",
    "src/draftsmith_leaky/transport.py": """
from draftsmith_hs_file.producer import FileWriter
from draftsmith_hs_file.transport import FileTransport

class LeakyWriter(FileWriter):
    def put(self, sample):
        raise KeyError("shelf")

class Leaky(FileTransport):
    def writer(self, layout):
        writer = super().writer(layout)
        writer.__class__ = LeakyWriter
        return writer
""",
}
#: Another package that takes for its network the name that draftsmith-toy's has in vLLM.
RIVAL = {
    "src/draftsmith_rival/__init__.py": """
from attrs import evolve
from draftsmith.hookspecs import hookimpl
from draftsmith_toy import plugin

@hookimpl
def draftsmith_algorithms():
    (toy,) = plugin.draftsmith_algorithms()
    return [evolve(toy, name="rival", vllm_network=None, vllm_registration="draftsmith_rival:register")]

def register():
    from vllm import ModelRegistry
    ModelRegistry.register_model("draftsmith_toy.network:ServedToy", "draftsmith_rival.network:Rival")
""",
}
#: What any of vLLM's processes does first; and then, which networks it has.
PROCESS = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm import ModelRegistry
print([each in ModelRegistry.models for each in ("draftsmith_toy.network:ServedToy", "LlamaForCausalLM")])
"""


def write_package(folder: Path, name: str, files: Mapping[str, str]) -> Path:
    """The package of a plugin, below *folder*."""
    package = folder / f"draftsmith-{name}"
    for path, content in {"pyproject.toml": PROJECT.replace("NAME", name), **files}.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(content, encoding="utf-8")
    return package


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outsider, Path]:
    """The recipe of a run of draftsmith-toy until its export, where its network fails in vLLM, and its environment."""
    folder = tmp_path_factory.mktemp("sabotaged")
    package = folder / "draftsmith-toy"
    shutil.copytree(EXAMPLES / "draftsmith-toy", package, ignore=shutil.ignore_patterns("__pycache__"))
    network = package / "src" / "draftsmith_toy" / "network.py"
    with open(network, "a", encoding="utf-8") as file:
        file.write("\n    def forward(self, input_ids, positions, hidden_states, inputs_embeds=None):\n")
        file.write("        return int('sabotaged')\n")
    environment = Outsider(folder)
    environment.install(package, write_package(folder, "leaky", LEAKY))
    make_tiny_verifier(folder / "verifier")
    write_chats(folder / "chats.jsonl")
    recipe = {
        "verifier": str(folder / "verifier"),
        "output": str(folder / "run"),
        "algorithm": "toy",
        "transport": "hs_file",
        "data": {"sources": ["chats.jsonl"], "max_length": 128},
        "capture": {"engine": "transformers"},
        "train": {"epochs": 1, "tokens_per_row": 512},
        "verify": {"prompts": "chats.jsonl", "max_tokens": 8, "max_prompts": 2, "require_vllm": True},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    done = environment.draftsmith("run", str(path), "--until", "export")
    assert done.returncode == 0, done.stdout + done.stderr
    return environment, path


@pytest.mark.parametrize("processes", ["0", "1"], ids=["one process", "an engine of its own"])
def test_a_network_that_raises_in_vllm_is_named_with_its_version(
    exported: tuple[Outsider, Path], monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    """Where the engine runs in another process the exception itself stays there: its log is what tells."""
    outsider, recipe = exported
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", processes)
    done = outsider.draftsmith("verify", str(recipe))
    assert done.returncode == 1, done.stdout + done.stderr
    first = done.stderr.splitlines()[0]
    assert "plugin 'toy' of draftsmith-toy 0.1.0 fails in ServedToy.forward(): ValueError: " in first
    assert "'sabotaged'" in first
    assert "Traceback" not in first


@pytest.mark.parametrize("processes", ["0", "1"], ids=["one process", "an engine of its own"])
def test_a_transport_that_raises_in_vllm_is_named_with_its_version(
    exported: tuple[Outsider, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    outsider, recipe = exported
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", processes)
    changes = [f"output={tmp_path / 'run'}", "transport=leaky", "capture.engine=vllm"]
    given = [part for each in changes for part in ("--set", each)]
    prepared = outsider.draftsmith("prepare", str(recipe), *given)
    assert prepared.returncode == 0, prepared.stderr
    done = outsider.draftsmith("capture", str(recipe), *given)
    assert done.returncode == 1, done.stdout + done.stderr
    said = done.stderr.splitlines()
    assert any(
        "plugin 'leaky' of draftsmith-leaky 0.2 fails in LeakyWriter.put(): KeyError: 'shelf'" in x for x in said
    )
    assert "Traceback" not in done.stderr


def test_a_name_of_vllms_that_two_plugins_register_is_neithers(tmp_path: Path) -> None:
    """vLLM keeps the last without a word, and the draft that is served would be another one than was exported."""
    outsider = Outsider(tmp_path)
    outsider.install(EXAMPLES / "draftsmith-toy", write_package(tmp_path, "rival", RIVAL))
    done = outsider.run("-c", PROCESS)
    assert done.stdout.splitlines()[-1] == "[False, True]", done.stdout + done.stderr
    assert (
        "the model architecture of vLLM 'draftsmith_toy.network:ServedToy' is claimed by plugin 'rival' of "
        "draftsmith-rival 0.2 and plugin 'toy' of draftsmith-toy 0.1.0" in done.stderr
    )
    assert "DRAFTSMITH_DISABLE_PLUGINS=rival" in done.stderr
    without = outsider.run("-c", f"import os; os.environ['DRAFTSMITH_DISABLE_PLUGINS'] = 'rival'\n{PROCESS}")
    assert without.stdout.splitlines()[-1] == "[True, True]"
