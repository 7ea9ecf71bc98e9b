"""Facts of a verifier, read from its files without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.api import VerifierFacts
from draftsmith.errors import VerifierError
from draftsmith.stored_tensors import tensor_files
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.verifier import read_verifier, tensor_specs, weight_files
from draftsmith.verifier_weights import load_verifier_weights

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def write_model(folder: Path, config: dict[str, Any] | None = None, *, head: bool = True, **changes: Any) -> Path:
    """A folder with that configuration and a few weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**(config or LLAMA), **changes}))
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(300, 64, generator=generator)}
    tensors |= {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(96, 64, generator=generator) for i in range(4)}
    if head:
        tensors["lm_head.weight"] = torch.randn(300, 64, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    return folder


def facts(folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> VerifierFacts:
    return read_verifier(write_model(folder, config, **changes))


# --- genuine models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["llama", "llama_tied", "llama3_rope", "qwen3", "qwen3_yarn", "qwen3_moe", "gemma3", "granite", "nested"]
)
def test_facts_equal_what_transformers_reads(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = make_tiny_verifier(tmp_path / family, family)
    read = read_verifier(folder)
    config = AutoConfig.from_pretrained(folder).get_text_config()
    for ours, theirs in {
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "intermediate_size": "intermediate_size",
        "vocab_size": "vocab_size",
        "rms_norm_eps": "rms_norm_eps",
        "max_position_embeddings": "max_position_embeddings",
    }.items():
        assert getattr(read, ours) == (
            getattr(config, theirs, None) or read.hidden_size // read.num_attention_heads
        ), ours
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert read.rope_parameters["rope_theta"] == rope["rope_theta"]
    assert read.rope_parameters["rope_type"] == rope["rope_type"]
    assert read.is_mixture_of_experts == ("moe" in family)
    assert read.tie_word_embeddings == bool(getattr(config, "tie_word_embeddings", False))
    if family == "granite":
        assert read.logit_scale == 0.25


def test_softcap_and_nesting(tmp_path: Path) -> None:
    assert read_verifier(make_tiny_verifier(tmp_path / "a", "gemma3_softcap")).logit_softcap == 3.0
    nested = read_verifier(make_tiny_verifier(tmp_path / "b", "nested"))
    assert nested.model_type == "gemma3_text"
    assert nested.architectures == ("Gemma3ForConditionalGeneration",)
    assert "vision_config" not in nested.text_config


@pytest.mark.model
def test_the_real_model(smollm2_path: Path) -> None:
    read = read_verifier(smollm2_path)
    assert (read.model_type, read.hidden_size, read.num_layers, read.vocab_size) == ("llama", 576, 30, 49152)
    assert (read.num_attention_heads, read.num_key_value_heads, read.head_dim) == (9, 3, 64)
    assert read.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert read.tie_word_embeddings
    assert read.eos_token_ids == (2,)


@pytest.mark.slow
def test_a_configuration_that_leaves_out_defaults_is_completed_without_importing_torch(tmp_path: Path) -> None:
    # As google/gemma-3-4b-it is published: heads, head_dim, vocabulary and norm come from the class's defaults.
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    folder = write_model(
        tmp_path / "m",
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text},
    )
    code = (
        "import sys, json; from draftsmith.verifier import read_verifier; f = read_verifier(sys.argv[1]);"
        "print(json.dumps([f.num_attention_heads, f.num_key_value_heads, f.head_dim, f.vocab_size,"
        " f.rope_parameters['rope_theta'], 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [8, 4, 256, 262208, 1000000.0, False]


# --- spellings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 16}},
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 16},
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
    ],
)
def test_both_spellings_of_rope(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    assert facts(tmp_path / "m", **keys).rope_parameters == expected


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_are_noticed_under_every_name(key: str, tmp_path: Path) -> None:
    assert facts(tmp_path / "m", **{key: 8}).is_mixture_of_experts
    assert not facts(tmp_path / "n", **{key: 1}).is_mixture_of_experts


@pytest.mark.parametrize(
    ("keys", "scale", "softcap"),
    [
        ({"logit_scale": 0.0625}, 0.0625, None),
        ({"logits_scaling": 8.0}, 0.125, None),
        ({"final_logit_softcapping": 30.0}, 1.0, 30.0),
        ({"final_logit_softcapping": None}, 1.0, None),
    ],
)
def test_logit_post_processing(keys: dict[str, Any], scale: float, softcap: float | None, tmp_path: Path) -> None:
    read = facts(tmp_path / "m", **keys)
    assert (read.logit_scale, read.logit_softcap) == (scale, softcap)


@pytest.mark.parametrize(
    ("keys", "head", "tied"),
    [({"tie_word_embeddings": False}, True, False), ({}, True, False), ({}, False, True)],
)
def test_a_model_without_a_head_is_tied(keys: dict[str, Any], head: bool, tied: bool, tmp_path: Path) -> None:
    assert facts(tmp_path / "m", head=head, **keys).tie_word_embeddings is tied


def test_ends_of_turn_come_from_the_generation_config_first(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "pad_token_id": 9}))
    read = read_verifier(folder)
    assert read.eos_token_ids == (7, 8, 2)
    assert read.pad_token_id == 9


