"""Options, the mask token, the exported configuration, and what lint finds in broken ones."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from draftsmith.api import DataFacts, VerifierFacts
from draftsmith.checkpoint.export import write_export
from draftsmith.checkpoint.exported import load_draft
from draftsmith.checkpoint.lint import has_errors, lint_checkpoint
from draftsmith.checkpoint.warm_start import warm_start_problems
from draftsmith.errors import CheckpointError, ConfigError
from draftsmith.interfaces import ExportContext, TensorSpec
from draftsmith.plugins import load_plugins
from draftsmith.testing.algorithm import AlgorithmCase, Material, make_material, slot_logits, tiny_case
from draftsmith_dflash.checkpoint import DFlashCheckpoint
from draftsmith_dflash.options import (
    DFlashOptions,
    check,
    check_data,
    default_layer_ids,
    derived,
    layer_attention,
    mask_token,
    max_speculative_tokens,
    requirements,
)

Config = dict[str, Any]
#: The tiny tokenizers have 312 tokens at most, the embeddings 320 rows.
SPARE = 312


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "qwen3")


@pytest.fixture(scope="module")
def case(material: Material) -> AlgorithmCase:
    return tiny_case(material, "dflash", draft_size=64)


def context(case: AlgorithmCase, **changes: Any) -> ExportContext:
    values: dict[str, Any] = {"verifier_name": "some/verifier", "speculative_tokens": case.num_steps}
    return ExportContext(setup=case.algorithm.setup, **{**values, **changes})


def specs(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape=tuple(each.shape)) for name, each in tensors.items()}


# --- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "ids"),
    [
        (36, (2, 10, 18, 26, 34)),
        (30, (2, 8, 15, 22, 28)),
        (8, (2, 3, 4, 5, 6)),
        (6, (2, 3, 4)),
        (3, (1, 2)),
        (1, (0,)),
    ],
)
def test_default_layer_ids(layers: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(layers) == ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_ids": (4, 2)}, "ascending"),
        ({"layer_ids": (2, 8)}, "outside"),
        ({"mask_token_id": 320}, "outside the verifier's vocabulary of 320"),
        ({"mask_token_id": 2}, "begins or ends texts"),
        ({"sliding_window": 4, "full_attention_indices": (5,)}, "no layers [5]"),
        ({"sliding_window": 4, "full_attention_indices": (1, 0)}, "ascending"),
        ({"full_attention_indices": (1,)}, "no layer slides"),
        ({"sliding_window": 4, "num_layers": 1, "full_attention_indices": (0,)}, "no layer slides"),
        ({"sliding_window_non_causal": False}, "serve all layers causally"),
        (
            {"sliding_window": 4, "full_attention_indices": (1,), "sliding_window_non_causal": False},
            "layers [1] see everything",
        ),
        ({"layer_overrides": {"hidden_size": 32}}, "option of its own"),
        ({"layer_overrides": {"layer_types": ["full_attention"]}}, "option of its own"),
        ({"layer_overrides": {"model_type": "llama"}}, "qwen3's layers only"),
        ({"layer_overrides": {"num_key_value_heads": 3}}, "divide"),
        ({"layer_overrides": {"num_key_value_heads": -1}}, "num_key_value_heads is -1; at least 1"),
        ({"layer_overrides": {"num_attention_heads": 0}}, "num_attention_heads is 0; at least 1"),
    ],
)
def test_options_that_cannot_work(material: Material, options: dict[str, Any], message: str) -> None:
    problems = check(DFlashOptions(**options), material.facts)
    assert any(message in each.what and each.where for each in problems), problems


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 4},
        {"sliding_window": 4, "sliding_window_non_causal": False},
        {"sliding_window": 4, "full_attention_indices": (0, 3)},
        {"hidden_size": 32, "mask_token_id": 5},
    ],
)
def test_options_that_vllm_serves_as_trained(material: Material, options: dict[str, Any]) -> None:
    assert not check(DFlashOptions(**options), material.facts)


@pytest.mark.parametrize(
    "values",
    [
        {"sliding_window": 0},
        {"block_size": 1},
        {"max_anchors": 0},
        {"num_layers": 0},
        {"gamma": 0.0},
        {"mask_token_id": -1},
        {"position_weights": "linear"},
    ],
)
def test_values_out_of_range_are_refused_at_once(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        DFlashOptions(**values)


def test_what_null_comes_to(material: Material) -> None:
    facts = material.facts
    assert derived(DFlashOptions(block_size=10), facts) == {
        "hidden_size": 64,
        "intermediate_size": facts.intermediate_size,
        "layer_ids": (2, 3, 4, 5, 6),
        "mask_token_id": SPARE,
        "gamma": 5.0,
    }
    own = DFlashOptions(hidden_size=32, layer_overrides={"intermediate_size": 40}, position_weights="uniform")
    assert (derived(own, facts)["hidden_size"], derived(own, facts)["intermediate_size"]) == (32, 40)
    assert "gamma" not in derived(own, facts)
    (options,) = (each.derived for each in load_plugins().algorithms if each.name == "dspark")
    assert options(DFlashOptions(), facts)["mask_token_id"] == SPARE


def test_the_verifier_says_what_is_captured_and_served(material: Material) -> None:
    assert requirements(DFlashOptions(), material.facts).ids(8) == (2, 3, 4, 5, 6, 8)
    assert max_speculative_tokens(DFlashOptions(block_size=9)) == 8
    assert max_speculative_tokens(DFlashOptions(block_size=9), "anchor_first") == 9


def test_every_layer_attends_as_vllm_resolves_it() -> None:
    options = DFlashOptions(num_layers=3, sliding_window=7, full_attention_indices=(1,))
    assert layer_attention(options) == ((7, False), (None, False), (7, False))
    assert layer_attention(DFlashOptions(num_layers=2)) == ((None, False),) * 2
    causal = DFlashOptions(num_layers=1, sliding_window=7, sliding_window_non_causal=False)
    assert layer_attention(causal) == ((7, True),)


def test_plugin_and_options_import_no_torch() -> None:
    code = "import draftsmith_dflash.plugin, sys; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the mask token ---------------------------------------------------------------------------------------------


def verifier_with(
    facts: VerifierFacts,
    folder: Path,
    *,
    size: int = 320,
    added: dict[str, int] | None = None,
    roles: dict[str, Any] | None = None,
) -> VerifierFacts:
    """A verifier with a tokenizer of *size* tokens."""
    folder.mkdir()
    tokens = {f"t{index}": index for index in range(size)}
    extra = [{"content": name, "id": token} for name, token in (added or {}).items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": extra}))
    (folder / "tokenizer_config.json").write_text(json.dumps(roles or {}))
    return attrs.evolve(facts, path=folder, bos_token_id=1, eos_token_ids=(2,), vocab_size=320)


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        ({"size": 300, "added": {"<mask>": 7}, "roles": {"mask_token": "<mask>"}}, 7),
        ({"size": 300, "added": {"<mask>": 7}, "roles": {"mask_token": {"content": "<mask>"}}}, 7),
        ({"size": 300, "added": {"<|x|>": 310}}, 311),
        ({"added": {"<|reserved_special_token_9|>": 40, "<|reserved_special_token_3|>": 30}}, 30),
        ({"added": {"<unused4>": 44}, "roles": {"pad_token": "t9"}}, 44),
        ({"roles": {"pad_token": "t9", "unk_token": "t0"}}, 9),
        ({"roles": {"pad_token": "t2", "unk_token": "t0"}}, 0),
        ({"roles": {"pad_token": "t1"}}, None),
        ({}, None),
    ],
)
def test_the_mask_token_is_one_without_another_use(
    material: Material, tmp_path: Path, tokenizer: dict[str, Any], expected: int | None
) -> None:
    facts = verifier_with(material.facts, tmp_path / "verifier", **tokenizer)
    assert mask_token(DFlashOptions(mask_token_id=17), facts) == 17
    problems = check(DFlashOptions(), facts)
    if expected is None:
        assert ["no mask token" in each.what for each in problems] == [True]
        with pytest.raises(ConfigError, match="no mask token"):
            mask_token(DFlashOptions(), facts)
    else:
        assert not problems
        assert mask_token(DFlashOptions(), facts) == expected


def test_a_tokenizer_of_pairs_and_one_that_is_not_read(material: Material, tmp_path: Path) -> None:
    facts = verifier_with(material.facts, tmp_path / "verifier")
    (tmp_path / "verifier" / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0]]}, "added_tokens": []})
    )
    assert mask_token(DFlashOptions(), facts) == 3
    (tmp_path / "verifier" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no mask token"):
        mask_token(DFlashOptions(), facts)


def facts_of(*, tokens: tuple[int, ...] = (5, 6), longest_answer: int = 100) -> DataFacts:
    return DataFacts(token_ids=frozenset(tokens), longest_row=200, longest_answer=longest_answer)


def test_a_mask_token_that_occurs_in_the_data_is_refused(material: Material) -> None:
    assert not check_data(DFlashOptions(), material.facts, facts_of())
    (problem,) = check_data(DFlashOptions(), material.facts, facts_of(tokens=(5, SPARE)))
    assert f"the mask token {SPARE} occurs" in problem.what
    assert problem.where == "algorithm.options.mask_token_id"
    (problem,) = check_data(DFlashOptions(mask_token_id=6), material.facts, facts_of())
    assert "the mask token 6 occurs" in problem.what


@pytest.mark.parametrize(
    ("layout", "size", "longest"), [("bonus_anchor", 8, 8), ("bonus_anchor", 16, 16), ("anchor_first", 8, 9)]
)
def test_a_block_larger_than_any_answer_is_refused(material: Material, layout: Any, size: int, longest: int) -> None:
    options = DFlashOptions(block_size=size)
    assert not check_data(options, material.facts, facts_of(longest_answer=longest), layout)
    (problem,) = check_data(options, material.facts, facts_of(longest_answer=longest - 2), layout)
    assert f"no answer has more than {longest - 2}" in problem.what
    assert problem.where == "algorithm.options.block_size"
    assert problem.hint is not None
    assert f"at most {size - 2}" in problem.hint
    (problem,) = check_data(options, material.facts, facts_of(longest_answer=1), layout)
    assert str(problem.hint).startswith("prepare longer answers")  # no block is as small as that


# --- writing ----------------------------------------------------------------------------------------------------


def test_everything_that_vllm_would_guess_is_written(material: Material) -> None:
    options = {"sliding_window": 9, "full_attention_indices": (1, 3), "block_size": 6}
    case = tiny_case(material, "dflash", options=options, draft_size=64)
    config = case.format.config(context(case))
    assert config["speculators_model_type"] == "dflash"
    assert "model_type" not in config
    assert config["aux_hidden_state_layer_ids"] == [2, 3, 4, 5, 6]
    assert config["mask_token_id"] == SPARE
    assert config["sliding_window_non_causal"] is True
    assert config["sample_from_anchor"] is False
    assert (config["block_size"], config["draft_vocab_size"], config["target_hidden_size"]) == (6, 64, 64)
    layers = config["transformer_layer_config"]
    kinds = ["full_attention" if index in (1, 3) else "sliding_attention" for index in range(5)]
    assert layers["layer_types"] == kinds
    assert (layers["sliding_window"], layers["model_type"], layers["head_dim"]) == (9, "qwen3", 32)


@pytest.mark.parametrize(("full", "needed"), [((), False), ((1,), True)])
def test_only_runner_v2_serves_layers_of_two_kinds(material: Material, full: tuple[int, ...], needed: bool) -> None:
    case = tiny_case(material, "dflash", options={"sliding_window": 9, "full_attention_indices": full})
    plan = case.format.serving(case.format.config(context(case)))
    assert (plan.method, plan.num_speculative_tokens, plan.needs_v2_runner) == ("dflash", 7, needed)
    assert plan.since == "0.20"


@pytest.mark.parametrize(("layers", "noted"), [(1, False), (2, True)])
def test_the_card_says_what_a_cpu_does_to_several_layers(material: Material, layers: int, noted: bool) -> None:
    case = tiny_case(material, "dflash", options={"num_layers": layers})
    plan = case.format.serving(case.format.config(context(case)))
    assert any("On a CPU" in note for note in plan.notes) is noted


def test_a_draft_of_another_width_brings_its_embedding_and_head(material: Material) -> None:
    shared = {"embed_tokens.weight", "lm_head.weight"}
    for draft_size, mapping in ((None, set()), (64, {"d2t", "t2d"})):
        narrow = tiny_case(material, "dflash", options={"hidden_size": 32}, draft_size=draft_size)
        model = narrow.algorithm.build_model()
        assert {name for name, p in model.named_parameters() if not p.requires_grad} == set()
        assert model.shared_tensors() == {}
        names = set(narrow.format.tensors(model, context(narrow)))
        assert shared | mapping <= names
        expected = narrow.format.expected_tensors(narrow.format.config(context(narrow)))
        assert all(expected[name].required for name in shared)
    same = tiny_case(material, "dflash")
    assert not set(same.format.tensors(same.algorithm.build_model(), context(same))) & {*shared, "d2t", "t2d"}


# --- reading ----------------------------------------------------------------------------------------------------


def test_a_mask_row_in_a_file_of_its_own_is_seen(case: AlgorithmCase, material: Material, tmp_path: Path) -> None:
    """vLLM reads it; here the draft would have another mask row, and everything would seem to work."""
    setup = case.algorithm.setup
    write_export(tmp_path, case.format, case.algorithm.build_model(), context(case), {})
    registry, place = load_plugins(), {"verifier": material.folder}
    ask = partial(
        warm_start_problems,
        tmp_path,
        registry.schemas.get("dflash"),
        setup.options,
        setup.verifier,
        setup.capture,
    )
    assert not ask()
    assert not has_errors(lint_checkpoint(tmp_path, registry, verifier=str(material.folder)))
    load_draft(tmp_path, registry, **place)
    (tmp_path / "mask_embedding.pt").write_bytes(b"not opened")
    (problem,) = ask()
    assert "mask_embedding.pt is not read here, and vLLM puts its row" in problem.what
    findings = lint_checkpoint(tmp_path, registry, verifier=str(material.folder))
    assert [each.severity for each in findings if "mask_embedding.pt" in each.what] == ["warning"]
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt"):
        load_draft(tmp_path, registry, **place)


def test_other_projects_checkpoints_are_read(material: Material) -> None:
    """z-lab's: no nesting, ids of the layers whose output it is."""
    case = tiny_case(material, "dflash", options={"block_size": 5})
    model = case.algorithm.build_model()
    written = case.format.config(context(case))
    config = {
        **written["transformer_layer_config"],
        "block_size": 5,
        "dflash_config": {"mask_token_id": SPARE, "target_layer_ids": [1, 2, 3, 4, 5]},
    }
    form = DFlashCheckpoint()
    assert form.capture(config, material.facts) == case.algorithm.setup.capture
    assert DFlashOptions(**form.options(config)) == DFlashOptions(**form.options(written))
    tensors = case.format.tensors(model, context(case))
    torch.manual_seed(1)
    loaded = case.algorithm.build_model()
    form.load(loaded, tensors, config)
    batch = case.algorithm.make_batch(case.row, torch.Generator())
    got, want = (slot_logits(case.algorithm.forward(each, batch)) for each in (loaded, model))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("own", "kinds", "expected"),
    [
        ({}, ["full_attention"] * 2, True),
        ({}, ["sliding_attention", "full_attention"], False),
        ({"causal": False}, ["sliding_attention"] * 2, True),
        ({"causal": True}, ["sliding_attention"] * 2, False),
    ],
)
def test_causality_of_other_projects_is_what_vllm_makes_of_it(
    case: AlgorithmCase, own: dict[str, Any], kinds: list[str], expected: bool
) -> None:
    layers = case.format.config(context(case))["transformer_layer_config"]
    foreign = {"mask_token_id": SPARE, "target_layer_ids": [1], **own}
    config = {
        **layers,
        "num_hidden_layers": 2,
        "layer_types": kinds,
        "sliding_window": 6,
        "dflash_config": foreign,
    }
    assert DFlashCheckpoint().options(config)["sliding_window_non_causal"] is expected


