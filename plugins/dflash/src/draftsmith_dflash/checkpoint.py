"""The exported format: speculators' ``dflash`` config.json and tensors, as vLLM 0.32 loads them.

Contract: ``vllm/transformers_utils/configs/speculators/algos.py`` (``update_dflash``: which keys are read, and their
defaults when missing), ``vllm/model_executor/models/qwen3_dflash.py`` (which tensors), and what all types of the
format share (:mod:`draftsmith.speculators`).

Drafts of z-lab's own format (``dflash_config`` at the top level, layer ids counted from 0 after a layer) are read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from attrs import evolve

from draftsmith.api import CaptureRequirements, Problem, ServingPlan, VerifierFacts
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
    lint_mask_token,
    lint_read_plainly,
    other_network,
    shared_tensor_specs,
    speculative_tokens,
    target_width,
    trained_tokens,
    warning,
    written_config,
)
from draftsmith_dflash.options import BlockOptions, layer_config, mask_token

__all__ = ["BlockCheckpoint", "DFlashCheckpoint"]

_IDS = "aux_hidden_state_layer_ids"
_NON_CAUSAL = "sliding_window_non_causal"
#: Gives queries, keys, values and outputs biases in vLLM, which then loads them.
_BIAS = "attention_bias"
#: Its row stands in for the embedding of the mask token; vLLM asks for it by this name in every DFlash draft's folder.
_MASK_FILE = "mask_embedding.pt"
_BIASES = "its attention has biases, which vLLM serves, and which are neither trained nor simulated here"


#: Of drafts of several layers; vLLM 0.32.
CPU_NOTE = (
    "On a CPU, vLLM normalises the context's keys of every layer with the first layer's weights, so that figures "
    "measured there differ a little from those of a GPU and of the simulator."
)


class BlockCheckpoint(SpeculatorsFormat):
    """What checkpoints of all algorithms with anchored blocks share: the network, its taps, its layers' attention."""

    #: a row for masks that some checkpoints carry; vLLM masks by the embedding of the mask token
    skipped = (*SpeculatorsFormat.skipped, "mask_embedding")
    renamed: ClassVar[Mapping[str, str]] = {
        **SpeculatorsFormat.renamed,
        "encoder.output_norm_enc.": "hidden_norm.",
        "encoder.fc.": "fc.",
    }

    # --- writing ------------------------------------------------------------------------------------------------

    def block_keys(self, context: ExportContext) -> dict[str, Any]:
        """The keys of config.json that describe network, blocks and attention."""
        setup = context.setup
        options: BlockOptions = setup.options
        return {
            "block_size": options.block_size,
            _IDS: list(setup.capture.layer_ids),
            "mask_token_id": mask_token(options, setup.verifier),
            _NON_CAUSAL: options.sliding_window_non_causal,
        }

    def expected_tensors(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        layers = _layer_config(config)
        width = layers.hidden_size
        why = "vLLM does not miss it, and drafts nonsense"
        specs = {
            "fc.weight": TensorSpec(shape=(width, len(required_layer_ids(config)) * target_width(config)), why=why),
            "hidden_norm.weight": TensorSpec(shape=(width,), why=why),
            "norm.weight": TensorSpec(shape=(width,), why=why),
            **shared_tensor_specs(config),
        }
        for index in range(layers.num_layers):
            specs.update({f"layers.{index}.{name}": spec for name, spec in decoder_tensors(layers)})
        known = bias_specs(specs)
        loaded = {name: evolve(known[name], required=True, why=why) for name in _loaded_biases(config, known)}
        return {**specs, **known, **loaded}

    # --- reading ------------------------------------------------------------------------------------------------

    def passed_over(self, config: Mapping[str, Any], names: Iterable[str]) -> Sequence[str]:
        found = biases(names)
        loaded = set(_loaded_biases(config, found))
        return [name for name in found if name not in loaded]

    def unread_files(self, config: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, str]:
        """The file of a mask row of its own, a pickle, which is never opened here."""
        return {name: "puts its row in place of the mask token's embedding" for name in names if name == _MASK_FILE}

    def block_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The options that those of :meth:`block_keys` and the layers imply."""
        layers = _layer_config(config)
        plain = layers.to_dict()
        mask = _mask_token_id(config)
        if mask is None:
            raise CheckpointError(
                "the mask token is missing", where="mask_token_id", hint="vLLM refuses a configuration without it"
            )
        if layers_of(config).get(_BIAS):
            raise CheckpointError(_BIASES, where=f"transformer_layer_config.{_BIAS}")
        return {
            "num_layers": layers.num_layers,
            "hidden_size": layers.hidden_size if layers.hidden_size != target_width(config) else None,
            "intermediate_size": layers.intermediate_size,
            "layer_ids": tuple(sorted(set(required_layer_ids(config)))),
            "mask_token_id": mask,
            "sliding_window": layers.sliding_window,
            "full_attention_indices": layers.full_attention,
            _NON_CAUSAL: non_causal(config),
            "layer_overrides": {key: plain[key] for key in LAYER_OVERRIDES},
        }

    def capture(self, config: Mapping[str, Any], verifier: VerifierFacts) -> CaptureRequirements:
        return CaptureRequirements(layer_ids=tuple(sorted(set(required_layer_ids(config)))))

    def warm_start_problems(
        self, config: Mapping[str, Any], options: Any, verifier: VerifierFacts
    ) -> Sequence[Problem]:
        ours: BlockOptions = options
        different = layer_config(ours, verifier).differences(_layer_config(config))
        theirs = self.block_options(config)
        pairs = {"mask_token_id": (mask_token(ours, verifier), theirs["mask_token_id"])}
        if ours.sliding_window is not None:  # layers that see everything see their whole block, whatever it says
            pairs[_NON_CAUSAL] = (ours.sliding_window_non_causal, theirs[_NON_CAUSAL])
        different += [f"{name} is {a}, the other's {b}" for name, (a, b) in pairs.items() if a != b]
        return other_network(different)

    # --- checking -----------------------------------------------------------------------------------------------

    def lint(
        self, config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: VerifierFacts | None
    ) -> Sequence[Finding]:
        findings = [
            *lint_layer_ids(required_layer_ids(config), _IDS, verifier),
            *lint_layers(config, bias_keys=()),
            *lint_biases(self.passed_over(config, present)),
            *lint_mask_token(_mask_token_id(config), config, verifier),
            *_lint_layer_type(config),
            *lint_read_plainly(config, READ_PLAINLY),
            *_lint_block_size(config, self.predicting_rows(config), self.rows_see_each_other(config)),
        ]
        if "mask_hidden" in present:
            findings.append(error("mask_hidden is there: vLLM's loader refuses it", "mask_hidden", "remove it"))
        if verifier is not None:
            findings += lint_against_verifier(config, present, verifier)
        return findings

    def predicting_rows(self, config: Mapping[str, Any]) -> int | None:
        """Rows of a block that predict, by the config; None where it does not say."""
        size = config.get("block_size")
        return None if size is None else int(size) - (0 if config.get("sample_from_anchor") else 1)

    def serving(self, config: Mapping[str, Any]) -> ServingPlan:
        """Notes what a CPU does to drafts of several layers: vLLM normalises the context's keys of all layers in one
        call (``qwen3_dflash.py``, ``_normalize_context_k``), and its CPU kernel takes the first layer's weight."""
        plan = super().serving(config)
        return evolve(plan, notes=(CPU_NOTE,)) if _layer_config(config).num_layers > 1 else plan

    def rows_see_each_other(self, config: Mapping[str, Any]) -> bool:
        """Whether some layer's rows see later rows of their block, so that their number makes a difference."""
        return non_causal(config)


class DFlashCheckpoint(BlockCheckpoint):
    """Reads, writes and checks DFlash drafts. What all speculators formats share is linted by the core."""

    method = "dflash"
    since = "0.20"  # by NVIDIA's guide to serving drafts of NeMo AutoModel with vLLM

    def config(self, context: ExportContext) -> dict[str, Any]:
        own = {**self.block_keys(context), "sample_from_anchor": False}
        layers = layer_config(context.setup.options, context.setup.verifier).to_dict()
        return written_config("dflash", "DFlashSpeculator", context, layers, own)

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        if config.get("sample_from_anchor"):
            raise CheckpointError(
                "the anchor's row predicts (sample_from_anchor): vLLM refuses such blocks for this type",
                where="sample_from_anchor",
                hint="a dspark draft may be laid out so",
            )
        drafted = trained_tokens(config) or speculative_tokens(config) or 1
        return {"block_size": int(config.get("block_size") or drafted + 1), **self.block_options(config)}

    def warm_start_problems(
        self, config: Mapping[str, Any], options: Any, verifier: VerifierFacts
    ) -> Sequence[Problem]:
        problems = list(super().warm_start_problems(config, options, verifier))
        if config.get("sample_from_anchor"):
            problems.append(
                Problem(
                    "the anchor's row predicts in the checkpoint (sample_from_anchor), and not in this run: every row "
                    "would have to learn anew which token it predicts",
                    hint="a dspark draft may be laid out so",
                )
            )
        return problems

    def serving(self, config: Mapping[str, Any]) -> ServingPlan:
        """Where some layers slide and some do not, there are two groups of caches, which only runner V2 has."""
        layers = _layer_config(config)
        return evolve(super().serving(config), needs_v2_runner=bool(layers.full_attention))

    def lint(
        self, config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: VerifierFacts | None
    ) -> Sequence[Finding]:
        return [*super().lint(config, present, verifier), *_lint_causality(config)]


# --- reading a configuration ------------------------------------------------------------------------------------


def _layer_config(config: Mapping[str, Any]) -> LayerConfig:
    layers = layers_of(config)
    return LayerConfig.from_dict({**layers, "model_type": layers.get("model_type") or "qwen3"})


def _loaded_biases(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those of *names*, all of them biases, that vLLM has a place for."""
    return [name for name in names if layers_of(config).get(_BIAS) and ".self_attn." in name and "_proj." in name]


def _foreign(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``dflash_config``, in which z-lab's own checkpoints have what the format keeps at the top level."""
    found = config.get("dflash_config")
    return found if isinstance(found, Mapping) else {}


def layer_ids(config: Mapping[str, Any]) -> list[int] | None:
    """The tapped layers, as vLLM counts; other projects count the layers whose output it is from 0."""
    ids = config.get(_IDS)
    if ids is None:
        after = _foreign(config).get("target_layer_ids")
        ids = None if after is None else [each + 1 for each in after]
    return [int(each) for each in ids] if ids else None


def required_layer_ids(config: Mapping[str, Any]) -> list[int]:
    """:func:`layer_ids`.

    Raises:
        CheckpointError: there are none.
    """
    ids = layer_ids(config)
    if ids is None:
        raise CheckpointError(
            "the tapped layers are missing", where=_IDS, hint="vLLM refuses a configuration without them"
        )
    return ids


def non_causal(config: Mapping[str, Any]) -> bool:
    """Whether sliding layers see their whole block, as vLLM takes it: yes where the key is missing.

    In other projects' own formats the draft's configuration may say ``causal``; sliding layers are causal where it
    does not.
    """
    value = config.get(_NON_CAUSAL)
    if value is None and "speculators_model_type" not in config:
        causal = _foreign(config).get("causal")
        slides = "sliding_attention" in (layers_of(config).get("layer_types") or ())
        return not (slides if causal is None else causal)
    return True if value is None else bool(value)


def _mask_token_id(config: Mapping[str, Any]) -> int | None:
    value = config.get("mask_token_id", _foreign(config).get("mask_token_id"))
    return None if value is None else int(value)


# --- lint -------------------------------------------------------------------------------------------------------


def _lint_layer_type(config: Mapping[str, Any]) -> Iterator[Finding]:
    kind = layers_of(config).get("model_type")
    if kind not in (None, "qwen3"):
        where = "transformer_layer_config.model_type"
        yield error(f"vLLM's draft has qwen3's layers, with a norm per head, not {kind!r}'s", where)
    if layers_of(config).get(_BIAS):
        yield warning(
            _BIASES, f"transformer_layer_config.{_BIAS}", "only its tensors and its configuration are checked"
        )


#: Keys of the layers that vLLM's class reads without a default; sizes are checked with the format itself.
READ_PLAINLY = ("hidden_act", "max_position_embeddings", "num_key_value_heads", "rms_norm_eps")


def _lint_block_size(config: Mapping[str, Any], rows: int | None, see_each_other: bool) -> Iterator[Finding]:
    tokens = speculative_tokens(config)
    if rows is not None and tokens is not None and tokens > rows:
        yield error(
            f"a block has {rows} rows that predict, and {tokens} tokens are drafted: the others were never trained",
            "speculators_config.proposal_methods[0].speculative_tokens",
            f"write {rows}",
        )
    elif rows is not None and tokens is not None and tokens < rows and see_each_other:
        yield warning(
            f"{tokens} tokens are drafted from blocks trained with {rows}: rows see how many there are",
            "speculators_config.proposal_methods[0].speculative_tokens",
            f"serve {rows}, unless fewer measure better",
        )


def _lint_causality(config: Mapping[str, Any]) -> Iterator[Finding]:
    where = _NON_CAUSAL
    if config.get("sample_from_anchor"):
        yield error("the anchor's row predicts; vLLM refuses such blocks for this type", "sample_from_anchor")
    layers = _layer_config(config)
    slides = [layers.slides(index) for index in range(layers.num_layers)]
    override = layers_of(config).get("is_causal")
    if override is not None and bool(override) == non_causal(config):
        yield error(
            f"is_causal: {override} overrides {where} in vLLM", "transformer_layer_config.is_causal", "remove it"
        )
    if config.get(_NON_CAUSAL) is None:
        yield warning(
            f"{where} is not written; vLLM takes True",
            where,
            "write it: the format's own default is False",
        )
    elif not non_causal(config) and not all(slides):
        yield error(
            "vLLM serves all layers causally, and layers that see everything are trained to see their whole block",
            where,
            "write true, if the sliding layers were trained so as well; else train again",
        )
