"""Options of DFlash, what they ask of the capture and of the data, and what is wrong with them. Torch-free.

:class:`BlockOptions` and the functions on it are written for every algorithm that drafts anchored blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from attrs import field, frozen
from attrs.validators import and_, ge, gt, in_, le, optional

from draftsmith.api import CaptureRequirements, DataFacts, Problem, VerifierFacts
from draftsmith.layer_config import LayerConfig, layer_id_problems, override_problems
from draftsmith.mask_token import choose_mask_token, mask_token_data_problems, mask_token_problems

__all__ = [
    "BlockOptions",
    "DFlashOptions",
    "LayerAttention",
    "Layout",
    "check",
    "check_blocks",
    "check_data",
    "default_layer_ids",
    "derived",
    "layer_attention",
    "layer_config",
    "mask_token",
    "max_speculative_tokens",
    "position_gamma",
    "requirements",
    "served_mask",
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
        metadata=_help(
            "width of the feed-forward; null: the verifier's (3 × hidden for mixtures of experts and with hidden_size)"
        ),
    )
    layer_ids: tuple[int, ...] | None = field(
        default=None, metadata=_help("tapped layers (vLLM's ids, ascending); null: five, evenly from 2 to n-2")
    )
    mask_token_id: int | None = field(
        default=None,
        validator=optional(ge(0)),
        metadata=_help("token that stands for what is to be drafted; null: one without another use"),
    )
    sliding_window: int | None = field(
        default=None,
        validator=optional(ge(1)),
        metadata=_help("positions that sliding layers see, the query's own included; null: no layer slides"),
    )
    full_attention_indices: tuple[int, ...] = field(
        default=(), metadata=_help("layers (from 0) that see everything although sliding_window is set")
    )
    sliding_window_non_causal: bool = field(
        default=True, metadata=_help("sliding layers see their whole block; false: earlier rows only")
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
    """Defaults are the paper's for its smallest block: five layers, cross-entropy, weights exp(-k/gamma).

    Source: DFlash (z-lab); the network and its settings are those that vLLM's ``qwen3_dflash.py`` serves.
    """


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
    """Predicting rows of a block: B - 1 where the anchor's row predicts nothing, else B.

    More are not trained. Fewer are served well only by causal layers: others see how many rows there are.
    """
    return options.block_size - (1 if layout == "bonus_anchor" else 0)


def position_gamma(options: BlockOptions) -> float:
    """The paper's decay for a block of this size, unless one is given."""
    if options.gamma is not None:
        return options.gamma
    return 4.0 if options.block_size <= 8 else 5.0 if options.block_size <= 10 else 7.0


def derived(options: BlockOptions, verifier: VerifierFacts) -> dict[str, Any]:
    """What null stands for: everything here is chosen by verifier and block size."""
    layers = layer_config(options, verifier)
    decay = {"gamma": position_gamma(options)} if options.position_weights == "exponential" else {}
    return {
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "layer_ids": requirements(options, verifier).layer_ids,
        "mask_token_id": mask_token(options, verifier),
        **decay,
    }


# --- layers -----------------------------------------------------------------------------------------------------


def layer_attention(options: BlockOptions) -> tuple[LayerAttention, ...]:
    """Window and causality of every layer. One that sees everything is never causal."""
    sliding = LayerAttention(options.sliding_window, causal=not options.sliding_window_non_causal)
    full = LayerAttention(None, causal=False)
    return tuple(sliding if _slides(options, index) else full for index in range(options.num_layers))


def served_mask(options: BlockOptions) -> str:
    """The rule by which vLLM serves the layers; where they differ, that of those that see their whole block."""
    return "anchored_causal" if all(layer.causal for layer in layer_attention(options)) else "anchored"


def _slides(options: BlockOptions, layer: int) -> bool:
    return options.sliding_window is not None and layer not in options.full_attention_indices


def layer_config(options: BlockOptions, verifier: VerifierFacts) -> LayerConfig:
    """The draft's layers: qwen3-style, of the verifier's shape, then what the options say.

    Raises:
        CheckpointError: an override is not a size, or names a layer type without a draft in vLLM.
    """
    return _derived(options, verifier).overridden(options.layer_overrides)


