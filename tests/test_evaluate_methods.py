"""Every kind of method that vLLM has of its own, beside a checkpoint's head, in one evaluation by a real vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from by_heart import Material, learn
from command_line import draftsmith
from make_mimo import add_head
from outsider import Outsider

from draftsmith.capture.engines.transformers import load_verifier
from draftsmith.data.template import load_tokenizer, render_prompt
from draftsmith.evaluation.prompts import encode, load_prompts
from draftsmith.evaluation.results import counters_of, figures, read_evaluation
from draftsmith.evaluation.run import Settings, evaluate
from draftsmith.serving.verifier_model import generate_greedily
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.verifier import read_verifier

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

#: Tokens of an answer, and how many more are known of it.
ANSWER, BEYOND = 20, 8
#: Tokens a round.
K = 3


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory) -> Path:
    """Six questions, the last of which has another one after it."""
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    turns = [*([f"Name colour {n}."] for n in range(5)), ["Name colour 5.", "Another."]]
    path.write_text("".join(json.dumps({"turns": each}) + "\n" for each in turns))
    return path


@pytest.fixture(scope="module")
def models(registry, export_draft, prompts_file, tmp_path_factory) -> SimpleNamespace:
    """A Llama, which is also the smaller model; the same with a native head that knows its answers, as MiMo has one;
    and that head beside it, as a checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    llama = make_tiny_verifier(folder / "llama")
    mimo = Path(shutil.copytree(llama, folder / "mimo"))
    add_head(mimo)
    ids = encode(load_prompts([str(prompts_file)], registry, Path()), load_tokenizer(mimo))
    model = load_verifier(mimo, dtype=torch.float32, device=torch.device("cpu"))
    prompts = [list(each) for each in ids]
    answers = generate_greedily(model, prompts, ANSWER, BEYOND, ())
    material = Material(mimo, read_verifier(mimo), model, prompts, answers)
    train = learn(material, registry, steps=150, rate=3e-3)
    head = export_draft(folder / "head", mimo, algorithm="mtp", train=train).folder
    draftsmith("stitch", mimo, head, folder / "stitched")
    return SimpleNamespace(llama=llama, verifier=folder / "stitched", head=head)


@pytest.fixture(scope="module")
def medusa(models, prompts_file, tmp_path_factory, repository) -> Path:
    """Medusa heads that a third party's package has trained on the verifier's answers to the prompts."""
    folder = tmp_path_factory.mktemp("medusa")
    outsider = Outsider(folder / "outsider")
    outsider.install(repository / "examples" / "draftsmith-medusa")
    chats = folder / "chats.jsonl"
    rows = [json.loads(line)["turns"][0] for line in prompts_file.read_text().splitlines()]
    turns = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "to be written anew"}] for text in rows
    ]
    chats.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    recipe = {
        "verifier": str(models.verifier),
        "output": str(folder / "run"),
        "algorithm": "medusa",
        "data": {
            "sources": [str(chats)],
            "max_length": 128,
            "keep_cut_answers": True,
            "responses": "regenerate",
            "generation": {"max_tokens": ANSWER + BEYOND},
        },
        "capture": {"engine": "transformers", "store_dtype": "float32"},
        "train": {"epochs": 100, "tokens_per_row": 512, "learning_rate": 0.003, "compute_dtype": "float32"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    done = outsider.draftsmith("run", str(folder / "recipe.yaml"), "--until", "export")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run" / "checkpoint"


def test_every_kind_of_method_is_measured_beside_a_head(models, medusa, prompts_file, registry, tmp_path):
    names = ["none", "mtp", f"medusa:{medusa}", f"draft_model:{models.llama}", "ngram:prompt_lookup_max=3"]
    settings = Settings(
        checkpoint=str(models.head),
        verifier=str(models.verifier),
        prompts=(str(prompts_file),),
        against=tuple(names),
        max_tokens=ANSWER,
        dtype="float32",
        repetitions=1,
    )
    found = evaluate(settings, registry, tmp_path / "out")
    assert [(each.name, each.status, each.reason) for each in found.methods] == [
        (name, "measured", None) for name in ("none", str(models.head), *names[1:])
    ]
    none, head, native, medusa_heads, smaller, ngram = found.methods
    assert [each.turn for each in found.prompts] == [1, 1, 1, 1, 1, 1, 2]
    tokenizer = load_tokenizer(models.verifier)
    answer = tokenizer.decode(list(none.repetitions[0].requests[5].output), skip_special_tokens=True)
    said = [("user", "Name colour 5."), ("assistant", answer), ("user", "Another.")]
    later = render_prompt(tokenizer, [{"role": role, "content": text} for role, text in said])
    assert found.prompts[6].tokens == len(later)
    for method in found.methods[1:]:
        # vLLM's counters against its own account of each request's rounds.
        assert counters_of(method) == counters_of(method, found.of_category(None)), method.name
        assert method.losslessness.identical == len(found.prompts), method.name
        assert figures(method, none)["speed_up"].median > 0
        assert figures(method, none)["drafting_share"].median > 0
    # The same head in two places.
    assert counters_of(native) == counters_of(head)
    assert figures(head, none)["acceptance_length"] > 1.5
    assert figures(medusa_heads, none)["acceptance_length"] > 1.2
    # The smaller model answers as the verifier does: all is accepted.
    assert figures(smaller, none)["acceptance_per_position"] == [1.0] * K
    # N-grams draft at most K tokens, often fewer.
    assert 0 < counters_of(ngram).drafted <= K * counters_of(ngram).drafts
    assert read_evaluation(tmp_path / "out") == found