@pytest.mark.parametrize("key", ["aux_hidden_state_layer_ids", "mask_token_id"])
def test_what_vllm_cannot_do_without_is_missed(case: AlgorithmCase, key: str) -> None:
    config = case.format.config(context(case))
    del config[key]
    with pytest.raises(CheckpointError, match=key):
        case.format.options(config)


def test_blocks_whose_anchor_predicts_are_refused(case: AlgorithmCase) -> None:
    config = {**case.format.config(context(case)), "sample_from_anchor": True}
    with pytest.raises(CheckpointError, match="sample_from_anchor"):
        case.format.options(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, None),
        ({"block_size": 4, "gamma": 1.0, "max_anchors": 2}, None),
        ({"mask_token_id": 5}, "mask_token_id is 5, the other's 312"),
        ({"num_layers": 2}, "num_layers is 2, the other's 5"),
        ({"sliding_window": 9}, "sliding_window is 9, the other's None"),
        ({"hidden_size": 32}, "hidden_size is 32, the other's 64"),
        ({"sliding_window": 9, "sliding_window_non_causal": False}, "sliding_window_non_causal is False"),
    ],
)
def test_training_begins_from_the_same_network_only(
    case: AlgorithmCase, options: dict[str, Any], message: str | None
) -> None:
    config = case.format.config(context(case))
    problems = case.format.warm_start_problems(config, DFlashOptions(**options), case.algorithm.setup.verifier)
    assert (not problems) if message is None else any(message in each.what for each in problems)


