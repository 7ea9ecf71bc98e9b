"""Families: told by their configuration, names mapped both ways, further ones from other packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import PluginError, VerifierError
from draftsmith.interfaces import TensorSpec
from draftsmith_mtp.families import FAMILIES, MtpFamily, families, family_named, family_of
from draftsmith_mtp.head import HEAD_KEY, head_config, head_tensors, recorded_tensors

MIMO = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_hidden_layers": 36}
CONFIGS: dict[str, dict[str, Any]] = {
    "mimo": {**MIMO, "num_nextn_predict_layers": 1},
    "qwen3_5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 24, "mtp_num_hidden_layers": 1},
    },
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 48},
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_hidden_layers": 46,
        "num_nextn_predict_layers": 1,
    },
}
#: family → (the model's name, own name)
NAMES = {
    "mimo": [
        ("model.mtp_layers.0.input_proj.weight", "input_proj.weight"),
        ("model.mtp_layers.0.self_attn.q_proj.bias", "layer.self_attn.q_proj.bias"),
        ("model.mtp_layers.0.input_layernorm.weight", "layer.input_layernorm.weight"),
    ],
    "qwen3_5": [
        ("mtp.fc.weight", "input_proj.weight"),
        ("mtp.norm.weight", "final_layernorm.weight"),
        ("mtp.pre_fc_norm_embedding.weight", "token_layernorm.weight"),
        ("mtp.layers.0.self_attn.q_norm.weight", "layer.self_attn.q_norm.weight"),
    ],
    "qwen3_next": [
        ("mtp.pre_fc_norm_hidden.weight", "hidden_layernorm.weight"),
        ("mtp.layers.0.mlp.experts.7.up_proj.weight", "layer.mlp.experts.7.up_proj.weight"),
    ],
    "deepseek_v3": [
        ("model.layers.61.eh_proj.weight", "input_proj.weight"),
        ("model.layers.61.shared_head.norm.weight", "final_layernorm.weight"),
        ("model.layers.61.self_attn.kv_a_proj_with_mqa.weight", "layer.self_attn.kv_a_proj_with_mqa.weight"),
    ],
    "glm4_moe": [
        ("model.layers.46.enorm.weight", "token_layernorm.weight"),
        ("model.layers.46.hnorm.weight", "hidden_layernorm.weight"),
    ],
}
OTHERS = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.4.mlp.up_proj.weight", "model.norm.weight")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_is_told_by_its_configuration_and_names_its_tensors(name: str) -> None:
    config = CONFIGS[name]
    family = family_of(config)
    assert family.name == name
    assert family.num_layers(config) == 1
    for model_name, own in NAMES[name]:
        assert family.belongs(model_name, config)
        assert family.own_name(model_name, config) == own
        assert family.model_name(own, config) == model_name
    for other in OTHERS:
        assert not family.belongs(other, config)
        assert family.own_name(other, config) is None


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_copies_of_embedding_and_head_belong_to_the_head_and_are_none_of_its_tensors(name: str) -> None:
    family, config = family_named(name), CONFIGS[name]
    for copy in ("embed_tokens.weight", "shared_head.head.weight"):
        name = family.prefix_of(config) + copy
        assert family.belongs(name, config)
        assert family.is_copy(name, config)
        assert family.own_name(name, config) is None
    assert not family.is_copy("model.embed_tokens.weight", config)


def test_every_family_maps_its_skeleton_both_ways() -> None:
    for family in FAMILIES:
        for own in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "layer.mlp.gate_proj"):
            name = family.model_name(f"{own}.weight", CONFIGS[family.name])
            assert family.own_name(name, CONFIGS[family.name]) == f"{own}.weight"


def test_a_text_model_alone_is_told_as_the_whole_one() -> None:
    for kind in ("qwen3_5_text", "qwen3_5_moe_text"):
        config = {"model_type": kind, "num_hidden_layers": 4, "mtp_num_hidden_layers": 1}
        assert family_of(config).name == "qwen3_5"
        assert family_of(config).num_layers(config) == 1


def test_an_unknown_family_is_an_error_that_lists_the_known_ones() -> None:
    for ask in (lambda: family_of({"architectures": ["LlamaForCausalLM"]}), lambda: family_named("llama")):
        with pytest.raises(VerifierError) as caught:
            ask()
        assert "deepseek_v3, glm4_moe, mimo, qwen3_5, qwen3_next" in str(caught.value)
        assert "draftsmith_mtp.families" in str(caught.value)


def test_a_model_without_the_key_has_no_head_where_the_family_always_says() -> None:
    assert family_of(MIMO).num_layers(MIMO) == 0


# --- other packages -------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, in which a test installs distributions; the known families are found anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    families.cache_clear()
    yield tmp_path
    families.cache_clear()
    for name in [name for name in sys.modules if name.startswith("somebodys_")]:
        del sys.modules[name]


def install(folder: Path, name: str, source: str, value: str) -> None:
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[draftsmith_mtp.families.v1]\n{name} = {value}\n")


THEIRS = """
from draftsmith_mtp.families import SKELETON, MtpFamily
FAMILY = MtpFamily(
    name="{name}", summary="theirs", architectures=("TheirsForCausalLM",), prefix="heads.{{index}}.",
    names={{each: each for each in SKELETON}},
)
"""


def test_another_package_adds_a_family(package: Path) -> None:
    install(package, "somebodys_family", THEIRS.format(name="theirs"), "somebodys_family:FAMILY")
    found = family_of({"architectures": ["TheirsForCausalLM"], "num_nextn_predict_layers": 1, "num_hidden_layers": 2})
    assert found.name == "theirs"
    assert isinstance(family_named("theirs"), MtpFamily)
    assert family_named("mimo").name == "mimo"


@pytest.mark.parametrize(
    ("source", "value", "message"),
    [
        (THEIRS.format(name="mimo"), "somebodys_family:FAMILY", "two families are called 'mimo'"),
        ("FAMILY = 3", "somebodys_family:FAMILY", "int is no MtpFamily"),
        ("1 / 0", "somebodys_family:FAMILY", "ZeroDivisionError"),
    ],
)
def test_a_family_that_cannot_be_had_is_an_error_that_names_its_entry_point(
    package: Path, source: str, value: str, message: str
) -> None:
    install(package, "somebodys_family", source, value)
    with pytest.raises(PluginError, match=message) as caught:
        families()
    assert "somebodys_family" in str(caught.value)


def test_a_family_without_all_names_is_refused() -> None:
    with pytest.raises(ValueError, match="token_layernorm"):
        MtpFamily(name="x", summary="x", prefix="x.", names={"input_proj": "fc"})


# --- a head in a folder of its own ----------------------------------------------------------------------------------


def test_a_heads_configuration_is_its_models_with_what_says_whose_head_it_is() -> None:
    config = {**CONFIGS["qwen3_5"], "quantization_config": {"quant_method": "fp8"}}
    config["text_config"] = {**config["text_config"], "quantization_config": {"quant_method": "fp8"}}
    family = family_of(config)
    present = {name: TensorSpec(shape=(2, 4)) for name in ("mtp.fc.weight", "model.norm.weight", "mtp.norm.weight")}
    tensors = head_tensors(family, config, present)
    assert list(tensors) == ["mtp.fc.weight", "mtp.norm.weight"]
    made = head_config(
        config,
        family,
        verifier_name="some/model",
        speculative_tokens=3,
        tensors={name: spec.shape for name, spec in tensors.items()},
    )
    assert made["architectures"] == config["architectures"]
    assert made["text_config"] == CONFIGS["qwen3_5"]["text_config"]
    assert "quantization_config" not in made
    assert made["speculators_config"]["verifier"]["name_or_path"] == "some/model"
    assert made["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert made[HEAD_KEY]["family"] == "qwen3_5"
    assert {name: spec.shape for name, spec in recorded_tensors(made).items()} == dict.fromkeys(tensors, (2, 4))
    assert family_of(made) == family
