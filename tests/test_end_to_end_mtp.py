"""Native heads in a real vLLM: a head beside its model and inside it, and a run by the command line.

The models are tiny random ones, of MiMo's, GLM's and Qwen3-Next's layout; untrained heads are right as often as chance
has it.
"""

from __future__ import annotations

import json

import pytest
from by_heart import ANSWER, Material, assert_served_as_trained, learn, make_material, request, serve
from command_line import assert_served_as_simulated, draftsmith, verification
from make_mimo import add_head
from native_heads import LAYERS, add_native_head, configuration

from draftsmith.checkpoint.lint import lint_checkpoint
from draftsmith.serving.vllm_process import run_engines
from draftsmith.testing.verifiers import make_tiny_verifier

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


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


@pytest.fixture
def other(export_draft, registry, tmp_path):
    """A function of a kind of model, and of engine arguments: what vLLM does with its head, trained."""

    def served_of(kind, **engine):
        folder = make_tiny_verifier(tmp_path / "model", configuration(kind), num_layers=LAYERS)
        add_native_head(folder)
        material = make_material(folder)
        train = learn(material, registry, steps=120, rate=3e-3)
        head = export_draft(tmp_path / "head", folder, algorithm="mtp", train=train)
        return material, serve(material, {kind: head}, registry, tmp_path / "vllm", as_model=(), engine=engine)[kind]

    return served_of


def test_a_layer_of_experts_is_served_as_it_was_trained(other):
    """GLM's: fed what comes after the final norm, and later its own state before the norm."""
    material, answers = other("glm4_moe")
    assert_served_as_trained(answers, material, at_least=0.3)


def test_a_layer_with_a_gate_is_accepted_in_bfloat16(other):
    """Qwen3-Next's. vLLM's kernels of linear attention for CPUs know bfloat16 alone, in which the model's own answers
    part from those that the head has learnt, so that rounds are not compared one by one."""
    _, answers = other("qwen3_next", dtype="bfloat16")
    assert min(answers.simulated.acceptance_per_position) > 0.9, answers.simulated
    # Where they part differs from run to run (.25 to .49 at the first position in three). A head that is fed something
    # else than it learnt from accepts one token in hundreds.
    assert answers.counters["beside"].acceptance_per_position[0] > 0.05, answers.counters


@pytest.fixture(scope="module")
def finished(mimo, tmp_path_factory):
    """A whole run on the tiny model's own answers: (recipe, output folder, what it printed)."""
    folder = tmp_path_factory.mktemp("end-to-end")
    text = "What is the capital of France? Why is the sky blue, please? How many legs does a spider have?"
    answer = {"role": "assistant", "content": "(the verifier writes its own)"}
    chats = [
        {"messages": [{"role": "user", "content": text[start : start + 20]}, answer]} for start in range(0, 70, 6)
    ]
    (folder / "conversations.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    output = folder / "run"
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"""
verifier: {mimo}
output: {output}
algorithm: mtp
data:
  sources: [conversations.jsonl]
  max_length: 128
  validation_share: 0.2
  keep_cut_answers: true
  responses: regenerate
  generation: {{max_tokens: 24}}
capture: {{engine: transformers, store_dtype: float32}}
train: {{epochs: 60, tokens_per_row: 512, learning_rate: 0.003, compute_dtype: float32}}
verify: {{prompts: conversations.jsonl, max_tokens: 16, require_vllm: true}}
"""
    )
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
