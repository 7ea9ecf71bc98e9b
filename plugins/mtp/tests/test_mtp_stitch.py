"""Heads stitched into copies of their models and taken out again: byte by byte, whole or not at all, or refused."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from make_mimo import add_head
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftsmith.checkpoint.lint import lint_checkpoint
from draftsmith.cli import main
from draftsmith.errors import CheckpointError, DiskSpaceError, DraftsmithError, OutputError, VerifierError
from draftsmith.plugins import load_plugins
from draftsmith.stored_tensors import read_file_header, tensor_files
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.verifier import read_verifier
from draftsmith_mtp.families import family_named
from draftsmith_mtp.head import HEAD_KEY
from draftsmith_mtp.shards import whole_folder
from draftsmith_mtp.stitch import Stitched, stitch, unstitch

FAMILIES = ("mimo", "qwen3_5", "qwen3_next", "deepseek_v3", "glm4_moe")
Tensors = dict[str, torch.Tensor]


# --- models that the tests make -----------------------------------------------------------------------------------


def configuration(family: str, hidden: int = 16) -> dict[str, Any]:
    known = family_named(family)
    text = {
        "model_type": known.model_types[0] if known.model_types else family,
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "vocab_size": 40,
        known.layers_key: 1,
    }
    if family == "qwen3_5":  # nested, as published
        return {"model_type": family, "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    return {**text, "architectures": list(known.architectures) or ["SomeForCausalLM"]}


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def head_of(family: str, config: dict[str, Any], dtype: torch.dtype, seed: int, hidden: int = 16) -> Tensors:
    """Random tensors of a head under the model's names, without copies of embedding and head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "token_layernorm.weight": (hidden,),
        "hidden_layernorm.weight": (hidden,),
        "input_proj.weight": (hidden, 2 * hidden),
        "layer.self_attn.q_proj.weight": (16, hidden),
        "layer.mlp.down_proj.weight": (hidden, 24),
        "final_layernorm.weight": (hidden,),
    }
    known = family_named(family)
    return {
        known.model_name(own, config): random_bytes(shape, dtype, generator) for own, shape in sorted(shapes.items())
    }


