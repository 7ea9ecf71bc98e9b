"""P-EAGLE drafts in a real vLLM, which drafts in parallel: layers, windows, norms, mask rows; and a run by command."""

from __future__ import annotations

import json

import pytest
from by_heart import Material, assert_served_as_trained, learn, make_material, serve
from command_line import draftsmith, verification

from draftsmith.checkpoint.lint import lint_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

DRAFT = {"num_depths": 5, "num_layers": 2, "max_anchors": None}
#: Options by what they show. Prompts are up to 60 tokens long, a round drafts 5.
KINDS = {
    "full": {},
    "reduced": {"draft_size": 160},
    "qwen3": {"layer_type": "qwen3", "norm_before_residual": True, "num_layers": 1},
    "without_norm": {"norm_before_fc": False, "layer_ids": (1, 2, 4, 6, 7)},
    "windowed": {"sliding_window": 12},
    # Narrower than a round: the last mask rows see none of the verified rows.
    "narrow": {"sliding_window": 4},
    "verifiers_embedding": {"train_mask_embedding": False},
}
#: Served as the model too, which differs from beside the verifier only in how vLLM finds the two.
AS_MODEL = ("reduced", "verifiers_embedding")


@pytest.fixture(scope="module")
def material(tiny_verifier) -> Material:
    return make_material(tiny_verifier)


@pytest.fixture(scope="module")
def served(export_draft, material, registry, tmp_path_factory):
    train = learn(material, registry, steps=100, rate=3e-3)
    folder = tmp_path_factory.mktemp("drafts")
    exports = {
        name: export_draft(folder / name, material.folder, algorithm="peagle", train=train, **{**DRAFT, **options})
        for name, options in KINDS.items()
    }
    return exports, serve(material, exports, registry, tmp_path_factory.mktemp("vllm"), as_model=AS_MODEL)


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_serves_every_kind_of_draft_as_it_was_trained(served, material, registry, kind):
    exports, answers = served
    findings = lint_checkpoint(exports[kind].folder, registry)
    assert [finding for finding in findings if finding.severity == "error"] == []
    assert_served_as_trained(answers[kind], material, at_least=0.2)


@pytest.mark.model
def test_from_conversations_to_a_served_draft(repository, smollm2_path, tmp_path):
    """The whole run on the real SmolLM2, short."""
    rows = (repository / "examples" / "data" / "smollm2_conversations.jsonl").read_text().splitlines()[:14]
    (tmp_path / "conversations.jsonl").write_text("\n".join(rows) + "\n")
    questions = [json.loads(row)["conversations"][0] for row in rows[:6]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"messages": [each]}) + "\n" for each in questions))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
verifier: {smollm2_path}
output: {tmp_path / "run"}
algorithm:
  name: peagle
  options: {{num_depths: 3, num_layers: 1, sliding_window: 64}}
data: {{sources: [conversations.jsonl], max_length: 96, validation_share: 0.15, keep_cut_answers: true}}
vocabulary: {{draft_size: 1024}}
capture: {{engine: transformers}}
train: {{epochs: 20, tokens_per_row: 256, learning_rate: 0.002}}
verify: {{prompts: prompts.jsonl, max_tokens: 32, require_vllm: true}}
"""
    )
    printed = draftsmith("run", recipe)
    assert f"output identical to the verifier alone: {len(questions)} of {len(questions)} prompts" in printed
    found = verification(tmp_path / "run")
    assert found["ways"]["as_model"]["identical"] == len(questions)
    served, simulated = found["served"]["all"], found["simulated"]["all"]
    assert abs(served["drafts"] - simulated["drafts"]) <= 1
    pairs = zip(served["accepted_per_position"], simulated["accepted_per_position"], strict=True)
    assert all(abs(vllms - ours) <= 1 for vllms, ours in pairs)
    assert served["accepted_per_position"][0] > 0, "the draft learned nothing, so nothing was compared"
