"""The exported files, as vLLM 0.32 reads them (``vllm/transformers_utils/configs/medusa.py`` and the model's loader).

vLLM knows the heads by ``model_type``; what says who drafts for whom stands beside it. Its loader passes over names
that it does not know, and misses a tensor that it wants. A reduced vocabulary (``token_map``) it refuses: it takes the
map for a weight that nobody loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from draftsmith.api import CaptureRequirements, Problem, ServingPlan, VerifierFacts
from draftsmith.errors import CheckpointError
from draftsmith.interfaces import CheckpointFormat, ExportContext, Finding, TensorSpec
from draftsmith.speculators import drafts_for, error, other_network, speculative_tokens, trained_tokens

if TYPE_CHECKING:
    from torch import Tensor, nn

_HEAD = "lm_head.weight"


class MedusaCheckpoint(CheckpointFormat):
    native: ClassVar[bool] = True

    def config(self, context: ExportContext) -> dict[str, Any]:
        setup = context.setup
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "dtype": "bfloat16",
            "hidden_size": setup.verifier.hidden_size,
            "vocab_size": setup.verifier.vocab_size,
            "truncated_vocab_size": setup.verifier.vocab_size,
            "num_heads": setup.options.num_heads,
            "num_hidden_layers": setup.options.num_layers,
            "original_lm_head": True,
            "medusa_fc_bias": False,
            "speculators_model_type": "medusa",
            "speculators_config": drafts_for(
                "medusa", context.verifier_name, setup.verifier.architectures, context.speculative_tokens
            ),
        }

    def tensors(self, model: nn.Module, context: ExportContext) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def expected_tensors(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        width = int(config["hidden_size"])
        specs = {
            f"blocks.{head}.layers.{layer}.weight": TensorSpec(shape=(width, width), refused=True)
            for head in range(int(config["num_heads"]))
            for layer in range(int(config["num_hidden_layers"]))
        }
        return {**specs, _HEAD: TensorSpec(shape=(int(config["vocab_size"]), width), refused=True)}

    def load(self, model: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        import torch

        from draftsmith_medusa.model import MedusaHeads

        assert isinstance(model, MedusaHeads)
        blocks = {name: each for name, each in model.state_dict().items() if name != _HEAD}
        for name in (_HEAD, *blocks):
            if name not in tensors or tensors[name].shape != model.state_dict()[name].shape:
                raise CheckpointError(
                    f"tensor {name} is missing, or has another shape",
                    where="model.safetensors",
                    hint="see `draftsmith lint`",
                )
        with torch.no_grad():
            for name, tensor in blocks.items():
                tensor.copy_(tensors[name])
        model.replace_head(tensors[_HEAD])

    def warm_start_problems(
        self, config: Mapping[str, Any], options: Any, verifier: VerifierFacts
    ) -> Sequence[Problem]:
        wanted = {"num_heads": options.num_heads, "num_hidden_layers": options.num_layers}
        different = {key: config.get(key) for key, value in wanted.items() if config.get(key) != value}
        return other_network(f"{key} is {wanted[key]}, the other's {theirs}" for key, theirs in different.items())

    def warm_start(self, model: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Sequence[str]:
        """The blocks; the output layer stays the verifier's."""
        self.load(model, {**tensors, _HEAD: model.get_parameter(_HEAD).detach()}, config)
        return ()

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"num_heads": int(config["num_heads"]), "num_layers": int(config["num_hidden_layers"])}

    def capture(self, config: Mapping[str, Any], verifier: VerifierFacts) -> CaptureRequirements:
        return CaptureRequirements(layer_ids=(verifier.num_layers,))

    def serving(self, config: Mapping[str, Any]) -> ServingPlan:
        tokens = speculative_tokens(config) or trained_tokens(config)
        if tokens is None:
            raise CheckpointError("the number of speculative tokens is missing", where="speculators_config")
        note = "vLLM serves Medusa heads with greedy proposals, on its model runner V1, beside their verifier."
        return ServingPlan(method="medusa", num_speculative_tokens=tokens, as_model=False, notes=(note,))

    def lint(
        self, config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: VerifierFacts | None
    ) -> Sequence[Finding]:
        findings = []
        if config.get("model_type") != "medusa":
            findings.append(error("vLLM knows the heads by model_type medusa", "config.json: model_type"))
        if not config.get("original_lm_head"):
            findings.append(error("the heads share one output layer", "config.json: original_lm_head", "write true"))
        if config.get("truncated_vocab_size") not in (None, config["vocab_size"]):
            there = "vLLM 0.32 refuses heads with a reduced vocabulary: their token_map counts as not loaded"
            findings.append(error(there, "config.json: truncated_vocab_size", "train with every token"))
        if (tokens := speculative_tokens(config)) not in (None, config["num_heads"]):
            where = "config.json: speculators_config.proposal_methods[0].speculative_tokens"
            findings.append(error(f"{config['num_heads']} heads draft that many tokens, not {tokens}", where))
        for key in ("hidden_size", "vocab_size"):
            if verifier is not None and config.get(key) != getattr(verifier, key):
                there = f"{key} is {config.get(key)}, the verifier's {getattr(verifier, key)}"
                findings.append(error(there, f"config.json: {key}", "it belongs to another verifier"))
        return findings
