"""The exported head: what is written, what lint says of a damaged one, what training may begin from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make_mimo import add_head
from safetensors.torch import load_file, save_file

from draftsmith.checkpoint.export import write_export
from draftsmith.checkpoint.lint import lint_checkpoint
from draftsmith.checkpoint.warm_start import begin_from, warm_start_problems
from draftsmith.errors import CheckpointError
from draftsmith.interfaces import ExportContext, Finding
from draftsmith.plugins import load_plugins
from draftsmith.testing.algorithm import AlgorithmCase, Material, make_material, tiny_case

PREFIX = "model.mtp_layers.0."


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("mimo"), "llama", finish=add_head)


@pytest.fixture(scope="module")
def case(material: Material) -> AlgorithmCase:
    return tiny_case(material, "mtp")


@pytest.fixture
def head(material: Material, case: AlgorithmCase, tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    context = ExportContext(setup=case.algorithm.setup, verifier_name=str(material.folder), speculative_tokens=3)
    notes = {"algorithm": "mtp", "verifier_fingerprint": material.facts.fingerprint, "trained_speculative_tokens": 3}
    write_export(folder, case.format, case.algorithm.build_model(), context, notes)
    return folder


def linted(folder: Path) -> list[Finding]:
    return lint_checkpoint(folder, load_plugins())


def test_what_is_written_is_the_models_configuration_and_the_heads_tensors(head: Path, material: Material) -> None:
    ours = json.loads((head / "config.json").read_text())
    theirs = json.loads((material.folder / "config.json").read_text())
    added = set(ours) - set(theirs)
    assert added == {"speculators_model_type", "speculators_config", "mtp_head", "draftsmith"}
    assert {key for key in theirs if ours[key] != theirs[key]} <= {"dtype"}
    tensors = load_file(head / "model.safetensors")
    assert all(name.startswith(PREFIX) for name in tensors)
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert linted(head) == []


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return apply


DAMAGED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a tensor is missing": (
        tensors(lambda found: found.pop(f"{PREFIX}final_layernorm.weight")),
        "error",
        "tensor model.mtp_layers.0.final_layernorm.weight [64] is missing",
    ),
    "a tensor too many": (
        tensors(lambda found: found.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)})),
        "error",
        "tensor model.layers.0.mlp.up_proj.weight is unknown",
    ),
    "another shape": (
        tensors(lambda found: found.update({f"{PREFIX}input_proj.weight": torch.zeros(64, 64)})),
        "error",
        "has shape [64, 64], the config makes it [64, 128]",
    ),
    "another width of the layer": (
        config(intermediate_size=128),
        "error",
        "intermediate_size is 128, the verifier's 96: vLLM would build another head",
    ),
    "no layers": (config(num_nextn_predict_layers=0), "error", "vLLM builds no head"),
    "another family": (
        config(architectures=["Glm4MoeForCausalLM"]),
        "error",
        "the verifier is of another family",
    ),
    "no family": (config(architectures=["LlamaForCausalLM"], model_type="llama"), "error", "no family"),
    "quantised": (config(quantization_config={"quant_method": "fp8"}), "error", "quantization_config was inherited"),
    "another model": (
        config(draftsmith={"verifier_fingerprint": "0" * 32}),
        "warning",
        "the head was trained for another model than this one",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_lint_finds(head: Path, damage: str) -> None:
    change, severity, message = DAMAGED[damage]
    change(head)
    found = [each for each in linted(head) if message in each.what]
    assert found, [each.what for each in linted(head)]
    assert found[0].severity == severity


def test_the_first_findings_of_other_drafts_are_none_of_a_heads(head: Path) -> None:
    """A top-level model_type is what makes vLLM build it, and it has no transformer_layer_config."""
    assert json.loads((head / "config.json").read_text())["model_type"] == "qwen2"
    assert linted(head) == []


def begin(head: Path, case: AlgorithmCase) -> list[str]:
    setup = case.algorithm.setup
    schema = load_plugins().schemas.get("mtp")
    return [each.what for each in warm_start_problems(head, schema, setup.options, setup.verifier, setup.capture)]


def test_training_begins_from_another_head_of_the_model(head: Path, case: AlgorithmCase) -> None:
    tensors(lambda found: found.update({name: each + 1 for name, each in found.items()}))(head)
    assert begin(head, case) == []
    model = case.algorithm.build_model()
    fresh = {name: each.clone() for name, each in model.state_dict().items()}
    begin_from(head, load_plugins().schemas.get("mtp"), model, case.algorithm.setup.vocabulary)
    for name, tensor in model.state_dict().items():
        if name.startswith("head."):
            torch.testing.assert_close(tensor, fresh[name] + 1, rtol=0.01, atol=0.01)
        else:
            assert torch.equal(tensor, fresh[name]), name


def test_a_head_of_another_model_is_refused_before_anything_starts(
    head: Path, case: AlgorithmCase, tmp_path: Path
) -> None:
    other = make_material(tmp_path / "wide", "llama", intermediate_size=80, finish=add_head)
    (problem, *_) = begin(head, tiny_case(other, "mtp"))
    assert "mlp" in problem
    assert "has shape" in problem
    config(architectures=["Glm4MoeForCausalLM"])(head)
    assert begin(head, case) == ["the head is of the family glm4_moe, the verifier's of mimo"]
    with pytest.raises(CheckpointError, match="of the family glm4_moe, the verifier's of mimo"):
        case.format.load(case.algorithm.build_model(), {}, json.loads((head / "config.json").read_text()))


def test_a_head_of_other_shapes_does_not_load(head: Path, case: AlgorithmCase) -> None:
    written = json.loads((head / "config.json").read_text())
    found = load_file(head / "model.safetensors")
    model = case.algorithm.build_model()
    with pytest.raises(CheckpointError, match="1 missing"):
        case.format.load(model, {name: each for name, each in found.items() if "o_proj" not in name}, written)
    with pytest.raises(CheckpointError, match=r"has shape \[1\], the configuration makes it"):
        case.format.load(model, {**found, f"{PREFIX}mlp.up_proj.weight": torch.zeros(1)}, written)
    with pytest.raises(CheckpointError, match="none of a head"):
        case.format.load(model, {**found, "model.norm.weight": torch.zeros(64)}, written)


def test_it_is_served_beside_its_model_alone(head: Path, case: AlgorithmCase) -> None:
    plan = case.format.serving(json.loads((head / "config.json").read_text()))
    assert (plan.method, plan.num_speculative_tokens, plan.as_model) == ("mtp", 3, False)
    assert not plan.needs_v2_runner
    assert "draftsmith stitch" in plan.notes[0]
    with pytest.raises(CheckpointError, match="number of speculative tokens"):
        case.format.serving({})


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_runner_v1_is_kept_from_the_heads_that_it_dies_of(head: Path, case: AlgorithmCase, model_type: str) -> None:
    written = json.loads((head / "config.json").read_text())
    config = {"model_type": model_type, "draftsmith": written["draftsmith"]} | {
        key: written[key] for key in ("speculators_config",) if key in written
    }
    assert case.format.serving(config).needs_v2_runner


def test_a_head_is_no_verifier(head: Path) -> None:
    from draftsmith.errors import VerifierError
    from draftsmith.verifier import read_verifier

    with pytest.raises(VerifierError, match="this checkpoint is a draft"):
        read_verifier(head)


def test_copies_of_embedding_and_head_in_it_are_passed_over(material: Material, tmp_path: Path) -> None:
    """As other tools may write them; vLLM takes the model's."""
    from draftsmith.interfaces import TensorSpec
    from draftsmith_mtp.checkpoint import MtpCheckpoint

    glm = {"architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    names = ("model.layers.2.shared_head.head.weight", "model.layers.2.embed_tokens.weight")
    present = {name: TensorSpec(shape=(1,)) for name in (*names, "model.layers.2.enorm.weight")}
    assert list(MtpCheckpoint().as_loaded(glm, present)) == ["model.layers.2.enorm.weight"]
