"""What the tiny plugin registers."""

from __future__ import annotations

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith_tiny.options import FilesOptions, TinyOptions


@hookimpl
def draftsmith_draft_architectures():
    return [
        api.DraftArchitecture(
            name="tiny", summary="a recurrent mixer", implementation="draftsmith_tiny.algorithm:TinyDraft"
        )
    ]


@hookimpl
def draftsmith_checkpoint_schemas():
    return [
        api.CheckpointSchema(
            name="tiny", summary="nothing serves it", implementation="draftsmith_tiny.algorithm:TinyFormat"
        )
    ]


@hookimpl
def draftsmith_transports():
    return [
        api.Transport(
            name="tiny-files",
            summary="one file a sample",
            implementation="draftsmith_tiny.transport:Files",
            options=FilesOptions,
            guarantees=api.TransportGuarantees(persistent=True, random_access=True, concurrent_writers=True),
        )
    ]


@hookimpl
def draftsmith_algorithms():
    return [
        api.Algorithm(
            name="tiny",
            summary="drafts with a recurrent mixer instead of attention",
            implementation="draftsmith_tiny.algorithm:Tiny",
            options=TinyOptions,
            architecture="tiny",
            loss="kl_div",
            mask="causal",
            schema="tiny",
            requirements=lambda options, verifier: api.CaptureRequirements(layer_ids=(1, verifier.num_layers - 1)),
            max_speculative_tokens=lambda options: options.steps,
            window=lambda options: options.sliding_window,
        )
    ]
