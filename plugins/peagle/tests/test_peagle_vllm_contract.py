"""The exported configuration through vLLM's own reader, tensors through its own loader, and what it makes of masks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm_loader import Change, Loader, fused, midlayer, one, open_loader, prefixed, renamed

from draftsmith.checkpoint.card import speculative_config
from draftsmith.interfaces import ExportContext
from draftsmith.testing.algorithm import Material, make_material, tiny_case

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SMALL: dict[str, Any] = {"num_depths": 4, "num_layers": 2}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "qwen3")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": False, "train_mask_embedding": False},
        {"layer_type": "qwen3", "sliding_window": 16, "layer_ids": (1, 2, 4, 6, 7), "mask_token_id": 9},
    ],
)
def test_vllm_reads_what_was_trained(material: Material, options: dict[str, Any]) -> None:
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    case = tiny_case(material, "peagle", options={**SMALL, **options}, draft_size=64)
    setup = case.algorithm.setup
    config = case.format.config(ExportContext(setup=setup, verifier_name="some/verifier", speculative_tokens=4))
    speculative = SpeculatorsConfig.extract_vllm_speculative_config(copy.deepcopy(config))
    plan = case.format.serving(config)
    # As the model vLLM tells itself what has to be said of a draft beside its verifier.
    beside = speculative_config(plan, "some/folder")
    assert {**speculative, "model": "some/folder"} == beside
    assert speculative == {"method": "eagle3", "num_speculative_tokens": 4, "parallel_drafting": True}
    draft = SpeculatorsConfig(**SpeculatorsConfig.extract_transformers_pre_trained_config(copy.deepcopy(config)))
    assert draft.norm_before_residual is setup.options.norm_before_residual
    assert draft.norm_before_fc is setup.options.norm_before_fc
    assert not hasattr(draft, "fc_norm"), "it is forwarded now: options.py need not refuse it any more"
    assert not hasattr(draft, "norm_output")
    assert draft.pard_token == config["mask_token_id"] == (setup.options.mask_token_id or 312)
    kind = {"llama": "PeagleLlamaForCausalLM", "qwen3": "PeagleQwen3ForCausalLM"}[setup.options.layer_type]
    assert draft.architectures == [kind]
    assert tuple(draft.eagle_aux_hidden_state_layer_ids) == setup.capture.layer_ids
    assert draft.num_aux_hidden_states == len(setup.capture.layer_ids)
    assert (draft.draft_vocab_size, draft.vocab_size) == (64, setup.verifier.vocab_size)
    assert (draft.head_dim, draft.num_hidden_layers) == (setup.verifier.head_dim, 2)
    if setup.options.sliding_window is not None:
        assert draft.layer_types == ["sliding_attention"] * 2
        assert draft.sliding_window == setup.options.sliding_window


# --- tensors ----------------------------------------------------------------------------------------------------

FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no norm": {"norm_before_fc": False},
    "qwen3": {"layer_type": "qwen3"},
}


@pytest.fixture(scope="module", params=FLAGS)
def loader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    with open_loader(tmp_path_factory.mktemp("loader"), "peagle", {**SMALL, **FLAGS[request.param]}) as opened:
        yield opened


def without(dropped: str) -> Change:
    return lambda tensors: {name: each for name, each in tensors.items() if name != dropped}


#: Change → whether vLLM takes the result.
CHANGES: dict[str, tuple[Change, bool]] = {
    "as written": (lambda tensors: tensors, True),
    "midlayer": (midlayer, True),
    "fused": (fused, True),
    "no mask_hidden": (without("mask_hidden"), False),
    "mask_hidden with a prefix": (renamed("mask_hidden", "model.mask_hidden"), True),
    "all with a prefix": (prefixed("model."), False),
    "norm of a tap": (one("fc_norm.0.weight", 64), False),
    "something else": (one("projector.weight", 3), False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_lint_loading_and_vllm_agree_on_every_name(loader: Loader, change: str) -> None:
    alter, taken = CHANGES[change]
    tensors = alter(dict(loader.tensors))
    assert (loader.load_theirs(tensors) is not None) is taken
    assert (loader.load_ours(tensors) is not None) is taken, "loading and vLLM"
    missing = change == "no mask_hidden"  # lint asks for what is required as well
    assert loader.case.format.expected_tensors(loader.config)["mask_hidden"].required
    assert (not loader.unknown(tensors) and not missing) is taken, "lint and vLLM"


class _PlainLinear:
    """In place of vLLM's kernel for a linear layer, which weights are prepared for once all are loaded."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.get_parameter("weight"), bias)


def test_a_mask_row_reads_in_vllm_what_it_was_trained_to_read(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding that vLLM looks up for the mask token, and the hidden state that it puts beside it."""
    assert loader.load_theirs(dict(loader.tensors)) is not None
    ours = loader.case.algorithm.build_model()
    loader.case.format.load(ours, loader.tensors, loader.config)
    theirs, token = loader.theirs, loader.config["mask_token_id"]
    monkeypatch.setattr(theirs.model.fc, "quant_method", _PlainLinear())
    with torch.no_grad():
        torch.testing.assert_close(theirs.embed_input_ids(torch.tensor([token])), ours.mask_row())  # type: ignore[operator]
        hidden = theirs.combine_hidden_states(theirs.mask_hidden.view(-1))
        fused_by_us = ours.fuse(ours.get_parameter("mask_hidden")[0])  # type: ignore[operator]
        torch.testing.assert_close(hidden[None], fused_by_us, rtol=1e-4, atol=1e-5)
