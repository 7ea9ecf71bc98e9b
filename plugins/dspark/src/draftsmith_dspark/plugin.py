"""What this distribution registers. Torch-free: implementations are named, and imported when a run uses them."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith_dflash.options import derived, requirements, served_mask
from draftsmith_dspark.options import DSparkOptions, check, check_data, max_speculative_tokens, notes


@hookimpl
def draftsmith_draft_architectures() -> Sequence[api.DraftArchitecture]:
    return [
        api.DraftArchitecture(
            name="dspark",
            summary="DFlash's network, a low-rank correction by the token before, and a confidence head",
            implementation="draftsmith_dspark.model:DSparkDraft",
            algorithms=("dspark",),
        )
    ]


@hookimpl
def draftsmith_checkpoint_schemas() -> Sequence[api.CheckpointSchema]:
    return [
        api.CheckpointSchema(
            name="dspark",
            summary="speculators' dspark format, as vLLM loads it",
            implementation="draftsmith_dspark.checkpoint:DSparkCheckpoint",
            architectures=("dspark",),
            speculators_types=("dspark",),
            warm_start_types=("dflash",),
        )
    ]


@hookimpl
def draftsmith_algorithms() -> Sequence[api.Algorithm]:
    return [
        api.Algorithm(
            name="dspark",
            summary="blocks in one pass, corrected token by token, with an estimate of what will be accepted",
            implementation="draftsmith_dspark.step:DSpark",
            options=DSparkOptions,
            architecture="dspark",
            # The paper's 0.1 CE + 0.9 |p - q|_1: the distance is twice the total variation.
            loss="sum",
            loss_options={"terms": {"ce": 0.1, "tv": 1.8}},
            mask="anchored",
            schema="dspark",
            reduction="weighted_mean",
            requirements=requirements,
            check=check,
            check_data=check_data,
            notes=notes,
            derived=derived,
            max_speculative_tokens=max_speculative_tokens,
            vllm_methods=("dspark",),
            window=lambda options: options.sliding_window,
            served_mask=served_mask,
        )
    ]
