"""The model of MiMo's layout that the demo and the tests train the head of."""

from __future__ import annotations

import json

import pytest
import torch
from make_mimo import make
from safetensors.torch import load_file

from draftsmith.capture.engines.transformers import load_verifier
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.verifier import read_verifier


def test_it_answers_as_the_model_that_it_was_made_of_and_has_a_head(tmp_path, capsys):
    source, target = make_tiny_verifier(tmp_path / "llama", "llama_tied"), tmp_path / "models" / "mimo"
    make(source, target, seed=0)
    tokens = torch.arange(4, 40)[None]
    device = torch.device("cpu")
    ours, theirs = (load_verifier(each, dtype=torch.float32, device=device) for each in (target, source))
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    facts = read_verifier(target)
    assert facts.architectures == ("MiMoForCausalLM",)
    assert facts.model_type == "qwen2"
    assert facts.text_config["num_nextn_predict_layers"] == 1
    heads = [name for name in load_file(target / "model.safetensors") if name.startswith("model.mtp_layers.0.")]
    assert len(heads) == 16
    (target / "made.txt").touch()
    assert (target / "model.safetensors").stat().st_mode == (target / "made.txt").stat().st_mode  # as readable as all
    assert "is ready" in capsys.readouterr().err
    before = (target / "model.safetensors").stat().st_mtime_ns
    make(source, target, seed=1)
    assert (target / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in target.parent.iterdir()] == ["mimo"]


@pytest.mark.parametrize("family", ["qwen3", "granite"])
def test_a_model_that_is_no_llama_leaves_nothing(tmp_path, family):
    source = make_tiny_verifier(tmp_path / family, family)
    with pytest.raises(SystemExit, match="no Llama"):
        make(source, tmp_path / "models" / "mimo", seed=0)
    assert list((tmp_path / "models").iterdir()) == []


def test_heads_of_another_width_are_refused(tmp_path):
    source = make_tiny_verifier(tmp_path / "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "head_dim": 16}))
    with pytest.raises(SystemExit, match="this model has others"):
        make(source, tmp_path / "mimo", seed=0)


def test_without_the_model_it_says_what_to_do(tmp_path):
    with pytest.raises(SystemExit, match="run `make model`"):
        make(tmp_path / "nowhere", tmp_path / "mimo", seed=0)
