"""Options, the exported configuration, what lint finds in broken ones, and beginning from other checkpoints."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import save_file

from draftsmith.api import PROJECT_NAME, DataFacts
from draftsmith.checkpoint.lint import lint_checkpoint
from draftsmith.checkpoint.warm_start import begin_from, warm_start_problems
from draftsmith.errors import CheckpointError
from draftsmith.interfaces import ExportContext, TensorSpec
from draftsmith.plugins import load_plugins
from draftsmith.testing.algorithm import AlgorithmCase, Material, make_material, slot_logits, tiny_case
from draftsmith_dspark.checkpoint import DSparkCheckpoint
from draftsmith_dspark.options import DSparkOptions, check, check_data, max_speculative_tokens

Config = dict[str, Any]
SMALL = {"num_layers": 1, "markov_rank": 6, "block_size": 4}
LAYERS = "transformer_layer_config"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "qwen3")


@pytest.fixture(scope="module")
def case(material: Material) -> AlgorithmCase:
    return tiny_case(material, "dspark", options=SMALL, draft_size=64)


def context(case: AlgorithmCase, **changes: Any) -> ExportContext:
    setup = case.algorithm.setup
    values: dict[str, Any] = {
        "verifier_name": str(setup.verifier.path),
        "speculative_tokens": max_speculative_tokens(setup.options) if hasattr(setup.options, "layout") else 3,
    }
    return ExportContext(setup=setup, **{**values, **changes})


def written(case: AlgorithmCase) -> Config:
    return dict(json.loads(json.dumps(case.format.config(context(case)))))


def specs(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape=tuple(each.shape)) for name, each in tensors.items()}


# --- options ----------------------------------------------------------------------------------------------------


def test_a_confidence_head_that_reads_an_embedding_needs_a_rank(material: Material) -> None:
    problems = check(DSparkOptions(markov_rank=0), material.facts)
    assert [each.where for each in problems] == ["algorithm.options.markov_rank"]
    assert "rank of 0" in problems[0].what
    assert "confidence_with_markov: false" in (problems[0].hint or "")
    assert not check(DSparkOptions(markov_rank=0, confidence_with_markov=False), material.facts)
    assert not check(DSparkOptions(markov_rank=0, confidence=False), material.facts)
    assert not check(DSparkOptions(), material.facts)


def test_the_checks_of_all_blocks_are_made(material: Material) -> None:
    assert check(DSparkOptions(layer_ids=(4, 2)), material.facts)
    assert check(DSparkOptions(mask_token_id=10**6), material.facts)
    assert check(DSparkOptions(layer_ids=(2, 99)), material.facts)
    # vLLM goes by the layers' types here: what it cannot serve of DFlash, it can of DSpark
    mixed = DSparkOptions(sliding_window=9, full_attention_indices=(0,), sliding_window_non_causal=False)
    assert not check(mixed, material.facts)


@pytest.mark.parametrize(("layout", "needed"), [("anchor_first", 9), ("bonus_anchor", 8)])
def test_blocks_longer_than_any_answer_are_refused(material: Material, layout: Any, needed: int) -> None:
    options = DSparkOptions(layout=layout, block_size=8)
    fits = DataFacts(token_ids=frozenset({1}), longest_row=100, longest_answer=needed)
    assert not check_data(options, material.facts, fits)
    (problem,) = check_data(options, material.facts, attrs.evolve(fits, longest_answer=needed - 1))
    assert "block_size" in str(problem.where)


def test_a_mask_token_that_occurs_in_the_data_is_refused(material: Material) -> None:
    data = DataFacts(token_ids=frozenset({5, 6}), longest_row=100, longest_answer=50)
    (problem,) = check_data(DSparkOptions(mask_token_id=6), material.facts, data)
    assert "the mask token 6 occurs in the prepared data" in problem.what


def test_tokens_are_those_of_the_predicting_rows() -> None:
    assert max_speculative_tokens(DSparkOptions(block_size=7)) == 7
    assert max_speculative_tokens(DSparkOptions(block_size=7, layout="bonus_anchor")) == 6


@pytest.mark.parametrize(
    "values",
    [
        {"layout": "sideways"},
        {"markov_head": "lstm"},
        {"markov_rank": -1},
        {"gamma": 0.0},
        {"block_size": 1},
        {"sliding_window": 0},
    ],
)
def test_values_out_of_range_are_refused_at_once(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        DSparkOptions(**values)


def test_plugin_and_options_import_no_torch() -> None:
    code = (
        "import draftsmith_dspark.plugin, draftsmith_dspark.checkpoint, sys; "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- writing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "keys", "causal"),
    [
        ({}, {"sample_from_anchor": True, "markov_head_type": "vanilla", "enable_confidence_head": True}, None),
        ({"layout": "bonus_anchor"}, {"sample_from_anchor": False, "block_size": 4}, None),
        ({"sliding_window": 9}, {"sliding_window_non_causal": True}, False),
        ({"sliding_window": 9, "sliding_window_non_causal": False}, {"sliding_window_non_causal": False}, None),
        ({"markov_head": "gated"}, {"markov_head_type": "gated", "markov_rank": 6}, None),
        ({"confidence": False}, {"enable_confidence_head": False}, None),
        (
            {"markov_rank": 0, "confidence_with_markov": False},
            {"markov_rank": 0, "confidence_head_with_markov": False},
            None,
        ),
    ],
)
def test_everything_that_vllm_would_guess_is_written(
    material: Material, options: dict[str, Any], keys: dict[str, Any], causal: bool | None
) -> None:
    case = tiny_case(material, "dspark", options={**SMALL, **options}, draft_size=64)
    config = written(case)
    assert {key: config[key] for key in keys} == keys
    for key in ("mask_token_id", "markov_rank", "markov_head_type", "sample_from_anchor", "block_size"):
        assert config[key] is not None
    assert config["aux_hidden_state_layer_ids"] == sorted(config["aux_hidden_state_layer_ids"])
    assert "model_type" not in config
    assert config[LAYERS].get("is_causal") is causal
    assert config["architectures"] == ["DSparkSpeculator"]


def test_vllm_is_asked_for_the_right_thing(case: AlgorithmCase, material: Material) -> None:
    plan = case.format.serving(written(case))
    assert (plan.method, plan.num_speculative_tokens, plan.needs_v2_runner) == ("dspark", 4, True)
    assert plan.unservable is plan.since is None
    assert any("enable_adaptive_verification" in each for each in plan.notes)
    for options, reason in (
        ({"markov_head": "rnn"}, "kind rnn"),
        ({"markov_rank": 0, "confidence_with_markov": False}, "markov_rank 0"),
    ):
        other = tiny_case(material, "dspark", options={**SMALL, **options})
        plan = other.format.serving(written(other))
        assert reason in str(plan.unservable)
        assert not plan.notes


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


def _tokens(count: int) -> Callable[[Config], None]:
    return lambda config: config["speculators_config"]["proposal_methods"][0].update(speculative_tokens=count)


@pytest.mark.parametrize(
    ("options", "change", "severity", "message"),
    [
        ({}, _set("sample_from_anchor", value=None), "warning", "vLLM takes False"),
        ({}, _tokens(5), "error", "4 rows that predict, and 5 tokens"),
        ({"layout": "bonus_anchor"}, _tokens(4), "error", "3 rows that predict, and 4 tokens"),
        ({}, _tokens(2), "warning", "rows see how many there are"),
        # No layer slides here, so that all see their whole block, whatever sliding ones would see.
        ({"sliding_window_non_causal": False}, _tokens(2), "warning", "rows see how many there are"),
        ({}, _set("markov_rank", value=None), "error", "rank of the Markov head is missing"),
        ({}, _set("markov_rank", value=0), "error", "which has none"),
        ({}, _set("enable_confidence_head", value=False), "warning", "passes it over"),
        ({"confidence": False}, _set("enable_confidence_head", value=True), "warning", "no confidence head"),
        ({}, _set("mask_token_id", value=None), "error", "mask token is missing"),
        ({}, _set("aux_hidden_state_layer_ids", value=[5, 2]), "error", "permuted"),
        ({"sliding_window": 9}, _set(LAYERS, "is_causal", value=None), "error", "their whole block"),
        (
            {"sliding_window": 9, "sliding_window_non_causal": False},
            _set(LAYERS, "is_causal", value=False),
            "error",
            "earlier rows only",
        ),
        ({}, _set(LAYERS, "is_causal", value=True), "error", "served causally"),
        ({}, _set(LAYERS, "dflash_config", value={"use_swa": True, "causal": True}), "error", "takes causal, use_swa"),
    ],
)
def test_lint(
    material: Material, options: dict[str, Any], change: Callable[[Config], None], severity: str, message: str
) -> None:
    case = tiny_case(material, "dspark", options={**SMALL, **options}, draft_size=64)
    config = written(case)
    present = specs(case.format.tensors(case.algorithm.build_model(), context(case)))
    verifier = case.algorithm.setup.verifier
    assert not case.format.lint(config, present, verifier)
    broken = copy.deepcopy(config)
    change(broken)
    findings = case.format.lint(broken, present, verifier)
    assert any(each.severity == severity and message in each.what for each in findings), findings


def test_half_a_confidence_head_is_an_error(case: AlgorithmCase) -> None:
    present = specs(case.format.tensors(case.algorithm.build_model(), context(case)))
    del present["confidence_head.proj.bias"]
    findings = case.format.lint(written(case), present, None)
    assert [each.what for each in findings if each.severity == "error"] == [
        "the confidence head has a weight or a bias, but not both"
    ]


def store(folder: Path, case: AlgorithmCase, model: torch.nn.Module, config: Config | None = None) -> Path:
    """An exported checkpoint, not rounded."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = case.format.tensors(model, context(case))
    save_file({name: each.clone().contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or case.format.config(context(case))))
    return folder


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"markov_head": "gated"}, "vanilla Markov head alone"),
        ({"markov_rank": 0, "confidence_with_markov": False}, "Markov head only"),
    ],
)
def test_the_linter_says_which_heads_vllm_loads(
    material: Material, options: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    case = tiny_case(material, "dspark", options={**SMALL, **options}, draft_size=64)
    store(tmp_path, case, case.algorithm.build_model())
    findings = lint_checkpoint(tmp_path, load_plugins(), verifier=str(material.folder))
    errors = [each.what for each in findings if each.severity == "error"]
    assert len(errors) == (0 if reason is None else 1)
    assert reason is None or reason in errors[0]
    # … and the recipe, before the hours of training
    notes = case.registered.notes(case.algorithm.setup.options, case.algorithm.setup.verifier)
    assert [note.startswith(errors[0]) for note in notes] == ([] if reason is None else [True])


# --- beginning from another checkpoint --------------------------------------------------------------------------


def speculators(config: Config, case: AlgorithmCase) -> Config:
    """As the peer writes it: without our notes."""
    return {key: value for key, value in config.items() if key != PROJECT_NAME}


def z_lab(config: Config, case: AlgorithmCase) -> Config:
    """The layers' keys at the top, the rest in ``dflash_config``, layers counted from 0 after each."""
    return {
        **config[LAYERS],
        "architectures": ["DFlashDraftModel"],
        "block_size": config["block_size"],
        "num_target_layers": case.algorithm.setup.verifier.num_layers,
        "dflash_config": {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [each - 1 for each in config["aux_hidden_state_layer_ids"]],
        },
    }


@pytest.fixture(scope="module")
def trained(material: Material) -> tuple[AlgorithmCase, torch.nn.Module]:
    """A DFlash draft that has learnt the case."""
    from draftsmith.losses.divergence import ForwardKL
    from draftsmith.train.scoring import Teacher, score_slots

    case = tiny_case(material, "dflash", options={"num_layers": 1, "block_size": 4})
    setup = case.algorithm.setup
    teacher = Teacher(setup.weights, setup.vocabulary, device="cpu", compute_dtype=torch.float32)
    torch.manual_seed(0)
    model = case.algorithm.build_model()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 5e-3)
    for _ in range(60):
        slots = case.algorithm.forward(model, case.algorithm.make_batch(case.row, torch.Generator().manual_seed(0)))
        loss = score_slots(slots, teacher, case.row.last_hidden, ForwardKL()).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return case, model.eval()


