"""The tiny verifiers are genuine: they load, run, tokenize, and are reproducible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.testing.verifiers import (
    CHAT_TEMPLATE_WITH_GENERATION,
    FAMILIES,
    make_tiny_tokenizer,
    make_tiny_verifier,
)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_loads_and_runs(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_tiny_verifier(tmp_path / "verifier", family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Hello, wörld!"}, {"role": "assistant", "content": "Hi."}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert max(ids) < 320
    assert tokenizer.decode(ids).startswith("<|im_start|>user\nHello, wörld!<|im_end|>\n<|im_start|>assistant\nHi.")
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
    assert logits.shape == (1, len(ids), 320)
    assert torch.isfinite(logits).all()
    # Different tokens must be predicted somewhere, or tests on these logits prove little.
    assert len(set(logits[0].argmax(-1).tolist())) > 3


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = load_file(make_tiny_verifier(tmp_path / "a", "qwen3") / "model.safetensors")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = load_file(make_tiny_verifier(tmp_path / "b", "qwen3") / "model.safetensors")
    other = load_file(make_tiny_verifier(tmp_path / "c", "qwen3", seed=5) / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_generation_template_marks_the_answer() -> None:
    tokenizer = make_tiny_tokenizer(chat_template=CHAT_TEMPLATE_WITH_GENERATION)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]
    out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(out["input_ids"], out["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == "Yes<|im_end|>"
