"""Options, the mask token's row, the exported configuration, and what lint finds in broken ones."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from draftsmith.api import DataFacts
from draftsmith.config.schema import TrainConfig
from draftsmith.errors import CheckpointError
from draftsmith.interfaces import ExportContext, TensorSpec
from draftsmith.plugins import load_plugins
from draftsmith.testing.algorithm import AlgorithmCase, Material, make_material, slot_logits, tiny_case
from draftsmith.train.optimizers import build_optimizers
from draftsmith_eagle3.checkpoint import Eagle3Checkpoint
from draftsmith_peagle.checkpoint import PEagleCheckpoint
from draftsmith_peagle.options import PEagleOptions, check, check_data, derived, mask_token, max_speculative_tokens

Config = dict[str, Any]
SMALL: dict[str, Any] = {"num_depths": 4, "num_layers": 1}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "qwen3")


@pytest.fixture(scope="module")
def case(material: Material) -> AlgorithmCase:
    return tiny_case(material, "peagle", options=SMALL, draft_size=64)


def context(case: AlgorithmCase, **changes: Any) -> ExportContext:
    values: dict[str, Any] = {"verifier_name": "some/verifier", "speculative_tokens": case.num_steps}
    return ExportContext(setup=case.algorithm.setup, **{**values, **changes})


def specs(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape=tuple(each.shape)) for name, each in tensors.items()}


# --- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fc_norm": True}, "fc_norm cannot be set: vLLM does not forward it"),
        ({"norm_output": True}, "norm_output cannot be set: one pass"),
        ({"layer_ids": (2, 8)}, "outside"),
        ({"layer_overrides": {"hidden_size": 32}}, "width"),
        ({"mask_token_id": 320}, "320 is outside the verifier's vocabulary"),
        ({"mask_token_id": 2}, "2 begins or ends texts"),
    ],
)
def test_options_that_cannot_work(material: Material, options: dict[str, Any], message: str) -> None:
    problems = check(PEagleOptions(**options), material.facts)
    assert any(message in each.what and each.where for each in problems), problems


def test_a_verifier_with_positions_of_several_parts(material: Material) -> None:
    facts = attrs.evolve(
        material.facts, rope_parameters={**material.facts.rope_parameters, "mrope_section": [8, 4, 4]}
    )
    assert any("mrope_section" in each.what for each in check(PEagleOptions(), facts))


def test_good_options_have_no_problems(material: Material) -> None:
    assert not check(PEagleOptions(), material.facts)
    assert max_speculative_tokens(PEagleOptions(num_depths=5)) == 5


def test_what_null_comes_to(material: Material, case: AlgorithmCase) -> None:
    found = {
        "intermediate_size": material.facts.intermediate_size,
        "layer_ids": case.algorithm.setup.capture.layer_ids,
        "mask_token_id": mask_token(PEagleOptions(), material.facts),
    }
    assert (
        derived(PEagleOptions(), material.facts) == case.registered.derived(PEagleOptions(), material.facts) == found
    )
    assert mask_token(PEagleOptions(), material.facts) == 312  # the first row that has no token
    assert mask_token(PEagleOptions(mask_token_id=7), material.facts) == 7


@pytest.mark.parametrize(
    "values",
    [
        {"num_depths": 0},
        {"num_depths": -1},
        {"down_sample_ratio": 0.0},
        {"down_sample_ratio": 1.1},
        {"down_sample_ratio": -0.5},
        {"down_sample_ratio_min": -0.1},
        {"down_sample_ratio_min": 1.5},
        {"max_anchors": 0},
        {"num_layers": 0},
    ],
)
def test_values_out_of_range_are_refused_at_once(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        PEagleOptions(**values)


@pytest.mark.parametrize(
    ("options", "answer", "token", "message"),
    [
        ({"num_depths": 8}, 9, 5, None),
        ({"num_depths": 8}, 8, 5, "8 depths need 9 tokens"),
        ({"num_depths": 500}, 64, 5, "500 depths need 501 tokens"),  # more than a whole row
        ({"num_depths": 1}, 1, 5, "1 depths need 2 tokens"),
        ({"num_depths": 2}, 9, 312, "the mask token 312 occurs in the prepared data"),
    ],
)
def test_what_the_data_do_not_allow(
    material: Material, options: dict[str, Any], answer: int, token: int, message: str | None
) -> None:
    data = DataFacts(token_ids=frozenset({1, token}), longest_row=64, longest_answer=answer)
    problems = check_data(PEagleOptions(**options), material.facts, data)
    if message is None:
        assert not problems
    else:
        (problem,) = problems
        assert message in problem.what
        assert problem.where
        assert problem.hint


def test_plugin_and_options_import_no_torch() -> None:
    code = "import draftsmith_peagle.plugin, sys; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the mask token's row ---------------------------------------------------------------------------------------


def test_only_one_row_of_the_embedding_is_trained(case: AlgorithmCase) -> None:
    """No gradient and no moments for the matrix: one row has them, and what stands in place of features."""
    model = case.algorithm.build_model()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    width, vocabulary = 64, 320
    assert trained["mask_embedding"].shape == (1, width)
    assert trained["mask_hidden"].shape == (1, 1, 3 * width)
    assert not any(vocabulary in each.shape for each in trained.values())
    slots = case.algorithm.forward(model, case.algorithm.make_batch(case.row, torch.Generator()))
    slot_logits(slots).square().sum().backward()  # type: ignore[no-untyped-call]
    embedding = model.get_parameter("embed_tokens.weight")
    assert embedding.grad is None
    assert trained["mask_embedding"].grad is not None
    assert bool(trained["mask_embedding"].grad.any())
    for name in ("adamw", "muon"):
        optimizers = build_optimizers(model, TrainConfig(optimizer=name), {64, vocabulary})  # type: ignore[arg-type]
        optimizers.step()
        moments = optimizers.state_tensors()
        assert any("mask_embedding" in key for key in moments)
        assert not any(vocabulary in each.shape for each in moments.values())
    assert torch.equal(embedding, case.algorithm.setup.weights.embed_tokens)


def test_the_export_has_the_row_in_the_verifiers_embedding(case: AlgorithmCase) -> None:
    model = case.algorithm.build_model()
    tensors = case.format.tensors(model, context(case))
    assert "mask_embedding" not in tensors
    embedding, own = tensors["embed_tokens.weight"], case.algorithm.setup.weights.embed_tokens
    different = (embedding != own).any(-1).nonzero().flatten().tolist()
    assert different == [312]
    assert torch.equal(embedding[312], model.get_parameter("mask_embedding")[0])
    assert torch.equal(model.get_parameter("embed_tokens.weight"), own), "the verifier's was written to"


def test_the_loaded_matrix_is_the_verifiers_again(case: AlgorithmCase) -> None:
    """One row apart, it stays shared; another's own matrix, as the peer trains it, is drafted with."""
    model = case.algorithm.build_model()
    config, tensors = case.format.config(context(case)), case.format.tensors(model, context(case))
    loaded = case.algorithm.build_model()
    case.format.load(loaded, tensors, config)
    own = case.algorithm.setup.weights.embed_tokens
    assert loaded.get_parameter("embed_tokens.weight").data_ptr() == own.data_ptr()
    assert torch.equal(loaded.get_parameter("mask_embedding"), model.get_parameter("mask_embedding"))
    theirs = {**tensors, "embed_tokens.weight": tensors["embed_tokens.weight"] + 1}
    case.format.load(loaded, theirs, config)
    embedding = loaded.get_parameter("embed_tokens.weight")
    assert torch.equal(embedding[:312], own[:312] + 1)
    assert not embedding.requires_grad
    torch.testing.assert_close(loaded.get_parameter("mask_embedding"), model.get_parameter("mask_embedding") + 1)


