"""What this distribution registers. Torch-free: implementations are named, and imported when a run uses them."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith_eagle3.options import (
    Eagle3Options,
    check,
    check_data,
    derived,
    max_speculative_tokens,
    requirements,
)


@hookimpl
def draftsmith_draft_architectures() -> Sequence[api.DraftArchitecture]:
    return [
        api.DraftArchitecture(
            name="eagle3",
            summary="decoder on (token embedding, fused verifier features), llama or qwen3 layers",
            implementation="draftsmith_eagle3.model:Eagle3Draft",
            algorithms=("eagle3",),
        )
    ]


@hookimpl
def draftsmith_checkpoint_schemas() -> Sequence[api.CheckpointSchema]:
    return [
        api.CheckpointSchema(
            name="eagle3",
            summary="speculators' eagle3 format, as vLLM loads it",
            implementation="draftsmith_eagle3.checkpoint:Eagle3Checkpoint",
            architectures=("eagle3",),
            speculators_types=("eagle3",),
        )
    ]


@hookimpl
def draftsmith_algorithms() -> Sequence[api.Algorithm]:
    return [
        api.Algorithm(
            name="eagle3",
            summary="autoregressive draft on the verifier's low, middle and high features (arXiv 2503.01840)",
            implementation="draftsmith_eagle3.step:Eagle3",
            options=Eagle3Options,
            architecture="eagle3",
            loss="kl_div",
            mask="chained",
            schema="eagle3",
            # The paper's code averages over all positions of the row, masked ones included.
            reduction="local_mean",
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
