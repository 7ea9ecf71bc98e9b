"""What this distribution registers. Torch-free: implementations are named, and imported when a run uses them."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith import api
from draftsmith.hookspecs import hookimpl
from draftsmith_mtp.options import MtpOptions, check, check_data, max_speculative_tokens, requirements


@hookimpl
def draftsmith_draft_architectures() -> Sequence[api.DraftArchitecture]:
    return [
        api.DraftArchitecture(
            name="mtp",
            summary="the verifier's own multi-token-prediction head, by its family",
            implementation="draftsmith_mtp.model:MtpDraft",
            algorithms=("mtp",),
        )
    ]


@hookimpl
def draftsmith_masks() -> Sequence[api.Mask]:
    return [
        api.Mask(
            name="step_by_step",
            summary="earlier rows of the same document at the query's own step, as FastMTP trains",
            implementation="draftsmith_mtp.mask:StepByStep",
        )
    ]


@hookimpl
def draftsmith_checkpoint_schemas() -> Sequence[api.CheckpointSchema]:
    return [
        api.CheckpointSchema(
            name="mtp",
            summary="a native head in a folder of its own, under its model's names, as vLLM loads it",
            implementation="draftsmith_mtp.checkpoint:MtpCheckpoint",
            architectures=("mtp",),
            speculators_types=("mtp",),
        )
    ]


@hookimpl
def draftsmith_algorithms() -> Sequence[api.Algorithm]:
    return [
        api.Algorithm(
            name="mtp",
            summary="the verifier's own multi-token-prediction head, finetuned for several tokens (arXiv 2509.18362)",
            implementation="draftsmith_mtp.step:Mtp",
            conformance="draftsmith_mtp.conformance:MtpCheck",
            options=MtpOptions,
            architecture="mtp",
            loss="ce",
            # What vLLM's cache holds while it drafts; the paper's is step_by_step.
            mask="chained",
            schema="mtp",
            reduction="weighted_mean",
            full_vocabulary=True,
            requirements=requirements,
            check=check,
            check_data=check_data,
            max_speculative_tokens=max_speculative_tokens,
            vllm_methods=("mtp",),
            served_mask=lambda options: "chained",
        )
    ]


@hookimpl
def draftsmith_commands() -> Sequence[api.Command]:
    return [
        api.Command(
            name="stitch",
            summary="write a trained multi-token-prediction head into a copy of its model",
            implementation="draftsmith_mtp.commands:stitch",
        ),
        api.Command(
            name="unstitch",
            summary="write the multi-token-prediction head of a model into a folder of its own",
            implementation="draftsmith_mtp.commands:unstitch",
        ),
    ]