def acceptance(case: AlgorithmCase, model: torch.nn.Module) -> tuple[float, torch.Tensor]:
    from draftsmith.losses.divergence import ForwardKL
    from draftsmith.train.scoring import Teacher, score_slots

    setup = case.algorithm.setup
    teacher = Teacher(setup.weights, setup.vocabulary, device="cpu", compute_dtype=torch.float32)
    with torch.no_grad():
        batch = case.algorithm.make_batch(case.row, torch.Generator().manual_seed(0))
        slots = case.algorithm.forward(model, batch)
        scored = score_slots(slots, teacher, case.row.last_hidden, ForwardKL())
    return float(scored.acceptance.mean()), slot_logits(slots)


@pytest.mark.parametrize("foreign", [None, speculators, z_lab], ids=["ours", "peer", "z-lab"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_step_0_has_the_acceptance_of_the_dflash_draft_that_it_begins_from(
    material: Material,
    trained: tuple[AlgorithmCase, torch.nn.Module],
    foreign: Callable[[Config, AlgorithmCase], Config] | None,
    head: str,
    tmp_path: Path,
) -> None:
    flash, model = trained
    config = flash.format.config(context(flash))
    folder = store(tmp_path, flash, model, config if foreign is None else foreign(config, flash))
    options = {**SMALL, "layout": "bonus_anchor", "markov_head": head}
    case = tiny_case(material, "dspark", options=options)
    setup = case.algorithm.setup
    schema = load_plugins().schemas.get("dspark")
    assert warm_start_problems(folder, schema, setup.options, setup.verifier, setup.capture) == []
    torch.manual_seed(5)
    draft = case.algorithm.build_model()
    chance, _ = acceptance(case, draft)
    fresh = begin_from(folder, schema, draft, setup.vocabulary)
    assert {name.split(".")[0] for name in fresh} == {"markov_head", "confidence_head"}
    learnt, want = acceptance(flash, model)
    got, logits = acceptance(case, draft.eval())
    assert learnt > 3 * chance > 0
    assert got == pytest.approx(learnt, abs=1e-6)
    torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)


def test_training_goes_on_from_a_draft_of_its_own_kind(material: Material, tmp_path: Path) -> None:
    case = tiny_case(material, "dspark", options={**SMALL, "confidence": False}, draft_size=64)
    torch.manual_seed(1)
    model = case.algorithm.build_model()
    torch.nn.init.normal_(model.get_parameter("markov_head.markov_w2.weight"))
    folder = store(tmp_path, case, model)
    with_head = tiny_case(material, "dspark", options=SMALL, draft_size=64)
    torch.manual_seed(2)
    draft = with_head.algorithm.build_model()
    schema = load_plugins().schemas.get("dspark")
    fresh = begin_from(folder, schema, draft, with_head.algorithm.setup.vocabulary)
    assert fresh == ["confidence_head.proj.weight", "confidence_head.proj.bias"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(draft.state_dict()[name], tensor), name


def test_deepseeks_own_format_is_begun_from(material: Material, tmp_path: Path) -> None:
    """All keys at the top, layers counted from 0 after each; anchors predict unless it says otherwise."""
    case = tiny_case(material, "dspark", options=SMALL)
    torch.manual_seed(1)
    model = case.algorithm.build_model()
    ours = written(case)
    theirs = {
        **ours[LAYERS],
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": [each - 1 for each in ours["aux_hidden_state_layer_ids"]],
        **{key: ours[key] for key in ("block_size", "mask_token_id", "markov_rank")},
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    folder = store(tmp_path, case, model, theirs)
    setup = case.algorithm.setup
    schema = load_plugins().schemas.get("dspark")
    assert warm_start_problems(folder, schema, setup.options, setup.verifier, setup.capture) == []
    assert DSparkCheckpoint().options(theirs)["layout"] == "anchor_first"
    torch.manual_seed(2)
    draft = case.algorithm.build_model()
    assert list(begin_from(folder, schema, draft, setup.vocabulary)) == []
    assert all(torch.equal(draft.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"layout": "anchor_first"}, "laid out bonus_anchor, this run's anchor_first", "layout: bonus_anchor"),
        ({"num_layers": 2}, "num_layers is 2, the other's 1", "algorithm.options"),
        ({"hidden_size": 32}, "hidden_size is 32, the other's 64", "algorithm.options"),
        ({"intermediate_size": 32}, "intermediate_size is 32", "algorithm.options"),
        ({"sliding_window": 9}, "sliding_window is 9, the other's None", "algorithm.options"),
        ({"mask_token_id": 319}, "mask_token_id is 319", "algorithm.options"),
        ({"layer_ids": (1, 2)}, "reads the hidden states of layers", "layer_ids: ["),
    ],
)
def test_another_network_is_refused_with_the_reason(
    material: Material,
    trained: tuple[AlgorithmCase, torch.nn.Module],
    options: dict[str, Any],
    message: str,
    hint: str,
    tmp_path: Path,
) -> None:
    folder = store(tmp_path, *trained)
    case = tiny_case(material, "dspark", options={**SMALL, "layout": "bonus_anchor", **options})
    setup = case.algorithm.setup
    schema = load_plugins().schemas.get("dspark")
    (problem,) = warm_start_problems(folder, schema, setup.options, setup.verifier, setup.capture)
    assert message in problem.what
    assert hint in str(problem.hint)


def test_a_mask_row_in_a_file_of_its_own_is_seen_where_vllm_reads_it(
    material: Material, case: AlgorithmCase, trained: tuple[AlgorithmCase, torch.nn.Module], tmp_path: Path
) -> None:
    schema = load_plugins().schemas.get("dspark")
    options = {**SMALL, "layout": "bonus_anchor"}
    drafts = (tiny_case(material, "dspark", options=options), *trained), (case, case, case.algorithm.build_model())
    found = []
    for index, (ours, theirs, model) in enumerate(drafts):
        folder = store(tmp_path / str(index), theirs, model)
        (folder / "mask_embedding.pt").write_bytes(b"not opened")
        setup = ours.algorithm.setup
        found.append(warm_start_problems(folder, schema, setup.options, setup.verifier, setup.capture))
    (problem,), own = found
    assert "mask_embedding.pt" in problem.what
    assert not own


def test_another_markov_head_is_refused(material: Material, case: AlgorithmCase, tmp_path: Path) -> None:
    folder = store(tmp_path, case, case.algorithm.build_model())
    other = DSparkOptions(**{**SMALL, "markov_rank": 8, "markov_head": "gated"})
    schema = load_plugins().schemas.get("dspark")
    setup = case.algorithm.setup
    found = [each.what for each in warm_start_problems(folder, schema, other, setup.verifier, setup.capture)]
    assert found == [
        "the draft is another network: markov_head is gated, the other's vanilla",
        "the draft is another network: markov_rank is 8, the other's 6",
    ]


def test_a_confidence_head_of_other_inputs_is_refused(case: AlgorithmCase, tmp_path: Path) -> None:
    folder = store(tmp_path, case, case.algorithm.build_model())
    other = DSparkOptions(**{**SMALL, "confidence_with_markov": False})
    schema = load_plugins().schemas.get("dspark")
    setup = case.algorithm.setup
    (problem,) = warm_start_problems(folder, schema, other, setup.verifier, setup.capture)
    assert "confidence_with_markov is False, the other's True" in problem.what
    without = DSparkOptions(**{**SMALL, "confidence_with_markov": False, "confidence": False})
    assert warm_start_problems(folder, schema, without, setup.verifier, setup.capture) == []


def test_a_draft_without_sliding_layers_begins_from_itself(material: Material, tmp_path: Path) -> None:
    case = tiny_case(material, "dspark", options={**SMALL, "sliding_window_non_causal": False}, draft_size=64)
    folder = store(tmp_path, case, case.algorithm.build_model())
    schema = load_plugins().schemas.get("dspark")
    setup = case.algorithm.setup
    assert warm_start_problems(folder, schema, setup.options, setup.verifier, setup.capture) == []


def test_another_vocabulary_is_refused(
    material: Material, trained: tuple[AlgorithmCase, torch.nn.Module], tmp_path: Path
) -> None:
    folder = store(tmp_path, *trained)
    case = tiny_case(material, "dspark", options={**SMALL, "layout": "bonus_anchor"}, draft_size=64)
    schema = load_plugins().schemas.get("dspark")
    with pytest.raises(CheckpointError, match="320 tokens, 256 of them not in this run's 64"):
        begin_from(folder, schema, case.algorithm.build_model(), case.algorithm.setup.vocabulary)


def test_drafts_of_a_third_kind_are_refused(material: Material, case: AlgorithmCase, tmp_path: Path) -> None:
    folder = store(tmp_path, case, case.algorithm.build_model(), {**written(case), "speculators_model_type": "eagle3"})
    schema = load_plugins().schemas.get("dspark")
    setup = case.algorithm.setup
    (problem,) = warm_start_problems(folder, schema, setup.options, setup.verifier, setup.capture)
    assert "begins from dspark or dflash" in problem.what