@pytest.mark.parametrize("ours", [{}, {"layer_ids": (2, 3, 4, 5, 6)}])
def test_causality_of_layers_that_slide_is_no_matter_where_none_does(
    case: AlgorithmCase, ours: dict[str, Any]
) -> None:
    """As another project writes it by default: layers that see everything are trained to see their whole block."""
    config = {**case.format.config(context(case)), "sliding_window_non_causal": False}
    verifier = case.algorithm.setup.verifier
    assert not case.format.warm_start_problems(config, DFlashOptions(), verifier)


def test_training_does_not_begin_from_blocks_whose_anchor_predicts(case: AlgorithmCase) -> None:
    config = {**case.format.config(context(case)), "sample_from_anchor": True}
    (problem,) = case.format.warm_start_problems(config, DFlashOptions(), case.algorithm.setup.verifier)
    assert "which token it predicts" in problem.what


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
        (_set("sliding_window_non_causal", value=None), "warning", "vLLM takes True"),
        (_set("sliding_window_non_causal", value=False), "error", "all layers causally"),
        (_set(LAYERS, "is_causal", value=True), "error", "is_causal: True overrides"),
        (_set("sample_from_anchor", value=True), "error", "refuses such blocks"),
        (_set("mask_token_id", value=None), "error", "mask token is missing"),
        (_set("mask_token_id", value=320), "error", "outside the vocabulary"),
        (_set("mask_token_id", value=2), "warning", "begins or ends"),
        (_set("aux_hidden_state_layer_ids", value=[6, 2, 3, 4, 5]), "error", "permuted"),
        (_set("aux_hidden_state_layer_ids", value=[2, 3, 4, 5, 9]), "error", "outside"),
        (_set("block_size", value=6), "error", "5 rows that predict, and 7"),
        (_set("block_size", value=12), "warning", "7 tokens are drafted from blocks trained with 11"),
        (_set(LAYERS, "model_type", value="llama"), "error", "qwen3's layers"),
        (_set(LAYERS, "layer_types", value=["sliding_attention"] * 5), "error", "without a window"),
        (_set(LAYERS, "max_position_embeddings", value=128), "warning", "longest position"),
        (_set(LAYERS, "rms_norm_eps", value=None), "error", "rms_norm_eps is missing; vLLM has no default"),
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


