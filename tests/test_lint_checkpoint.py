"""The linter on real exports: silent on a good one, one finding for each way of damaging it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.checkpoint.exported import load_draft
from draftsmith.checkpoint.lint import has_errors, lint_checkpoint


def damage(folder, change):
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def layers(config):
    return config["transformer_layer_config"]


def method(config):
    return config["speculators_config"]["proposal_methods"][0]


def absolute_ids(_, tensors):
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def swap_ids(_, tensors):
    # Offsets of two draft ids exchanged: in range, and no longer ascending.
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    ids[[30, 31]] = ids[[31, 30]]
    tensors["d2t"] = ids - torch.arange(len(ids))


def other_t2d(_, tensors):
    tensors["t2d"] = tensors["t2d"].roll(1)


CASES = {
    "missing tensor": (lambda c, t: t.pop("layers.0.hidden_norm.weight"), "error", "hidden_norm.weight [64] is miss"),
    "missing d2t": (lambda c, t: t.pop("d2t"), "error", "tensor d2t [128] is missing"),
    "missing head": (lambda c, t: t.pop("lm_head.weight"), "error", "lm_head.weight [128, 64] is missing"),
    "unexpected tensor": (
        lambda c, t: t.update({"layers.9.norm": torch.ones(2)}),
        "error",
        "unknown to vLLM's loader",
    ),
    "prefixed name": (
        lambda c, t: t.update({"model.norm.weight": t.pop("norm.weight")}),
        "error",
        "model.norm.weight",
    ),
    "wrong shape": (lambda c, t: t.update({"norm.weight": torch.ones(32).bfloat16()}), "error", "has shape [32]"),
    "float32": (lambda c, t: t.update({"norm.weight": t["norm.weight"].float()}), "warning", "BF16 is what vLLM"),
    "integer weight": (
        lambda c, t: t.update({"norm.weight": torch.ones(64, dtype=torch.int8)}),
        "error",
        "a float is",
    ),
    "d2t holds target ids": (absolute_ids, "error", "d2t holds target ids"),
    "d2t out of range": (lambda c, t: t["d2t"].add_(1000), "error", "d2t leads to target ids from"),
    "d2t not ascending": (swap_ids, "error", "ascending, distinct"),
    "d2t of another dtype": (lambda c, t: t.update({"d2t": t["d2t"].float()}), "error", "I64 is needed"),
    "t2d of another map": (other_t2d, "error", "t2d marks"),
    "t2d of another size": (lambda c, t: t.update({"t2d": t["t2d"][:100].clone()}), "error", "BOOL [320] is needed"),
    "draft vocabulary too large": (
        lambda c, t: c.update(draft_vocab_size=999),
        "error",
        "the verifier has 320 tokens",
    ),
    "layer ids not sorted": (
        lambda c, t: c["eagle_aux_hidden_state_layer_ids"].reverse(),
        "error",
        "not ascending and distinct",
    ),
    "layer ids out of range": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[2, 4, 60]),
        "error",
        "outside the verifier's 8 layers",
    ),
    "flag not written": (lambda c, t: c.pop("norm_before_residual"), "warning", "norm_before_residual is not written"),
    "four taps, three announced": (
        lambda c, t: layers(c).update(num_aux_hidden_states=4),
        "error",
        "it says 4 tapped layers, the list has 3",
    ),
    "K beyond trained steps": (lambda c, t: method(c).update(speculative_tokens=7), "warning", "3 were trained"),
    "K missing": (lambda c, t: method(c).pop("speculative_tokens"), "error", "number of speculative tokens is None"),
    "no speculators_config": (lambda c, t: c.pop("speculators_config"), "error", "speculators_config is missing"),
    "no layers": (lambda c, t: c.pop("transformer_layer_config"), "error", "transformer_layer_config is missing"),
    "verifier not there": (
        lambda c, t: c["speculators_config"]["verifier"].update(name_or_path="/nowhere/model"),
        "error",
        "the verifier cannot be read",
    ),
    "verifier elsewhere": (
        lambda c, t: c["speculators_config"]["verifier"].update(name_or_path="somebody/model"),
        "warning",
        "is not on this machine",
    ),
    "no verifier": (
        lambda c, t: c["speculators_config"].pop("verifier"),
        "error",
        "verifier.name_or_path is missing",
    ),
    "another width": (lambda c, t: c.update(target_hidden_size=96), "error", "the verifier's are 64 wide"),
    "another vocabulary": (lambda c, t: layers(c).update(vocab_size=128), "error", "the verifier's is 320"),
    "short positions": (lambda c, t: layers(c).update(max_position_embeddings=16), "warning", "is 16, the verifier's"),
    "partial rotary": (lambda c, t: layers(c).update(partial_rotary_factor=0.5), "error", "partial rotary (0.5)"),
    "no theta": (lambda c, t: layers(c)["rope_parameters"].pop("rope_theta"), "error", "rope_theta is missing"),
    "no theta, and no number that would be wrong for half of the classes": (
        lambda c, t: layers(c)["rope_parameters"].pop("rope_theta"),
        "error",
        "a value of its own, which depends on the class",
    ),
    "another theta": (
        lambda c, t: layers(c)["rope_parameters"].update(rope_theta=5.0),
        "warning",
        "right only if the draft was trained so",
    ),
    "M-RoPE": (lambda c, t: layers(c)["rope_parameters"].update(mrope_section=[4, 2, 2]), "error", "M-RoPE"),
    "quantised": (lambda c, t: c.update(quantization_config={"bits": 4}), "error", "quantised verifier"),
    "quantised layers": (
        lambda c, t: layers(c).update(quantization_config={"bits": 4}),
        "error",
        "quantised verifier",
    ),
    "model type": (lambda c, t: c.update(model_type="llama"), "error", "top-level model_type ('llama')"),
    "no layer type": (lambda c, t: layers(c).pop("model_type"), "error", "no model_type"),
    "no kind": (lambda c, t: c.pop("speculators_model_type"), "error", "speculators_model_type is missing"),
    "a norm without its flag": (
        lambda c, t: c.update(norm_before_fc=False),
        "error",
        "drafts without the norm",
    ),
    "both norms": (lambda c, t: c.update(fc_norm=True), "error", "exclude each other"),
}


def test_a_good_export_has_no_findings(exported, registry):
    assert lint_checkpoint(exported.folder, registry) == []


@pytest.mark.parametrize("name", CASES)
def test_each_fault_is_found_and_explained(name, checkpoint_copy, registry):
    change, severity, text = CASES[name]
    damage(checkpoint_copy, change)
    findings = lint_checkpoint(checkpoint_copy, registry)
    matching = [finding for finding in findings if text in finding.what]
    assert matching, "\n".join(map(str, findings))
    assert matching[0].severity == severity
    assert matching[0].where
    assert has_errors(findings) == any(finding.severity == "error" for finding in findings)


@pytest.mark.parametrize(
    ("algorithm", "change", "option"),
    [
        ("eagle3", lambda c: c.update(norm_output=not c["norm_output"]), "norm_output"),
        ("eagle3", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 4, 5]), "layer_ids"),
        ("dflash", lambda c: c.update(aux_hidden_state_layer_ids=[1, 3, 4, 5, 6]), "layer_ids"),
        ("dflash", lambda c: c.update(mask_token_id=5), "mask_token_id"),
        ("dflash", lambda c: layers(c).update(sliding_window=7), "sliding_window"),
        ("dflash", lambda c: layers(c).update(rms_norm_eps=0.5), "layer_overrides.rms_norm_eps"),
        ("dspark", lambda c: c.update(mask_token_id=5), "mask_token_id"),
        (
            "dspark",
            lambda c: layers(c)["rope_parameters"].update(factor=3.0),
            "layer_overrides.rope_parameters.factor",
        ),
    ],
)
def test_what_was_changed_since_the_export_is_found(
    algorithm, change, option, export_draft, tiny_verifier, tmp_path, registry
):
    """The changed draft fits its weights, and only what was noted at the export tells that it was not trained so."""
    options = {} if algorithm == "eagle3" else {"sliding_window": 9}
    made = export_draft(tmp_path / "draft", tiny_verifier, algorithm=algorithm, **options)
    assert lint_checkpoint(made.folder, registry) == []
    damage(made.folder, lambda config, _: change(config))
    (finding,) = lint_checkpoint(made.folder, registry)
    assert finding.severity == "error"
    assert finding.what.startswith(f"{option} is ")
    assert "draftsmith.trained_as" in finding.hint
    damage(made.folder, lambda config, _: config["draftsmith"].pop("trained_as"))
    assert lint_checkpoint(made.folder, registry) == []


@pytest.mark.parametrize(("algorithm", "noticed"), [("dspark", True), ("dflash", False)])
@pytest.mark.parametrize("name", ["lm_head.weight", "d2t"])
def test_it_says_whether_vllm_notices_what_is_missing(
    algorithm, noticed, name, export_draft, tiny_verifier, tmp_path, registry
):
    made = export_draft(tmp_path / "draft", tiny_verifier, algorithm=algorithm, draft_size=128, num_layers=1)
    damage(made.folder, lambda _, tensors: tensors.pop(name))
    (finding,) = (each for each in lint_checkpoint(made.folder, registry) if f"tensor {name}" in each.what)
    assert ("vLLM refuses" in finding.what) is noticed
    assert ("vLLM does not notice" in finding.what) is not noticed
    assert not (noticed and "does not miss" in finding.hint)


def test_a_draft_of_no_known_kind_comes_with_what_can_be_done(checkpoint_copy, registry):
    damage(checkpoint_copy, lambda config, _: config.pop("speculators_model_type"))
    (finding,) = (each for each in lint_checkpoint(checkpoint_copy, registry) if "speculators_model_type" in each.what)
    assert "`speculators convert`" in finding.hint
    assert "train.warm_start" in finding.hint


def test_target_ids_are_told_from_offsets_even_where_they_are_in_range(exported, checkpoint_copy, registry):
    def low_ids_without_t2d(_, tensors):
        tensors["d2t"] = torch.arange(128)  # as offsets: ids 0, 2, 4, … 254
        del tensors["t2d"]

    damage(checkpoint_copy, low_ids_without_t2d)
    assert any("d2t holds target ids" in finding.what for finding in lint_checkpoint(checkpoint_copy, registry))


def first_checkpoints_names(config, tensors):
    for name in [each for each in tensors if each.startswith("layers.0.")]:
        tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(16)


def fused_projections(config, tensors):
    for fused, parts in {
        "self_attn.qkv": ["self_attn.q", "self_attn.k", "self_attn.v"],
        "mlp.gate_up": ["mlp.gate", "mlp.up"],
    }.items():
        rows = [tensors.pop(f"layers.0.{part}_proj.weight") for part in parts]
        tensors[f"layers.0.{fused}_proj.weight"] = torch.cat(rows)


@pytest.mark.parametrize("rename", [first_checkpoints_names, fused_projections])
def test_other_names_that_the_loader_takes_are_no_findings(rename, exported, checkpoint_copy, registry):
    damage(checkpoint_copy, rename)
    assert lint_checkpoint(checkpoint_copy, registry) == []
    # And they are read as what they are.
    _, model, _ = load_draft(checkpoint_copy, registry)
    _, wanted, _ = load_draft(exported.folder, registry)
    theirs = wanted.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())
    # Under any name, what is missing is missing.
    damage(checkpoint_copy, lambda _, tensors: tensors.pop(next(each for each in tensors if "o_proj" in each)))
    (finding,) = lint_checkpoint(checkpoint_copy, registry)
    assert "layers.0.self_attn.o_proj.weight" in finding.what


def test_a_fused_projection_of_other_sizes_is_found(checkpoint_copy, registry):
    damage(checkpoint_copy, fused_projections)
    name = "layers.0.mlp.gate_up_proj.weight"
    damage(checkpoint_copy, lambda _, tensors: tensors.update({name: tensors[name][2:].clone()}))
    assert any("gate_proj.weight has shape" in each.what for each in lint_checkpoint(checkpoint_copy, registry))


def test_a_verifier_whose_layers_vllm_cannot_tap(exported, registry, monkeypatch):
    from draftsmith.checkpoint import lint

    asked = []
    monkeypatch.setattr(lint, "hands_out_hidden_states", asked.append)
    assert lint_checkpoint(exported.folder, registry) == []
    assert asked == [("LlamaForCausalLM",)]
    monkeypatch.setattr(lint, "hands_out_hidden_states", lambda names: False)
    (finding,) = lint_checkpoint(exported.folder, registry)
    assert finding.severity == "warning"
    assert "hidden states of LlamaForCausalLM" in finding.what


def test_an_unknown_kind_names_the_distribution(checkpoint_copy, registry):
    damage(checkpoint_copy, lambda config, _: config.update(speculators_model_type="my_idea"))
    (finding,) = [each for each in lint_checkpoint(checkpoint_copy, registry) if "my_idea" in each.what]
    assert finding.severity == "error"
    assert "pip install draftsmith-my-idea" in finding.hint


def test_files_that_cannot_be_read_are_findings(checkpoint_copy, registry):
    weights = checkpoint_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "cut or damaged" in lint_checkpoint(checkpoint_copy, registry)[0].what
    weights.unlink()
    assert "no model.safetensors" in lint_checkpoint(checkpoint_copy, registry)[0].what
    (checkpoint_copy / "config.json").write_text("{")
    assert "cannot be read" in lint_checkpoint(checkpoint_copy, registry)[0].what
    (checkpoint_copy / "config.json").unlink()
    assert "no config.json" in lint_checkpoint(checkpoint_copy, registry)[0].what
    assert "no such folder" in lint_checkpoint(checkpoint_copy / "nothing", registry)[0].hint


def test_full_vocabulary_needs_no_map(export_draft, tiny_verifier, tmp_path, registry):
    made = export_draft(tmp_path / "full", tiny_verifier)
    assert lint_checkpoint(made.folder, registry) == []
    assert not {"d2t", "t2d", "lm_head.weight"} & made.tensors.keys()
    damage(made.folder, lambda c, t: t.update({"d2t": torch.zeros(320, dtype=torch.int64)}))
    assert any("identity" in finding.what for finding in lint_checkpoint(made.folder, registry))


def test_the_command_exits_with_2_on_errors_and_needs_no_torch(exported, checkpoint_copy):
    def run(folder):
        script = (
            "import sys; from draftsmith.cli import main\n"
            "try: sys.exit(main())\n"
            "finally: assert 'torch' not in sys.modules, 'torch was imported'"
        )
        command = [sys.executable, "-c", script, "lint", str(folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    good = run(exported.folder)
    assert good.returncode == 0, good.stdout + good.stderr
    damage(checkpoint_copy, lambda _, tensors: tensors.pop("d2t"))
    bad = run(checkpoint_copy)
    assert bad.returncode == 2, bad.stdout + bad.stderr
    assert "d2t" in bad.stdout
    assert "Traceback" not in bad.stderr
