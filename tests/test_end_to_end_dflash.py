"""DFlash drafts in a real vLLM: every kind of attention that can be configured, and a run by the command line."""

from __future__ import annotations

import json

import pytest
from by_heart import Material, assert_served_as_trained, learn, make_material, serve
from command_line import draftsmith, verification

from draftsmith.checkpoint.lint import lint_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

BLOCK = {"block_size": 6, "num_layers": 2, "max_anchors": 64}
#: Options by what they show. Prompts are up to 60 tokens long, a block has 6 rows.
KINDS = {
    "full": {},
    "reduced": {"draft_size": 160},
    "causal": {"sliding_window": 12, "sliding_window_non_causal": False},
    "causal_and_narrow": {"sliding_window": 3, "sliding_window_non_causal": False},
    "bidirectional": {"sliding_window": 12},
    # Narrower than a block: the window cuts rows to both sides.
    "bidirectional_and_narrow": {"sliding_window": 4},
    "wide": {"hidden_size": 96},
}
#: Served as the model too, which differs from beside the verifier only in how vLLM finds the two.
AS_MODEL = ("reduced", "causal")
#: Only vLLM's model runner V2 serves layers of both kinds in one draft.
MIXED = {"mixed": {"sliding_window": 12, "full_attention_indices": (1,)}}


@pytest.fixture(scope="module")
def material(tiny_verifier) -> Material:
    return make_material(tiny_verifier)


@pytest.fixture(scope="module")
def export(export_draft, material, registry, tmp_path_factory):
    def by_name(kinds):
        train = learn(material, registry, steps=100, rate=3e-3)
        folder = tmp_path_factory.mktemp("drafts")
        return {
            name: export_draft(folder / name, material.folder, algorithm="dflash", train=train, **BLOCK, **options)
            for name, options in kinds.items()
        }

    return by_name


@pytest.fixture(scope="module")
def served(export, material, registry, tmp_path_factory):
    exports = export(KINDS)
    return exports, serve(material, exports, registry, tmp_path_factory.mktemp("vllm"), as_model=AS_MODEL)


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_serves_every_kind_of_attention_as_it_was_trained(served, material, registry, kind):
    exports, answers = served
    findings = lint_checkpoint(exports[kind].folder, registry)
    assert [finding for finding in findings if finding.severity == "error"] == []
    assert_served_as_trained(answers[kind], material, at_least=0.2)


def test_layers_that_slide_beside_layers_that_do_not(export, material, registry, tmp_path):
    exports = export(MIXED)
    answers = serve(material, exports, registry, tmp_path, as_model=["mixed"])
    assert_served_as_trained(answers["mixed"], material, at_least=0.2)


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
  name: dflash
  options: {{block_size: 4, num_layers: 2, max_anchors: 64, sliding_window: 64, sliding_window_non_causal: false}}
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