@pytest.mark.parametrize(
    ("name", "size", "taken"),
    [("verifier.t2d", 3, True), ("draft_id_to_target_id", 64, False), ("model.norm.weight", 64, False)],
)
def test_names_are_read_as_vllm_reads_them(case: AlgorithmCase, name: str, size: int, taken: bool) -> None:
    """Another map from target ids is passed over, and the vocabulary map is not stored twice."""
    config = case.format.config(context(case))
    tensors = case.format.tensors(case.algorithm.build_model(), context(case))
    loaded = case.format.as_loaded(config, specs({**tensors, name: torch.ones(size)}))
    assert bool(loaded.keys() - case.format.expected_tensors(config).keys()) == (not taken)
    # Without a map beside it vLLM passes its own name for one over.
    alone = {"draft_id_to_target_id": torch.ones(64), "norm.weight": tensors["norm.weight"]}
    assert set(case.format.as_loaded(config, specs(alone))) == {"norm.weight"}


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        (lambda tensors: {f"model.{name}": each for name, each in tensors.items()}, False),
        (lambda tensors: {**tensors, "layers.0.self_attn.o_proj.bias": torch.ones(64)}, True),
        (lambda tensors: {**tensors, "layers.9.mlp.down_proj.bias": torch.ones(64)}, False),
        (lambda tensors: {**tensors, "mask_embedding": torch.ones(64)}, True),
    ],
    ids=["model. before all", "bias", "bias of no layer", "mask_embedding"],
)
def test_lint_and_loading_agree_on_names(case: AlgorithmCase, change: Callable[[Any], Any], taken: bool) -> None:
    """What vLLM's loader really does with these names is asked in test_dflash_vllm_contract.py."""
    config = case.format.config(context(case))
    changed = change(case.format.tensors(case.algorithm.build_model(), context(case)))
    unknown = case.format.as_loaded(config, specs(changed)).keys() - case.format.expected_tensors(config).keys()
    assert bool(unknown) == (not taken)
    if taken:
        case.format.load(case.algorithm.build_model(), changed, config)
    else:
        with pytest.raises(CheckpointError, match="prefix 'model.'" if "model.fc.weight" in changed else "lint"):
            case.format.load(case.algorithm.build_model(), changed, config)


