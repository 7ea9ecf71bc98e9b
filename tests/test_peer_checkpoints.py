"""Checkpoints exchanged with the peer library: ours load there and theirs here, and the logits are equal.

The peer wants an environment of its own, in which `peer_logits.py` runs; `make test-peer` makes it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.checkpoint.exported import load_draft
from draftsmith.checkpoint.lint import lint_checkpoint
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.verifier import read_verifier

pytestmark = [pytest.mark.peer, pytest.mark.slow]

#: Drafts are compared that follow the tokens at STARTS.
TOKENS, DRAFTED, STARTS = 40, 5, (1, 2, 7, 15, 16, 33)
LAYER_IDS = (2, 4, 6)
#: Wider than the document: narrower ones mean something else to the peer (the same context for a whole block).
WIDE = 64

#: What every draft of an algorithm has: our options, and keys of the peer's configuration.
OPTIONS = {"dflash": {"block_size": DRAFTED + 1}, "peagle": {"num_depths": DRAFTED}}
KEYS = {
    "dflash": {"block_size": DRAFTED + 1, "aux_hidden_state_layer_ids": list(LAYER_IDS)},
    "peagle": {"eagle_aux_hidden_state_layer_ids": list(LAYER_IDS), "fc_norm": False, "norm_output": False},
}
#: What we export: name → (algorithm, draft vocabulary, options).
OURS = {
    "full": ("dflash", None, {}),
    "reduced": ("dflash", 100, {}),
    "sliding": ("dflash", None, {"sliding_window": WIDE, "sliding_window_non_causal": False}),
    "mixed": ("dflash", 100, {"sliding_window": WIDE, "full_attention_indices": (1,)}),
    "peagle_full": ("peagle", None, {}),
    "peagle_reduced": ("peagle", 100, {"layer_type": "qwen3", "norm_before_residual": True}),
    "peagle_bare": ("peagle", None, {"norm_before_fc": False, "train_mask_embedding": False}),
    "peagle_sliding": ("peagle", 100, {"sliding_window": WIDE}),
}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": WIDE, "use_sliding_window": True}
#: What the peer makes: name → (algorithm, draft vocabulary, keys of its configuration, keys of its layers').
THEIRS = {
    "peer_full": ("dflash", 320, {}, {}),
    "peer_reduced": ("dflash", 100, {}, {}),
    "peer_sliding": ("dflash", 320, {"sliding_window_non_causal": False}, SLIDING),
    "peer_bidirectional": ("dflash", 320, {"sliding_window_non_causal": True}, SLIDING),
    "peer_peagle_full": ("peagle", 320, {"norm_before_fc": True}, {}),
    "peer_peagle_reduced": ("peagle", 100, {"norm_before_residual": True}, {}),
    "peer_peagle_llama": ("peagle", 100, {"norm_before_fc": True}, {"model_type": "llama"}),
}


def peer_python() -> str:
    python = os.environ.get("DRAFTSMITH_PEER_PYTHON")
    if not python:
        pytest.fail("no Python with the peer library: run `make test-peer`", pytrace=False)
    return python


def peer_config(verifier, algorithm, draft_size, own, layers):
    return {
        "speculators_model_type": algorithm,
        "draft_vocab_size": draft_size,
        **KEYS[algorithm],
        "mask_token_id": verifier.vocab_size - 1,
        **own,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "vocab_size": verifier.vocab_size,
            "hidden_size": verifier.hidden_size,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            **layers,
        },
    }


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory, export_draft):
    """All checkpoints on both sides, what they were asked, and the peer's answers."""
    folder = tmp_path_factory.mktemp("peer")
    verifier = make_tiny_verifier(folder / "verifier", "qwen3")
    facts = read_verifier(verifier)
    ours = {}
    for seed, (name, (algorithm, draft_size, options)) in enumerate(OURS.items()):
        ours[name] = export_draft(
            folder / f"ours_{name}", verifier, algorithm=algorithm, draft_size=draft_size, seed=seed,
            num_layers=2, layer_ids=LAYER_IDS, **OPTIONS[algorithm], **options,
        )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "input_ids": torch.randint(4, 300, (TOKENS,), generator=generator),
        "taps": torch.randn(TOKENS, len(LAYER_IDS) * facts.hidden_size, generator=generator),
        "last_hidden": torch.randn(TOKENS, facts.hidden_size, generator=generator),
        "starts": torch.tensor(STARTS),
    }
    save_file(inputs, folder / "inputs.safetensors")
    request = {
        "verifier": str(verifier),
        "load": {name: str(each.folder) for name, each in ours.items()},
        "make": {name: peer_config(facts, *each) for name, each in THEIRS.items()},
        "drafted": DRAFTED,
    }
    (folder / "request.json").write_text(json.dumps(request))
    done = subprocess.run(
        [peer_python(), str(Path(__file__).with_name("peer_logits.py")), str(folder)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return SimpleNamespace(folder=folder, verifier=verifier, facts=facts, ours=ours, inputs=inputs)


def drafted(folder, registry, exchanged):
    """Our logits [starts, K, V_d] from the checkpoint in *folder*, by the serving path."""
    algorithm, model, _ = load_draft(folder, registry, verifier=exchanged.verifier)
    drafter = algorithm.drafter(model)
    ids, taps = exchanged.inputs["input_ids"], exchanged.inputs["taps"]
    rows = []
    for start in STARTS:
        drafter.reset()
        rows.append(drafter.propose(ids[: start + 1], taps[:start], DRAFTED))
    return torch.stack(rows)


def assert_equal_logits(exchanged, name, ours):
    theirs = load_file(exchanged.folder / f"{name}.safetensors")["logits"]
    assert theirs.shape == ours.shape
    assert ours.std() > 0.1, "logits all alike would agree with anything"
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OURS)
def test_our_checkpoint_means_the_same_to_the_peer(exchanged, registry, name):
    assert_equal_logits(exchanged, name, drafted(exchanged.ours[name].folder, registry, exchanged))


@pytest.mark.parametrize("name", THEIRS)
def test_the_peers_checkpoint_means_the_same_to_us(exchanged, registry, name):
    assert_equal_logits(exchanged, name, drafted(exchanged.folder / name, registry, exchanged))


@pytest.mark.parametrize("name", THEIRS)
def test_the_linter_finds_only_what_vllm_serves_otherwise(exchanged, registry, name):
    findings = lint_checkpoint(exchanged.folder / name, registry)
    errors = [finding.where for finding in findings if finding.severity == "error"]
    # By the peer's default its layers see their whole block, and its config tells vLLM to serve them causally.
    assert errors == (["sliding_window_non_causal"] if name in ("peer_full", "peer_reduced") else [])
