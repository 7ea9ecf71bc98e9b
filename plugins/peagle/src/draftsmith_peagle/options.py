"""Options of P-EAGLE beyond those of EAGLE-3's network, and what is wrong with them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from attrs import field, frozen
from attrs.validators import and_, ge, gt, le, optional

from draftsmith.api import DataFacts, Problem, VerifierFacts
from draftsmith.mask_token import choose_mask_token, mask_token_data_problems, mask_token_problems
from draftsmith_eagle3.options import NetworkOptions
from draftsmith_eagle3.options import check as check_network
from draftsmith_eagle3.options import derived as derived_network

__all__ = ["PEagleOptions", "check", "check_data", "derived", "mask_token", "max_speculative_tokens"]


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@frozen(kw_only=True)
class PEagleOptions(NetworkOptions):
    """Defaults: eight depths, of which each keeps 0.7 of the one before and 0.2 at least; four layers.

    Sources: P-EAGLE for the layers, speculators for depths and ratios; the flags are those that vLLM forwards to a
    draft of this type (``speculators/algos.py``).
    """

    num_depths: int = field(
        default=8,
        validator=ge(1),
        metadata=_help("tokens that one pass drafts: the next one, and num_depths - 1 behind mask rows; served K"),
    )
    down_sample_ratio: float = field(
        default=0.7,
        validator=and_(gt(0), le(1)),
        metadata=_help("share of the continued tokens that depth d trains on: down_sample_ratio ** d"),
    )
    down_sample_ratio_min: float = field(
        default=0.2, validator=and_(ge(0), le(1)), metadata=_help("the least share that a depth trains on")
    )
    max_anchors: int | None = field(
        default=512,
        validator=optional(ge(1)),  # type: ignore[arg-type]  # takes the field's type from its default
        metadata=_help("at most so many tokens of a packed row are continued, drawn anew every step; null: all"),
    )
    mask_token_id: int | None = field(
        default=None,
        validator=optional(ge(0)),
        metadata=_help("token that mask rows read; null: one that the tokenizer never produces"),
    )
    train_mask_embedding: bool = field(
        default=True,
        metadata=_help(
            "the mask token's embedding is the draft's own, trained; the export then holds the whole embedding. "
            "false: the verifier's, and no embedding is exported"
        ),
    )
    num_layers: int = field(default=4, validator=ge(1), metadata=_help("decoder layers of the draft"))
    norm_before_residual: bool = field(
        default=False, metadata=_help("the first layer's residual is the normed hidden state")
    )
    fc_norm: bool = field(
        default=False, metadata=_help("cannot be set: vLLM does not forward it to a draft of this type")
    )
    norm_output: bool = field(default=False, metadata=_help("cannot be set: nothing is fed back"))


def max_speculative_tokens(options: PEagleOptions) -> int:
    """vLLM takes any number; rows beyond the trained depths stand where none was trained to."""
    return options.num_depths


def mask_token(options: PEagleOptions, verifier: VerifierFacts) -> int:
    """What mask rows read: as given, else a token that the core chooses.

    Raises:
        ConfigError: there is none.
    """
    return choose_mask_token(options.mask_token_id, verifier)


def derived(options: PEagleOptions, verifier: VerifierFacts) -> dict[str, Any]:
    """What null stands for: everything here is chosen by the verifier."""
    return {**derived_network(options, verifier), "mask_token_id": mask_token(options, verifier)}


def check(options: PEagleOptions, verifier: VerifierFacts) -> Sequence[Problem]:
    """All that cannot work with this verifier, found before torch is imported."""
    return [
        *_dropped_flags(options),
        *check_network(options, verifier),
        *mask_token_problems(options.mask_token_id, verifier),
        *_position_problems(verifier),
    ]


def check_data(options: PEagleOptions, verifier: VerifierFacts, data: DataFacts) -> Sequence[Problem]:
    """Whether some answer reaches every depth, and the mask token is one that does not occur."""
    return [
        *data.unreached(options.num_depths, option="num_depths", name="depths"),
        *mask_token_data_problems(mask_token(options, verifier), data),
    ]


def _dropped_flags(options: PEagleOptions) -> Iterator[Problem]:
    reasons = {
        "fc_norm": "vLLM does not forward it to a draft of this type, and would serve it without the norms",
        "norm_output": "one pass drafts all tokens, so that no hidden state is fed back",
    }
    for name, reason in reasons.items():
        if getattr(options, name):
            yield Problem(f"{name} cannot be set: {reason}", where=f"algorithm.options.{name}", hint="leave it out")


def _position_problems(verifier: VerifierFacts) -> Iterator[Problem]:
    if verifier.rope_parameters.get("mrope_section"):
        yield Problem(
            "vLLM does not draft in parallel for a verifier whose positions have several parts (mrope_section)",
            where="verifier",
            hint="train a draft that drafts token by token",
        )
