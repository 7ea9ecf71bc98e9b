"""The exported format: speculators' ``dspark`` config.json and tensors, as vLLM 0.32 loads them.

Contract: ``vllm/transformers_utils/configs/speculators/algos.py`` (``update_dspark``: which keys are read, and their
defaults when missing), ``vllm/model_executor/models/qwen3_dspark.py`` (which tensors), and what DFlash's format shares
with it. Training also begins from DFlash checkpoints, of the format or of z-lab's own, and from DeepSeek's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from attrs import evolve

from draftsmith.api import CaptureRequirements, Problem, ServingPlan, VerifierFacts
from draftsmith.interfaces import ExportContext, Finding, TensorSpec
from draftsmith.layer_config import LayerConfig
from draftsmith.speculators import (
    draft_size,
    error,
    layers_of,
    other_network,
    speculative_tokens,
    trained_tokens,
    warning,
    written_config,
)
from draftsmith_dflash.checkpoint import BlockCheckpoint
from draftsmith_dflash.options import Layout, layer_config
from draftsmith_dspark.options import DSparkOptions, MarkovKind, why_unservable

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["DSparkCheckpoint"]

_HEADS = ("markov_head.", "confidence_head.")
_ANCHOR = "sample_from_anchor"
_NON_CAUSAL = "sliding_window_non_causal"


class DSparkCheckpoint(BlockCheckpoint):
    """Reads, writes and checks DSpark drafts. What all speculators formats share is linted by the core."""

    method = "dspark"

    # --- writing ------------------------------------------------------------------------------------------------

    def config(self, context: ExportContext) -> dict[str, Any]:
        options: DSparkOptions = context.setup.options
        own = {
            **self.block_keys(context),
            _ANCHOR: options.layout == "anchor_first",
            "markov_rank": options.markov_rank,
            "markov_head_type": options.markov_head,
            "enable_confidence_head": options.confidence,
            "confidence_head_with_markov": options.confidence_with_markov and options.markov_rank > 0,
        }
        layers = layer_config(options, context.setup.verifier).to_dict()
        if options.sliding_window is not None and options.sliding_window_non_causal:
            # vLLM goes by the layers' types and takes sliding ones for causal, unless this stands among their keys.
            layers["is_causal"] = False
        return written_config("dspark", "DSparkSpeculator", context, layers, own)

    def expected_tensors(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        layers = LayerConfig.from_dict({"model_type": "qwen3", **layers_of(config)})
        width, rank = layers.hidden_size, _rank(config)
        specs = dict(super().expected_tensors(config))
        if draft_size(config) < layers.vocab_size:
            why = "this type's loader asks for it where the vocabulary is reduced"
            specs |= {name: evolve(specs[name], refused=True, why=why) for name in ("lm_head.weight", "d2t")}
        if rank:
            why = "vLLM does not miss it, and corrects the logits by noise"
            specs["markov_head.markov_w1.weight"] = TensorSpec(shape=(layers.vocab_size, rank), why=why)
            specs["markov_head.markov_w2.weight"] = TensorSpec(shape=(draft_size(config), rank), why=why)
            if _kind(config) == "gated":
                specs["markov_head.gate_proj.weight"] = TensorSpec(shape=(rank, width + rank))
                specs["markov_head.gate_proj.bias"] = TensorSpec(shape=(rank,))
            if _kind(config) == "rnn":
                specs["markov_head.joint_proj.weight"] = TensorSpec(shape=(3 * rank, 2 * rank + width))
                specs["markov_head.joint_proj.bias"] = TensorSpec(shape=(3 * rank,))
        inputs = width + (rank if config.get("confidence_head_with_markov") else 0)
        why = "without it vLLM estimates the acceptance by itself"
        specs["confidence_head.proj.weight"] = TensorSpec(shape=(1, inputs), required=False, why=why)
        specs["confidence_head.proj.bias"] = TensorSpec(shape=(1,), required=False, why=why)
        return specs

    # --- reading ------------------------------------------------------------------------------------------------

    def passed_over(self, config: Mapping[str, Any], names: Iterable[str]) -> Sequence[str]:
        return [name for name in super().passed_over(config, names) if not name.startswith(_HEADS)]

    def unread_files(self, config: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, str]:
        """Those of a DFlash draft that is begun from: of this type vLLM reads the tensors alone."""
        return {} if _is_dspark(config) else super().unread_files(config, names)

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        config = _translated(config)
        layout = _layout(config)
        unused = 1 if layout == "bonus_anchor" else 0
        trained = trained_tokens(config)
        size = trained + unused if trained else config.get("block_size")
        return {
            **self.block_options(config),
            "block_size": int(size or (speculative_tokens(config) or 1) + unused),
            "layout": layout,
            "markov_head": _kind(config),
            "markov_rank": _rank(config),
            "confidence": bool(config.get("enable_confidence_head")),
            "confidence_with_markov": bool(config.get("confidence_head_with_markov")),
        }

    def block_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        values = super().block_options(config)
        if _is_dspark(config):  # else a DFlash draft, whose key vLLM follows
            values[_NON_CAUSAL] = not (_slides(config) and _sliding_layers_are_causal(config))
        return values

    def capture(self, config: Mapping[str, Any], verifier: VerifierFacts) -> CaptureRequirements:
        return super().capture(_translated(config), verifier)

    def rows_see_each_other(self, config: Mapping[str, Any]) -> bool:
        types = layers_of(config).get("layer_types") or ("full_attention",)
        return not (_sliding_layers_are_causal(config) and all(each == "sliding_attention" for each in types))

    def serving(self, config: Mapping[str, Any]) -> ServingPlan:
        """Model runner V2 only, and only the vanilla Markov head."""
        plan, reason = super().serving(config), why_unservable(_rank(config), _kind(config))
        notes = () if reason else (*plan.notes, *_notes(config))
        return evolve(plan, needs_v2_runner=True, unservable=reason, notes=notes)

    # --- beginning from another checkpoint ----------------------------------------------------------------------

    def warm_start_problems(
        self, config: Mapping[str, Any], options: Any, verifier: VerifierFacts
    ) -> Sequence[Problem]:
        ours: DSparkOptions = options
        config = _translated(config)
        problems = []
        layout = _layout(config)
        if layout != ours.layout:
            problems.append(
                Problem(
                    f"the checkpoint's blocks are laid out {layout}, this run's {ours.layout}: every row would have "
                    "to learn anew which token it predicts",
                    hint=f"set algorithm.options.layout: {layout}",
                )
            )
        problems += super().warm_start_problems(config, options, verifier)
        if _rank(config) and ours.markov_rank:
            pairs = {
                "markov_head": (ours.markov_head, _kind(config)),
                "markov_rank": (ours.markov_rank, _rank(config)),
            }
            problems += other_network(f"{name} is {a}, the other's {b}" for name, (a, b) in pairs.items() if a != b)
        if ours.confidence and config.get("enable_confidence_head"):
            reads = ours.confidence_with_markov, bool(config.get("confidence_head_with_markov"))
            if reads[0] != reads[1]:
                problems += other_network([f"confidence_with_markov is {reads[0]}, the other's {reads[1]}"])
        return problems

    def warm_start(self, model: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Sequence[str]:
        """The backbone, and the heads as far as both have them; the rest of the model's stays fresh."""
        state = model.state_dict()
        given = {name: tensor for name, tensor in tensors.items() if name in state or not name.startswith(_HEADS)}
        fresh = [name for name in state if name.startswith(_HEADS) and name not in given]
        self.load(model, {**given, **{name: state[name] for name in fresh}}, _translated(config))
        return fresh

    # --- checking -----------------------------------------------------------------------------------------------

    def lint(
        self, config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: VerifierFacts | None
    ) -> Sequence[Finding]:
        return [
            *super().lint(config, present, verifier),
            *_lint_layout(config),
            *_lint_causality(config),
            *_lint_heads(config, present),
        ]


