"""Options of DFlash, what they ask of the capture, and what is wrong with them. Torch-free.

:class:`BlockOptions` and the functions on it are written for every algorithm that drafts anchored blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from attrs import field, frozen
from attrs.validators import and_, ge, gt, in_, le, optional

from draftsmith.api import CaptureRequirements, Problem, VerifierFacts
from draftsmith.layer_config import LayerConfig

__all__ = [
    "BlockOptions",
    "DFlashOptions",
    "LayerAttention",
    "Layout",
    "check",
    "check_blocks",
    "default_layer_ids",
    "layer_attention",
    "layer_config",
    "max_speculative_tokens",
    "requirements",
]

#: ``bonus_anchor``: the anchor's own row predicts nothing, rows 1 … B-1 predict the tokens at their own positions.
#: ``anchor_first``: every row predicts the token after its own position.
Layout = Literal["bonus_anchor", "anchor_first"]


def _help(text: str) -> dict[str, str]:
    return {"help": text}


class LayerAttention(NamedTuple):
    """Who sees whom in one layer.

    Attributes:
        window: W: a query at position q sees positions > q - W (and < q + W, where it is not causal); None: all.
        causal: rows of a block see earlier rows of their block only.
    """

    window: int | None
    causal: bool


@frozen(kw_only=True)
class BlockOptions:
    """What all algorithms with anchored blocks can be told."""

    block_size: int = field(default=8, validator=ge(2), metadata=_help("rows of a block, the anchor's own included"))
    max_anchors: int = field(
        default=512, validator=ge(1), metadata=_help("at most so many blocks a document, drawn anew every step")
    )
    num_layers: int = field(default=5, validator=ge(1), metadata=_help("decoder layers of the draft"))
    hidden_size: int | None = field(
        default=None,
        validator=optional(ge(1)),
        metadata=_help("width of the draft; null: the verifier's, whose embedding and head it then shares, frozen"),
    )
    intermediate_size: int | None = field(
        default=None,
        validator=optional(ge(1)),
        metadata=_help("width of the feed-forward; null: the verifier's (3 × hidden for mixtures of experts)"),
    )
    layer_ids: tuple[int, ...] | None = field(
        default=None, metadata=_help("tapped layers (vLLM's ids, ascending); null: five, evenly from 2 to n-2")
    )
    mask_token_id: int | None = field(
        default=None,
        validator=optional(ge(0)),
        metadata=_help("token that stands for what is to be drafted; null: one that the tokenizer never produces"),
    )
    sliding_window: int | None = field(
        default=None,
        validator=optional(ge(1)),
        metadata=_help("positions that sliding layers see, the query's own included; null: no layer slides"),
    )
    full_attention_indices: tuple[int, ...] = field(
        default=(), metadata=_help("layers (from 0) that see everything although sliding_window is set")
    )
    position_weights: Literal["d_pace", "exponential", "uniform"] = field(
        default="exponential",
        validator=in_(("d_pace", "exponential", "uniform")),
        metadata=_help("weight of a slot in the loss: exp(-k/gamma), by what the draft gets right, or 1"),
    )
    gamma: float | None = field(
        default=None,
        validator=optional(gt(0)),
        metadata=_help("decay of exponential weights; null: by block size, 4 up to 8, 5 up to 10, else 7"),
    )
    pace_smoothing: float = field(
        default=0.5,
        validator=and_(gt(0), le(1)),
        metadata=_help("d_pace: the smallest factor by which a slot's confidence lowers the weight of later ones"),
    )
    initializer_range: float = field(
        default=0.02, validator=gt(0), metadata=_help("standard deviation of the initial weights")
    )
    layer_overrides: dict[str, Any] | None = field(
        default=None,
        metadata=_help(
            "keys of transformer_layer_config that replace the verifier's, such as {num_key_value_heads: 4}"
        ),
    )


@frozen(kw_only=True)
class DFlashOptions(BlockOptions):
    """Source: DFlash (z-lab), as vLLM's ``qwen3_dflash.py`` serves it."""

    sliding_window_non_causal: bool = field(
        default=True,
        metadata=_help("sliding layers see their whole block; false: earlier rows only"),
    )


def default_layer_ids(num_layers: int, taps: int = 5) -> tuple[int, ...]:
    """Evenly spaced as z-lab's drafts have them: outputs of layers 1 … n-3, as ids one more."""
    span = num_layers - 4
    wanted = (2 + round(tap * span / (taps - 1)) for tap in range(taps))
    return tuple(sorted({min(max(layer, 0), num_layers - 1) for layer in wanted}))


def requirements(options: BlockOptions, verifier: VerifierFacts) -> CaptureRequirements:
    """The taps, and the last hidden state for the teacher."""
    ids = options.layer_ids
    if ids is None:
        ids = default_layer_ids(verifier.num_layers)
    return CaptureRequirements(layer_ids=tuple(ids), last_hidden=True)


def max_speculative_tokens(options: BlockOptions, layout: Layout = "bonus_anchor") -> int:
    """Predicting rows of a block: B - 1 where the anchor's row predicts nothing, else B."""
    return options.block_size - (1 if layout == "bonus_anchor" else 0)


def layer_attention(options: DFlashOptions) -> tuple[LayerAttention, ...]:
    """Window and causality of every layer, as vLLM serves them."""
    causal = not options.sliding_window_non_causal
    return tuple(
        LayerAttention(None, causal=False)
        if options.sliding_window is None or index in options.full_attention_indices
        else LayerAttention(options.sliding_window, causal)
        for index in range(options.num_layers)
    )


def layer_config(options: BlockOptions, verifier: VerifierFacts) -> LayerConfig:
    """The draft's layers: qwen3-style, of the verifier's shape, then what the options say."""
    raise NotImplementedError


def check_blocks(options: BlockOptions, verifier: VerifierFacts) -> Sequence[Problem]:
    """What is wrong with the options that all algorithms with anchored blocks share."""
    return ()


def check(options: DFlashOptions, verifier: VerifierFacts) -> Sequence[Problem]:
    """All that cannot work with this verifier, found before torch is imported."""
    return check_blocks(options, verifier)