def test_without_an_embedding_the_row_is_the_verifiers(material: Material) -> None:
    options = {**SMALL, "train_mask_embedding": False}
    case = tiny_case(material, "peagle", options=options, draft_size=64)
    model = case.algorithm.build_model()
    names = set(case.format.tensors(model, context(case)))
    assert "mask_hidden" in names
    assert "embed_tokens.weight" not in names
    assert torch.equal(model.mask_row()[0], material.weights.embed_tokens[312])  # type: ignore[operator]
    config = case.format.config(context(case))
    assert case.format.options(config)["train_mask_embedding"] is False
    del config["embed_requires_grad"]  # a writer's default is to train it; the file has none all the same
    trained = tiny_case(material, "peagle", options=SMALL, draft_size=64)
    loaded = trained.algorithm.build_model()
    trained.format.load(loaded, case.format.tensors(model, context(case)), config)
    assert torch.equal(loaded.get_parameter("mask_embedding")[0], material.weights.embed_tokens[312])


# --- writing and reading ----------------------------------------------------------------------------------------


def test_every_key_is_written(case: AlgorithmCase) -> None:
    config = case.format.config(context(case))
    assert config["speculators_model_type"] == "peagle"
    assert config["mask_token_id"] == 312
    assert config["embed_requires_grad"] is True
    assert (config["norm_before_residual"], config["norm_before_fc"]) == (False, True)
    assert (config["fc_norm"], config["norm_output"]) == (False, False)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 3
    assert "model_type" not in config
    plan = case.format.serving(config)
    assert (plan.method, plan.num_speculative_tokens, plan.extra) == ("eagle3", 4, {"parallel_drafting": True})
    assert plan.as_model


