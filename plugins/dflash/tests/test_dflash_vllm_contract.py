"""The exported configuration through vLLM's own reader, and each layer's attention as vLLM resolves it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm_loader import Change, Loader, fused, midlayer, one, open_loader, prefixed, renamed

from draftsmith.interfaces import ExportContext
from draftsmith.testing.algorithm import Material, make_material, tiny_case
from draftsmith_dflash.checkpoint import READ_PLAINLY
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


def test_vllm_fails_without_what_the_linter_misses(material: Material) -> None:
    """Its class reads these keys as they are, and what is not written is not there."""
    import inspect

    from vllm.model_executor.models import qwen3_dflash
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    case = tiny_case(material, "dflash")
    setup = case.algorithm.setup
    context = ExportContext(setup=setup, verifier_name="some/verifier", speculative_tokens=case.num_steps)
    config = case.format.config(context)
    source = inspect.getsource(qwen3_dflash)
    for key in READ_PLAINLY:
        broken = copy.deepcopy(config)
        del broken["transformer_layer_config"][key]
        with pytest.raises(AttributeError, match=key):
            getattr(SpeculatorsConfig(**SpeculatorsConfig.extract_transformers_pre_trained_config(broken)), key)
        assert f"config.{key}," in source
        findings = case.format.lint({**config, **broken}, {}, None)
        assert any(each.severity == "error" and key in each.what for each in findings)


def test_a_mask_row_of_its_own_is_read_from_the_file_that_is_looked_for(material: Material) -> None:
    import inspect

    from vllm.model_executor.models import qwen3_dflash, qwen3_dspark

    form, read = tiny_case(material, "dflash").format, "self._read_mask_embedding()"
    (name,) = form.unread_files({}, ["config.json", "mask_embedding.pt", "model.safetensors"])
    assert f'"{name}"' in inspect.getsource(qwen3_dflash.DFlashQwen3ForCausalLM._read_mask_embedding)
    assert read in inspect.getsource(qwen3_dflash.DFlashQwen3ForCausalLM.load_weights)
    assert read not in inspect.getsource(qwen3_dspark.Qwen3DSparkForCausalLM.load_weights)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 5, 64])
def test_windows_are_those_of_vllms_kernel(causal: bool, window: int | None) -> None:
    """vLLM's CPU kernel on a block of rows after a context, against the rule that the blocks are trained with."""
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


# --- names of tensors ------------------------------------------------------------------------------------------------

CHANGES: dict[str, Change] = {
    "as written": lambda tensors: tensors,
    "midlayer, fused": lambda tensors: midlayer(fused(tensors)),
    "model.": prefixed("model."),
    "one of them model.": renamed("fc.weight", "model.fc.weight"),
    "model.d2t": renamed("d2t", "model.d2t"),
    "model.lm_head": renamed("lm_head.weight", "model.lm_head.weight"),
    "another layer": one("layers.2.mlp.down_proj.weight", 64, 96),
    "a bias of another layer": one("layers.2.mlp.down_proj.bias", 64),
    "a bias": one("fc.bias", 64),
    "a bias in a layer": one("layers.0.mlp.down_proj.bias", 64),
    "bias of a norm": one("norm.bias", 64),
    "bias of the head": one("lm_head.bias", 64),
    "rotary table": one("midlayer.self_attn.rotary_emb.inv_freq", 8),
    "mask_hidden": one("mask_hidden", 1, 1, 64),
    "mask_embedding": one("mask_embedding", 64),
    "another t2d": one("verifier.t2d", 320),
    "other names of fc and its norm": lambda tensors: renamed("fc.weight", "encoder.fc.weight")(
        renamed("hidden_norm.weight", "encoder.output_norm_enc.weight")(tensors)
    ),
    "map under both names": one("draft_id_to_target_id", 64),
    "something else": one("projector.weight", 3),
}
ATTENTION = {
    **{f"layers.{layer}.self_attn.{name}_proj.bias": 32 for layer in (0, 1) for name in ("k", "v")},
    **{f"layers.{layer}.self_attn.{name}_proj.bias": 64 for layer in (0, 1) for name in ("q", "o")},
}


def with_attention_biases(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, **{name: torch.ones(size) for name, size in ATTENTION.items()}}


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    with open_loader(tmp_path_factory.mktemp("loader"), "dflash", {"num_layers": 2}) as found:
        yield found


@pytest.mark.parametrize("change", [*CHANGES, "biases of attention"])
def test_lint_loading_and_vllm_agree_on_every_name(loader: Loader, change: str) -> None:
    """DSpark's class in vLLM derives from this one."""
    tensors = {**CHANGES, "biases of attention": with_attention_biases}[change](dict(loader.tensors))
    theirs, ours = loader.load_theirs(tensors), loader.load_ours(tensors)
    assert (theirs is None) == bool(loader.unknown(tensors)), "lint and vLLM"
    assert (theirs is None) == (ours is None), "loading and vLLM"
    if theirs is None or ours is None:
        return
    expected = loader.load_theirs(dict(loader.tensors))
    assert expected is not None
    assert all(torch.equal(each, expected[name]) for name, each in theirs.items())
    assert all(torch.equal(ours[name], each) for name, each in (loader.load_ours(loader.tensors) or {}).items())


def test_attention_biases_are_loaded_where_the_config_has_them(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    options, layers = {"num_layers": 2}, {"attention_bias": True}
    with open_loader(tmp_path_factory.mktemp("biases"), "dflash", options, layers) as loader:
        theirs = loader.load_theirs(with_attention_biases(loader.tensors))
        without = loader.load_theirs(loader.tensors)
        expected = loader.case.format.expected_tensors(loader.config)
    assert theirs is not None
    assert without is not None
    biases = [name for name in theirs if name.endswith("_proj.bias")]
    assert len(biases) == 4  # queries, keys and values in one
    assert all((theirs[name] == 1).all() for name in biases)
    assert all((without[name] == -1).all() for name in biases)  # vLLM does not miss them
    assert {name for name, spec in expected.items() if spec.required and name.endswith("bias")} == ATTENTION.keys()
    assert all(expected[name].shape == (size,) for name, size in ATTENTION.items())


@pytest.mark.xfail(
    not torch.cuda.is_available(),
    strict=True,
    reason="vLLM 0.32's CPU kernel takes the first layer's weight for every layer",
)
def test_context_keys_are_normalised_with_their_own_layers_weight() -> None:
    """When this passes on a CPU, ``CPU_NOTE`` of :mod:`draftsmith_dflash.checkpoint` can go."""
    import vllm.platforms
    from vllm import _custom_ops

    vllm.platforms.current_platform.import_kernels()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    keys = torch.randn(2, 5, 3, 64, generator=torch.Generator().manual_seed(0)).to(device)  # layer, token, head, dim
    weights, normed = torch.tensor([[1.0], [2.0]], device=device).repeat(1, 64), torch.empty_like(keys)
    _custom_ops.rms_norm(normed, keys, weights, 1e-6)
    expected = torch.nn.functional.rms_norm(keys, (64,), eps=1e-6) * weights[:, None, None]
    torch.testing.assert_close(normed[0], expected[0])
    torch.testing.assert_close(normed[1], expected[1])