def test_biases_that_vllm_passes_over_and_those_that_it_loads(case: AlgorithmCase) -> None:
    config = case.format.config(context(case))
    name = "layers.0.self_attn.o_proj.bias"
    tensors = {**case.format.tensors(case.algorithm.build_model(), context(case)), name: torch.ones(64)}
    (finding,) = case.format.lint(config, specs(tensors), None)
    assert (finding.severity, "1 biases are there" in finding.what) == ("error", True)
    assert not case.format.expected_tensors(config)[name].required
    _set(LAYERS, "attention_bias", value=True)(config)
    (finding,) = case.format.lint(config, specs(tensors), None)
    assert (finding.severity, "neither trained nor simulated" in finding.what) == ("warning", True)
    assert case.format.expected_tensors(config)[name].required
    with pytest.raises(CheckpointError, match="neither trained nor simulated"):
        case.format.options(config)


def test_a_tensor_that_vllm_refuses(case: AlgorithmCase) -> None:
    config = case.format.config(context(case))
    present = specs(case.format.tensors(case.algorithm.build_model(), context(case)))
    findings = case.format.lint(config, {**present, "mask_hidden": TensorSpec(shape=(1,))}, None)
    assert [each.where for each in findings if each.severity == "error"] == ["mask_hidden"]


def test_the_mask_gets_the_window_that_the_config_says() -> None:
    registered = load_plugins().algorithms.get("dflash")
    assert registered.window(registered.options(sliding_window=7)) == 7
    assert registered.window(registered.options()) is None