def test_missing_flags_are_read_as_vllm_reads_them(case: AlgorithmCase) -> None:
    config = case.format.config(context(case))
    for flag in ("norm_before_residual", "norm_before_fc"):
        del config[flag]
    options = case.format.options(config)
    assert (options["norm_before_residual"], options["norm_before_fc"]) == (False, False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("mask_token_id", None, "mask token is missing"), ("fc_norm", True, "norms that vLLM")],
)
def test_configurations_that_cannot_be_drafted_with(case: AlgorithmCase, key: str, value: Any, message: str) -> None:
    config = {**case.format.config(context(case)), key: value}
    with pytest.raises(CheckpointError, match=message):
        case.format.options(config)


@pytest.mark.parametrize("change", ["drop", "add", "reshape", "token"])
def test_tensors_that_do_not_fit_are_refused(case: AlgorithmCase, change: str) -> None:
    model = case.algorithm.build_model()
    config, tensors = case.format.config(context(case)), case.format.tensors(model, context(case))
    if change == "drop":
        del tensors["mask_hidden"]
    elif change == "add":
        tensors["fc_norm.0.weight"] = torch.zeros(64)
    elif change == "reshape":
        tensors["mask_hidden"] = torch.zeros(1, 1, 64)
    else:
        config["mask_token_id"] = 400
    with pytest.raises(CheckpointError, match=r"mask_hidden|fc_norm|mask token 400"):
        case.format.load(model, tensors, config)


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


