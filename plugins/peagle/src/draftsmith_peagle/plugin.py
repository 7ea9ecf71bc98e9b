"""What this distribution registers. Torch-free: implementations are named, and imported when a run uses them."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith_eagle3.options import requirements
from draftsmith_peagle.options import PEagleOptions, check, check_data, derived, max_speculative_tokens


@hookimpl
def draftsmith_draft_architectures() -> Sequence[api.DraftArchitecture]:
    return [
        api.DraftArchitecture(
            name="peagle",
            summary="EAGLE-3's network, and a learned input for what does not exist yet",
            implementation="draftsmith_peagle.model:PEagleDraft",
            algorithms=("peagle",),
        )
    ]


@hookimpl
def draftsmith_checkpoint_schemas() -> Sequence[api.CheckpointSchema]:
    return [
        api.CheckpointSchema(
            name="peagle",
            summary="speculators' peagle format, as vLLM loads it",
            implementation="draftsmith_peagle.checkpoint:PEagleCheckpoint",
            architectures=("peagle",),
            speculators_types=("peagle",),
            warm_start_types=("eagle3",),
        )
    ]


@hookimpl
def draftsmith_algorithms() -> Sequence[api.Algorithm]:
    return [
        api.Algorithm(
            name="peagle",
            summary="all tokens of a round in one pass over the verifier's features (parallel drafting)",
            implementation="draftsmith_peagle.step:PEagle",
            conformance="draftsmith_peagle.conformance:PeagleCheck",
            options=PEagleOptions,
            architecture="peagle",
            loss="kl_div",
            mask="chained",
            schema="peagle",
            # A mean over all elements that have a target, whatever their depth.
            reduction="masked_mean",
            requirements=requirements,
            check=check,
            check_data=check_data,
            derived=derived,
            max_speculative_tokens=max_speculative_tokens,
            vllm_methods=("eagle3",),
            window=lambda options: options.sliding_window,
            served_mask=lambda options: "chained",
        )
    ]
