"""What this distribution registers. Torch-free: implementations are named, and imported when a run uses them."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith_dflash.options import (
    DFlashOptions,
    check,
    check_data,
    derived,
    max_speculative_tokens,
    requirements,
    served_mask,
)


@hookimpl
def draftsmith_draft_architectures() -> Sequence[api.DraftArchitecture]:
    return [
        api.DraftArchitecture(
            name="dflash",
            summary="blocks of mask tokens over the verifier's features, injected as keys and values in every layer",
            implementation="draftsmith_dflash.model:DFlashDraft",
            algorithms=("dflash",),
        )
    ]


@hookimpl
def draftsmith_checkpoint_schemas() -> Sequence[api.CheckpointSchema]:
    return [
        api.CheckpointSchema(
            name="dflash",
            summary="speculators' dflash format, as vLLM loads it",
            implementation="draftsmith_dflash.checkpoint:DFlashCheckpoint",
            architectures=("dflash",),
            speculators_types=("dflash",),
        )
    ]


@hookimpl
def draftsmith_algorithms() -> Sequence[api.Algorithm]:
    return [
        api.Algorithm(
            name="dflash",
            summary="a block of tokens in one pass over the verifier's features (block diffusion, one step)",
            implementation="draftsmith_dflash.step:DFlash",
            options=DFlashOptions,
            architecture="dflash",
            loss="ce",
            mask="anchored",
            schema="dflash",
            reduction="weighted_mean",
            requirements=requirements,
            check=check,
            check_data=check_data,
            derived=derived,
            max_speculative_tokens=max_speculative_tokens,
            vllm_methods=("dflash",),
            window=lambda options: options.sliding_window,
            served_mask=served_mask,
        )
    ]
