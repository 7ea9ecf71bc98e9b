"""Options, the exported configuration, and what lint finds in broken ones."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.api import DataFacts
from draftsmith.errors import CheckpointError
from draftsmith.interfaces import ExportContext, TensorSpec
from draftsmith.plugins import load_plugins
from draftsmith.testing.algorithm import AlgorithmCase, Material, make_material, slot_logits, tiny_case
from draftsmith_eagle3.checkpoint import Eagle3Checkpoint
from draftsmith_eagle3.options import Eagle3Options, check, check_data, default_layer_ids, requirements

Config = dict[str, Any]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "qwen3")


@pytest.fixture(scope="module")
def case(material: Material) -> AlgorithmCase:
    return tiny_case(material, "eagle3", draft_size=64)


def context(case: AlgorithmCase, **changes: Any) -> ExportContext:
    values: dict[str, Any] = {"verifier_name": "some/verifier", "speculative_tokens": 3}
    return ExportContext(setup=case.algorithm.setup, **{**values, **changes})


def specs(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape=tuple(each.shape)) for name, each in tensors.items()}


# --- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "ids"),
    [(36, (2, 18, 33)), (30, (2, 15, 27)), (8, (2, 4, 5)), (6, (2, 3)), (4, (1, 2)), (2, (0, 1)), (1, (0,))],
)
def test_default_layer_ids(layers: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(layers) == ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_ids": (4, 2)}, "ascending"),
        ({"layer_ids": (2, 2)}, "ascending"),
        ({"layer_ids": ()}, "no layer"),
        ({"layer_ids": (2, 8)}, "outside"),
        ({"layer_ids": (-1, 2)}, "outside"),
        ({"fc_norm": True}, "exclude"),
        ({"layer_overrides": {"hidden_size": 32}}, "width"),
        ({"layer_overrides": {"num_key_value_heads": 3}}, "divide"),
        ({"layer_overrides": {"num_key_value_heads": -1}}, "num_key_value_heads is -1; at least 1"),
        ({"layer_overrides": {"num_attention_heads": 0}}, "num_attention_heads is 0; at least 1"),
        ({"layer_overrides": {"head_dim": 31}}, "odd"),
        ({"layer_overrides": {"sliding_window": 4}}, "option of its own"),
        ({"sliding_window": 4, "layer_overrides": {"layer_types": ["full_attention"]}}, "option of its own"),
        ({"layer_overrides": {"hidden_act": "gelu"}}, "hidden_act: 'gelu' is not something"),
        ({"layer_overrides": {"rope_theta": 5000}}, "have no rope_theta"),
        ({"layer_overrides": {"rope_parameters": "plain"}}, "not of its kind"),
        ({"layer_overrides": {"rope_parameters": {"rope_type": "funny"}}}, "'funny'"),
        ({"layer_overrides": {"rope_parameters": {"rope_type": "yarn"}}}, "needs factor"),
        (
            {"layer_overrides": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}},
            "needs original_max_position_embeddings",
        ),
        (
            {"layer_overrides": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0}}},
            "needs low_freq_factor",
        ),
        ({"layer_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}}, "rope_theta is missing"),
        ({"layer_overrides": {"rope_parameters": None}}, "rope_theta is missing"),
        (
            {"layer_overrides": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
            "partial_rotary_factor: not something that training and vLLM compute alike",
        ),
        ({"layer_overrides": {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [8, 4, 4]}}}, "mrope_section"),
        ({"layer_overrides": {"num_attention_heads": "many"}}, "not of its kind"),
    ],
)
def test_options_that_cannot_work(material: Material, options: dict[str, Any], message: str) -> None:
    problems = check(Eagle3Options(**options), material.facts)
    assert any(message in each.what and each.where for each in problems), problems


def test_good_options_have_no_problems(material: Material) -> None:
    assert not check(Eagle3Options(), material.facts)
    assert requirements(Eagle3Options(), material.facts).ids(8) == (2, 4, 5, 8)


@pytest.mark.parametrize(("longest", "hint"), [(4, None), (3, "choose at most 2"), (1, "prepare longer answers")])
def test_the_last_step_needs_one_token_more_than_there_are_steps(
    material: Material, longest: int, hint: str | None
) -> None:
    data = DataFacts(token_ids=frozenset({1}), longest_row=64, longest_answer=longest)
    problems = check_data(Eagle3Options(ttt_steps=3), material.facts, data)
    assert len(problems) == (hint is not None)
    assert all("3 steps need 4 tokens" in each.what and str(each.hint).startswith(str(hint)) for each in problems)


@pytest.mark.parametrize(
    "values", [{"ttt_steps": 0}, {"step_decay": 0.0}, {"layer_type": "gemma"}, {"sliding_window": 0}]
)
def test_values_out_of_range_are_refused_at_once(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Eagle3Options(**values)


def test_plugin_and_options_import_no_torch() -> None:
    code = "import draftsmith_eagle3.plugin, sys; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- writing ----------------------------------------------------------------------------------------------------


def test_every_flag_is_written(case: AlgorithmCase) -> None:
    config = case.format.config(context(case))
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert config[flag] is getattr(case.algorithm.setup.options, flag)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["draft_vocab_size"] == 64
    assert "model_type" not in config
    layers = config["transformer_layer_config"]
    assert layers["num_aux_hidden_states"] == 3
    assert layers["vocab_size"] == 320
    assert layers["head_dim"] == 32
    assert layers["max_position_embeddings"] == 512


def test_shared_tensors_are_left_out_where_vllm_shares_them(material: Material) -> None:
    full, reduced = tiny_case(material, "eagle3"), tiny_case(material, "eagle3", draft_size=64)
    names = {
        key: set(each.format.tensors(each.algorithm.build_model(), context(each)))
        for key, each in {"full": full, "reduced": reduced}.items()
    }
    assert not names["full"] & {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    assert names["reduced"] - names["full"] == {"lm_head.weight", "d2t", "t2d"}
    with_embedding = full.format.tensors(full.algorithm.build_model(), context(full, include_embedding=True))
    assert torch.equal(with_embedding["embed_tokens.weight"], material.weights.embed_tokens)


# --- reading ----------------------------------------------------------------------------------------------------


def test_first_checkpoints_names_and_flags_are_read(material: Material) -> None:
    """`midlayer.`, no nested configuration, no flags: then all of them are off."""
    off = {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False}
    case = tiny_case(material, "eagle3", options=off, draft_size=64)
    model = case.algorithm.build_model()
    written = case.format.config(context(case))
    config = {**written["transformer_layer_config"], "draft_vocab_size": 64}
    options = Eagle3Checkpoint().options(config)
    assert {name: options[name] for name in (*off, "fc_norm")} == {**off, "fc_norm": False}
    tensors = {
        name.replace("layers.0.", "midlayer."): each
        for name, each in case.format.tensors(model, context(case)).items()
    }
    torch.manual_seed(1)
    loaded = case.algorithm.build_model()
    Eagle3Checkpoint().load(loaded, tensors, config)
    batch = case.algorithm.make_batch(case.row, torch.Generator())
    got, want = (slot_logits(case.algorithm.forward(each, batch)) for each in (loaded, model))
    assert torch.equal(got, want)


def test_a_rounded_head_is_drafted_with_as_vllm_does(case: AlgorithmCase) -> None:
    """The verifier is stored in float32 and the checkpoint in bfloat16: vLLM loads the draft's head from the file."""
    tensors = {
        name: each.bfloat16() if each.is_floating_point() else each
        for name, each in case.format.tensors(case.algorithm.build_model(), context(case)).items()
    }
    loaded = case.algorithm.build_model()
    case.format.load(loaded, tensors, case.format.config(context(case)))
    head = loaded.get_parameter("lm_head.weight")
    assert torch.equal(head, tensors["lm_head.weight"].float())
    assert not torch.equal(head, case.algorithm.build_model().get_parameter("lm_head.weight"))
    assert not head.requires_grad


