"""What is read of the verifier, how steps are weighed, which verifiers are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from make_mimo import add_head
from safetensors.torch import load_file, save_file

from draftsmith.interfaces import ExportContext
from draftsmith.testing.algorithm import Material, make_material, slot_logits, tiny_case
from draftsmith.verifier import read_verifier, tensor_specs
from draftsmith.verifier_weights import load_verifier_weights
from draftsmith_mtp.options import MtpOptions, check, requirements


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("mimo"), "llama", finish=add_head)


def test_nothing_of_the_verifier_is_read_but_embedding_head_norm_and_its_own_head(
    material: Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers are never loaded: what is fetched from its files is counted where it is fetched."""
    import safetensors

    read: list[str] = []
    opened = safetensors.safe_open

    class Watched:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.file = opened(*arguments, **options)

        def __enter__(self) -> Watched:
            self.file.__enter__()
            return self

        def __exit__(self, *exc: Any) -> None:
            self.file.__exit__(*exc)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> Any:
            read.append(name)
            return self.file.get_tensor(name)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a whole file is loaded")

    monkeypatch.setattr(safetensors, "safe_open", Watched)
    monkeypatch.setattr("safetensors.torch.load_file", refuse)
    facts = read_verifier(material.folder)
    material = attrs.evolve(material, facts=facts, weights=load_verifier_weights(facts))
    case = tiny_case(material, "mtp")
    model = case.algorithm.build_model()
    slots = case.algorithm.forward(model, case.algorithm.make_batch(case.row, torch.Generator()))
    slot_logits(slots).sum().backward()
    context = ExportContext(setup=case.algorithm.setup, verifier_name="x", speculative_tokens=3)
    case.format.tensors(model, context)
    case.format.config(context)
    heads = {name for name in tensor_specs(material.folder) if name.startswith("model.mtp_layers.")}
    assert len(heads) == 16
    assert set(read) == {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} | heads


def test_the_draft_begins_as_the_verifiers_own_head(material: Material) -> None:
    case = tiny_case(material, "mtp")
    model = case.algorithm.build_model()
    stored = load_file(material.folder / "model.safetensors")
    context = ExportContext(setup=case.algorithm.setup, verifier_name="x", speculative_tokens=3)
    tensors = case.format.tensors(model, context)
    assert set(tensors) == {name for name in stored if name.startswith("model.mtp_layers.")}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in tensors.items())
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert trained == sum(tensor.numel() for tensor in tensors.values())


def test_the_steps_weigh_as_in_the_paper(material: Material) -> None:
    """0.51, 0.31 and 0.18 of the loss where all steps have as many slots."""
    from draftsmith.train.step import reduce_loss

    case = tiny_case(material, "mtp")
    slots = case.algorithm.forward(
        case.algorithm.build_model(), case.algorithm.make_batch(case.row, torch.Generator())
    )
    counts = torch.bincount(slots.step)
    kept = torch.cat([torch.nonzero(slots.step == step).flatten()[: int(counts.min())] for step in range(3)])
    equal = attrs.evolve(slots, step=slots.step[kept], weight=slots.weight[kept])
    for step, share in enumerate((0.5102, 0.3061, 0.1837)):
        loss = (equal.step == step).float()
        value, _ = reduce_loss(loss, equal, torch.ones_like(loss, dtype=torch.bool), case.registered.reduction)
        assert float(value) == pytest.approx(share, abs=1e-4)


def test_the_last_layers_output_is_all_that_is_captured(material: Material) -> None:
    wanted = requirements(MtpOptions(), material.facts)
    assert wanted.ids(material.facts.num_layers) == (8,)
    assert not wanted.last_is_extra(8)


# --- refusals -------------------------------------------------------------------------------------------------------


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def without_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if "mtp" not in name}, folder / "model.safetensors")


def replaced(name: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        if tensor is not None:
            tensors[name] = tensor
        save_file(tensors, folder / "model.safetensors")

    return change


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tensors": (without_head, "no multi-token-prediction head: its files hold no tensor of it"),
    "not configured": (
        lambda folder: edited(folder, num_nextn_predict_layers=None),
        "no multi-token-prediction head: num_nextn_predict_layers is None",
    ),
    "no number": (
        lambda folder: edited(folder, num_nextn_predict_layers="one"),
        "num_nextn_predict_layers is 'one', which is no number of layers",
    ),
    "fewer than none": (
        lambda folder: edited(folder, num_nextn_predict_layers=-1),
        "no multi-token-prediction head: num_nextn_predict_layers is -1",
    ),
    "two layers": (lambda folder: edited(folder, num_nextn_predict_layers=2), "the head has 2 layers"),
    "unknown family": (
        lambda folder: edited(folder, architectures=["Qwen2ForCausalLM"]),
        "no family of multi-token-prediction heads is known for Qwen2ForCausalLM",
    ),
    "another shape": (
        replaced("model.mtp_layers.0.input_proj.weight", torch.zeros(64, 64)),
        "input_proj.weight has shape [64, 64], the model makes it [64, 128]",
    ),
    "a norm is missing": (
        replaced("model.mtp_layers.0.final_layernorm.weight", None),
        "model.mtp_layers.0.final_layernorm.weight is missing",
    ),
    "quantised": (
        replaced("model.mtp_layers.0.mlp.up_proj.weight", torch.zeros(96, 64, dtype=torch.float8_e4m3fn)),
        "1 tensors of the head are quantised, such as model.mtp_layers.0.mlp.up_proj.weight (F8_E4M3)",
    ),
    "rotary scaling": (
        lambda folder: edited(folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "the rotary scaling 'dynamic'",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_verifier_whose_head_cannot_be_trained_is_refused(material: Material, tmp_path: Path, kind: str) -> None:
    """Found by the check, so before torch is imported."""
    change, message = REFUSED[kind]
    folder = Path(shutil.copytree(material.folder, tmp_path / "verifier"))
    change(folder)
    problems = check(MtpOptions(), read_verifier(folder))
    assert any(message in each.what for each in problems), [each.what for each in problems]
    assert all(each.where and each.hint for each in problems)


def test_a_head_whose_layer_is_of_other_shapes_is_refused(material: Material, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(material.folder, tmp_path / "verifier"))
    replaced("model.mtp_layers.0.mlp.up_proj.weight", torch.zeros(8, 64))(folder)
    problems = check(MtpOptions(), read_verifier(folder))
    assert any("model.mtp_layers.0.mlp.up_proj.weight has shape [8, 64]" in each.what for each in problems)


def test_a_plain_head_in_a_model_of_packed_layers_is_trained(material: Material, tmp_path: Path) -> None:
    """Four bits a weight, two in a byte: such models often leave their head as it was."""
    folder = Path(shutil.copytree(material.folder, tmp_path / "verifier"))
    tensors = load_file(folder / "model.safetensors")
    packed = [name for name in tensors if name.startswith("model.layers.") and name.endswith("up_proj.weight")]
    rows, columns = tensors[packed[0]].shape
    tensors |= {name: torch.zeros(rows, columns // 2, dtype=torch.uint8) for name in packed}
    save_file(tensors, folder / "model.safetensors")
    assert not check(MtpOptions(), read_verifier(folder))
