"""DSpark drafts in a real vLLM: both layouts of blocks, and a run by the command line.

Only vLLM's model runner V2 serves them. On a machine without a GPU its kernels run in Triton's interpreter, slow and
right, which is why everything here is small.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from by_heart import Material, assert_served_as_trained, learn, make_material, serve
from command_line import draftsmith, verification
from runner_v2 import v2_environment
from tiny_runs import write_own_answers

from draftsmith.checkpoint.lint import lint_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

BLOCK = {"block_size": 5, "num_layers": 2, "max_anchors": 64, "markov_rank": 16}
KINDS = {
    "anchor_first": {},
    "bonus_anchor": {"layout": "bonus_anchor", "draft_size": 160},
    "mixed": {
        "sliding_window": 12,
        "full_attention_indices": (1,),
        "sliding_window_non_causal": False,
        # Of another width than the verifier, with an embedding and a head of its own.
        "hidden_size": 96,
        "draft_size": 160,
    },
    "bidirectional": {"sliding_window": 3, "full_attention_indices": (1,), "confidence": False},
}
#: Served as the model too, which differs from beside the verifier only in how vLLM finds the two.
AS_MODEL = ("bonus_anchor",)


@pytest.fixture(scope="module")
def material(tiny_verifier) -> Material:
    return make_material(tiny_verifier)


@pytest.fixture(scope="module")
def served(export_draft, material, registry, tmp_path_factory):
    train = learn(material, registry, steps=100, rate=3e-3)
    folder = tmp_path_factory.mktemp("drafts")
    exports = {
        name: export_draft(folder / name, material.folder, algorithm="dspark", train=train, **BLOCK, **options)
        for name, options in KINDS.items()
    }
    return exports, serve(material, exports, registry, tmp_path_factory.mktemp("vllm"), as_model=AS_MODEL)


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_serves_every_kind_of_block_as_it_was_trained(served, material, registry, kind):
    exports, answers = served
    findings = lint_checkpoint(exports[kind].folder, registry)
    assert [finding for finding in findings if finding.severity == "error"] == []
    assert_served_as_trained(answers[kind], material, at_least=0.2)


@pytest.fixture(scope="module")
def finished(tiny_verifier, tmp_path_factory):
    """A whole run on the tiny verifier's own answers: (recipe, output folder, what it printed)."""
    folder = tmp_path_factory.mktemp("end-to-end")
    recipe, output = write_own_answers(
        folder, tiny_verifier, "{name: dspark, options: {block_size: 4, num_layers: 2, markov_rank: 16}}"
    )
    return recipe, output, draftsmith("run", recipe, environment=v2_environment())


def test_from_conversations_to_a_served_draft(finished):
    _, output, printed = finished
    found = verification(output)
    for way in ("with_draft", "as_model"):
        assert found["ways"][way]["identical"] == found["ways"][way]["prompts"] > 0
    served, simulated = found["served"]["all"], found["simulated"]["all"]
    assert abs(served["drafts"] - simulated["drafts"]) <= 1
    pairs = zip(served["accepted_per_position"], simulated["accepted_per_position"], strict=True)
    assert all(abs(vllms - ours) <= 1 for vllms, ours in pairs)
    assert served["acceptance_per_position"][0] > 0.3
    assert served["drafted"] == 4 * served["drafts"]
    assert "output identical to the verifier alone" in printed


def test_where_model_runner_v2_cannot_run_the_simulator_alone_speaks(finished, tmp_path):
    recipe, output, _ = finished
    copy = Path(shutil.copytree(output, tmp_path / "run"))
    shutil.rmtree(copy / "verification")
    settings = ["--set", f"output={copy}", "--set", "verify.require_vllm=false"]
    printed = draftsmith("verify", recipe, *settings, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert "this draft needs vLLM's model runner V2, which cannot run here" in printed
    found = verification(copy)
    assert found["served"] == {}
    assert found["simulated"] == verification(output)["simulated"]