# --- fingerprint ------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    first = facts(tmp_path / "a").fingerprint
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert read_verifier(tmp_path / "b").fingerprint == first
    assert facts(tmp_path / "c", rms_norm_eps=1e-6).fingerprint != first
    assert facts(tmp_path / "d", transformers_version="9", _name_or_path="x").fingerprint == first


def test_every_tensor_counts(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    first = read_verifier(folder).fingerprint
    original = load_file(folder / "model.safetensors")
    for name in original:
        # A training step moves every number of a tensor it trains.
        save_file({**original, name: original[name] + 1e-3}, folder / "model.safetensors")
        assert read_verifier(folder).fingerprint != first, name


def test_a_large_model_is_sampled_not_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    size = 40 << 30
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)  # sparse: 40 GB that take no room
    assert read_verifier(folder).fingerprint


def test_without_an_index_all_files_are_the_model_as_they_are_to_vllm(tmp_path: Path) -> None:
    """A final norm in a file of its own is found, and part of the fingerprint; Mistral's copy of it all is neither."""
    folder = make_tiny_verifier(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    norm = {"model.norm.weight": tensors.pop("model.norm.weight")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(norm, folder / "norm.safetensors")
    assert weight_files(folder) == (folder / "model.safetensors", folder / "norm.safetensors")
    assert tensor_files(folder) == list(weight_files(folder))
    facts = read_verifier(folder)
    found = load_verifier_weights(facts).final_norm.get_parameter("weight")
    torch.testing.assert_close(found, norm["model.norm.weight"])
    save_file({"model.norm.weight": found.detach() + 1}, folder / "norm.safetensors")
    changed = read_verifier(folder).fingerprint
    assert changed != facts.fingerprint
    save_file({"norm.weight": found.detach()}, folder / "consolidated.safetensors")
    assert [file.name for file in weight_files(folder)] == ["model.safetensors", "norm.safetensors"]
    assert tensor_files(folder) == list(weight_files(folder))
    assert read_verifier(folder).fingerprint == changed


# --- what is no verifier ----------------------------------------------------------------------------------------


def refused(path: Path | str, what: str) -> VerifierError:
    with pytest.raises(VerifierError, match=what) as raised:
        read_verifier(path)
    assert raised.value.hint
    assert raised.value.exit_code == 2
    return raised.value


def test_a_missing_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such verifier")
    assert "hf download nobody/such-model" in str(refused("nobody/such-model", "no such verifier").hint)


def test_a_file_is_no_verifier(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("x")
    refused(tmp_path / "model.gguf", "must be a folder")


@pytest.mark.parametrize(
    ("file", "hint"),
    [("notes.txt", "config.json"), ("adapter_config.json", "merge"), ("model.gguf", "safetensors")],
)
def test_a_folder_without_a_model_says_what_it_is(tmp_path: Path, file: str, hint: str) -> None:
    (tmp_path / file).write_text("{}")
    assert hint in str(refused(tmp_path, "config.json is missing").hint)


def test_a_configuration_of_something_else(tmp_path: Path) -> None:
    refused(write_model(tmp_path / "a", {"hello": 1}), "describes no model")
    refused(write_model(tmp_path / "b", speculators_model_type="x"), "draft, not a verifier")
    for number, name in enumerate(("CLIPModel", "BertForMaskedLM", "Qwen3ForSequenceClassification")):
        refused(write_model(tmp_path / f"c{number}", architectures=[name]), "writes no text")
    (tmp_path / "a" / "config.json").write_text("{")
    refused(tmp_path / "a", "cannot be read as JSON")
    (tmp_path / "a" / "config.json").write_text("[]")
    refused(tmp_path / "a", "not a JSON object")


def test_missing_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    refused(folder, "no safetensors weights")
    (folder / "pytorch_model.bin").write_text("x")
    assert "convert" in str(refused(folder, "a pickle").hint)


def test_an_index_that_names_missing_files(tmp_path: Path) -> None:
    folder = make_tiny_verifier(tmp_path / "m", "llama", max_shard_size="50KB")
    files = weight_files(folder)
    assert len(files) > 2
    files[1].unlink()
    refused(folder, f"1 of {len(files)} weight files are missing, {files[1].name}")


@pytest.mark.parametrize("damage", ["cut", "pointer", "empty", "header"])
def test_damaged_weights(tmp_path: Path, damage: str) -> None:
    file = write_model(tmp_path / "m") / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(
        {
            "cut": content[:-100],
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
            "empty": b"",
            "header": content[:8] + b"!" + content[9:],
        }[damage]
    )
    refused(tmp_path / "m", "cut or damaged")


def test_shapes_and_dtypes_of_all_tensors_are_read_from_the_headers(tmp_path: Path) -> None:
    folder = make_tiny_verifier(tmp_path / "it", dtype="bfloat16", max_shard_size="50KB")
    specs = tensor_specs(folder)
    stored = {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}
    assert {name: spec.shape for name, spec in specs.items()} == {name: tuple(x.shape) for name, x in stored.items()}
    assert {spec.dtype for spec in specs.values()} == {"BF16"}
    (folder / weight_files(folder)[0].name).unlink()
    with pytest.raises(VerifierError, match="missing"):
        tensor_specs(folder)
