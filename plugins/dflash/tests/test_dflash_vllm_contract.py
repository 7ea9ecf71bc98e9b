"""The exported configuration through vLLM's own reader, and each layer's attention as vLLM resolves it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from draftsmith.interfaces import ExportContext
from draftsmith.testing.algorithm import Material, make_material, tiny_case
from draftsmith_dflash.options import layer_attention

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "qwen3_yarn")


@pytest.mark.parametrize("draft_size", [None, 64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 16},
        {"sliding_window": 16, "sliding_window_non_causal": False, "block_size": 4},
        {"sliding_window": 16, "full_attention_indices": (1, 4), "layer_ids": (0, 3, 7)},
        {"hidden_size": 32, "num_layers": 2},
    ],
)
def test_vllm_reads_what_was_trained(material: Material, options: dict[str, Any], draft_size: int | None) -> None:
    from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    case = tiny_case(material, "dflash", options=options, draft_size=draft_size)
    setup = case.algorithm.setup
    context = ExportContext(setup=setup, verifier_name="some/verifier", speculative_tokens=case.num_steps)
    config = case.format.config(context)
    speculative = SpeculatorsConfig.extract_vllm_speculative_config(copy.deepcopy(config))
    plan = case.format.serving(config)
    assert speculative["method"] == plan.method
    assert speculative["num_speculative_tokens"] == plan.num_speculative_tokens == setup.options.block_size - 1
    draft = SpeculatorsConfig(**SpeculatorsConfig.extract_transformers_pre_trained_config(copy.deepcopy(config)))
    assert draft.architectures == ["DFlashDraftModel"]
    assert tuple(draft.eagle_aux_hidden_state_layer_ids) == setup.capture.layer_ids
    assert [each + 1 for each in draft.dflash_config["target_layer_ids"]] == list(setup.capture.layer_ids)
    assert draft.dflash_config["mask_token_id"] == case.algorithm.mask_token_id  # type: ignore[attr-defined]
    assert draft.dflash_config["sample_from_anchor"] is False
    assert (draft.draft_vocab_size, draft.vocab_size) == (draft_size or 320, 320)
    assert (draft.hidden_size, draft.target_hidden_size) == (setup.options.hidden_size or 64, 64)
    assert (draft.head_dim, draft.num_hidden_layers) == (setup.verifier.head_dim, setup.options.num_layers)
    for index, layer in enumerate(layer_attention(setup.options)):
        slides = draft.layer_types[index] == "sliding_attention"
        assert (draft.sliding_window if slides else None) == layer.window
        assert _dflash_layer_causal(draft, index) is layer.causal


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 5, 64])
def test_windows_are_those_of_vllms_kernel(causal: bool, window: int | None) -> None:
    """vLLM's CPU kernel on a block of rows after a context, against the rule that the blocks are trained with."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    from draftsmith.attention import AnchoredBlocks
    from draftsmith.masks.rules import Anchored
    from draftsmith_dflash.mask import block_attention
    from draftsmith_dflash.options import LayerAttention

    if not current_platform.is_cpu():
        pytest.skip("vLLM's CPU kernels are in its CPU build only")
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    context, rows, heads, dim, page = 10, 6, 2, 32, 128
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(rows, heads, dim, generator=generator)
    key, value = (torch.randn(context + rows, 1, dim, generator=generator) for _ in range(2))
    blocks = AnchoredBlocks(anchors=(context,), document_lengths=(context + 1,), block_size=rows)
    padded = [torch.cat((each[:context], torch.zeros(1, 1, dim))) for each in (key, value)]
    ours = block_attention(Anchored(window), "auto")(
        query, *padded, key[context:], value[context:], blocks, LayerAttention(window, causal)
    )
    cache = torch.zeros(2, 1, 2 * page, dim)
    isa = _get_attn_isa(torch.float32, page)
    slots = page + torch.arange(context + rows)
    halves = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)
    lengths, starts = (torch.tensor(each, dtype=torch.int32) for each in ([context + rows], [0, rows]))
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=dim,
        seq_lens=lengths,
        dtype=torch.float32,
        query_start_loc=starts,
        causal=causal,
        sliding_window_size=window or -1,
        isa=isa,
        enable_kv_split=False,
    )
    theirs = torch.zeros_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=halves[0],
        value_cache=halves[1],
        output=theirs,
        query_start_loc=starts,
        seq_lens=lengths,
        scale=dim**-0.5,
        causal=causal,
        alibi_slopes=None,
        sliding_window=window or -1,
        block_table=torch.tensor([[1]], dtype=torch.int32),
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
