"""What the toy plugin registers."""

from __future__ import annotations

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith_toy.options import FilesOptions, ToyOptions


@hookimpl
def draftsmith_draft_architectures():
    return [
        api.DraftArchitecture(
            name="toy", summary="a recurrent mixer", implementation="draftsmith_toy.algorithm:ToyDraft"
        )
    ]


@hookimpl
def draftsmith_checkpoint_schemas():
    return [
        api.CheckpointSchema(
            name="toy", summary="nothing serves it", implementation="draftsmith_toy.algorithm:ToyFormat"
        )
    ]


@hookimpl
def draftsmith_transports():
    return [
        api.Transport(
            name="toy-files",
            summary="one file a sample",
            implementation="draftsmith_toy.transport:Files",
            options=FilesOptions,
            guarantees=api.TransportGuarantees(persistent=True, random_access=True, concurrent_writers=True),
        )
    ]


@hookimpl
def draftsmith_algorithms():
    return [
        api.Algorithm(
            name="toy",
            summary="drafts with a recurrent mixer instead of attention",
            implementation="draftsmith_toy.algorithm:Toy",
            options=ToyOptions,
            architecture="toy",
            loss="kl_div",
            mask="causal",
            schema="toy",
            requirements=lambda options, verifier: api.CaptureRequirements(layer_ids=(1, verifier.num_layers - 1)),
            max_speculative_tokens=lambda options: options.steps,
            window=lambda options: options.sliding_window,
        )
    ]
