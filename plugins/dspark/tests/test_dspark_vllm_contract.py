"""The exported configuration through vLLM's own reader, and the heads against vLLM's own arithmetic."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.interfaces import ExportContext
from draftsmith.testing.algorithm import AlgorithmCase, Material, make_material, tiny_case

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SMALL = {"num_layers": 2, "markov_rank": 6}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "qwen3")


def read_by_vllm(case: AlgorithmCase) -> tuple[dict[str, Any], Any]:
    """What vLLM makes of the exported configuration: its speculative config, and the draft's own."""
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    context = ExportContext(
        setup=case.algorithm.setup, verifier_name="some/verifier", speculative_tokens=case.num_steps
    )
    config = case.format.config(context)
    speculative = SpeculatorsConfig.extract_vllm_speculative_config(copy.deepcopy(config))
    draft = SpeculatorsConfig(**SpeculatorsConfig.extract_transformers_pre_trained_config(copy.deepcopy(config)))
    return speculative, draft


@pytest.mark.parametrize("layout", ["anchor_first", "bonus_anchor"])
@pytest.mark.parametrize("confidence", [True, False])
def test_vllm_reads_what_was_trained(material: Material, layout: str, confidence: bool) -> None:
    options = {**SMALL, "layout": layout, "confidence": confidence, "confidence_with_markov": not confidence}
    case = tiny_case(material, "dspark", options=options, draft_size=64)
    setup = case.algorithm.setup
    speculative, draft = read_by_vllm(case)
    assert speculative["method"] == "dspark"
    assert speculative["num_speculative_tokens"] == case.num_steps == 8 - (layout == "bonus_anchor")
    assert draft.architectures == ["Qwen3DSparkModel"]
    assert draft.sample_from_anchor is (layout == "anchor_first")
    assert draft.mask_token_id == case.algorithm.mask_token_id  # type: ignore[attr-defined]
    assert tuple(draft.eagle_aux_hidden_state_layer_ids) == setup.capture.layer_ids
    assert [each + 1 for each in draft.target_layer_ids] == list(setup.capture.layer_ids)
    assert (draft.markov_rank, draft.markov_head_type, draft.block_size) == (6, "vanilla", 8)
    assert draft.enable_confidence_head is confidence
    assert draft.confidence_head_with_markov is not confidence
    assert (draft.draft_vocab_size, draft.vocab_size) == (64, setup.verifier.vocab_size)
    assert draft.head_dim == setup.verifier.head_dim


@pytest.mark.parametrize("name", ["lm_head.weight", "d2t"])
def test_vllm_refuses_what_the_linter_says_it_refuses(material: Material, name: str) -> None:
    from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

    case = tiny_case(material, "dspark", options=SMALL, draft_size=64)
    context = ExportContext(setup=case.algorithm.setup, verifier_name="x", speculative_tokens=case.num_steps)
    refused = {
        each for each, spec in case.format.expected_tensors(case.format.config(context)).items() if spec.refused
    }
    assert refused == {"lm_head.weight", "d2t"}
    tensors = case.format.tensors(case.algorithm.build_model(), context)
    del tensors[name]
    size = material.facts.vocab_size
    bare = SimpleNamespace(config=SimpleNamespace(vocab_size=size, draft_vocab_size=64), target_vocab_size=size)
    with pytest.raises(ValueError, match=f"must include.*{name.removesuffix('.weight')}"):
        Qwen3DSparkForCausalLM.load_weights(bare, tensors.items())


@pytest.mark.parametrize(
    "attention",
    [
        {},
        {"sliding_window": 9},
        {"sliding_window": 9, "sliding_window_non_causal": False},
        {"sliding_window": 9, "full_attention_indices": (0,)},
        {"sliding_window": 9, "full_attention_indices": (1,), "sliding_window_non_causal": False},
    ],
)
def test_every_layer_is_served_as_it_was_trained(material: Material, attention: dict[str, Any]) -> None:
    """Window and causality, by vLLM's own functions."""
    from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal, _resolve_layer_attention

    case = tiny_case(material, "dspark", options={**SMALL, **attention})
    _, draft = read_by_vllm(case)
    trained = case.algorithm.layer_attention()  # type: ignore[attr-defined]
    for index, layer in enumerate(trained):
        assert _dflash_layer_causal(draft, index) is layer.causal
    if "full_attention_indices" not in attention:  # else vLLM asks its engine's configuration for the runner
        assert [_resolve_layer_attention(draft, index) for index in range(len(trained))] == [tuple(x) for x in trained]


def test_the_confidence_is_what_vllm_computes(material: Material) -> None:
    """Its head is one linear map in float32, and a sigmoid; so the folded temperature is applied there too."""
    import inspect

    from vllm.model_executor.models.qwen3_dspark import DSparkConfidenceHead, Qwen3DSparkForCausalLM

    case = tiny_case(material, "dspark", options=SMALL)
    model = case.algorithm.build_model()
    head = model.confidence_head
    torch.nn.init.normal_(head.proj.weight)
    torch.nn.init.normal_(head.proj.bias)
    hidden, embedded = torch.randn(5, 64), torch.randn(5, 6)
    theirs = object.__new__(DSparkConfidenceHead)
    torch.nn.Module.__init__(theirs)
    theirs.with_markov, theirs.proj = True, head.proj
    torch.testing.assert_close(DSparkConfidenceHead.forward(theirs, hidden, embedded), head(hidden, embedded))
    assert "torch.sigmoid(self.model.confidence_head(" in inspect.getsource(Qwen3DSparkForCausalLM.compute_confidence)
