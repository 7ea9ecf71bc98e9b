"""From conversations to a draft that a real vLLM serves, on the real SmolLM2: short, and with every stage."""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.request
from pathlib import Path

import pytest
from command_line import draftsmith, verification

from draftsmith.serving.vllm_process import running_server

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.vllm]

QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Tell me a joke.",
    "How do I change a flat tire?",
    "Name three fruits.",
    "Hello",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, repository, smollm2_path):
    """A whole run: (recipe, output folder, what it printed)."""
    folder = tmp_path_factory.mktemp("end-to-end")
    rows = (repository / "examples" / "data" / "smollm2_conversations.jsonl").read_text().splitlines()[:14]
    (folder / "conversations.jsonl").write_text("\n".join(rows) + "\n")
    prompts = [
        {"source": "ab"[index % 2], "messages": [{"role": "user", "content": text}]}
        for index, text in enumerate(QUESTIONS)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    output = folder / "run"
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"""
verifier: {smollm2_path}
output: {output}
algorithm: eagle3
data: {{sources: [conversations.jsonl], max_length: 96, validation_share: 0.15, keep_cut_answers: true}}
vocabulary: {{draft_size: 1024}}
capture: {{engine: transformers}}
train: {{epochs: 20, tokens_per_row: 256, learning_rate: 0.002}}
verify: {{prompts: prompts.jsonl, max_tokens: 32, require_vllm: true}}
"""
    )
    return recipe, output, draftsmith("run", recipe)


def times(output):
    """When each file was written, but for the two that every command writes: what was used, and who is at work."""
    files = [path for path in output.rglob("*") if path.is_file() and path.name not in ("run.json", ".lock")]
    return {path: path.stat().st_mtime_ns for path in files}


def test_vllm_serves_it_both_ways_with_the_verifiers_own_output(finished):
    _, output, printed = finished
    found = verification(output)
    assert found["ways"]["with_draft"]["identical"] == found["ways"]["as_model"]["identical"] == len(QUESTIONS)
    # The same draft on the same prompts, found by vLLM in another way.
    as_model = found["ways"]["as_model"]
    assert as_model["served"] == as_model["served_with_draft"]
    assert as_model["served"]["accepted"] > 0
    lines = [line for line in printed.splitlines() if line.strip()]
    assert lines[-1] == f"output identical to the verifier alone: {len(QUESTIONS)} of {len(QUESTIONS)} prompts"


def test_the_simulator_counts_what_vllm_counts(finished):
    _, output, _ = finished
    found = verification(output)
    served, simulated = found["served"], found["simulated"]
    assert set(served) == set(simulated) == {"all", "a", "b"}
    for source in served:
        # The same rounds; a near tie of the draft's own logits may fall the other way once.
        assert abs(served[source]["drafts"] - simulated[source]["drafts"]) <= 1
        for ours, theirs in zip(
            simulated[source]["accepted_per_position"], served[source]["accepted_per_position"], strict=True
        ):
            assert abs(ours - theirs) <= 1
    # vLLM counts by request as it counts in all.
    for key in ("drafts", "drafted", "accepted"):
        assert served["a"][key] + served["b"][key] == served["all"][key]
    assert served["all"]["drafted"] == 3 * served["all"]["drafts"]
    assert served["all"]["accepted"] > 0, "the draft learned nothing, so nothing was compared"


def test_the_card_says_how_to_serve_it_and_what_was_measured(finished):
    _, output, _ = finished
    card = (output / "checkpoint" / "README.md").read_text()
    assert "vllm serve ." in card
    assert "--speculative-config" in card
    assert "| vLLM | all |" in card
    assert "conversations.jsonl" in card


def test_a_second_run_redoes_nothing(finished):
    recipe, output, printed = finished
    before = times(output)
    started = time.monotonic()
    again = draftsmith("run", recipe)
    assert time.monotonic() - started < 60
    assert times(output) == before
    assert again.splitlines()[-1] == printed.splitlines()[-1]


def test_without_vllm_the_simulator_alone_speaks(finished, tmp_path):
    recipe, output, _ = finished
    copy = Path(shutil.copytree(output, tmp_path / "run"))
    shutil.rmtree(copy / "verification")
    printed = draftsmith(
        "verify", recipe, "--set", f"output={copy}", "--set", "verify.require_vllm=false", without_vllm=True
    )
    found = verification(copy)
    assert found["vllm"] is None
    assert found["served"] == {}
    # transformers' greedy answers are vLLM's, and so are the simulated rounds.
    assert [each["answer"] for each in found["per_prompt"]] == [
        each["answer"] for each in verification(output)["per_prompt"]
    ]
    assert found["simulated"] == verification(output)["simulated"]
    assert "vLLM is not installed" in printed


def test_the_server_answers_and_counts(finished, tmp_path):
    _, output, _ = finished
    found = verification(output)
    arguments = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "2", "--enforce-eager"]
    with running_server(output / "checkpoint", *arguments, log=tmp_path / "server.log", timeout=400) as address:
        body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0, "max_tokens": 32}
        with urllib.request.urlopen(f"{address}/v1/models", timeout=60) as answer:
            body["model"] = json.load(answer)["data"][0]["id"]
        request = urllib.request.Request(
            f"{address}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            completion = json.load(answer)
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
    assert completion["usage"]["completion_tokens"] == len(found["per_prompt"][0]["answer"])
    drafts = re.search(r"^vllm:spec_decode_num_drafts_total\{.*\} ([\d.]+)$", metrics, re.MULTILINE)
    assert drafts, "the server drafted nothing"
    assert abs(float(drafts[1]) - found["per_prompt"][0]["simulated"]["drafts"]) <= 1
