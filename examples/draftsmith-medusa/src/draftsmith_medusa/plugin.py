"""What the package registers. Draftsmith imports this module for every command, so it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith_medusa.options import MedusaOptions, requirements


@hookimpl
def draftsmith_draft_architectures() -> Sequence[api.DraftArchitecture]:
    return [
        api.DraftArchitecture(
            name="medusa",
            summary="residual blocks a head on the verifier's last hidden state, and the verifier's output layer",
            implementation="draftsmith_medusa.model:MedusaHeads",
            algorithms=("medusa",),
        )
    ]


@hookimpl
def draftsmith_checkpoint_schemas() -> Sequence[api.CheckpointSchema]:
    return [
        api.CheckpointSchema(
            name="medusa",
            summary="Medusa heads, as vLLM reads them by their own model type",
            implementation="draftsmith_medusa.checkpoint:MedusaCheckpoint",
            architectures=("medusa",),
            speculators_types=("medusa",),
        )
    ]


@hookimpl
def draftsmith_algorithms() -> Sequence[api.Algorithm]:
    return [
        api.Algorithm(
            name="medusa",
            summary="one head for each drafted token, side by side (arXiv 2401.10774)",
            implementation="draftsmith_medusa.step:Medusa",
            conformance="draftsmith_medusa.conformance:MedusaCheck",
            options=MedusaOptions,
            architecture="medusa",
            loss="ce",
            mask="causal",  # without attention it plays no part
            schema="medusa",
            reduction="weighted_mean",
            full_vocabulary=True,  # vLLM 0.32 does not load heads with a reduced one
            requirements=requirements,
            max_speculative_tokens=lambda options: options.num_heads,
            vllm_methods=("medusa",),
        )
    ]
