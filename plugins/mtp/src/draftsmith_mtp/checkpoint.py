"""The exported format: a native head in a folder of its own, as vLLM 0.32 loads it beside its model.

Contract: ``vllm/config/speculative.py`` (the head's class follows from the model's ``architectures`` and
``model_type``) and ``vllm/model_executor/models/*_mtp.py`` (names). vLLM builds the network from the model's
configuration, so config.json is a copy of it, with what draftsmith wants to find again beside (head.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from draftsmith.api import PROJECT_NAME, CaptureRequirements, Problem, ServingPlan, VerifierFacts
from draftsmith.errors import CheckpointError, DraftsmithError
from draftsmith.interfaces import CheckpointFormat, ExportContext, Finding, TensorSpec
from draftsmith.speculators import error, speculative_tokens, trained_tokens, warning
from draftsmith.verifier import tensor_specs
from draftsmith_mtp.families import MtpFamily, family_of, text_config
from draftsmith_mtp.head import ADDED_KEYS, HEAD_KEY, head_config, head_tensors, model_config, recorded_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["MtpCheckpoint"]

#: Keys of config.json in which a head and its model may differ: how they were written, not what they are.
_FREE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "quantization_config", "compression_config")


class MtpCheckpoint(CheckpointFormat):
    """Reads, writes and checks native heads. They come and go under the names of their model's tensors."""

    native: ClassVar[bool] = True

    # --- writing ------------------------------------------------------------------------------------------------

    def config(self, context: ExportContext) -> dict[str, Any]:
        verifier = context.setup.verifier
        family = family_of(verifier.text_config)
        native = _native(family, verifier)
        exact = {name: spec for name, spec in native.items() if family.is_exact(name, verifier.text_config)}
        return head_config(
            model_config(verifier.path),
            family,
            verifier_name=context.verifier_name,
            speculative_tokens=context.speculative_tokens,
            tensors={name: spec.shape for name, spec in native.items()},
            dtypes={name: spec.dtype for name, spec in exact.items() if spec.dtype is not None},
        )

    def tensors(self, model: nn.Module, context: ExportContext) -> dict[str, Tensor]:
        from draftsmith_mtp.model import MtpDraft

        assert isinstance(model, MtpDraft)
        verifier = context.setup.verifier
        family, config = model.family, verifier.text_config
        names = [str(family.own_name(name, config)) for name in _native(family, verifier)]
        return {family.model_name(own, config): tensor for own, tensor in model.head.stored(names).items()}

    def expected_tensors(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        return recorded_tensors(config)

    # --- reading ------------------------------------------------------------------------------------------------

    def as_loaded(self, config: Mapping[str, Any], present: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """Without copies of the model's embedding and head: vLLM puts the model's own in their place."""
        family, text = _family(config), text_config(config)
        return {name: spec for name, spec in present.items() if not family.is_copy(name, text)}

    def load(self, model: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        from draftsmith_mtp.model import MtpDraft

        assert isinstance(model, MtpDraft)
        family, text = _family(config), text_config(config)
        if family != model.family:
            raise CheckpointError(
                f"the head is of the family {family.name}, the verifier's of {model.family.name}",
                where=f"config.json: {HEAD_KEY}",
                hint="it belongs to another model",
            )
        kept = {name: tensor for name, tensor in tensors.items() if not family.is_copy(name, text)}
        model.load_head(kept, text)

    def warm_start_problems(
        self, config: Mapping[str, Any], options: Any, verifier: VerifierFacts
    ) -> Sequence[Problem]:
        try:
            family, own = _family(config), family_of(verifier.text_config)
        except DraftsmithError as problem:
            return list(problem.problems)
        if family != own:
            return [Problem(f"the head is of the family {family.name}, the verifier's of {own.name}")]
        different = _differences(recorded_tensors(config), _native(own, verifier))
        return [Problem(each, hint="it belongs to another model") for each in different]

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"num_steps": trained_tokens(config) or speculative_tokens(config) or 1}

    def capture(self, config: Mapping[str, Any], verifier: VerifierFacts) -> CaptureRequirements:
        return CaptureRequirements(layer_ids=(verifier.num_layers,))

    def serving(self, config: Mapping[str, Any]) -> ServingPlan:
        tokens = speculative_tokens(config)
        if tokens is None:
            raise CheckpointError(
                "the number of speculative tokens is missing",
                where="speculators_config.proposal_methods[0].speculative_tokens",
            )
        note = (
            "It is the model's own head: put back into a copy of the model (`draftsmith stitch`), it is served "
            "without a folder of its own."
        )
        return ServingPlan(
            method="mtp",
            num_speculative_tokens=tokens,
            as_model=False,
            needs_v2_runner=_family(config).needs_v2_runner,
            notes=(note,),
        )

    # --- checking -----------------------------------------------------------------------------------------------

    def lint(
        self, config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: VerifierFacts | None
    ) -> Sequence[Finding]:
        family = _family(config)
        findings: list[Finding] = []
        if family.num_layers(config) < 1:
            findings.append(
                error(
                    f"{family.layers_key} is {text_config(config).get(family.layers_key)!r}: vLLM builds no head",
                    f"config.json: {family.layers_key}",
                    "write 1",
                )
            )
        if verifier is not None:
            findings += _lint_against(config, family, verifier)
        return findings


def _family(config: Mapping[str, Any]) -> MtpFamily:
    """As vLLM tells it, which does not look at what is noted.

    Raises:
        CheckpointError: no family is known for such a configuration.
    """
    try:
        return family_of(config)
    except DraftsmithError as problem:
        raise CheckpointError(problem.what, where=problem.where, hint=problem.hint) from problem


def _native(family: MtpFamily, verifier: VerifierFacts) -> dict[str, TensorSpec]:
    """The tensors of the verifier's own head."""
    return head_tensors(family, verifier.text_config, tensor_specs(verifier.path))


def _differences(ours: Mapping[str, TensorSpec], theirs: Mapping[str, TensorSpec]) -> Iterator[str]:
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            yield f"the verifier's head has no tensor {name}"
        elif name not in ours:
            yield f"tensor {name} of the verifier's head is missing"
        elif ours[name].shape != theirs[name].shape:
            yield f"tensor {name} has shape {list(ours[name].shape)}, the verifier's {list(theirs[name].shape)}"


def _lint_against(config: Mapping[str, Any], family: MtpFamily, verifier: VerifierFacts) -> Iterator[Finding]:
    own = model_config(verifier.path)
    if not family.tells(own):
        yield error("the verifier is of another family", "config.json: architectures", "it belongs to another model")
        return
    skipped = {*_FREE, *ADDED_KEYS, PROJECT_NAME}
    ours, theirs = text_config(config), text_config(own)
    for key in sorted((ours.keys() | theirs.keys()) - skipped - {"text_config"}):
        if ours.get(key) != theirs.get(key):
            yield error(
                f"{key} is {ours.get(key)!r}, the verifier's {theirs.get(key)!r}: vLLM would build another head",
                f"config.json: {key}",
                "write the verifier's",
            )
    for each in _differences(recorded_tensors(config), _native(family, verifier)):
        yield error(each, "model.safetensors", "it belongs to another model")
    noted = config.get(PROJECT_NAME)
    fingerprint = noted.get("verifier_fingerprint") if isinstance(noted, Mapping) else None
    if fingerprint not in (None, verifier.fingerprint):
        yield warning(
            "the head was trained for another model than this one, or for it before its head was exchanged",
            f"config.json: {PROJECT_NAME}.verifier_fingerprint",
            "serve it with the model that it was trained for",
        )
