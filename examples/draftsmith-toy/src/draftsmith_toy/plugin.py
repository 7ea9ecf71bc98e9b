"""What the package registers. Draftsmith imports this module for every command, so it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith.recurrent import RecurrentOptions, requirements


@hookimpl
def draftsmith_draft_architectures() -> Sequence[api.DraftArchitecture]:
    return [
        api.DraftArchitecture(
            name="toy",
            summary="a GRU cell that goes on from the verifier's last hidden state",
            implementation="draftsmith_toy.model:ToyDraft",
            algorithms=("toy",),
        )
    ]


@hookimpl
def draftsmith_checkpoint_schemas() -> Sequence[api.CheckpointSchema]:
    return [
        api.CheckpointSchema(
            name="toy",
            summary="the cell, its norm, and how vLLM is to serve them",
            implementation="draftsmith_toy.checkpoint:ToyCheckpoint",
            architectures=("toy",),
            speculators_types=("toy",),
        )
    ]


@hookimpl
def draftsmith_algorithms() -> Sequence[api.Algorithm]:
    return [
        api.Algorithm(
            name="toy",
            summary="a GRU cell, a token a step; vLLM knows it by this package alone",
            implementation="draftsmith_toy.step:Toy",
            conformance="draftsmith_toy.conformance:ToyCheck",
            options=RecurrentOptions,
            architecture="toy",
            loss="ce",
            mask="causal",  # without attention it plays no part
            schema="toy",
            reduction="weighted_mean",
            full_vocabulary=True,
            requirements=requirements,
            max_speculative_tokens=lambda options: options.num_tokens,
            vllm_methods=("eagle",),
            vllm_network="draftsmith_toy.network:ServedToy",
        )
    ]
