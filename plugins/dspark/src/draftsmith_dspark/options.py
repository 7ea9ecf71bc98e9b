"""Options of DSpark beyond those of all anchored blocks, and what is wrong with them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, gt, in_

from draftsmith.api import DataFacts, Problem, VerifierFacts
from draftsmith_dflash.options import BlockOptions, Layout, check_blocks
from draftsmith_dflash.options import check_data as check_blocks_data
from draftsmith_dflash.options import max_speculative_tokens as block_tokens

__all__ = [
    "DSparkOptions",
    "MarkovKind",
    "check",
    "check_data",
    "max_speculative_tokens",
    "notes",
    "why_unservable",
]

MarkovKind = Literal["vanilla", "gated", "rnn"]


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@frozen(kw_only=True)
class DSparkOptions(BlockOptions):
    """Defaults are the DSpark paper's: anchor-first blocks, rank 256, weights exp(-k/4), both heads."""

    layout: Layout = field(
        default="anchor_first",
        validator=in_(("anchor_first", "bonus_anchor")),
        metadata=_help(
            "anchor_first: every row predicts the token after its own, B tokens; bonus_anchor: rows 1 … B-1 predict "
            "the token at their own position, as in DFlash"
        ),
    )
    gamma: float = field(
        default=4.0, validator=gt(0), metadata=_help("decay of the position weights exp(-k/gamma), confidence's too")
    )
    markov_head: MarkovKind = field(
        default="vanilla",
        validator=in_(("vanilla", "gated", "rnn")),
        metadata=_help("how the token before corrects a slot's logits; vLLM serves vanilla alone"),
    )
    markov_rank: int = field(default=256, validator=ge(0), metadata=_help("rank of the correction; 0: none"))
    confidence: bool = field(
        default=True, metadata=_help("train a head that estimates each slot's acceptance, for adaptive verification")
    )
    confidence_with_markov: bool = field(
        default=True, metadata=_help("the confidence head also reads the embedding of the token before")
    )
    confidence_weight: float = field(
        default=1.0, validator=ge(0), metadata=_help("weight of the confidence head's cross-entropy in the objective")
    )


def max_speculative_tokens(options: DSparkOptions) -> int:
    """Predicting rows of a block. vLLM takes any number; rows see each other, so that another one was not trained."""
    return block_tokens(options, options.layout)


def check(options: DSparkOptions, verifier: VerifierFacts) -> Sequence[Problem]:
    """All that cannot work with this verifier, found before torch is imported."""
    problems = list(check_blocks(options, verifier))
    if options.markov_rank == 0 and options.confidence and options.confidence_with_markov:
        problems.append(
            Problem(
                "a Markov rank of 0 leaves the confidence head without the embedding that it reads",
                where="algorithm.options.markov_rank",
                hint="set confidence_with_markov: false, or a rank of at least 1",
            )
        )
    return problems


def why_unservable(rank: int, kind: MarkovKind) -> str | None:
    """Why no vLLM serves a draft with this Markov head; None: it does."""
    if not rank:
        return "vLLM serves this type with a Markov head only, and there is none (markov_rank 0)"
    if kind != "vanilla":
        return f"vLLM loads the vanilla Markov head alone; this one is of the kind {kind}"
    return None


def notes(options: DSparkOptions, verifier: VerifierFacts) -> Sequence[str]:
    """That a draft will not be served is worth knowing before it is trained."""
    reason = why_unservable(options.markov_rank, options.markov_head)
    return [f"{reason}: the draft is trained, exported and simulated all the same"] if reason else []


def check_data(options: DSparkOptions, verifier: VerifierFacts, data: DataFacts) -> Sequence[Problem]:
    """Whether blocks fit the answers, and the mask token is one that does not occur."""
    return check_blocks_data(options, verifier, data, options.layout)
