"""Drafts that take one step a token: output, state ← step(embedding of the newest token, state), and the verifier's
head reads the output. The state begins as the verifier's last hidden state, after its final norm. Torch-free import.

A package for such a draft has the step, which training and vLLM both run, and its equations once more. What all of
them share is here: options and format, the training forward (:mod:`draftsmith.recurrent.training`), the serving path
(:mod:`draftsmith.recurrent.replay`), and the network as vLLM runs it (:mod:`draftsmith.recurrent.served`).

Source of the idea: Recurrent Drafter (arXiv 2403.09919).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from attrs import asdict, evolve, field, frozen
from attrs.validators import and_, ge, gt, le

from draftsmith.api import PROJECT_NAME, CaptureRequirements, ServingPlan, VerifierFacts
from draftsmith.interfaces import ExportContext, Finding, TensorSpec
from draftsmith.layer_config import LayerConfig
from draftsmith.speculators import (
    SpeculatorsFormat,
    error,
    layers_of,
    lint_against_verifier,
    package_of,
    shared_tensor_specs,
    speculative_tokens,
    trained_tokens,
    written_config,
)

__all__ = ["RecurrentFormat", "RecurrentOptions", "requirements"]

_EMBEDDING = "embed_tokens.weight"
#: Key of config.json that has the algorithm's options.
_OPTIONS = "options"


@frozen(kw_only=True)
class RecurrentOptions:
    """What every such algorithm can be told; derive from it to add the step's own."""

    num_tokens: int = field(default=3, validator=ge(1), metadata={"help": "tokens drafted in training, one a step"})
    step_decay: float = field(
        default=0.8,
        validator=and_(gt(0.0), le(1.0)),
        metadata={"help": "weight of each step in the loss, of the one before"},
    )


def requirements(options: RecurrentOptions, verifier: VerifierFacts) -> CaptureRequirements:
    """The last layer's output: the state begins with it, and the teacher's logits are made of it."""
    return CaptureRequirements(layer_ids=(verifier.num_layers,))


class RecurrentFormat(SpeculatorsFormat):
    """Exported files of a recurrent draft: the step's tensors, and in config.json the algorithm's ``options``.
    Embedding and head are the verifier's.

    Attributes:
        kind: ``speculators_model_type``, a type of the package's own.
        method: vLLM's proposer, one that hands a draft the token and the state before it.
    """

    kind: ClassVar[str]

    @abstractmethod
    def step_shapes(self, config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        """Shape of each of the step's tensors, by its name there. Torch-free."""

    def config(self, context: ExportContext) -> dict[str, Any]:
        setup = context.setup
        # No layer is made of these. vLLM reads widths and heads here, as of any draft.
        layers = LayerConfig.from_verifier(setup.verifier, layer_type="llama", num_layers=1)
        own = {_OPTIONS: asdict(setup.options)}
        return written_config(self.kind, setup.architecture.__name__, context, layers.to_dict(), own)

    def expected_tensors(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        shapes = self.step_shapes(config)
        step = {f"step.{name}": TensorSpec(shape=shape, refused=True) for name, shape in shapes.items()}
        return {**step, _EMBEDDING: shared_tensor_specs(config)[_EMBEDDING]}

    def passed_over(self, config: Mapping[str, Any], names: Iterable[str]) -> Sequence[str]:
        return ()  # a step's biases are no layer's

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        tokens = trained_tokens(config) or speculative_tokens(config)
        return {**config[_OPTIONS], **({} if tokens is None else {"num_tokens": tokens})}

    def capture(self, config: Mapping[str, Any], verifier: VerifierFacts) -> CaptureRequirements:
        return CaptureRequirements(layer_ids=(verifier.num_layers,))

    def serving(self, config: Mapping[str, Any]) -> ServingPlan:
        package = package_of(config) or f"the package of {self.kind!r}"
        note = f"vLLM must have {PROJECT_NAME} and {package} installed beside it: they make the draft known to it."
        return evolve(super().serving(config), notes=(note,))

    def lint(
        self, config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: VerifierFacts | None
    ) -> Sequence[Finding]:
        if verifier is None:
            return ()
        findings = list(lint_against_verifier(config, present, verifier))
        width = layers_of(config)["hidden_size"]
        if width != verifier.hidden_size:
            there = f"the state is {width} wide, the verifier's hidden state {verifier.hidden_size}"
            findings.append(error(there, "transformer_layer_config.hidden_size", "it belongs to another verifier"))
        return findings