def make_model(
    folder: Path,
    family: str = "mimo",
    *,
    index: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    head: Tensors | None = None,
    hidden: int = 16,
    seed: int = 0,
) -> Path:
    """A model of random tensors with neighbours of every kind; its head is in two of four files, among others."""
    config = configuration(family, hidden)
    generator = torch.Generator().manual_seed(seed)
    kinds = {
        "model.embed_tokens.weight": ((40, hidden), dtype),
        "model.layers.0.self_attn.q_proj.weight": ((16, hidden), dtype),
        "model.layers.0.mlp.qweight": ((3, 5), torch.int32),
        "model.layers.0.mlp.scale": ((), torch.float32),
        "model.layers.1.mlp.weight": ((7, 3), torch.float8_e4m3fn),
        "model.layers.1.mlp.zeros": ((3,), torch.uint8),
        "model.layers.1.mlp.flag": ((1,), torch.bool),
        "model.norm.weight": ((hidden,), dtype),
        "lm_head.weight": ((40, hidden), dtype),
    }
    rest = {name: random_bytes(shape, kind, generator) for name, (shape, kind) in kinds.items()}
    mine = head_of(family, config, dtype, seed + 1, hidden) if head is None else dict(head)
    known = family_named(family)
    for copy in known.copies:
        mine[known.prefix_of(config) + copy] = random_bytes((40, hidden), dtype, generator)
    folder.mkdir(parents=True)
    names = list(rest)
    if index:
        half = list(mine)[: len(mine) // 2]
        parts = [
            names[:3],
            names[3:5],
            [*names[5:7], *half],
            [*names[7:], *(name for name in mine if name not in half)],
        ]
        weight_map = {}
        for number, part in enumerate(parts, 1):
            file = f"model-{number:05}-of-00004.safetensors"
            save_file({name: {**rest, **mine}[name] for name in part}, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        total = sum(each.nbytes for each in (*rest.values(), *mine.values()))
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        (folder / "model.safetensors.index.json").write_text(text)
    else:
        save_file({**rest, **mine}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "templates").mkdir()
    (folder / "templates" / "chat.jinja").write_text("{{ messages }}")
    return folder


def make_head(folder: Path, model: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    """A head directory as training writes it, for *model*; *changes* are of its config.json."""
    config = json.loads((model / "config.json").read_text())
    family = next(name for name in FAMILIES if family_named(name).tells(config))
    tensors = head_of(family, config, torch.bfloat16, seed=77) if tensors is None else tensors
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    method = {"proposal_type": "greedy", "speculative_tokens": 3}
    own = {
        "speculators_model_type": "mtp",
        "speculators_config": {"proposal_methods": [method]},
        HEAD_KEY: {"family": family},
        "draftsmith": {"verifier_fingerprint": read_verifier(model).fingerprint},
    }
    (folder / "config.json").write_text(json.dumps({**config, **own, **changes}))
    return folder


def snapshot(folder: Path) -> dict[str, tuple[str, int]]:
    """Content and time of every file."""
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def raw(folder: Path) -> dict[str, bytes]:
    """Every tensor's bytes, from all files that loaders read."""
    found = {}
    for file in tensor_files(folder):
        data = file.read_bytes()
        for name, place in read_file_header(file).items():
            assert name not in found
            found[name] = data[place.begin : place.end]
    return found


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def head(tmp_path: Path, model: Path) -> Path:
    return make_head(tmp_path / "head", model)


def refused(kind: type[DraftsmithError], *texts: str, target: Path, call: Callable[[], object]) -> None:
    """*call* raises, naming *texts*; nothing is beside *target* that was not before."""
    before = sorted(target.parent.iterdir())
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    for text in texts:
        assert text in message
    assert caught.value.where
    assert caught.value.hint
    assert sorted(target.parent.iterdir()) == before


# --- what is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [False, True], ids=["shared", "copied"])
@pytest.mark.parametrize("index", [True, False], ids=["sharded", "single"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_replaced_and_nothing_else(tmp_path: Path, family: str, index: bool, copy: bool) -> None:
    model = make_model(tmp_path / "model", family, index=index)
    head = make_head(tmp_path / "head", model)
    before = snapshot(model)
    done = stitch(model, head, tmp_path / "out", copy=copy)
    assert snapshot(model) == before
    old, new, given = raw(model), raw(tmp_path / "out"), load_file(head / "model.safetensors")
    assert new == {**old, **{name: as_bytes(tensor) for name, tensor in given.items()}}
    assert all(new[name] != old[name] for name in given)
    files = set(before) - {path.name for path in tensor_files(model)}
    after = snapshot(tmp_path / "out")
    assert after.keys() == before.keys()
    assert {"config.json", "tokenizer.json", "templates/chat.jinja"} <= files
    assert all(after[name][0] == before[name][0] for name in files)
    assert (done.tensors, done.family, done.converted, done.speculative_tokens) == (6, family, 0, 3)
    assert done.rewritten == (2 if index else 1)
    assert done.linked + done.reflinked + done.copied == (2 if index else 0)
    assert not list(tmp_path.glob(".*"))


def test_headers_stay_as_they_are(tmp_path: Path, model: Path, head: Path) -> None:
    stitch(model, head, tmp_path / "out")
    for file in tensor_files(model):
        with safe_open(file, "pt") as old, safe_open(tmp_path / "out" / file.name, "pt") as new:
            assert old.metadata() == new.metadata() == {"format": "pt"}
            assert old.offset_keys() == new.offset_keys()
        assert [place.begin for place in read_file_header(file).values()] == [
            place.begin for place in read_file_header(tmp_path / "out" / file.name).values()
        ]


def test_only_weight_files_that_do_not_change_are_shared(tmp_path: Path, model: Path, head: Path) -> None:
    done = stitch(model, head, tmp_path / "shared")
    assert done.copied == 0
    changed = [f"model-{number:05}-of-00004.safetensors" for number in (3, 4)]
    for path in (each for each in model.rglob("*") if each.is_file()):
        same = path.samefile(tmp_path / "shared" / path.relative_to(model))
        assert same == (path.suffix == ".safetensors" and path.name not in changed and not done.reflinked)
    done = stitch(model, head, tmp_path / "copied", copy=True)
    assert (done.linked, done.reflinked, done.copied) == (0, 0, 2)
    assert not any(path.samefile(tmp_path / "copied" / path.name) for path in model.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    assert done.bytes_written == size


def test_another_file_system_gets_copies(model: Path, head: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        assert os.stat(memory).st_dev != model.stat().st_dev
        done = stitch(model, head, Path(memory) / "out")
        assert (done.reflinked, done.linked, done.copied) == (0, 0, 2)
        given = load_file(head / "model.safetensors")
        stitched = {name: as_bytes(tensor) for name, tensor in given.items()}
        assert raw(Path(memory) / "out") == {**raw(model), **stitched}


def test_shared_blocks_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems that share blocks are rare where tests run: the clone is a copy here, the rest is as there."""

    def clone(source: Path, copy: Path) -> bool:
        shutil.copyfile(source, copy)
        return True

    monkeypatch.setattr("draftsmith_mtp.stitch.reflink", clone)
    monkeypatch.setattr("draftsmith_mtp.shards.reflink", clone)
    model = make_model(tmp_path / "model")
    head = make_head(tmp_path / "head", model)
    done = stitch(model, head, tmp_path / "out")
    given = load_file(head / "model.safetensors")
    assert raw(tmp_path / "out") == {**raw(model), **{name: as_bytes(tensor) for name, tensor in given.items()}}
    assert (done.reflinked, done.linked, done.copied) == (2, 0, 0)
    small = sum(path.stat().st_size for path in model.rglob("*") if path.suffix in (".json", ".jinja"))
    assert done.bytes_written == small + sum(tensor.nbytes for tensor in given.values())


def test_the_hub_cache_of_links_becomes_files(tmp_path: Path, model: Path, head: Path) -> None:
    cached = tmp_path / "snapshots" / "revision"
    cached.mkdir(parents=True)
    for path in model.iterdir():
        (cached / path.name).symlink_to(path)
    done = stitch(cached, head, tmp_path / "out")
    assert done.left_out == ("templates",)  # a link to a folder
    made = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(path.is_symlink() for path in made)
    assert len(made) == 7
    name = "model-00001-of-00004.safetensors"
    assert (model / name).samefile(tmp_path / "out" / name) or done.reflinked


def test_other_files_with_the_old_head_are_left_out(tmp_path: Path, model: Path, head: Path) -> None:
    for name in ("consolidated.00.pth", "consolidated.safetensors", "pytorch_model.bin", "model.Q4.gguf"):
        (model / name).write_bytes(b"old")
    (model / "vision").mkdir()
    kept = ("voice.pt", "vision/model.safetensors")
    for name in kept:
        (model / name).write_bytes(b"other")
    (model / ".cache").mkdir()
    (model / ".cache" / "x").write_text("hub")
    done = stitch(model, head, tmp_path / "out")
    assert done.left_out == (
        "consolidated.00.pth",
        "consolidated.safetensors",
        "model.Q4.gguf",
        "pytorch_model.bin",
    )
    assert all((tmp_path / "out" / name).read_bytes() == b"other" for name in kept)
    assert not (tmp_path / "out" / ".cache").exists()
    assert not (tmp_path / "out" / "consolidated.safetensors").exists()


def test_a_tensor_that_two_files_hold_is_replaced_in_both(tmp_path: Path, model: Path) -> None:
    """vLLM reads both files, whole, and takes the later one's."""
    old = load_file(model / "model-00004-of-00004.safetensors")
    name = next(each for each in old if each.startswith("model.mtp_layers"))
    save_file(
        {**load_file(model / "model-00001-of-00004.safetensors"), name: old[name]},
        model / "model-00001-of-00004.safetensors",
    )
    head = make_head(tmp_path / "head", model)
    done = stitch(model, head, tmp_path / "out")
    assert done.rewritten == 3
    new = load_file(head / "model.safetensors")[name]
    for number in (1, 4):
        stored = load_file(tmp_path / "out" / f"model-{number:05}-of-00004.safetensors")[name]
        assert torch.equal(stored, new)


def test_memory_holds_a_chunk_and_not_the_model(tmp_path: Path, model: Path) -> None:
    big = {"model.layers.0.big": torch.zeros(48 << 20, dtype=torch.uint8)}
    path = model / "model-00004-of-00004.safetensors"
    save_file({**load_file(path), **big}, path)
    head = make_head(tmp_path / "head", model)
    tracemalloc.start()
    try:
        stitch(model, head, tmp_path / "out", copy=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


# --- dtypes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_dtype_of_the_model_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_model(tmp_path / "model", dtype=dtype)
    head = make_head(tmp_path / "head", model)
    done = stitch(model, head, tmp_path / "out")
    assert done.converted == 6
    given = load_file(head / "model.safetensors")
    converted = {name: as_bytes(tensor.to(dtype)) for name, tensor in given.items()}
    assert raw(tmp_path / "out") == {**raw(model), **converted}


def test_values_that_the_models_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", dtype=torch.float16)
    tensors = head_of("mimo", configuration("mimo"), torch.bfloat16, seed=3)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = 1e6
    head = make_head(tmp_path / "head", model, tensors)
    out = tmp_path / "out"
    refused(CheckpointError, name, "F16", target=out, call=lambda: stitch(model, head, out))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_head_with_values_that_are_not_finite_is_refused(tmp_path: Path, model: Path, value: float) -> None:
    tensors = head_of("mimo", configuration("mimo"), torch.bfloat16, seed=3)
    name = sorted(tensors)[2]
    tensors[name].view(-1)[-1] = value
    head, out = make_head(tmp_path / "head", model, tensors), tmp_path / "out"
    told = (name, f"1 of the {tensors[name].numel()} values", "not finite")
    refused(CheckpointError, *told, target=out, call=lambda: stitch(model, head, out))


def test_a_quantised_head_with_values_that_are_no_numbers_is_refused(tmp_path: Path) -> None:
    model, out = quantised_model(tmp_path / "model"), tmp_path / "out"
    unstitch(model, tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn)
    tensors[name].view(torch.uint8).view(-1)[0] = 0x7F
    save_file(tensors, file)
    refused(CheckpointError, name, "not finite", target=out, call=lambda: stitch(model, tmp_path / "head", out))


def quantised_model(folder: Path) -> Path:
    config = configuration("deepseek_v3")
    plain = head_of("deepseek_v3", config, torch.bfloat16, seed=5)
    wide = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in plain.items() if tensor.dim() > 1}
    scales = {f"{name}_scale_inv": torch.rand(1, 1) for name in wide}
    made = make_model(folder, "deepseek_v3", head={**plain, **wide, **scales})
    settings = {"quantization_config": {"quant_method": "fp8"}}
    (made / "config.json").write_text(json.dumps({**config, **settings}))
    return made


def test_a_quantised_head_goes_out_and_in_again(tmp_path: Path) -> None:
    model = quantised_model(tmp_path / "model")
    unstitch(model, tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "fp8"}
    stitch(model, tmp_path / "head", tmp_path / "out")
    assert {name: content for name, (content, _) in snapshot(tmp_path / "out").items()} == {
        name: content for name, (content, _) in snapshot(model).items()
    }


def test_a_plain_head_is_not_forced_into_a_quantised_model(tmp_path: Path) -> None:
    model = quantised_model(tmp_path / "model")
    out = tmp_path / "out"
    head = make_head(tmp_path / "head", model)
    refused(CheckpointError, "scale_inv", "quantised", target=out, call=lambda: stitch(model, head, out))
    # In place, with one scale for all: only the dtype tells.
    config = configuration("mimo")
    plain = head_of("mimo", config, torch.bfloat16, seed=5)
    name = next(each for each in plain if "q_proj" in each)
    model = make_model(tmp_path / "other", head={**plain, name: plain[name].to(torch.float8_e4m3fn)})
    head = make_head(tmp_path / "plain", model)
    refused(CheckpointError, name, "BF16", "F8_E4M3", "quantised", target=out, call=lambda: stitch(model, head, out))


# --- unstitch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_unstitch_writes_what_stitch_takes(tmp_path: Path, family: str) -> None:
    model = make_model(tmp_path / "model", family)
    config = json.loads((model / "config.json").read_text())
    before = snapshot(model)
    done = unstitch(model, tmp_path / "head", speculative_tokens=4)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    expected = head_of(family, config, torch.bfloat16, seed=1)
    assert tensors.keys() == expected.keys()  # no copy of embedding and head among them
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    written = json.loads((tmp_path / "head" / "config.json").read_text())
    assert written.items() >= config.items()
    assert written["speculators_model_type"] == "mtp"
    assert written["speculators_config"]["verifier"]["name_or_path"] == str(model)
    assert written["draftsmith"]["verifier_fingerprint"] == read_verifier(model).fingerprint
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]
    assert done.bytes_written == sum(path.stat().st_size for path in (tmp_path / "head").iterdir())
    assert stitch(model, tmp_path / "head", tmp_path / "out").speculative_tokens == 4
    assert raw(tmp_path / "out") == raw(model)
    assert snapshot(model) == before


def test_tokens_that_vllm_does_not_draft_by_so_many_layers_are_refused(tmp_path: Path, model: Path) -> None:
    """vLLM: more than n_predict must be divisible by it."""
    path, out = model / "config.json", tmp_path / "out"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 2}))
    call = partial(unstitch, model, out, speculative_tokens=3)
    refused(VerifierError, "2 layers", "multiple of 2", target=out, call=call)
    assert unstitch(model, out, speculative_tokens=4).speculative_tokens == 4
    assert unstitch(model, tmp_path / "one", speculative_tokens=1).speculative_tokens == 1


def test_extracted_tensors_begin_at_multiples_of_their_elements(tmp_path: Path) -> None:
    plain = head_of("mimo", configuration("mimo"), torch.bfloat16, seed=5)
    odd = {"model.mtp_layers.0.flags": torch.ones(3, dtype=torch.uint8), "model.mtp_layers.0.one": torch.tensor(1.5)}
    model = make_model(tmp_path / "model", head={**odd, **plain})
    unstitch(model, tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    assert torch.equal(load_file(path)["model.mtp_layers.0.one"], torch.tensor(1.5))
    sizes = {"F32": 4, "BF16": 2, "U8": 1}
    for place in read_file_header(path).values():
        assert place.begin % sizes[str(place.spec.dtype)] == 0


# --- heads of other models ------------------------------------------------------------------------------------------


def test_a_head_of_another_family_is_refused(tmp_path: Path, head: Path) -> None:
    other, out = make_model(tmp_path / "other", "glm4_moe"), tmp_path / "out"
    refused(CheckpointError, "mimo", "glm4_moe", target=out, call=lambda: stitch(other, head, out))


def test_a_head_of_another_width_is_refused(tmp_path: Path, head: Path) -> None:
    other, out = make_model(tmp_path / "other", hidden=32), tmp_path / "out"
    refused(CheckpointError, "hidden size is 16", "32", target=out, call=lambda: stitch(other, head, out))


def test_a_head_of_other_shapes_is_refused(tmp_path: Path, model: Path) -> None:
    tensors = head_of("mimo", configuration("mimo"), torch.bfloat16, seed=3)
    name = next(each for each in tensors if "down_proj" in each)
    head = make_head(tmp_path / "head", model, {**tensors, name: torch.zeros(16, 25, dtype=torch.bfloat16)})
    out = tmp_path / "out"
    refused(CheckpointError, name, "[16, 25]", "[16, 24]", target=out, call=lambda: stitch(model, head, out))


def test_a_head_with_other_tensors_is_refused(tmp_path: Path, model: Path) -> None:
    tensors = head_of("mimo", configuration("mimo"), torch.bfloat16, seed=3)
    name = next(each for each in tensors if "down_proj" in each)
    tensors[name.replace("down", "up")] = tensors.pop(name)
    head, out = make_head(tmp_path / "head", model, tensors), tmp_path / "out"
    texts = (f"it lacks {name}", f"the model's head has no {name.replace('down', 'up')}")
    refused(CheckpointError, *texts, target=out, call=lambda: stitch(model, head, out))
    # A whole model in place of a head has tensors that the model has too, elsewhere.
    whole = make_model(tmp_path / "whole")
    refused(CheckpointError, "the model's head has no", target=out, call=lambda: stitch(model, whole, out))


def test_a_head_trained_on_other_weights_is_refused_unless_told(tmp_path: Path, head: Path) -> None:
    other, out = make_model(tmp_path / "other", seed=9), tmp_path / "out"
    refused(
        CheckpointError, "other weights", "--ignore-fingerprint", target=out, call=lambda: stitch(other, head, out)
    )
    assert stitch(other, head, out, ignore_fingerprint=True).tensors == 6
    # A copy that was stitched before has other weights too, and the message says so.
    again = tmp_path / "again"
    refused(CheckpointError, "another head stitched in", target=again, call=lambda: stitch(out, head, again))


def test_a_head_that_does_not_say_of_which_weights_it_is_is_taken(tmp_path: Path, model: Path, head: Path) -> None:
    config = json.loads((head / "config.json").read_text())
    for key in ("draftsmith", HEAD_KEY, "speculators_config", "speculators_model_type"):
        del config[key]
    (head / "config.json").write_text(json.dumps(config))
    assert stitch(model, head, tmp_path / "out").speculative_tokens == 1
    # Of the configuration nothing is needed but the family.
    (head / "config.json").write_text(json.dumps({HEAD_KEY: {"family": "mimo"}}))
    assert stitch(model, head, tmp_path / "again").tensors == 6


def test_what_is_no_head_is_refused(tmp_path: Path, model: Path, head: Path) -> None:
    out = tmp_path / "out"
    for folder, text in ((tmp_path / "nowhere", "config.json"), (model, "the model's head has no")):
        refused(CheckpointError, text, target=out, call=lambda folder=folder: stitch(model, folder, out))
    (head / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    refused(CheckpointError, "LlamaForCausalLM", "mimo", target=out, call=lambda: stitch(model, head, out))
    for broken, text in (("[]", "JSON object"), ("{", "cannot be read")):
        (head / "config.json").write_text(broken)
        refused(CheckpointError, text, target=out, call=lambda: stitch(model, head, out))


# --- models without a head, and damaged ones ------------------------------------------------------------------------


def call_both(model: Path, head: Path, out: Path) -> Iterator[Callable[[], Stitched]]:
    yield lambda: stitch(model, head, out)
    yield lambda: unstitch(model, out)


def test_a_model_without_a_head_is_refused(tmp_path: Path, model: Path, head: Path) -> None:
    out = tmp_path / "out"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    for call in call_both(model, head, out):
        refused(VerifierError, "no multi-token-prediction head", "num_nextn_predict_layers", target=out, call=call)
    (model / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": "one"}))
    for call in call_both(model, head, out):
        refused(VerifierError, "does not say where the head is", target=out, call=call)
    bare = make_model(tmp_path / "bare", head={})
    for call in call_both(bare, head, out):
        refused(VerifierError, "model.mtp_layers.0.", "save_pretrained", target=out, call=call)
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    for call in call_both(model, head, out):
        refused(VerifierError, "LlamaForCausalLM", "mimo", target=out, call=call)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path, model: Path, head: Path) -> None:
    (model / "model-00002-of-00004.safetensors").unlink()
    out = tmp_path / "out"
    for call in call_both(model, head, out):
        refused(VerifierError, "model-00002-of-00004.safetensors", "missing", target=out, call=call)


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path, model: Path, head: Path) -> None:
    index = model / "model.safetensors.index.json"
    shutil.move(model / "model-00001-of-00004.safetensors", tmp_path / "elsewhere.safetensors")
    index.write_text(index.read_text().replace("model-00001-of-00004", "../elsewhere"))
    out = tmp_path / "out"
    refused(VerifierError, "outside the model's folder", target=out, call=lambda: stitch(model, head, out))


def test_damaged_files_are_refused(tmp_path: Path, model: Path, head: Path) -> None:
    out = tmp_path / "out"
    path = model / "model-00004-of-00004.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    for call in call_both(model, head, out):
        refused(VerifierError, path.name, "damaged", target=out, call=call)
    # Two tensors over each other: the sizes alone do not tell.
    places = read_file_header_of(whole, tmp_path)
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    first, second = [name for name in places if places[name].spec.shape == (16,)][:2]
    header[first]["data_offsets"] = header[second]["data_offsets"]
    text = json.dumps(header).encode().ljust(size)[:]
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])
    for call in call_both(model, head, out):
        refused(CheckpointError, path.name, "damaged", target=out, call=call)


def read_file_header_of(data: bytes, folder: Path) -> dict[str, Any]:
    path = folder / "whole.safetensors"
    path.write_bytes(data)
    return read_file_header(path)


def test_a_damaged_head_is_refused(tmp_path: Path, model: Path, head: Path) -> None:
    path, out = head / "model.safetensors", tmp_path / "out"
    path.write_bytes(path.read_bytes()[:-5])
    refused(CheckpointError, str(path), "damaged", target=out, call=lambda: stitch(model, head, out))
    path.unlink()
    refused(CheckpointError, str(head), target=out, call=lambda: stitch(model, head, out))


# --- targets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_target_that_exists_is_left_alone(tmp_path: Path, model: Path, head: Path, kind: str) -> None:
    out = tmp_path / "out"
    {"folder": out.mkdir, "file": out.touch, "link": lambda: out.symlink_to("nowhere")}[kind]()
    for call in call_both(model, head, out):
        refused(OutputError, "exists already", target=out, call=call)


def test_a_target_in_the_models_folder_is_refused(tmp_path: Path, model: Path, head: Path) -> None:
    before = snapshot(model)
    out = model / "out"
    refused(OutputError, "own folder", target=out, call=lambda: stitch(model, head, out))
    assert snapshot(model) == before


def test_a_target_that_cannot_be_written_is_refused(tmp_path: Path, model: Path, head: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    with pytest.raises(OutputError, match="cannot write"):
        stitch(model, head, out)


def test_folders_on_the_way_to_the_target_are_made(tmp_path: Path, model: Path, head: Path) -> None:
    stitch(model, head, tmp_path / "a" / "b" / "out")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["out"]


def test_folders_made_on_the_way_are_removed_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    out = tmp_path / "a" / "b" / "c" / "out"
    for error in (OutputError("no", where="here"), KeyboardInterrupt()):
        with pytest.raises(type(error)), whole_folder(out):
            raise error
        assert list(tmp_path.rglob("*")) == [tmp_path / "a"]  # that was there before
    mine = tmp_path / "a" / "b" / "of somebody else"
    with pytest.raises(OutputError), whole_folder(out):
        raise OutputError("no", where=str(mine.touch()))
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["of somebody else"]


def test_two_do_not_write_one_target(tmp_path: Path, model: Path, head: Path) -> None:
    out = tmp_path / "out"
    with whole_folder(out) as folder:
        (folder / "mine").touch()
        with pytest.raises(OutputError, match="another draftsmith command is at work"):
            stitch(model, head, out)
        assert (folder / "mine").exists()
    assert [path.name for path in out.iterdir()] == ["mine"]


# --- disks that are full, and processes that are killed -------------------------------------------------------------


def forked(body: Callable[[], object]) -> tuple[int, str]:
    """Run *body* in a fork of this process; returns its wait status, and the error that it ended with."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                body()
                code = 0
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(code)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        text = pipe.read()
    return os.waitpid(child, 0)[1], text


@pytest.mark.parametrize("what", ["stitch", "unstitch"])
def test_a_disk_that_fills_up_leaves_nothing_half_written(tmp_path: Path, model: Path, head: Path, what: str) -> None:
    """The system's own limit on a file's size stops a write in the middle, as a full disk does."""
    before, out = snapshot(model), tmp_path / "out"
    beside = sorted(tmp_path.iterdir())

    def body() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        stitch(model, head, out, copy=True) if what == "stitch" else unstitch(model, out)

    status, text = forked(body)
    assert os.waitstatus_to_exitcode(status) == 1
    assert text.startswith("DiskSpaceError")
    for part in (str(out), "the disk is full", "nothing half-written was kept"):
        assert part in text
    assert sorted(tmp_path.iterdir()) == beside
    assert snapshot(model) == before
    stitch(model, head, out)  # there is room again
    assert raw(out).keys() == raw(model).keys()


def test_too_little_room_is_told_before_anything_is_copied(tmp_path: Path, model: Path) -> None:
    """A file with a hole: eight terabytes that take no room."""
    header = json.dumps({"model.layers.0.huge": {"dtype": "U8", "shape": [8 << 40], "data_offsets": [0, 8 << 40]}})
    huge = model / "model-00005-of-00005.safetensors"
    huge.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    os.truncate(huge, 8 + len(header) + (8 << 40))
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.huge"] = huge.name
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    head, out = make_head(tmp_path / "head", model), tmp_path / "out"
    call = lambda: stitch(model, head, out, copy=True)  # noqa: E731
    refused(DiskSpaceError, "8796", "are free", target=out, call=call)
    assert stitch(model, head, out).rewritten == 2  # what is shared needs none


#: What Python tells of itself whenever it touches a file: https://docs.python.org/3/library/audit_events.html
_TOUCHES = {"open", "os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir", "fcntl.ioctl", "fcntl.flock"}


def end_at(moment: int, number: signal.Signals) -> list[int]:
    """Send this process signal *number* when it touches a file for the *moment*-th time; returns the counter."""
    count = [0]

    def hook(event: str, arguments: object) -> None:
        if event in _TOUCHES:
            count[0] += 1
            if count[0] == moment:
                os.kill(os.getpid(), number)

    sys.addaudithook(hook)
    return count


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_no_target(tmp_path: Path, model: Path, head: Path) -> None:
    stitch(model, head, tmp_path / "warm")  # imports are done before the forks
    before, out = snapshot(model), tmp_path / "out"
    expected = {name: content for name, (content, _) in snapshot(tmp_path / "warm").items()}
    beside = sorted(tmp_path.iterdir())
    survived = left_behind = 0
    for moment in range(1, 1000):

        def body(moment: int = moment) -> None:
            end_at(moment, signal.SIGKILL)
            stitch(model, head, out)

        status, text = forked(body)
        assert not text
        assert snapshot(model) == before
        if status == 0:
            break
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        if out.exists():  # after the last rename: it is whole
            survived += 1
            with pytest.raises(OutputError, match="exists already"):
                stitch(model, head, out)
        else:
            left_behind += sorted(tmp_path.iterdir()) != beside
            stitch(model, head, out)
        assert {name: content for name, (content, _) in snapshot(out).items()} == expected
        assert sorted(tmp_path.iterdir()) == sorted([*beside, out])
        shutil.rmtree(out)
    assert left_behind > 20
    assert survived > 0
    assert status == 0


@pytest.mark.parametrize("what", ["stitch", "unstitch"])
def test_ctrl_c_leaves_no_target(tmp_path: Path, model: Path, head: Path, what: str) -> None:
    """Nor anything else, unless it comes in the moment between the making of a folder and its lock."""
    stitch(model, head, tmp_path / "warm")
    out, beside = tmp_path / "out", sorted(tmp_path.iterdir())
    clean = left = 0
    for moment in range(1, 1000, 5):

        def body(moment: int = moment) -> None:
            # A shell lets what it starts in the background ignore SIGINT, and that is inherited.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            end_at(moment, signal.SIGINT)
            stitch(model, head, out) if what == "stitch" else unstitch(model, out)

        status, text = forked(body)
        if status == 0:
            break
        assert text.startswith("KeyboardInterrupt")
        if out.exists():  # after the last rename
            assert len(list(out.iterdir())) == (8 if what == "stitch" else 2)
            shutil.rmtree(out)
        clean += sorted(tmp_path.iterdir()) == beside
        left += (tmp_path / ".out.unfinished").exists()
        shutil.rmtree(tmp_path / ".out.unfinished", ignore_errors=True)
        assert sorted(tmp_path.iterdir()) == beside
    assert clean > 5
    assert left <= 1
    assert status == 0


# --- the command line -----------------------------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


def test_the_commands(tmp_path: Path, model: Path) -> None:
    (model / "consolidated.safetensors").write_bytes(b"old")
    code, told, _ = run("unstitch", model, tmp_path / "head", "--speculative-tokens", 3)
    assert code == 0
    assert "6 tensors of the mimo head" in told
    code, told, _ = run("stitch", model, tmp_path / "head", tmp_path / "out", "--copy")
    assert code == 0
    for text in (
        "6 tensors of the mimo head replaced",
        "weight files: 2 rewritten, 2 copied",
        "left out: consolidated.safetensors",
        f'vllm serve {tmp_path / "out"} --speculative-config \'{{"method": "mtp", "num_speculative_tokens": 3}}\'',
    ):
        assert text in told
    assert "stitch: " in told  # progress, a line at least
    _, told, _ = run("stitch", model, tmp_path / "head", tmp_path / "my out")
    assert f"vllm serve '{tmp_path / 'my out'}' --speculative-config" in told  # as a shell takes it


def test_mistakes_on_the_command_line(tmp_path: Path, model: Path, head: Path) -> None:
    code, _, err = run("stitch", model, head, model)
    assert code == 2
    assert "exists already" in err
    assert "→" in err
    code, _, err = run("stitch", tmp_path / "nowhere", head, tmp_path / "out")
    assert code == 2
    assert "there is no such verifier" in err
    code, _, err = run("unstitch", model, tmp_path / "out", "--speculative-tokens", 0)
    assert code == 2
    other = make_model(tmp_path / "other", seed=4)
    assert run("stitch", other, head, tmp_path / "out")[0] == 2
    assert run("stitch", other, head, tmp_path / "out", "--ignore-fingerprint")[0] == 0


# --- loaders --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A tiny llama in several files with a MiMo head in the last, a trained head, and the stitched copy."""
    folder = tmp_path_factory.mktemp("real")
    model = make_tiny_verifier(folder / "model", "llama", max_shard_size="200KB")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    index = json.loads((model / "model.safetensors.index.json").read_text())
    last = max(index["weight_map"].values())
    hidden = config["hidden_size"]
    old = head_of("mimo", config, torch.float32, seed=1, hidden=hidden)
    save_file({**load_file(model / last), **old}, model / last, metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(old, last)
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    head = make_head(folder / "head", model, head_of("mimo", config, torch.bfloat16, seed=2, hidden=hidden))
    stitch(model, head, folder / "out")
    return model, head, folder / "out"


def test_the_index_is_complete_and_no_tensor_is_stored_twice(real: tuple[Path, Path, Path]) -> None:
    _, _, out = real
    index = json.loads((out / "model.safetensors.index.json").read_text())
    stored = [(name, file.name) for file in sorted(out.glob("*.safetensors")) for name in read_file_header(file)]
    assert sorted(stored) == sorted(index["weight_map"].items())
    assert len(set(index["weight_map"].values())) > 2
    places = [place for file in tensor_files(out) for place in read_file_header(file).values()]
    assert index["metadata"]["total_size"] <= sum(place.end - place.begin for place in places)


def test_transformers_loads_the_stitched_model_as_the_model(real: tuple[Path, Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.arange(20)[None]
    logits = []
    for folder in (real[0], real[2]):
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
        assert not info["missing_keys"]
        assert all(name.startswith("model.mtp_layers.") for name in info["unexpected_keys"])
        with torch.inference_mode():
            logits.append(loaded(ids).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_lint_takes_an_unstitched_head_in_its_models_dtype(tmp_path: Path, dtype: str) -> None:
    model = make_tiny_verifier(tmp_path / "model", dtype=dtype)
    add_head(model)
    file = model / "model.safetensors"
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    unstitch(model, tmp_path / "head", speculative_tokens=3)
    findings = lint_checkpoint(tmp_path / "head", load_plugins())
    assert [finding for finding in findings if finding.severity in ("error", "warning")] == []


@pytest.mark.vllm
@pytest.mark.slow
def test_vllms_loader_reads_every_tensor_once_and_the_new_head(real: tuple[Path, Path, Path]) -> None:
    from vllm.model_executor.model_loader.weight_utils import (
        filter_duplicate_safetensors_files,
        safetensors_weights_iterator,
    )

    model, head, out = real
    files = sorted(map(str, out.glob("*.safetensors")))
    kept = filter_duplicate_safetensors_files(files, str(out), "model.safetensors.index.json")
    assert kept == files
    read: Tensors = {}
    for name, tensor in safetensors_weights_iterator(kept, use_tqdm_on_load=False):
        assert name not in read
        read[name] = tensor
    assert read.keys() == raw(model).keys()
    for name, tensor in load_file(head / "model.safetensors").items():
        assert torch.equal(read[name], tensor.float())
