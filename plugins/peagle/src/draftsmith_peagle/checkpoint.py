"""The exported format: speculators' ``peagle`` config.json and tensors, as vLLM 0.32 loads them.

Contract: ``vllm/transformers_utils/configs/speculators/algos.py`` (``update_peagle``: which keys are read, and their
defaults when missing), ``vllm/model_executor/models/{llama,qwen3}_eagle3.py`` (which tensors), and what all types of
the format share (:mod:`draftsmith.speculators`).

The mask token's embedding is a row of ``embed_tokens``. Where it is trained, the file holds the verifier's embedding
with that row in its place: vLLM shares the verifier's only where none is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve

from draftsmith.api import Problem, ServingPlan, VerifierFacts
from draftsmith.errors import CheckpointError
from draftsmith.interfaces import ExportContext, Finding, TensorSpec
from draftsmith.speculators import (
    SpeculatorsFormat,
    error,
    lint_mask_token,
    other_network,
    speculative_tokens,
    trained_tokens,
    warning,
    written_config,
)
from draftsmith_eagle3.checkpoint import Eagle3Checkpoint, NetworkCheckpoint
from draftsmith_peagle.options import PEagleOptions, mask_token

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["PEagleCheckpoint"]

_EMBEDDING, _HIDDEN, _ROW = "embed_tokens.weight", "mask_hidden", "mask_embedding"
_TRAINED = "embed_requires_grad"


class PEagleCheckpoint(NetworkCheckpoint):
    """Reads, writes and checks P-EAGLE drafts. What all speculators formats share is linted by the core."""

    #: those that vLLM forwards to a draft of this type
    flags: ClassVar[Mapping[str, bool]] = {"norm_before_residual": False, "norm_before_fc": False}
    #: vLLM looks for mask_hidden anywhere in a name
    renamed: ClassVar[Mapping[str, str]] = {**SpeculatorsFormat.renamed, "model.mask_hidden": _HIDDEN}

    # --- writing ------------------------------------------------------------------------------------------------

    def config(self, context: ExportContext) -> dict[str, Any]:
        setup = context.setup
        options: PEagleOptions = setup.options
        own = {
            **self.network_keys(context),
            "fc_norm": False,
            "norm_output": False,
            "mask_token_id": mask_token(options, setup.verifier),
            _TRAINED: options.train_mask_embedding,
        }
        return written_config("peagle", "PEagleSpeculator", context, self.layer_keys(context), own)

    def tensors(self, model: nn.Module, context: ExportContext) -> dict[str, Tensor]:
        tensors = super().tensors(model, context)
        row = tensors.pop(_ROW, None)
        if row is not None:
            embedding = model.get_parameter(_EMBEDDING).detach().clone()
            embedding[mask_token(context.setup.options, context.setup.verifier)] = row[0].to(embedding)
            tensors[_EMBEDDING] = embedding
        return tensors

    def expected_tensors(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        specs = dict(super().expected_tensors(config))
        width = specs["fc.weight"].shape[1]
        specs[_HIDDEN] = TensorSpec(shape=(1, 1, width), why="mask rows read it in place of features")
        if config.get(_TRAINED):
            why = "one of its rows is trained, that of the mask token; vLLM would take the verifier's"
            specs[_EMBEDDING] = evolve(specs[_EMBEDDING], required=True, why=why)
        return specs

    # --- reading ------------------------------------------------------------------------------------------------

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        token = _mask_token_id(config)
        if token is None:
            raise CheckpointError(
                "the mask token is missing", where="mask_token_id", hint="vLLM refuses a configuration without it"
            )
        if config.get("fc_norm"):
            raise CheckpointError(
                "the draft was trained with norms that vLLM does not give to one of this type",
                where="fc_norm",
                hint="train it again without",
            )
        return {
            "num_depths": trained_tokens(config) or speculative_tokens(config) or 1,
            "mask_token_id": token,
            # The format's own default: writers that leave it out train the embedding.
            "train_mask_embedding": bool(config.get(_TRAINED, True)),
            **self.network_options(config),
        }

    def load(self, model: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """The mask token's row of the embedding becomes the parameter that it is in training."""
        state = model.state_dict()
        given = dict(tensors)
        if _ROW in state:
            token = _mask_token_id(config)
            embedding = given.get(_EMBEDDING, state[_EMBEDDING])
            if token is None or not 0 <= token < embedding.shape[0]:
                raise CheckpointError(f"there is no row of the mask token {token}", where=_EMBEDDING)
            given[_ROW] = embedding[token][None].float()
            if _EMBEDDING in given:
                # But for that row, the matrix may be the verifier's: then it stays shared.
                given[_EMBEDDING] = embedding.clone()
                given[_EMBEDDING][token] = state[_EMBEDDING][token].to(embedding)
        super().load(model, given, config)

    def serving(self, config: Mapping[str, Any]) -> ServingPlan:
        """vLLM's method for EAGLE-3, all tokens in one pass: https://github.com/vllm-project/speculators/pull/480."""
        return evolve(super().serving(config), extra={"parallel_drafting": True}, since="0.16")

    # --- beginning from another checkpoint ----------------------------------------------------------------------

    def warm_start_problems(
        self, config: Mapping[str, Any], options: Any, verifier: VerifierFacts
    ) -> Sequence[Problem]:
        ours: PEagleOptions = options
        if not _is_peagle(config):
            # What is fed back (norm_output) is the only flag without a meaning here.
            compared = evolve(ours, norm_output=Eagle3Checkpoint().flag(config, "norm_output"))
            return Eagle3Checkpoint().warm_start_problems(config, compared, verifier)
        token, theirs = mask_token(ours, verifier), _mask_token_id(config)
        different = [] if token == theirs else [f"mask_token_id is {token}, the other's {theirs}"]
        return [*super().warm_start_problems(config, options, verifier), *other_network(different)]

    def warm_start(self, model: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Sequence[str]:
        """All of it; from an EAGLE-3 draft the network alone, and what mask rows read stays fresh."""
        if _is_peagle(config):
            return super().warm_start(model, tensors, config)
        state = model.state_dict()
        fresh = [name for name in (_HIDDEN, _ROW) if name in state]
        super().load(model, {**tensors, **{name: state[name] for name in fresh}}, config)
        return fresh

    # --- checking -----------------------------------------------------------------------------------------------

    def lint(
        self, config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: VerifierFacts | None
    ) -> Sequence[Finding]:
        return [
            *super().lint(config, present, verifier),
            *lint_mask_token(_mask_token_id(config), config, verifier),
            *_lint_dropped(config),
        ]


# --- reading a configuration ------------------------------------------------------------------------------------


def _is_peagle(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") == "peagle"


def _mask_token_id(config: Mapping[str, Any]) -> int | None:
    value = config.get("mask_token_id")
    return None if value is None else int(value)


# --- lint -------------------------------------------------------------------------------------------------------


def _lint_dropped(config: Mapping[str, Any]) -> Iterator[Finding]:
    if config.get("fc_norm"):
        what = "vLLM does not forward fc_norm to a draft of this type, and serves it without the norms"
        yield error(what, "fc_norm", "train it again without")
    if config.get("norm_output"):
        what = "norm_output has no effect: nothing is fed back, and vLLM does not forward it"
        yield warning(what, "norm_output", "write false")