def test_missing_flags_are_read_as_vllm_reads_them(case: AlgorithmCase) -> None:
    config = case.format.config(context(case))
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        del config[flag]
    options = case.format.options(config)
    assert options["norm_before_residual"] is True
    assert not any(options[flag] for flag in ("norm_before_fc", "fc_norm", "norm_output"))


def test_layers_that_differ_in_their_window_are_refused(case: AlgorithmCase) -> None:
    config = case.format.config(context(case))
    kinds = ["sliding_attention", "full_attention"]
    config["transformer_layer_config"] |= {"layer_types": kinds, "sliding_window": 5, "num_hidden_layers": 2}
    with pytest.raises(CheckpointError, match="others see everything"):
        case.format.options(config)


@pytest.mark.parametrize("change", ["drop", "add", "reshape"])
def test_tensors_that_do_not_fit_are_refused(case: AlgorithmCase, change: str) -> None:
    model = case.algorithm.build_model()
    tensors = case.format.tensors(model, context(case))
    if change == "drop":
        del tensors["layers.0.hidden_norm.weight"]
    elif change == "add":
        tensors["layers.7.bias"] = torch.zeros(1)
    else:
        tensors["fc.weight"] = torch.zeros(2, 2)
    with pytest.raises(CheckpointError, match=r"hidden_norm|layers\.7|fc\.weight"):
        case.format.load(model, tensors, case.format.config(context(case)))


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        (lambda tensors: {f"model.{name}": each for name, each in tensors.items()}, False),
        (lambda tensors: {**tensors, "layers.0.mlp.down_proj.bias": torch.ones(64)}, True),
        (lambda tensors: {**tensors, "midlayer.self_attn.qkv_proj.bias": torch.ones(128)}, True),
        (lambda tensors: {**tensors, "layers.3.mlp.down_proj.bias": torch.ones(64)}, False),
        (lambda tensors: {**tensors, "verifier.t2d": torch.ones(3)}, True),
        (lambda tensors: {**tensors, "draft_id_to_target_id": torch.ones(64)}, False),  # beside d2t
    ],
    ids=["model. before all", "bias", "fused bias", "bias of no layer", "another t2d", "the map twice"],
)
def test_lint_and_loading_agree_on_names(case: AlgorithmCase, change: Callable[[Any], Any], taken: bool) -> None:
    """What vLLM's loader really does with these names is asked in test_eagle3_vllm_contract.py."""
    config = case.format.config(context(case))
    tensors = case.format.tensors(case.algorithm.build_model(), context(case))
    loaded = case.algorithm.build_model()
    changed = change(tensors)
    unknown = case.format.as_loaded(config, specs(changed)).keys() - case.format.expected_tensors(config).keys()
    assert bool(unknown) == (not taken)
    if taken:
        case.format.load(loaded, changed, config)
        state = loaded.state_dict()
        assert all(torch.equal(state[name], each) for name, each in tensors.items() if name not in ("d2t", "t2d"))
    else:
        hint = "prefix 'model.'" if "model.fc.weight" in changed else "lint"
        with pytest.raises(CheckpointError, match=hint):
            case.format.load(loaded, changed, config)


