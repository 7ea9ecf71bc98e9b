"""The transformers engine against transformers' own outputs, for every family; batches; the choice of engine."""

from __future__ import annotations

import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftsmith.api import CaptureRequirements, VerifierFacts
from draftsmith.capture import engines
from draftsmith.capture.engines import Request, batches_by_length, choose_engine
from draftsmith.capture.engines.messages import is_sample_id, report_line, token_digest
from draftsmith.capture.engines.transformers import (
    find_decoder,
    hidden_states,
    load_verifier,
    own_dtype,
    verifier_dtype,
)
from draftsmith.capture.finite import all_finite, refusal
from draftsmith.capture.plan import check_verifier, human_bytes, human_seconds
from draftsmith.errors import ServingError, VerifierError
from draftsmith.testing.verifiers import FAMILIES, make_tiny_verifier
from draftsmith.verifier import read_verifier


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: make_tiny_verifier(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> VerifierFacts:
    return read_verifier(folders["llama"])


def test_a_verifier_without_all_of_its_weights_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """transformers would make them up and go on. What its files hold beyond its layers is of no consequence."""
    folder = make_tiny_verifier(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load_verifier(folder, dtype=torch.float32, device=torch.device("cpu"))
    assert "mtp_layers" not in "".join(capfd.readouterr())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerifierError, match=r"1 weights .* not in its files, such as model\.layers\.1\.mlp\.up_proj"):
        load_verifier(folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_model(folders: dict[str, Path], family: str) -> None:
    """ids 0 … n-1 equal transformers' hidden states; the final norm of id n gives its last one; padding changes
    nothing."""
    model = load_verifier(folders[family], dtype=torch.float32, device=torch.device("cpu"))
    decoder = find_decoder(model)
    count = len(decoder.layers)
    lengths = (11, 7, 1)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.zeros(3, 11, dtype=torch.int64)
    mask = torch.zeros(3, 11, dtype=torch.bool)
    for row, length in enumerate(lengths):
        token_ids[row, :length] = torch.randint(10, 200, (length,), generator=generator)
        mask[row, :length] = True
    states = hidden_states(model, token_ids, mask, range(count + 1))
    assert states.shape[:3] == (3, 11, count + 1)
    for row, length in enumerate(lengths):
        with torch.inference_mode():
            theirs = decoder.module(
                input_ids=token_ids[row : row + 1, :length], output_hidden_states=True, use_cache=False
            ).hidden_states
            ours = states[row, :length]
            for layer_id in range(count):
                torch.testing.assert_close(ours[:, layer_id], theirs[layer_id][0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(decoder.norm(ours[:, count]), theirs[count][0], rtol=1e-4, atol=1e-5)
            assert not torch.allclose(ours[:, count], theirs[count][0], rtol=1e-2, atol=1e-3)


def test_ids_come_in_the_order_asked_for(folders: dict[str, Path]) -> None:
    model = load_verifier(folders["llama"], dtype=torch.float32, device=torch.device("cpu"))
    tokens = torch.arange(20, 29)[None]
    everything = hidden_states(model, tokens, None, range(len(find_decoder(model).layers) + 1))
    assert torch.equal(hidden_states(model, tokens, None, (3, 0, 1)), everything[:, :, [3, 0, 1]])
    with pytest.raises(VerifierError, match="not all within"):
        hidden_states(model, tokens, None, (0, 99))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_without_decoder_layers_is_refused(folders: dict[str, Path]) -> None:
    model = load_verifier(folders["llama"], dtype=torch.float32, device=torch.device("cpu"))
    del find_decoder(model).module.norm
    with pytest.raises(VerifierError, match="final norm side by side"):
        find_decoder(model)


def test_a_model_that_cannot_be_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model", "architectures": ["Nothing"]}')
    with pytest.raises(VerifierError, match="transformers cannot load the verifier"):
        load_verifier(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


def test_threads_that_load_at_once_leave_transformers_as_it_was(folders: dict[str, Path]) -> None:
    from transformers import PreTrainedModel

    def load(_: int) -> None:
        load_verifier(folders["llama"], dtype=torch.float32, device=torch.device("cpu"))

    tie_weights = PreTrainedModel.tie_weights
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load, range(12)))
    assert PreTrainedModel.tie_weights is tie_weights


def test_auto_dtype_is_the_verifiers_own_where_that_is_fast(llama: VerifierFacts) -> None:
    cpu = torch.device("cpu")
    fast = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    assert verifier_dtype("auto", torch.bfloat16, cpu) == (torch.bfloat16 if fast else torch.float32)
    assert verifier_dtype("auto", torch.float32, cpu) == torch.float32
    assert verifier_dtype("auto", None, cpu) == torch.float32
    assert verifier_dtype("bfloat16", torch.float32, cpu) == torch.bfloat16
    published = evolve(llama, text_config={**llama.text_config, "dtype": "bfloat16"})
    assert own_dtype(published) == torch.bfloat16
    assert own_dtype(evolve(llama, text_config={"torch_dtype": "torch.float16"})) == torch.float16
    assert own_dtype(evolve(llama, text_config={})) is None


# --- batches and messages ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 1000))
def test_batches_hold_every_row_once_within_the_limit(lengths: list[int], limit: int) -> None:
    requests = [Request(f"{number:032x}", [7] * length) for number, length in enumerate(lengths)]
    batches = batches_by_length(requests, limit)
    assert sorted(each.sample_id for batch in batches for each in batch) == [each.sample_id for each in requests]
    for batch in batches:
        longest = max(len(each.token_ids) for each in batch)
        assert len(batch) == 1 or len(batch) * longest <= limit
    order = [len(each.token_ids) for batch in batches for each in batch]
    assert order == sorted(order, reverse=True)


@given(st.lists(st.integers(0, 2**31)), st.lists(st.integers(0, 2**31)))
def test_digests_tell_token_rows_apart(first: list[int], second: list[int]) -> None:
    assert (token_digest(first) == token_digest(second)) == (first == second)


@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=64),
    finite=st.booleans(),
)
def test_finite_means_finite(bits: list[int], finite: bool) -> None:
    values = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    if finite:
        values = torch.nan_to_num(values, nan=1.0)
    assert all_finite(values) == all(map(bool, torch.isfinite(values)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_value_among_many_that_is_not_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([0.0, -0.0, largest, -largest], dtype=dtype).repeat(100_000)
    assert all_finite(values)
    assert all_finite(values[::2])
    for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        for place in (0, 131_072, -2):
            broken = values.clone()
            broken[place] = bad
            assert not all_finite(broken)
            assert not all_finite(broken.view(2, -1).T)
            assert not all_finite(broken[::2])


def test_finite_values_whose_sum_overflows_are_finite() -> None:
    assert all_finite(torch.full((4,), torch.finfo(torch.float32).max))
    assert refusal(torch.tensor([1.0, float("inf"), float("nan")])) == "2 of 3 values are not finite"


# --- what cannot be captured ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": ["conv", "full_attention"]},
        {"layers_block_type": ["mamba", "attention"]},
        {"mamba_d_state": 16},
    ],
)
def test_hybrid_verifiers_are_refused(llama: VerifierFacts, config: dict[str, object]) -> None:
    hybrid = evolve(llama, text_config={**llama.text_config, **config})
    with pytest.raises(VerifierError, match="hybrid verifiers is not supported"):
        check_verifier(hybrid, CaptureRequirements(layer_ids=(1,)))


def test_sliding_windows_are_no_hybrid(folders: dict[str, Path]) -> None:
    for family in FAMILIES:
        check_verifier(read_verifier(folders[family]), CaptureRequirements(layer_ids=(0, 1)))


def test_encoders_are_refused(llama: VerifierFacts) -> None:
    with pytest.raises(VerifierError, match="decoder-only"):
        check_verifier(evolve(llama, text_config={"is_encoder_decoder": True}), CaptureRequirements(layer_ids=(1,)))


def test_the_last_layers_output_may_be_a_feature_and_is_captured_once(llama: VerifierFacts) -> None:
    count = llama.num_layers
    both = CaptureRequirements(layer_ids=(1, count))
    check_verifier(llama, both)
    assert both.ids(count) == (1, count)
    assert not both.last_is_extra(count)
    usual = CaptureRequirements(layer_ids=(1,))
    assert usual.ids(count) == (1, count)
    assert usual.last_is_extra(count)
    assert not CaptureRequirements(layer_ids=(1,), last_hidden=False).last_is_extra(count)


@pytest.mark.parametrize("beyond", [1, 5])
def test_layer_ids_beyond_the_verifier_are_refused(llama: VerifierFacts, beyond: int) -> None:
    with pytest.raises(VerifierError, match="do not fit"):
        check_verifier(llama, CaptureRequirements(layer_ids=(1, llama.num_layers + beyond)))


def test_the_engine_is_probed_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def found(folder: Path | None) -> None:
        spec = None
        if folder is not None:
            spec = ModuleSpec("vllm", None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    found(None)
    assert choose_engine("auto") == "transformers"
    assert choose_engine("transformers") == "transformers"
    with pytest.raises(ServingError, match="not installed"):
        choose_engine("vllm")
    found(tmp_path)  # an old vLLM, without the method
    assert choose_engine("auto") == "transformers"
    with pytest.raises(ServingError, match="too old"):
        choose_engine("vllm")
    (tmp_path / "model_executor" / "models").mkdir(parents=True)
    (tmp_path / "model_executor" / "models" / "extract_hidden_states.py").write_text("")
    found(tmp_path)
    assert choose_engine("auto") == choose_engine("vllm") == "vllm"


def test_a_verifier_that_vllm_cannot_tap_is_captured_by_transformers(
    llama: VerifierFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself says so only when it has loaded the weights."""
    monkeypatch.setattr(engines, "vllm_problem", lambda: None)
    for answer, engine in ((True, "vllm"), (None, "vllm"), (False, "transformers")):
        monkeypatch.setattr(engines, "hands_out_hidden_states", lambda names, answer=answer: answer)
        assert choose_engine("auto", llama) == engine
    with pytest.raises(ServingError, match="hidden states of LlamaForCausalLM"):
        choose_engine("vllm", llama)
    assert choose_engine("transformers", llama) == "transformers"


def linear(common: dict[str, Any], **changes: Any) -> Any:
    """A configuration with a layer of linear attention and one of full attention."""
    from transformers import Qwen3_5TextConfig

    special = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    return Qwen3_5TextConfig(**{**common, **special, **changes})


def test_linear_attention_is_captured_by_transformers_padded_rows_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_verifier(tmp_path / "linear", linear, num_layers=2)
    facts = read_verifier(folder)
    check_verifier(facts, CaptureRequirements(layer_ids=(0, 2)))
    monkeypatch.setattr(engines, "vllm_problem", lambda: None)
    assert choose_engine("auto", facts) == "transformers"
    with pytest.raises(ServingError, match="linear attention"):
        choose_engine("vllm", facts)
    model = load_verifier(folder, dtype=torch.float32, device=torch.device("cpu"))
    long, short = torch.arange(4, 100), torch.arange(50, 61)
    ids, mask = torch.zeros(2, len(long), dtype=torch.int64), torch.zeros(2, len(long), dtype=torch.bool)
    for row, tokens in enumerate((long, short)):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
    together = hidden_states(model, ids, mask, (0, 1, 2))
    for row, tokens in enumerate((long, short)):
        alone = hidden_states(model, tokens[None], None, (0, 1, 2))[0]
        torch.testing.assert_close(together[row, : len(tokens)], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "keys",
    [{"full_attention_interval": 4}, {"linear_num_value_heads": 32}, {"linear_attn_config": {"kda_layers": [1]}}],
)
def test_linear_attention_is_known_where_the_list_of_layers_is_left_to_the_class(
    llama: VerifierFacts, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    """As Qwen3-Next is published."""
    monkeypatch.setattr(engines, "vllm_problem", lambda: None)
    monkeypatch.setattr(engines, "hands_out_hidden_states", lambda names: True)
    published = evolve(llama, text_config=keys)
    assert choose_engine("auto", published) == "transformers"
    with pytest.raises(ServingError, match="linear attention"):
        choose_engine("vllm", published)
    listed = evolve(published, text_config={**keys, "layer_types": ["full_attention"] * 4})
    assert choose_engine("auto", listed) == "vllm"


def test_sizes_and_times_are_readable() -> None:
    assert [human_bytes(count) for count in (512, 1536, 3 << 20, 5 << 40)] == [
        "512 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 TiB",
    ]
    assert [human_seconds(count) for count in (42, 180, 9000)] == ["42 s", "3 min", "2.5 h"]


@given(st.text(), st.integers(0, 20000))
def test_a_report_is_one_line_that_a_pipe_takes_in_one_piece(why: str, times: int) -> None:
    line = report_line(
        why=why * times, sample_id="ab" * 16, status="failed", kind="TransportError", tokens=7, digest="0"
    )
    assert len(line) <= 4096
    assert line.count(b"\n") == 1
    report = json.loads(line)
    assert (report["sample_id"], report["tokens"]) == ("ab" * 16, 7)
    assert (why * times).startswith(report["why"])


@pytest.mark.parametrize(
    "value", ["../" + "0" * 29, "0" * 31, "0" * 33, "A" * 32, "0" * 31 + "\n", "0" * 32 + "\n", 7, None]
)
def test_only_32_hex_digits_are_a_sample_id(value: object) -> None:
    assert is_sample_id("0123456789abcdef" * 2)
    assert not is_sample_id(value)
