"""The exported format: speculators' ``eagle3`` config.json and tensors, as vLLM 0.32 loads them.

Contract: ``vllm/model_executor/models/{llama,qwen3}_eagle3.py`` (which tensors and flags), and what all types of the
format share (:mod:`draftsmith.speculators`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from draftsmith.api import CaptureRequirements, Problem, VerifierFacts
from draftsmith.errors import CheckpointError
from draftsmith.interfaces import ExportContext, Finding, TensorSpec
from draftsmith.layer_config import LayerConfig
from draftsmith.speculators import (
    LAYER_OVERRIDES,
    SpeculatorsFormat,
    bias_specs,
    biases,
    decoder_tensors,
    error,
    layers_of,
    lint_against_verifier,
    lint_biases,
    lint_layer_ids,
    lint_layers,
    lint_read_plainly,
    other_network,
    shared_tensor_specs,
    speculative_tokens,
    target_width,
    trained_tokens,
    warning,
    written_config,
)
from draftsmith_eagle3.options import default_layer_ids, layer_config

__all__ = ["Eagle3Checkpoint", "NetworkCheckpoint"]


class NetworkCheckpoint(SpeculatorsFormat):
    """What checkpoints of all algorithms with EAGLE-3's network share.

    Attributes:
        flags: flag of the network → what vLLM takes where the key is missing.
    """

    method = "eagle3"
    since = "0.8.5"  # https://github.com/vllm-project/vllm/pull/16937
    flags: ClassVar[Mapping[str, bool]]

    # --- writing ------------------------------------------------------------------------------------------------

    def network_keys(self, context: ExportContext) -> dict[str, Any]:
        """The keys of config.json that describe network and taps."""
        setup = context.setup
        return {
            **{name: getattr(setup.options, name) for name in self.flags},
            "eagle_aux_hidden_state_layer_ids": list(setup.capture.layer_ids),
        }

    def layer_keys(self, context: ExportContext) -> dict[str, Any]:
        """``transformer_layer_config``."""
        setup = context.setup
        layers = layer_config(setup.options, setup.verifier).to_dict()
        # vLLM's Llama class takes three tapped layers for granted unless this stands among the layers' keys.
        return {**layers, "num_aux_hidden_states": len(setup.capture.layer_ids)}

    def expected_tensors(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        layers = LayerConfig.from_dict(layers_of(config))
        width, read_width, taps = layers.hidden_size, target_width(config), _num_taps(config)
        specs = {
            "fc.weight": TensorSpec(shape=(width, taps * read_width)),
            "norm.weight": TensorSpec(shape=(width,)),
            **shared_tensor_specs(config),
            # Without the flag vLLM passes it over, which lint reports as what it is.
            "input_norm.weight": TensorSpec(
                shape=(taps * read_width,),
                required=self.flag(config, "norm_before_fc"),
                why="norm_before_fc asks for it",
            ),
        }
        if self.flag(config, "fc_norm"):
            specs.update({f"fc_norm.{tap}.weight": TensorSpec(shape=(read_width,)) for tap in range(taps)})
        why = "vLLM does not miss it, and drafts nonsense"
        specs["layers.0.hidden_norm.weight"] = TensorSpec(shape=(width,), why=why)
        for index in range(layers.num_layers):
            # The first layer reads [embedding, hidden].
            tensors = decoder_tensors(layers, width if index else 2 * width)
            specs.update({f"layers.{index}.{name}": spec for name, spec in tensors})
        return {**specs, **bias_specs(specs)}

    # --- reading ------------------------------------------------------------------------------------------------

    def flag(self, config: Mapping[str, Any], name: str) -> bool:
        """The flag as vLLM takes it. In checkpoints older than the format all are off.

        Some of those have a dictionary of their own for what concerns the draft; one flag is looked for there first.
        """
        if name not in self.flags:
            return False
        default = self.flags[name] if "speculators_model_type" in config else False
        value = (layers_of(config).get("eagle_config") or {}).get(name) if name == "norm_before_fc" else None
        value = config.get(name) if value is None else value
        return default if value is None else bool(value)

    def passed_over(self, config: Mapping[str, Any], names: Iterable[str]) -> Sequence[str]:
        known = set(names)
        norm = "input_norm.weight"
        return [*biases(known), *([norm] if norm in known and not self.flag(config, "norm_before_fc") else [])]

    def warm_start_problems(
        self, config: Mapping[str, Any], options: Any, verifier: VerifierFacts
    ) -> Sequence[Problem]:
        flags = {name: (getattr(options, name), self.flag(config, name)) for name in self.flags}
        different = [
            f"{name} is {ours}, the other's {theirs}" for name, (ours, theirs) in flags.items() if ours != theirs
        ]
        different += layer_config(options, verifier).differences(LayerConfig.from_dict(layers_of(config)))
        return other_network(different)

    def network_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The options that flags, taps and layers imply."""
        layers = LayerConfig.from_dict(layers_of(config))
        if layers.full_attention:
            raise CheckpointError(
                "some of the layers slide and others see everything",
                where="transformer_layer_config.layer_types",
                hint="drafts of this type have one window for all their layers",
            )
        plain = layers.to_dict()
        ids = _layer_ids(config)
        return {
            "num_layers": layers.num_layers,
            "layer_type": layers.layer_type,
            "intermediate_size": layers.intermediate_size,
            **{name: self.flag(config, name) for name in self.flags},
            "layer_ids": None if ids is None else tuple(sorted(set(ids))),
            "sliding_window": layers.sliding_window,
            "layer_overrides": {key: plain[key] for key in LAYER_OVERRIDES},
        }

    def capture(self, config: Mapping[str, Any], verifier: VerifierFacts) -> CaptureRequirements:
        ids = _layer_ids(config) or default_layer_ids(verifier.num_layers)
        return CaptureRequirements(layer_ids=tuple(sorted(set(ids))))

    # --- checking -----------------------------------------------------------------------------------------------

    def lint(
        self, config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: VerifierFacts | None
    ) -> Sequence[Finding]:
        findings = [
            *self._lint_flags(config, present),
            *_lint_layer_ids(config, verifier),
            *lint_layers(config),
            *lint_read_plainly(config, READ_PLAINLY.get(layers_of(config).get("model_type") or "llama", ())),
        ]
        if verifier is not None:
            findings += lint_against_verifier(config, present, verifier)
        return findings

    def _lint_flags(self, config: Mapping[str, Any], present: Mapping[str, TensorSpec]) -> Iterator[Finding]:
        for name, default in self.flags.items():
            if config.get(name) is None:
                yield warning(
                    f"{name} is not written; vLLM takes {default}",
                    name,
                    "write every flag: writers' defaults and vLLM's differ",
                )
        if "input_norm.weight" in present and not self.flag(config, "norm_before_fc"):
            yield error(
                "input_norm.weight is there and norm_before_fc is off: vLLM passes it over, and drafts without "
                "the norm",
                "norm_before_fc",
                "write true, if the draft was trained with it",
            )
        yield from lint_biases(biases(present))
        if self.flag(config, "norm_before_fc") and self.flag(config, "fc_norm"):
            yield error("norm_before_fc and fc_norm exclude each other; vLLM would apply both", "fc_norm")


