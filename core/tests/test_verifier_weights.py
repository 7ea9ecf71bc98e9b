"""The teacher's tensors: with them and the captured last state, the verifier's own logits come out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.errors import VerifierError
from draftsmith.testing.verifiers import FAMILIES, make_tiny_verifier
from draftsmith.verifier import read_verifier
from draftsmith.verifier_weights import load_verifier_weights, read_verifier_tensors


def teacher_logits(folder: Path, last_hidden: torch.Tensor) -> torch.Tensor:
    """softcap(scale · head(norm(y))), written out."""
    weights = load_verifier_weights(read_verifier(folder))
    logits = weights.logit_scale * (weights.final_norm(last_hidden.float()) @ weights.lm_head.float().T)
    if weights.logit_softcap is not None:
        logits = weights.logit_softcap * torch.tanh(logits / weights.logit_softcap)
    return logits


def run_verifier(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Last hidden states before the final norm [T, H], and the verifier's logits [T, V]."""
    from draftsmith.capture.engines.transformers import hidden_states, load_verifier

    model = load_verifier(folder, dtype=torch.float32, device=torch.device("cpu"))
    tokens = torch.arange(4, 24)[None]
    layers = read_verifier(folder).num_layers
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0]
    return hidden_states(model, tokens, None, [layers])[0, :, 0].clone(), logits


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_teacher_is_the_verifier(tmp_path: Path, family: str) -> None:
    folder = make_tiny_verifier(tmp_path / "verifier", family, num_layers=4)
    last_hidden, want = run_verifier(folder)
    torch.testing.assert_close(teacher_logits(folder, last_hidden), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_files_and_tied_heads(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_verifier(tmp_path / "verifier", "llama", tied=tied, max_shard_size="60KB", num_layers=3)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    last_hidden, want = run_verifier(folder)
    torch.testing.assert_close(teacher_logits(folder, last_hidden), want, rtol=1e-4, atol=1e-4)
    weights = load_verifier_weights(read_verifier(folder))
    assert (weights.lm_head.data_ptr() == weights.embed_tokens.data_ptr()) == tied


def test_nothing_else_is_read(tmp_path: Path) -> None:
    """The layers may be anything: only the needed tensors are touched. Stored dtypes are kept."""
    folder = make_tiny_verifier(tmp_path / "verifier", "qwen3", dtype="bfloat16", num_layers=3)
    want = load_verifier_weights(read_verifier(folder))
    tensors = load_file(folder / "model.safetensors")
    poisoned = {name: each * float("nan") if ".layers." in name else each for name, each in tensors.items()}
    save_file(poisoned, folder / "model.safetensors", metadata={"format": "pt"})
    got = load_verifier_weights(read_verifier(folder))
    assert torch.equal(got.lm_head, want.lm_head)
    assert got.lm_head.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in got.final_norm.parameters())


def test_the_norm_is_of_the_verifiers_own_class(tmp_path: Path) -> None:
    """Gemma scales by 1 + w; its draft would learn from a wrong teacher with anybody else's norm."""
    weights = load_verifier_weights(read_verifier(make_tiny_verifier(tmp_path / "verifier", "gemma3", num_layers=3)))
    assert type(weights.final_norm).__name__ == "Gemma3RMSNorm"


def damage(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "final norm"),
        ("model.embed_tokens.weight", None, "embedding"),
        ("lm_head.weight", torch.zeros(7, 64), "config.json says"),
        ("model.embed_tokens.weight", torch.zeros(320, 64, dtype=torch.int8), "quantised"),
        ("model.norm.weight", torch.zeros(3), "its class expects"),
    ],
)
def test_damaged_weights_are_named(tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str) -> None:
    folder = make_tiny_verifier(tmp_path / "verifier", "llama", num_layers=3)
    facts = read_verifier(folder)
    damage(folder, name, tensor)
    with pytest.raises(VerifierError, match=message):
        load_verifier_weights(facts)


def test_a_family_unknown_to_transformers_is_an_error_with_a_hint(tmp_path: Path) -> None:
    folder = make_tiny_verifier(tmp_path / "verifier", "llama", num_layers=3)
    facts = read_verifier(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no_such_family"}))
    with pytest.raises(VerifierError, match=r"no_such_family|does not recognize|trust_remote_code"):
        load_verifier_weights(facts)


def test_further_tensors_are_read_by_name_from_whichever_file_has_them(tmp_path: Path) -> None:
    folder = make_tiny_verifier(tmp_path, "llama", max_shard_size="50KB")
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.7.self_attn.k_proj.weight"]
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = read_verifier_tensors(read_verifier(folder), names)
    assert list(found) == names
    for name, tensor in found.items():
        assert torch.equal(tensor, load_file(folder / files[name])[name])
    with pytest.raises(VerifierError, match=r"model\.nothing is missing"):
        read_verifier_tensors(read_verifier(folder), ["model.nothing"])


def test_further_tensors_that_are_quantised_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_verifier(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(VerifierError, match="is quantised"):
        read_verifier_tensors(read_verifier(folder), [name])