def test_a_norm_that_vllm_passes_over_is_passed_over(material: Material) -> None:
    off = {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False}
    case = tiny_case(material, "eagle3", options=off, draft_size=64)
    config = case.format.config(context(case))
    tensors = case.format.tensors(case.algorithm.build_model(), context(case))
    width = tensors["fc.weight"].shape[1]
    case.format.load(case.algorithm.build_model(), {**tensors, "input_norm.weight": torch.ones(width)}, config)
    # Checkpoints older than the format may say elsewhere that it is meant.
    old = {**config["transformer_layer_config"], "draft_vocab_size": 64, "eagle_config": {"norm_before_fc": True}}
    assert case.format.options(old)["norm_before_fc"] is True
    assert case.format.expected_tensors(old)["input_norm.weight"].required


# --- lint -------------------------------------------------------------------------------------------------------


def _set(*path: str, value: Any) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        for key in path[:-1]:
            config = config[key]
        if value is None:
            config.pop(path[-1], None)
        else:
            config[path[-1]] = value

    return change


LAYERS = "transformer_layer_config"


@pytest.mark.parametrize(
    ("change", "severity", "message"),
    [
        (_set("norm_before_residual", value=None), "warning", "vLLM takes True"),
        (_set("norm_output", value=None), "warning", "vLLM takes False"),
        (_set("fc_norm", value=True), "error", "exclude"),
        (_set("eagle_aux_hidden_state_layer_ids", value=None), "warning", "n//2"),
        (_set("eagle_aux_hidden_state_layer_ids", value=[5, 2, 4]), "error", "permuted"),
        (_set("eagle_aux_hidden_state_layer_ids", value=[2, 4, 12]), "error", "outside"),
        (_set("eagle_aux_hidden_state_layer_ids", value=[2, 4]), "error", "the list has 2"),
        (_set(LAYERS, "hidden_act", value="gelu"), "error", "silu"),
        (_set(LAYERS, "head_dim", value=None), "warning", "head_dim"),
        (_set(LAYERS, "hidden_act", value=None), "error", "hidden_act is missing"),
        (_set(LAYERS, "rms_norm_eps", value=None), "error", "rms_norm_eps is missing"),
        (_set(LAYERS, "attention_bias", value=True), "error", "biases"),
        (_set(LAYERS, "layer_types", value=["full_attention"] * 2), "error", "layer types"),
        (_set(LAYERS, "layer_types", value=["sliding_attention"]), "error", "without a window"),
        (_set(LAYERS, "max_position_embeddings", value=128), "warning", "longest position"),
    ],
)
def test_lint(case: AlgorithmCase, change: Callable[[Config], None], severity: str, message: str) -> None:
    config = case.format.config(context(case))
    present = specs(case.format.tensors(case.algorithm.build_model(), context(case)))
    verifier = case.algorithm.setup.verifier
    assert not case.format.lint(config, present, verifier)
    broken = copy.deepcopy(config)
    change(broken)
    findings = case.format.lint(broken, present, verifier)
    assert any(each.severity == severity and message in each.what for each in findings), findings