def _derived(options: BlockOptions, verifier: VerifierFacts) -> LayerConfig:
    return LayerConfig.from_verifier(
        verifier,
        layer_type="qwen3",
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        sliding_window=options.sliding_window,
        full_attention=options.full_attention_indices,
        initializer_range=options.initializer_range,
    )


# --- the mask token ---------------------------------------------------------------------------------------------


def mask_token(options: BlockOptions, verifier: VerifierFacts) -> int:
    """The token that stands for what is to be drafted: as given, else one that the core chooses.

    Raises:
        ConfigError: there is none.
    """
    return choose_mask_token(options.mask_token_id, verifier)


# --- what is wrong ----------------------------------------------------------------------------------------------


def check_blocks(options: BlockOptions, verifier: VerifierFacts) -> list[Problem]:
    """What is wrong with the options that all algorithms with anchored blocks share."""
    own = {
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "sliding_window": "sliding_window",
        "layer_types": "full_attention_indices",
    }
    return [
        *_layer_type_problems(options),
        *layer_id_problems(options.layer_ids, verifier),
        *_full_attention_problems(options),
        *mask_token_problems(options.mask_token_id, verifier),
        *override_problems(_derived(options, verifier), options.layer_overrides, own),
    ]


def _layer_type_problems(options: BlockOptions) -> Iterator[Problem]:
    if (options.layer_overrides or {}).get("model_type", "qwen3") != "qwen3":
        where = "algorithm.options.layer_overrides"
        what = "vLLM has drafts of this kind with qwen3's layers only"
        yield Problem(what, where=where, hint="leave model_type out")


def _full_attention_problems(options: BlockOptions) -> Iterator[Problem]:
    where = "algorithm.options.full_attention_indices"
    indices = options.full_attention_indices
    if not indices:
        return
    if list(indices) != sorted(set(indices)):
        yield Problem(
            f"{list(indices)} is not ascending and distinct", where=where, hint=f"write {sorted(set(indices))}"
        )
    outside = [index for index in indices if not 0 <= index < options.num_layers]
    if outside:
        hint = f"layers are counted from 0 to {options.num_layers - 1} (num_layers: {options.num_layers})"
        yield Problem(f"the draft has no layers {outside}", where=where, hint=hint)
    elif options.sliding_window is None or not any(_slides(options, index) for index in range(options.num_layers)):
        what = "no layer slides, so that all of them see everything"
        yield Problem(what, where=where, hint="leave it out, and sliding_window too; or let some layer slide")


def check(options: DFlashOptions, verifier: VerifierFacts) -> Sequence[Problem]:
    """All that cannot work with this verifier, found before torch is imported."""
    problems = check_blocks(options, verifier)
    full = [index for index in range(options.num_layers) if not _slides(options, index)]
    if full and not options.sliding_window_non_causal:
        # vLLM derives one flag from the key, and applies it to all layers (speculators/algos.py, update_dflash).
        problems.append(
            Problem(
                f"vLLM would serve all layers causally, and layers {full} see everything and are not trained so",
                where="algorithm.options.sliding_window_non_causal",
                hint="let all layers slide, or set it to true",
            )
        )
    return problems


def check_data(
    options: BlockOptions, verifier: VerifierFacts, data: DataFacts, layout: Layout = "bonus_anchor"
) -> Sequence[Problem]:
    """Whether blocks fit the answers, and the mask token is one that does not occur."""
    problems = []
    needed = max_speculative_tokens(options, layout) + 1
    if data.longest_answer < needed:
        longer = "prepare longer answers, or cut them later (train.tokens_per_row)"
        fits = options.block_size - needed + data.longest_answer
        problems.append(
            Problem(
                f"a block of {options.block_size} needs {needed} tokens that the verifier wrote one after the other, "
                f"and no answer has more than {data.longest_answer}: its last rows would never be trained",
                where="algorithm.options.block_size",
                hint=longer if fits < 2 else f"choose at most {fits}, or {longer}",
            )
        )
    problems += mask_token_data_problems(mask_token(options, verifier), data)
    return problems
