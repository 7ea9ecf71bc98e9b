"""What is exported is what was built: read back it gives the same logits; what vLLM shares is left out."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.checkpoint import export
from draftsmith.checkpoint.card import add_measurement
from draftsmith.checkpoint.export import run_export, write_export
from draftsmith.checkpoint.exported import load_draft, open_format, read_config, read_header, read_tensor
from draftsmith.checkpoint.lint import lint_checkpoint
from draftsmith.config.load import load_recipe
from draftsmith.config.resolve import resolve
from draftsmith.errors import CheckpointError, NumericsError, UnknownNameError
from draftsmith.interfaces import ExportContext, Finding
from draftsmith.pipeline import run_all
from draftsmith.plugins import load_reference
from draftsmith.stages import Stage
from draftsmith.testing.verifiers import make_tiny_verifier

VARIANTS = {
    "default": {},
    "full vocabulary": {"draft_size": None},
    "qwen3 layers": {"layer_type": "qwen3"},
    "two layers, plain norms": {"num_layers": 2, "norm_before_fc": False, "norm_output": False},
    "a norm for each tap": {"norm_before_fc": False, "fc_norm": True, "norm_before_residual": False},
    "two taps": {"layer_ids": (1, 4)},
    "a window": {"sliding_window": 4, "ttt_steps": 2},
}


def draft_logits(algorithm, model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    setup = algorithm.setup
    tokens = torch.randint(setup.verifier.vocab_size, (12,), generator=generator)
    taps = torch.randn(11, len(setup.capture.layer_ids) * setup.verifier.hidden_size, generator=generator)
    drafter = algorithm.drafter(model.eval())
    drafter.reset()
    return drafter.propose(tokens, taps, 3, forced=tokens[:3])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_draft_read_back_gives_the_same_logits(name, export_draft, tiny_verifier, tmp_path, registry):
    made = export_draft(tmp_path / "out", tiny_verifier, **{"draft_size": 128, **VARIANTS[name]})
    assert lint_checkpoint(made.folder, registry) == []
    algorithm, model, config = load_draft(made.folder, registry)
    assert config == read_config(made.folder)
    assert model.config == made.model.config
    assert algorithm.setup.capture == made.algorithm.setup.capture
    with torch.no_grad():  # the export rounds to bf16; what is compared is the same draft, so rounded
        shared = made.model.shared_tensors()
        for key, tensor in made.model.state_dict().items():
            if tensor.is_floating_point() and key not in shared:
                tensor.copy_(tensor.bfloat16())
        for key, tensor in model.shared_tensors().items():  # stored where vLLM needs them, and then rounded as well
            shared[key].copy_(tensor)
    torch.testing.assert_close(
        draft_logits(algorithm, model), draft_logits(made.algorithm, made.model), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_drafts_for_other_families_lint_clean(family, export_draft, tmp_path, registry):
    verifier = make_tiny_verifier(tmp_path / family, family)
    made = export_draft(tmp_path / "out", verifier, draft_size=100)
    # An installed vLLM may not know how to tap a verifier's layers; the checkpoint is no worse for that.
    findings = [each for each in lint_checkpoint(made.folder, registry) if "installed vLLM" not in each.what]
    assert findings == []
    load_draft(made.folder, registry)


def test_the_files_hold_what_the_config_says(exported):
    tensors = load_file(exported.folder / "model.safetensors")
    assert tensors.keys() == exported.tensors.keys()
    assert "embed_tokens.weight" not in tensors  # vLLM shares the verifier's
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    setup = exported.algorithm.setup
    assert torch.equal(tensors["d2t"], setup.vocabulary.d2t)
    assert torch.equal(tensors["lm_head.weight"], setup.weights.lm_head[setup.vocabulary.t2d].bfloat16())
    header = read_header(exported.folder)
    assert {name: each.spec.shape for name, each in header.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert read_tensor(header["d2t"]) == setup.vocabulary.d2t.tolist()
    config = json.loads((exported.folder / "config.json").read_text())
    assert "model_type" not in config
    assert config["dtype"] == "bfloat16"
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(exported.verifier)
    assert not [path.name for path in exported.folder.iterdir() if path.name.startswith(".")]


def context_of(exported):
    return ExportContext(setup=exported.algorithm.setup, verifier_name="v", speculative_tokens=3)


def test_values_that_are_not_finite_are_not_exported(export_draft, tiny_verifier, tmp_path, registry):
    made = export_draft(tmp_path / "good", tiny_verifier, draft_size=64)
    with torch.no_grad():
        next(each for each in made.model.parameters() if each.requires_grad).view(-1)[0] = float("nan")
    with pytest.raises(NumericsError, match="not finite"):
        write_export(tmp_path / "bad", open_format(registry.schemas.get("eagle3")), made.model, context_of(made), {})
    assert not (tmp_path / "bad").exists()


def test_a_format_that_forgets_a_tensor_is_refused(exported, tmp_path, registry):
    class Forgetful(load_reference(registry.schemas.get("eagle3").implementation)):
        def tensors(self, model, context):
            tensors = super().tensors(model, context)
            del tensors["fc.weight"]
            return tensors

    with pytest.raises(CheckpointError, match=r"missing \['fc.weight'\]"):
        write_export(tmp_path / "bad", Forgetful(), exported.model, context_of(exported), {})
    assert not (tmp_path / "bad").exists()


@pytest.fixture(scope="module")
def trained(tiny_verifier, tmp_path_factory, registry):
    """A run of a tiny verifier that is trained, and not exported."""
    folder = tmp_path_factory.mktemp("run")
    turns = [("user", "Why is grass green?"), ("assistant", "It holds a dye that eats red and blue light.")]
    lines = [
        json.dumps({"messages": [{"role": role, "content": f"{text} {number}"} for role, text in turns]})
        for number in range(12)
    ]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    recipe = {
        "verifier": str(tiny_verifier),
        "output": str(folder / "out"),
        "algorithm": "eagle3",
        "transport": "hs_file",
        "data": {"sources": ["chats.jsonl"], "max_length": 64},
        "vocabulary": {"draft_size": 64},
        "capture": {"engine": "transformers"},
        "train": {"epochs": 1, "tokens_per_row": 256},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    run = resolve(load_recipe(folder / "recipe.yaml"), registry)
    run_all(run, None, stages=["prepare", "capture", "train"])
    return run


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_lint_refuses_is_not_left_in_the_checkpoint(trained, monkeypatch):
    folder = trained.folders.checkpoint
    seen = []

    def refuse(linted, registry, *, verifier):
        assert names(folder) == ["stage.json"]
        seen.extend(names(linted))
        return [Finding(severity="error", what="it drafts nonsense", where="config.json", hint="think again")]

    monkeypatch.setattr(export, "lint_checkpoint", refuse)
    with pytest.raises(CheckpointError, match="drafts nonsense") as caught:
        run_export(trained)
    assert str(folder) in str(caught.value)
    assert seen == ["README.md", "config.json", "model.safetensors"]
    assert names(folder) == ["stage.json"]
    assert not [name for name in names(folder.parent) if "checkpoint." in name]
    # What a kill has left beside it is in nobody's way.
    aside = folder.with_name(".checkpoint.new")
    aside.mkdir()
    (aside / "left.bin").write_text("half")
    monkeypatch.undo()
    assert run_export(trained).complete
    assert names(folder) == ["README.md", "config.json", "model.safetensors", "stage.json"]
    assert not aside.exists()
    assert lint_checkpoint(folder, trained.registry) == []


def test_the_card_says_what_was_trained_where_the_recipe_says_null(trained):
    assert trained.resolved_recipe()["algorithm"]["options"]["layer_ids"] is None
    run_export(trained)
    card = (trained.folders.checkpoint / "README.md").read_text()
    config = json.loads((trained.folders.checkpoint / "config.json").read_text())
    assert "What is served is measured on other prompts" in card
    assert f"* layer_ids: {config['eagle_aux_hidden_state_layer_ids']}\n" in card
    assert f"* intermediate_size: {config['transformer_layer_config']['intermediate_size']}\n" in card


def test_an_export_that_lost_its_weights_is_made_again_or_stays_incomplete(trained, monkeypatch):
    folder = trained.folders.checkpoint
    run_export(trained)
    (folder / "model.safetensors").unlink()

    def gone(*_):
        raise CheckpointError("gone")

    monkeypatch.setattr(export, "load_final_weights", gone)
    with pytest.raises(CheckpointError, match="gone"):
        run_export(trained)
    assert not Stage("export", folder).record().complete
    monkeypatch.undo()
    assert run_export(trained).complete
    assert "model.safetensors" in names(folder)


def test_loading_says_what_is_wrong(checkpoint_copy, tmp_path, registry):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_draft(tmp_path / "nothing", registry)
    weights = checkpoint_copy / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="cut or damaged"):
        load_draft(checkpoint_copy, registry)
    weights.write_bytes(data)
    config = json.loads((checkpoint_copy / "config.json").read_text())
    config["speculators_model_type"] = "eagle"
    (checkpoint_copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownNameError, match="eagle3"):
        load_draft(checkpoint_copy, registry)


def test_measured_figures_replace_earlier_ones(tmp_path):
    card = tmp_path / "README.md"
    card.write_text("before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nafter\n")
    add_measurement(tmp_path, "## new\n")
    add_measurement(tmp_path, "## newer\n")
    text = card.read_text()
    assert "newer" in text
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    card.write_text("somebody's own")
    add_measurement(tmp_path, "x")
    assert card.read_text() == "somebody's own"