class Eagle3Checkpoint(NetworkCheckpoint):
    """Reads, writes and checks EAGLE-3 drafts. What all speculators formats share is linted by the core."""

    flags: ClassVar[Mapping[str, bool]] = {
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }
    skipped = (*SpeculatorsFormat.skipped, "mask_hidden")  # the input of parallel drafting

    def config(self, context: ExportContext) -> dict[str, Any]:
        own = {**self.network_keys(context), "embed_requires_grad": False}
        return written_config("eagle3", "Eagle3Speculator", context, self.layer_keys(context), own)

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        steps = trained_tokens(config) or speculative_tokens(config) or 1
        return {"ttt_steps": steps, **self.network_options(config)}


# --- reading a configuration ------------------------------------------------------------------------------------


def _layer_ids(config: Mapping[str, Any]) -> list[int] | None:
    eagle = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    return [int(each) for each in ids] if ids else None


def _num_taps(config: Mapping[str, Any]) -> int:
    ids = _layer_ids(config)
    return len(set(ids)) if ids else int(layers_of(config).get("num_aux_hidden_states") or 3)


# --- lint -------------------------------------------------------------------------------------------------------


#: layer type → keys of the layers that vLLM's class reads without a default; sizes are checked with the format itself
READ_PLAINLY = {
    "llama": ("hidden_act", "rms_norm_eps"),
    "qwen3": ("hidden_act", "max_position_embeddings", "num_key_value_heads", "rms_norm_eps"),
}


def _lint_layer_ids(config: Mapping[str, Any], verifier: VerifierFacts | None) -> Iterator[Finding]:
    where = "eagle_aux_hidden_state_layer_ids"
    ids = _layer_ids(config)
    taps = layers_of(config).get("num_aux_hidden_states")
    if ids is None:
        yield warning("the tapped layers are not written; vLLM takes [2, n//2, n-3]", where, "write them")
        return
    yield from lint_layer_ids(ids, where, verifier)
    count = len(set(ids))
    inside = "transformer_layer_config.num_aux_hidden_states"
    if taps is None and count != 3 and layers_of(config).get("model_type", "llama") == "llama":
        yield error(f"vLLM's Llama draft assumes 3 tapped layers, there are {count}", inside, f"set it to {count}")
    if taps is not None and int(taps) != count:
        yield error(f"it says {taps} tapped layers, the list has {count}", inside, f"set it to {count}")