@pytest.mark.parametrize(
    ("change", "severity", "message"),
    [
        (_set("norm_before_residual", value=None), "warning", "vLLM takes False"),
        (_set("norm_before_fc", value=None), "warning", "vLLM takes False"),
        (_set("norm_before_fc", value=False), "error", "drafts without the norm"),
        (_set("fc_norm", value=True), "error", "does not forward fc_norm"),
        (_set("norm_output", value=True), "warning", "no effect"),
        (_set("mask_token_id", value=None), "error", "mask token is missing"),
        (_set("mask_token_id", value=320), "error", "outside the vocabulary"),
        (_set("mask_token_id", value=2), "warning", "begins or ends texts"),
        (_set("eagle_aux_hidden_state_layer_ids", value=[5, 2, 4]), "error", "permuted"),
        (_set("transformer_layer_config", "attention_bias", value=True), "error", "biases"),
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


def test_what_mask_rows_read_must_be_there(case: AlgorithmCase) -> None:
    config = case.format.config(context(case))
    expected = case.format.expected_tensors(config)
    assert expected["mask_hidden"].required
    assert expected["embed_tokens.weight"].required
    assert not case.format.expected_tensors({**config, "embed_requires_grad": False})["embed_tokens.weight"].required


def test_the_mask_gets_the_window_that_the_config_says() -> None:
    registered = load_plugins().algorithms.get("peagle")
    assert registered.window(registered.options(sliding_window=7)) == 7
    assert registered.window(registered.options()) is None


# --- beginning from another checkpoint --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_before_residual": True}, "norm_before_residual is True, the other's False"),
        ({"num_layers": 2}, "num_layers is 2, the other's 1"),
        ({"sliding_window": 9}, "sliding_window is 9, the other's None"),
        ({"mask_token_id": 7}, "mask_token_id is 7, the other's 312"),
    ],
)
def test_training_cannot_begin_from_another_network(
    case: AlgorithmCase, options: dict[str, Any], message: str
) -> None:
    config = case.format.config(context(case))
    verifier = case.algorithm.setup.verifier
    found = case.format.warm_start_problems(config, PEagleOptions(**{**SMALL, **options}), verifier)
    assert any(message in each.what and each.hint for each in found), found
    # more depths can be trained from it
    assert not case.format.warm_start_problems(config, PEagleOptions(**{**SMALL, "num_depths": 9}), verifier)


def test_training_begins_from_an_eagle3_draft(material: Material) -> None:
    """The network is the same; what mask rows read is fresh. What an EAGLE-3 draft feeds back plays no part."""
    flags = {"norm_before_residual": True, "norm_before_fc": True}
    eagle3 = tiny_case(material, "eagle3", options={**flags, "norm_output": True}, draft_size=64)
    case = tiny_case(material, "peagle", options={**SMALL, **flags}, draft_size=64)
    config = eagle3.format.config(context(eagle3))
    format_, verifier = PEagleCheckpoint(), material.facts
    assert not format_.warm_start_problems(config, case.algorithm.setup.options, verifier)
    different = PEagleOptions(**SMALL, norm_before_residual=False)
    assert format_.warm_start_problems(config, different, verifier)
    with_taps_normed = {**config, "norm_before_fc": False, "fc_norm": True}
    assert format_.warm_start_problems(with_taps_normed, case.algorithm.setup.options, verifier)

    torch.manual_seed(5)
    source = eagle3.algorithm.build_model()
    tensors = eagle3.format.tensors(source, context(eagle3, include_embedding=True))
    model = case.algorithm.build_model()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    assert list(format_.warm_start(model, tensors, config)) == ["mask_hidden", "mask_embedding"]
    after = model.state_dict()
    for name, each in source.state_dict().items():
        assert torch.equal(after[name], each), name
    for name in ("mask_hidden", "mask_embedding"):
        assert torch.equal(after[name], before[name])


def test_an_eagle3_checkpoint_is_no_draft_of_this_kind(material: Material) -> None:
    eagle3 = tiny_case(material, "eagle3", draft_size=64)
    tensors = eagle3.format.tensors(eagle3.algorithm.build_model(), context(eagle3))
    case = tiny_case(material, "peagle", options=SMALL, draft_size=64)
    config = case.format.config(context(case))
    with pytest.raises(CheckpointError, match="mask_hidden"):
        case.format.load(case.algorithm.build_model(), tensors, config)
    # and the other way round vLLM passes the one tensor over that EAGLE-3 does not know
    own = case.format.tensors(case.algorithm.build_model(), context(case))
    names = Eagle3Checkpoint().as_loaded(config, specs(own))
    assert "mask_hidden" not in names
