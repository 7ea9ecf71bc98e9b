"""The exported files: the format that vLLM finds its drafts by, with a type of this package's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from draftsmith.api import CaptureRequirements, ServingPlan, VerifierFacts
from draftsmith.interfaces import ExportContext, Finding, TensorSpec
from draftsmith.layer_config import LayerConfig
from draftsmith.speculators import (
    SpeculatorsFormat,
    error,
    layers_of,
    lint_against_verifier,
    speculative_tokens,
    trained_tokens,
    written_config,
)


class ToyCheckpoint(SpeculatorsFormat):
    method = "eagle"  # vLLM's proposer that hands a draft the token and the hidden state before it

    def config(self, context: ExportContext) -> dict[str, Any]:
        # No layer is made of these. vLLM reads widths and heads here, as of any draft.
        layers = LayerConfig.from_verifier(context.setup.verifier, layer_type="llama", num_layers=1)
        return written_config("toy", "ToyDraftModel", context, layers.to_dict(), {})

    def expected_tensors(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        width = int(layers_of(config)["hidden_size"])
        shapes = {
            **{f"cell.weight_{part}": (3 * width, width) for part in ("ih", "hh")},
            **{f"cell.bias_{part}": (3 * width,) for part in ("ih", "hh")},
            "norm.weight": (width,),
        }
        return {name: TensorSpec(shape=shape, refused=True) for name, shape in shapes.items()}

    def passed_over(self, config: Mapping[str, Any], names: Any) -> Sequence[str]:
        return ()  # the cell's biases are no layer's

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        tokens = trained_tokens(config) or speculative_tokens(config)
        return {} if tokens is None else {"num_tokens": tokens}

    def capture(self, config: Mapping[str, Any], verifier: VerifierFacts) -> CaptureRequirements:
        return CaptureRequirements(layer_ids=(verifier.num_layers,))

    def serving(self, config: Mapping[str, Any]) -> ServingPlan:
        note = "vLLM must have draftsmith and draftsmith-toy installed beside it: they make the draft known to it."
        # On model runner V2 it was not tried.
        return evolve(super().serving(config), environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}, notes=(note,))

    def lint(
        self, config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: VerifierFacts | None
    ) -> Sequence[Finding]:
        if verifier is None:
            return ()
        findings = list(lint_against_verifier(config, present, verifier))
        width = layers_of(config)["hidden_size"]
        if width != verifier.hidden_size:
            there = f"the cell is {width} wide, the verifier's hidden state {verifier.hidden_size}"
            findings.append(error(there, "transformer_layer_config.hidden_size", "it belongs to another verifier"))
        return findings
