"""Options of EAGLE-3, what they ask of the capture, and what is wrong with them. Torch-free.

:class:`NetworkOptions` and the functions on it are written for every algorithm that drafts with EAGLE-3's network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import and_, ge, gt, in_, le, optional

from draftsmith.api import CaptureRequirements, DataFacts, Problem, VerifierFacts
from draftsmith.layer_config import LayerConfig, layer_id_problems, override_problems

__all__ = [
    "Eagle3Options",
    "NetworkOptions",
    "check",
    "check_data",
    "default_layer_ids",
    "derived",
    "layer_config",
    "max_speculative_tokens",
    "requirements",
]


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@frozen(kw_only=True)
class NetworkOptions:
    """What every algorithm that drafts with this network can be told of it."""

    num_layers: int = field(default=1, validator=ge(1), metadata=_help("decoder layers of the draft"))
    layer_type: Literal["llama", "qwen3"] = field(
        default="llama",
        validator=in_(("llama", "qwen3")),
        metadata=_help("qwen3 adds a norm per head to queries and keys: steadier at high learning rates"),
    )
    intermediate_size: int | None = field(
        default=None,
        validator=optional(ge(1)),
        metadata=_help("width of the feed-forward; null: the verifier's (3 × hidden for mixtures of experts)"),
    )
    norm_before_residual: bool = field(
        default=True, metadata=_help("the first layer's residual is the normed hidden state")
    )
    norm_before_fc: bool = field(default=True, metadata=_help("one norm over all tapped features before fc"))
    fc_norm: bool = field(default=False, metadata=_help("one norm per tapped layer before fc; not both"))
    norm_output: bool = field(default=True, metadata=_help("feed the final-normed hidden state back, not the raw one"))
    layer_ids: tuple[int, ...] | None = field(
        default=None, metadata=_help("tapped layers (vLLM's ids, ascending); null: 2, n//2 and n-3 of n layers")
    )
    sliding_window: int | None = field(
        default=None,
        validator=optional(ge(1)),
        metadata=_help("positions that the draft's layers see, the query's own included; null: all"),
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
class Eagle3Options(NetworkOptions):
    """Defaults are those of "EAGLE-3.1" drafts: every optional norm but ``fc_norm``, one llama layer.

    Sources: EAGLE-3 (arXiv 2503.01840) for training-time test and the decay of 0.8 a step; the network's flags are
    those of vLLM's ``llama_eagle3.py``.
    """

    ttt_steps: int = field(
        default=3,
        validator=ge(1),
        metadata=_help("steps of training-time test: tokens the draft is trained to continue; written as served K"),
    )
    step_decay: float = field(
        default=0.8, validator=and_(gt(0), le(1)), metadata=_help("weight of step k in the loss is step_decay ** k")
    )


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """[2, n//2, n-3] as in vLLM and the paper; on very small models whatever of them is distinct and in range."""
    wanted = (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({min(max(layer, 0), num_layers - 1) for layer in wanted}))


def requirements(options: NetworkOptions, verifier: VerifierFacts) -> CaptureRequirements:
    """The taps, and the last hidden state for the teacher."""
    ids = options.layer_ids
    if ids is None:
        ids = default_layer_ids(verifier.num_layers)
    return CaptureRequirements(layer_ids=tuple(ids), last_hidden=True)


def max_speculative_tokens(options: Eagle3Options) -> int:
    """Serving more tokens than were trained extrapolates, and degrades."""
    return options.ttt_steps


def check(options: NetworkOptions, verifier: VerifierFacts) -> Sequence[Problem]:
    """All that cannot work with this verifier, found before torch is imported."""
    problems = layer_id_problems(options.layer_ids, verifier)
    if options.norm_before_fc and options.fc_norm:
        problems.append(
            Problem(
                "norm_before_fc and fc_norm exclude each other",
                where="algorithm.options",
                hint="set norm_before_fc: false to use one norm per tapped layer",
            )
        )
    own = {
        "model_type": "layer_type",
        "num_hidden_layers": "num_layers",
        "sliding_window": "sliding_window",
        "layer_types": "sliding_window",
    }
    problems += override_problems(_derived(options, verifier), options.layer_overrides, own)
    return problems


def check_data(options: Eagle3Options, verifier: VerifierFacts, data: DataFacts) -> Sequence[Problem]:
    """Whether some answer reaches every step; where none has two tokens, nothing at all would be trained."""
    return data.unreached(options.ttt_steps, option="ttt_steps")


def layer_config(options: NetworkOptions, verifier: VerifierFacts) -> LayerConfig:
    """The draft's layers: the verifier's shape, then what the options say.

    Raises:
        CheckpointError: an override is not a size, or names a layer type without a draft in vLLM.
    """
    return _derived(options, verifier).overridden(options.layer_overrides)


def _derived(options: NetworkOptions, verifier: VerifierFacts) -> LayerConfig:
    return LayerConfig.from_verifier(
        verifier,
        layer_type=options.layer_type,
        num_layers=options.num_layers,
        intermediate_size=options.intermediate_size,
        sliding_window=options.sliding_window,
        initializer_range=options.initializer_range,
    )


def derived(options: NetworkOptions, verifier: VerifierFacts) -> dict[str, Any]:
    """What null stands for: everything here is chosen by the verifier."""
    return {
        "intermediate_size": layer_config(options, verifier).intermediate_size,
        "layer_ids": requirements(options, verifier).layer_ids,
    }