def test_lint_finds_biases_that_vllm_passes_over(case: AlgorithmCase) -> None:
    config = case.format.config(context(case))
    tensors = case.format.tensors(case.algorithm.build_model(), context(case))
    tensors["midlayer.self_attn.qkv_proj.bias"] = torch.ones(tensors["layers.0.self_attn.q_proj.weight"].shape[0] * 2)
    present = case.format.as_loaded(config, specs(tensors))
    (finding,) = case.format.lint(config, present, case.algorithm.setup.verifier)
    assert finding.severity == "error"
    assert "3 biases are there" in finding.what


def test_lint_misses_the_number_of_taps_where_vllm_would_take_three(material: Material) -> None:
    case = tiny_case(material, "eagle3", options={"layer_ids": (1, 3)}, draft_size=64)
    config = case.format.config(context(case))
    del config[LAYERS]["num_aux_hidden_states"]
    findings = case.format.lint(config, {}, case.algorithm.setup.verifier)
    assert [each.severity for each in findings if "assumes 3" in each.what] == ["error"]


def test_a_verifier_without_a_head_to_share(material: Material, tmp_path: Path) -> None:
    import attrs

    case = tiny_case(material, "eagle3")
    present = specs(case.format.tensors(case.algorithm.build_model(), context(case)))
    config = case.format.config(context(case))
    cohere = attrs.evolve(material.facts, model_type="cohere2")
    assert any("no head to share" in each.what for each in case.format.lint(config, present, cohere))
    setup = attrs.evolve(case.algorithm.setup, verifier=cohere)
    model = case.algorithm.build_model()
    with_head = case.format.tensors(model, ExportContext(setup=setup, verifier_name="x", speculative_tokens=3))
    assert "lm_head.weight" in with_head


def test_the_mask_gets_the_window_that_the_config_says() -> None:
    """Trained without and served with a window: fine validation, and acceptance that falls off a cliff."""
    registered = load_plugins().algorithms.get("eagle3")
    assert registered.window(registered.options(sliding_window=7)) == 7
    assert registered.window(registered.options()) is None


# --- beginning from another checkpoint --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_output": False}, "norm_output is False, the other's True"),
        ({"norm_before_fc": False, "fc_norm": True}, "fc_norm is True, the other's False"),
        ({"num_layers": 2}, "num_layers is 2, the other's 1"),
        ({"layer_type": "qwen3"}, "layer_type is qwen3, the other's llama"),
        ({"sliding_window": 9}, "sliding_window is 9, the other's None"),
        ({"layer_overrides": {"num_key_value_heads": 4}}, "num_key_value_heads is 4"),
    ],
)
def test_training_cannot_begin_from_another_network(
    case: AlgorithmCase, options: dict[str, Any], message: str
) -> None:
    """Most of these have tensors of the same shapes."""
    config = case.format.config(context(case))
    verifier = case.algorithm.setup.verifier
    found = case.format.warm_start_problems(config, Eagle3Options(**options), verifier)
    assert any(message in each.what and each.hint for each in found), found
    # more steps, or less weight on the later ones, can be trained from it
    assert not case.format.warm_start_problems(config, Eagle3Options(ttt_steps=7, step_decay=1.0), verifier)
