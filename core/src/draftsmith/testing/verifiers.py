"""Tiny random verifiers with a tokenizer and a chat template: real models that build in a second.

Each family exercises something that breaks drafts silently: a head dimension that is not hidden/heads, norms that
scale by 1 + w, soft-capped or scaled logits, tied heads, scaled rope, experts, a text model nested in a larger one.
They are written by transformers' own classes, so that every loader under test meets genuine files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

__all__ = ["CHAT_TEMPLATE", "CHAT_TEMPLATE_WITH_GENERATION", "FAMILIES", "make_tiny_tokenizer", "make_tiny_verifier"]

#: ChatML, with an argument (`enable_thinking`) and tools, so that template arguments change what is rendered.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
    "{% endif %}"
)
#: The same text with the answers marked as transformers' ``return_assistant_tokens_mask`` expects.
CHAT_TEMPLATE_WITH_GENERATION = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is the capital of France? The capital of France is Paris.",
    "Write a function that adds two numbers: def add(a, b): return a + b. Explain why the sky is blue, please.",
    "Once upon a time there was a little engine that could. How many legs does a spider have? It has eight of them.",
    "user assistant system Hello! How can I help you today? Thank you, that is all that I wanted to know.",
)


def _common(vocab_size: int, num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "tie_word_embeddings": False,
    }


def _llama(common: dict[str, Any], **changes: Any) -> PretrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(**{**common, "head_dim": 32, "rope_parameters": _rope("default"), **changes})


def _qwen3(common: dict[str, Any], **changes: Any) -> PretrainedConfig:
    from transformers import Qwen3Config

    # 4 heads of 32 on a width of 64: the attention's width differs from the hidden size.
    wide = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return Qwen3Config(**{**common, **wide, "rope_parameters": _rope("default"), **changes})


def _qwen3_moe(common: dict[str, Any], **changes: Any) -> PretrainedConfig:
    from transformers import Qwen3MoeConfig

    wide = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    return Qwen3MoeConfig(**{**common, **wide, **experts, "rope_parameters": _rope("default"), **changes})


def _gemma3(common: dict[str, Any], **changes: Any) -> PretrainedConfig:
    from transformers import Gemma3TextConfig

    n = common["num_hidden_layers"]
    return Gemma3TextConfig(
        **{
            **common,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "layer_types": ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(n)],
            "tie_word_embeddings": True,
            **changes,
        }
    )


def _granite(common: dict[str, Any], **changes: Any) -> PretrainedConfig:
    from transformers import GraniteConfig

    scales = {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
    return GraniteConfig(
        **{**common, **scales, "attention_multiplier": 32**-0.5, "rope_parameters": _rope("default"), **changes}
    )


def _nested(common: dict[str, Any], **changes: Any) -> PretrainedConfig:
    from transformers import Gemma3Config

    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    text = _gemma3(common, **changes).to_dict()
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=common["vocab_size"] - 1,
        boi_token_index=common["vocab_size"] - 2,
        eoi_token_index=common["vocab_size"] - 3,
        tie_word_embeddings=text["tie_word_embeddings"],
    )


def _rope(kind: str) -> dict[str, Any]:
    if kind == "llama3":
        return {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    if kind == "yarn":
        return {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    return {"rope_type": "default", "rope_theta": 10000.0}


#: name → (config builder, changes to the family's configuration)
FAMILIES: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {
    "llama": (_llama, {}),
    "llama_tied": (_llama, {"tie_word_embeddings": True}),
    "llama3_rope": (_llama, {"rope_parameters": _rope("llama3")}),
    "qwen3": (_qwen3, {}),
    "qwen3_yarn": (_qwen3, {"rope_parameters": _rope("yarn"), "tie_word_embeddings": True}),
    "qwen3_moe": (_qwen3_moe, {}),
    "gemma3": (_gemma3, {}),
    "gemma3_softcap": (_gemma3, {"final_logit_softcapping": 3.0}),
    "granite": (_granite, {}),
    "nested": (_nested, {}),
}


def make_tiny_verifier(
    folder: str | Path,
    family: str | Callable[..., PretrainedConfig] = "llama",
    *,
    seed: int = 0,
    vocab_size: int = 320,
    num_layers: int = 8,
    tied: bool | None = None,
    dtype: str = "float32",
    max_shard_size: str | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    **config_changes: Any,
) -> Path:
    """Write a random model of one of :data:`FAMILIES`, a tokenizer and a chat template into *folder*.

    Weights depend on *family*, *seed* and the sizes alone; torch's global random state is left as it was. Norm
    weights are random too, so that a norm applied twice, or of the wrong kind, is visible.

    Args:
        folder: created where missing.
        family: a key of :data:`FAMILIES`, or a function like those there: of the sizes that all share, and of changes
            by keyword, to a configuration.
        seed: of the weights.
        vocab_size: rows of the embedding, at least 300: 4 special tokens, 256 bytes, then merges; the last 8 rows
            are not used by the tokenizer, as in many published models.
        num_layers: decoder layers.
        tied: tie head and embedding; None keeps the family's choice.
        dtype: stored dtype, by torch's name.
        max_shard_size: as of ``save_pretrained``, such as ``"50KB"`` for several files.
        chat_template: None writes a tokenizer without one.
        **config_changes: further changes to the (text) configuration.

    Returns:
        The folder.

    Raises:
        KeyError: *family* is not known.
    """
    import torch
    from transformers import AutoModelForCausalLM

    build, family_changes = FAMILIES[family] if isinstance(family, str) else (family, {})
    changes = {**family_changes, **config_changes}
    if tied is not None:
        changes["tie_word_embeddings"] = tied
    config = build(_common(vocab_size, num_layers), **changes)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, seed)
    model.to(getattr(torch, dtype))
    # transformers refuses to save a pad id outside generation's rules; a tiny model needs no generation defaults.
    model.generation_config.pad_token_id = 3
    model.generation_config.eos_token_id = 2
    extra = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(folder, **extra)
    make_tiny_tokenizer(vocab_size - 8, chat_template=chat_template).save_pretrained(folder)
    return folder


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights by name and seed, not by the order in which a transformers version happens to initialise."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                # A norm's weight starts at 1, or at 0 in the families that scale by 1 + w; a bias at 0.
                parameter.add_(0.1 * noise)
            elif "embed" in name:
                parameter.copy_(0.4 * noise)
            elif "lm_head" in name:
                parameter.copy_(2.0 * parameter.shape[-1] ** -0.5 * noise)
            else:
                parameter.copy_(parameter.shape[-1] ** -0.5 * noise)


def make_tiny_tokenizer(
    vocab_size: int = 312, *, chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most *vocab_size* tokens; any text decodes to itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    if chat_template is not None:
        fast.chat_template = chat_template
    return fast