# --- reading a configuration ------------------------------------------------------------------------------------


def _translated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A draft in DeepSeek's own format (all keys at the top, layers counted from 0 after each) in the terms of ours.

    Its anchors predict unless it says otherwise: that is what vLLM takes of a configuration that is no speculators'.
    """
    if "speculators_model_type" in config or "markov_rank" not in config:
        return config
    after = config.get("target_layer_ids")
    ids = {} if after is None else {"aux_hidden_state_layer_ids": [int(each) + 1 for each in after]}
    return {_ANCHOR: True, **ids, **config}


def _layout(config: Mapping[str, Any]) -> Layout:
    """As vLLM takes it: a missing key means that the anchor's row predicts nothing. So it is in every DFlash draft."""
    return "anchor_first" if config.get(_ANCHOR) else "bonus_anchor"


def _rank(config: Mapping[str, Any]) -> int:
    return int(config.get("markov_rank") or 0)


def _kind(config: Mapping[str, Any]) -> MarkovKind:
    return cast(MarkovKind, config.get("markov_head_type") or "vanilla")


def _is_dspark(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") == "dspark" or "markov_rank" in config


def _sliding_layers_are_causal(config: Mapping[str, Any]) -> bool:
    """As vLLM takes it of this type: ``is_causal`` among the layers' keys, or else their own type."""
    value = layers_of(config).get("is_causal")
    return True if value is None else bool(value)


def _slides(config: Mapping[str, Any]) -> bool:
    return "sliding_attention" in (layers_of(config).get("layer_types") or ())


def _notes(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("enable_confidence_head"):
        yield 'Its confidence head is used with `"enable_adaptive_verification": true` in the speculative config.'
    yield 'Where tokens are sampled, `"draft_sample_method": "probabilistic"` gets more of them accepted.'


# --- lint -------------------------------------------------------------------------------------------------------


def _lint_layout(config: Mapping[str, Any]) -> Iterator[Finding]:
    if config.get(_ANCHOR) is None:
        yield warning(
            f"{_ANCHOR} is not written; vLLM takes False, the format's own default is True",
            _ANCHOR,
            "write true where the anchor's row predicts a token, else false",
        )


def _lint_causality(config: Mapping[str, Any]) -> Iterator[Finding]:
    nested = layers_of(config).get("dflash_config")
    if isinstance(nested, Mapping) and nested:
        yield error(
            f"vLLM takes {', '.join(sorted(nested))} from here, before what the draft was trained with",
            "transformer_layer_config.dflash_config",
            "remove it",
        )
    where = "transformer_layer_config.is_causal"
    value = layers_of(config).get("is_causal")
    types = layers_of(config).get("layer_types") or ()
    if value and any(each != "sliding_attention" for each in types):
        yield error("layers that see everything are served causally, and trained to see their whole block", where)
    written = config.get(_NON_CAUSAL)
    if _slides(config) and written is not None and bool(written) == _sliding_layers_are_causal(config):
        seen = "their whole block" if written else "earlier rows only"
        yield error(
            f"sliding layers are trained to see {seen} ({_NON_CAUSAL} {bool(written)}), and vLLM, which goes by "
            "their type and by is_causal, serves them otherwise",
            where,
            f"write {str(not written).lower()}, or leave it out where only sliding layers are causal",
        )


def _lint_heads(config: Mapping[str, Any], present: Mapping[str, TensorSpec]) -> Iterator[Finding]:
    if config.get("markov_rank") is None:
        yield error("the rank of the Markov head is missing; vLLM refuses the configuration", "markov_rank")
    if config.get("confidence_head_with_markov") and not _rank(config):
        yield error(
            "the confidence head reads an embedding of the Markov head, which has none (markov_rank 0)",
            "confidence_head_with_markov",
            "write false, if it was trained so",
        )
    there = "confidence_head.proj.weight" in present
    if there != ("confidence_head.proj.bias" in present):
        yield error("the confidence head has a weight or a bias, but not both", "confidence_head.proj")
    if there and not config.get("enable_confidence_head"):
        yield warning(
            "there is a confidence head, and vLLM passes it over",
            "enable_confidence_head",
            "write true, to use it for adaptive verification",
        )
    if not there and config.get("enable_confidence_head"):
        yield warning(
            "there is no confidence head: vLLM estimates the acceptance by itself, if it verifies adaptively",
            "enable_confidence_head",
            "write false",
        )
