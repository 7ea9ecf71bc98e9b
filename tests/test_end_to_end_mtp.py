"""Native heads in a real vLLM: a head beside its model and inside it, and a run by the command line.

The models are tiny random ones, of MiMo's, GLM's, Qwen3.5's and Qwen3-Next's layout; untrained heads are
right as often as chance has it.
"""

from __future__ import annotations

import pytest
from by_heart import (
    ANSWER,
    Material,
    assert_served_as_trained,
    learn,
    make_material,
    make_sure_of_answers,
    request,
    serve,
    simulated,
)
from command_line import assert_served_as_simulated, draftsmith, verification
from make_mimo import add_head
from native_heads import LAYERS, add_native_head, configuration
from runner_v2 import qwen3_5_environment
from tiny_runs import write_own_answers

from draftsmith.checkpoint.lint import lint_checkpoint
from draftsmith.serving.vllm_process import run_engines
from draftsmith.testing.verifiers import make_tiny_verifier

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

#: Lengths of the prompts where kernels run in an interpreter.
FEW = (9, 27, 44, 60)


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    folder = make_tiny_verifier(tmp_path_factory.mktemp("mimo"))
    add_head(folder)
    return folder


@pytest.fixture(scope="module")
def material(mimo) -> Material:
    return make_material(mimo)


@pytest.fixture(scope="module")
def exports(export_draft, material, registry, tmp_path_factory):
    train = learn(material, registry, steps=150, rate=3e-3)
    folder = tmp_path_factory.mktemp("heads")
    return {
        "untrained": export_draft(folder / "untrained", material.folder, algorithm="mtp"),
        "trained": export_draft(folder / "trained", material.folder, algorithm="mtp", train=train),
    }


@pytest.fixture(scope="module")
def served(exports, material, registry, tmp_path_factory):
    return serve(material, exports, registry, tmp_path_factory.mktemp("vllm"), as_model=())


def test_vllm_serves_a_head_beside_its_model_as_it_was_trained(exports, served, material, registry):
    findings = lint_checkpoint(exports["trained"].folder, registry)
    assert [finding for finding in findings if finding.severity == "error"] == []
    assert_served_as_trained(served["trained"], material, at_least=0.3)
    trained, untrained = (served[name].counters["beside"].acceptance_length for name in ("trained", "untrained"))
    assert trained > untrained + 0.3


def test_inside_the_model_it_is_served_alike(exports, served, material, tmp_path):
    model = tmp_path / "model"
    printed = draftsmith("stitch", material.folder, exports["trained"].folder, model)
    assert "tensors of the mimo head replaced" in printed
    native = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    results = run_engines([request(material, "inside", str(model), native)], tmp_path / "vllm")
    assert list(results["inside"].outputs) == [tuple(answer[:ANSWER]) for answer in material.answers]
    beside = served["trained"].counters["beside"]
    assert results["inside"].counters.accepted_per_position == beside.accepted_per_position
    assert results["inside"].counters.drafts == beside.drafts


def test_a_layer_of_experts_is_served_as_it_was_trained(export_draft, registry, tmp_path):
    """GLM's: fed what comes after the final norm, and later its own state before the norm."""
    folder = make_tiny_verifier(tmp_path / "model", configuration("glm4_moe"), num_layers=LAYERS)
    add_native_head(folder)
    material = make_material(folder)
    train = learn(material, registry, steps=120, rate=3e-3)
    head = export_draft(tmp_path / "head", folder, algorithm="mtp", train=train)
    answers = serve(material, {"head": head}, registry, tmp_path / "vllm", as_model=())["head"]
    assert_served_as_trained(answers, material, at_least=0.3)


@pytest.mark.parametrize(
    ("kind", "environment"),
    [("qwen3_5", qwen3_5_environment), ("qwen3_5_moe", qwen3_5_environment), ("qwen3_next", dict)],
)
def test_models_with_linear_attention_are_served_as_trained(kind, environment, export_draft, registry, tmp_path):
    """vLLM's kernels of linear attention for CPUs know bfloat16 alone, so that the models are made sure of what they
    answer. The head stands inside the model, the untrained one in the same place."""
    folder = make_tiny_verifier(tmp_path / "model", configuration(kind), num_layers=LAYERS)
    make_sure_of_answers(folder, FEW)
    add_native_head(folder)
    material = make_material(folder, FEW)
    head = export_draft(tmp_path / "head", folder, algorithm="mtp", train=learn(material, registry, 120, 3e-3))
    draftsmith("stitch", folder, head.folder, tmp_path / "stitched")
    alone = {"dtype": "bfloat16"}
    native = {**alone, "speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    engines = [
        request(material, "alone", str(folder), alone),
        request(material, "untrained", str(folder), native),
        request(material, "trained", str(tmp_path / "stitched"), native),
    ]
    results = run_engines(engines, tmp_path / "vllm", required=environment())
    own = [tuple(answer[:ANSWER]) for answer in material.answers]
    assert {name: list(result.outputs) == own for name, result in results.items()} == dict.fromkeys(results, True)
    expected = simulated(material, head.folder, 3, registry)
    trained, untrained = results["trained"].counters, results["untrained"].counters
    # A near tie of the head's own logits may fall the other way in bfloat16.
    assert abs(trained.drafts - expected.drafts) <= 1, (trained, expected)
    pairs = zip(trained.accepted_per_position, expected.accepted_per_position, strict=True)
    assert all(abs(vllms - ours) <= 1 for vllms, ours in pairs), (trained, expected)
    assert min(trained.acceptance_per_position) > 0.7 > 0.2 > untrained.acceptance_per_position[0]


@pytest.fixture(scope="module")
def finished(mimo, tmp_path_factory):
    """A whole run on the tiny model's own answers: (recipe, output folder, what it printed)."""
    folder = tmp_path_factory.mktemp("end-to-end")
    recipe, output = write_own_answers(folder, mimo, "mtp")
    return recipe, output, draftsmith("run", recipe)


def test_from_conversations_to_a_served_head(finished):
    _, output, printed = finished
    found = verification(output)
    assert_served_as_simulated(found)
    served = found["served"]["all"]
    assert served["acceptance_per_position"][0] > 0.3
    assert served["drafted"] == 3 * served["drafts"]
    assert "output identical to the verifier alone" in printed
    card = (output / "checkpoint" / "README.md").read_text()
    assert '"method": "mtp"' in card
    assert "vllm serve ." not in card
