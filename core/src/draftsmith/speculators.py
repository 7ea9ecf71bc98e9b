"""The exported format that vLLM knows by ``speculators_model_type``: what all its types share. Torch-free to import.

Contract: ``vllm/transformers_utils/configs/speculators`` (which keys are read, and their defaults when missing), and
the loaders of the drafts' classes. vLLM does not check that a draft is complete, so everything that it would fill with
a default or leave uninitialised is written, or found by lint.

A plugin's format derives from :class:`SpeculatorsFormat`, and says what is special of its type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from attrs import evolve

from draftsmith.api import PROJECT_NAME, Problem, ServingPlan, VerifierFacts
from draftsmith.errors import CheckpointError
from draftsmith.interfaces import CheckpointFormat, ExportContext, Finding, TensorSpec
from draftsmith.layer_config import LayerConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "LAYER_OVERRIDES",
    "SpeculatorsFormat",
    "bias_specs",
    "biases",
    "decoder_tensors",
    "draft_size",
    "drafts_for",
    "error",
    "layers_of",
    "lint_against_verifier",
    "lint_biases",
    "lint_layer_ids",
    "lint_layers",
    "lint_mask_token",
    "lint_read_plainly",
    "other_network",
    "shared_tensor_specs",
    "speculative_tokens",
    "target_width",
    "trained_tokens",
    "warning",
    "written_config",
]

#: The format's version that is written; vLLM does not read it.
SPECULATORS_VERSION = "0.9.0"
#: Keys of ``transformer_layer_config`` that a checkpoint may have otherwise than its verifier, and no option sets.
LAYER_OVERRIDES = (
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
)
#: Key of config.json, below this project's own: the distribution whose format wrote it.
PACKAGE = "package"
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
#: Tables of old checkpoints, which vLLM's loaders pass over.
_ROTARY_TABLES = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: Verifiers whose class in vLLM has no ``lm_head`` that a draft could share.
_WITHOUT_SHARED_HEAD = ("cohere", "gemma2")


class SpeculatorsFormat(CheckpointFormat):
    """Writing, reading and serving as far as they are the same for every type of the format.

    Attributes:
        method: vLLM's name of what serves it.
        since: the release of vLLM that it came with; None: not known.
        skipped: parts of names of tensors that vLLM's loader passes over.
        renamed: part of a name in other checkpoints → what vLLM's loader reads it as.

    vLLM's loader adds ``model.`` to names itself, and knows none in a file that has it already.
    """

    method: ClassVar[str]
    since: ClassVar[str | None] = None
    skipped: ClassVar[tuple[str, ...]] = _ROTARY_TABLES
    renamed: ClassVar[Mapping[str, str]] = {"midlayer.": "layers.0."}

    def tensors(self, model: nn.Module, context: ExportContext) -> dict[str, Tensor]:
        """All of the model's tensors, without those that vLLM shares with the verifier, and the vocabulary map."""
        setup = context.setup
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        shared = _shared_names(model)
        if _EMBEDDING in shared and not context.include_embedding:
            del tensors[_EMBEDDING]
        if not setup.vocabulary.is_identity:
            tensors["d2t"], tensors["t2d"] = setup.vocabulary.d2t, setup.vocabulary.t2d
        elif _HEAD in shared and shares_head(setup.verifier):
            del tensors[_HEAD]
        return tensors

    def as_loaded(self, config: Mapping[str, Any], present: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        parts = self._loaded({name: spec.shape for name, spec in present.items()}, config)
        return {
            part.name: evolve(present[name], shape=(part.end - part.begin, *present[name].shape[1:]))
            if present[name].shape
            else present[name]
            for name, part in parts
        }

    def passed_over(self, config: Mapping[str, Any], names: Iterable[str]) -> Sequence[str]:
        """Those of *names*, as in :meth:`as_loaded`, that vLLM knows and loads into nothing; lint reports them."""
        return biases(names)

    def load(self, model: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        import torch

        state = model.state_dict()
        shared = _shared_names(model)
        given = {
            part.name: tensors[name][part.begin : part.end] if tensors[name].dim() else tensors[name]
            for name, part in self._loaded({name: tensor.shape for name, tensor in tensors.items()}, config)
        }
        for name in self.passed_over(config, given):
            del given[name]
        mapping = {name: given.pop(name) for name in ("d2t", "t2d") if name in given}
        _check_names(given, set(state), shared)
        size = state[_HEAD].shape[0]
        mapped = mapping["d2t"].shape[0] if "d2t" in mapping else size
        if mapped != size:
            raise CheckpointError(f"d2t maps {mapped} draft tokens, the draft has {size}", where="d2t")
        with torch.no_grad():
            for name, tensor in given.items():
                if tensor.shape != state[name].shape:
                    raise CheckpointError(
                        f"{name} has shape {list(tensor.shape)}, the configuration makes it {list(state[name].shape)}",
                        where="model.safetensors",
                    )
                if name in shared:
                    _replace_frozen(model, name, tensor)
                else:
                    state[name].copy_(tensor)

    def serving(self, config: Mapping[str, Any]) -> ServingPlan:
        tokens = speculative_tokens(config)
        if tokens is None:
            raise CheckpointError(
                "the number of speculative tokens is missing",
                where="speculators_config.proposal_methods[0].speculative_tokens",
                hint="vLLM refuses a configuration without it",
            )
        return ServingPlan(method=self.method, num_speculative_tokens=tokens, since=self.since)

    def _loaded(self, shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> Iterator[tuple[str, _Part]]:
        """(stored name, part) of what vLLM's loader takes of stored tensors; what it skips is left out.

        The vocabulary map has a name of its own in vLLM, under which it passes a stored one over, unless ``d2t`` is
        stored as well.
        """
        layers = LayerConfig.from_dict(layers_of(config))
        has_map = any("d2t" in name for name in shapes)
        for name, shape in shapes.items():
            if "draft_id_to_target_id" not in name or has_map:
                for part in self._parts(name, int(shape[0]) if len(shape) else 0, layers):
                    yield name, part

    def _parts(self, name: str, rows: int, layers: LayerConfig) -> Iterator[_Part]:
        """What vLLM's loader makes of a stored tensor of so many rows: nothing of one that it skips, one part of most.

        Projections may be stored fused, as vLLM holds them; wrong sizes then show in the first part.
        """
        if any(each in name for each in self.skipped) or ("t2d" in name and name != "t2d"):
            return
        for theirs, ours in self.renamed.items():
            name = name.replace(theirs, ours)
        for fused, names in _FUSED.items():
            if fused in name:
                later = [layers.key_value_size] * 2 if fused == "qkv_proj" else [layers.intermediate_size]
                begin = 0
                for part, size in zip(names, [rows - sum(later), *later], strict=True):
                    yield _Part(name.replace(fused, part), begin, begin + size)
                    begin += size
                return
        yield _Part(name, 0, rows)


class _Part(NamedTuple):
    """Rows [begin, end) of a stored tensor, under the name that they have in the network."""

    name: str
    begin: int
    end: int


# --- writing ----------------------------------------------------------------------------------------------------


def written_config(
    kind: str, architecture: str, context: ExportContext, layers: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of a draft.

    Args:
        kind: ``speculators_model_type``.
        architecture: the peer's class; vLLM ignores it.
        layers: ``transformer_layer_config``.
        own: the type's own keys.
    """
    setup = context.setup
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "dtype": "bfloat16",
        "draft_vocab_size": setup.vocabulary.draft_size,
        "target_hidden_size": setup.verifier.hidden_size,
        "tie_word_embeddings": False,
        **own,
        "speculators_config": drafts_for(
            kind, context.verifier_name, setup.verifier.architectures, context.speculative_tokens
        ),
        "transformer_layer_config": dict(layers),
    }


def drafts_for(kind: str, verifier: str, architectures: Sequence[str], speculative_tokens: int) -> dict[str, Any]:
    """``speculators_config``: which kind of draft drafts for whom, and how many tokens a round. Native formats too.

    Args:
        kind: ``speculators_model_type``.
        verifier: name or path.
        architectures: as published in the verifier's config.json.
    """
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
    }


# --- reading ----------------------------------------------------------------------------------------------------


def layers_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``transformer_layer_config``; in checkpoints older than the format its keys stand at the top level."""
    nested = config.get("transformer_layer_config")
    return nested if isinstance(nested, Mapping) else config


def target_width(config: Mapping[str, Any]) -> int:
    """Width of the hidden states that the draft reads: the verifier's."""
    return int(config.get("target_hidden_size") or layers_of(config)["hidden_size"])


def draft_size(config: Mapping[str, Any]) -> int:
    """Tokens that the draft can propose."""
    return int(config.get("draft_vocab_size") or layers_of(config)["vocab_size"])


def speculative_tokens(config: Mapping[str, Any]) -> int | None:
    """Tokens that vLLM drafts in a round, unless told otherwise; None where the config does not say."""
    try:
        return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def trained_tokens(config: Mapping[str, Any]) -> int | None:
    """Tokens that the draft was trained for, as noted at export; the format itself has no place for it."""
    own = config.get(PROJECT_NAME)
    tokens = own.get("trained_speculative_tokens") if isinstance(own, Mapping) else None
    return None if tokens is None else int(tokens)


def package_of(config: Mapping[str, Any]) -> str | None:
    """The distribution whose format wrote the checkpoint, as noted at export: what to install where it is missing."""
    own = config.get(PROJECT_NAME)
    package = own.get(PACKAGE) if isinstance(own, Mapping) else None
    # It becomes part of a command that is shown, and anybody may have written it.
    return package if isinstance(package, str) and _DISTRIBUTION.fullmatch(package) else None


def other_network(differences: Iterable[str]) -> list[Problem]:
    """Why training cannot begin from a checkpoint: one problem a difference (``width is 64, the other's 32``)."""
    hint = "set algorithm.options to what it was trained with"
    return [Problem(f"the draft is another network: {each}", hint=hint) for each in differences]


def shares_head(verifier: VerifierFacts) -> bool:
    """Whether a draft without a head of its own gets this verifier's in vLLM."""
    return not verifier.model_type.startswith(_WITHOUT_SHARED_HEAD)


def _shared_names(model: nn.Module) -> set[str]:
    return set(model.shared_tensors())  # type: ignore[operator]  # a DraftArchitecture: checked when built


def _check_names(given: Mapping[str, Any], have: set[str], shared: set[str]) -> None:
    problems = {"unknown": sorted(set(given) - have), "missing": sorted(have - set(given) - shared)}
    found = [f"{len(names)} {kind}, such as {names[0]}" for kind, names in problems.items() if names]
    if found:
        prefixed = any(name.startswith("model.") for name in problems["unknown"])
        raise CheckpointError(
            f"tensors: {'; '.join(found)}",
            where="model.safetensors",
            hint="vLLM knows no names with a prefix 'model.': take it off"
            if prefixed
            else "do configuration and tensors belong together? `draftsmith lint` compares all of them",
        )


def _replace_frozen(model: nn.Module, name: str, tensor: Tensor) -> None:
    """A checkpoint's own embedding or head stands in for the verifier's, as in vLLM, unless the two are the same.

    They are not where the verifier is stored in float32 and the checkpoint in bfloat16: then vLLM drafts with the
    rounded one, and so does the simulator.
    """
    import torch

    module = model.get_submodule(name.rpartition(".")[0])
    current = module.get_parameter("weight")
    own = tensor.to(current.device)
    wide = torch.promote_types(current.dtype, own.dtype)
    if torch.equal(current.to(wide), own.to(wide)):
        return
    module.weight = torch.nn.Parameter(own.float(), requires_grad=False)


# --- tensors ----------------------------------------------------------------------------------------------------


def shared_tensor_specs(config: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Embedding, head and vocabulary map. vLLM shares the verifier's embedding and full head where they fit."""
    layers = LayerConfig.from_dict(layers_of(config))
    width, size = layers.hidden_size, draft_size(config)
    reduced, own_width = size != layers.vocab_size, width != target_width(config)
    why = "of another width than the verifier's, it cannot be shared" if own_width else "vLLM shares the verifier's"
    missed = "with a reduced vocabulary vLLM cannot share the verifier's head, and does not miss it"
    specs = {
        _HEAD: TensorSpec(shape=(size, width), required=reduced or own_width, why=missed if reduced else why),
        _EMBEDDING: TensorSpec(shape=(layers.vocab_size, width), required=own_width, why=why),
        "t2d": TensorSpec(shape=(layers.vocab_size,), dtype="BOOL", required=False, why="vLLM skips it"),
    }
    if reduced:
        why = "without it vLLM proposes draft ids as if they were target ids"
        specs["d2t"] = TensorSpec(shape=(size,), dtype="I64", why=why)
    return specs


def decoder_tensors(layers: LayerConfig, input_size: int | None = None) -> Iterator[tuple[str, TensorSpec]]:
    """Names within a decoder layer, and shapes.

    Args:
        input_size: width that queries, keys and values are projected from; None: the hidden size.
    """
    width, inner = layers.hidden_size, layers.intermediate_size
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", TensorSpec(shape=(width,), why="vLLM does not miss it, and drafts nonsense")
    for name, size in (("q", layers.query_size), ("k", layers.key_value_size), ("v", layers.key_value_size)):
        yield f"self_attn.{name}_proj.weight", TensorSpec(shape=(size, input_size or width))
    yield "self_attn.o_proj.weight", TensorSpec(shape=(width, layers.query_size))
    if layers.layer_type == "qwen3":
        for name in ("q_norm", "k_norm"):
            yield f"self_attn.{name}.weight", TensorSpec(shape=(layers.head_dim,))
    yield "mlp.gate_proj.weight", TensorSpec(shape=(inner, width))
    yield "mlp.up_proj.weight", TensorSpec(shape=(inner, width))
    yield "mlp.down_proj.weight", TensorSpec(shape=(width, inner))


def bias_specs(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """A bias beside each weight of *specs*: vLLM's loader knows the names whether or not the network has them."""
    return {
        name.removesuffix("weight") + "bias": TensorSpec(shape=spec.shape[:1], required=False)
        for name, spec in specs.items()
        if name.endswith(".weight")
    }


def biases(names: Iterable[str]) -> list[str]:
    """Those of *names* that are the bias beside a weight."""
    known = set(names)
    return sorted(name for name in known if name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in known)


# --- lint -------------------------------------------------------------------------------------------------------


def error(what: str, where: str, hint: str = "") -> Finding:
    """vLLM fails, or drafts nonsense."""
    return Finding(severity="error", what=what, where=where, hint=hint)


def warning(what: str, where: str, hint: str = "") -> Finding:
    """It works, and may disappoint."""
    return Finding(severity="warning", what=what, where=where, hint=hint)


def lint_layer_ids(ids: list[int], where: str, verifier: VerifierFacts | None) -> Iterator[Finding]:
    """The tapped layers: their order is that of the features, which vLLM sorts."""
    if ids != sorted(set(ids)):
        yield error(
            f"{ids} is not ascending and distinct: vLLM sorts the ids, so the features reach fc permuted",
            where,
            f"write {sorted(set(ids))} and permute fc's columns to match",
        )
    if verifier is not None and (min(ids) < 0 or max(ids) > verifier.num_layers):
        yield error(f"{ids} reaches outside the verifier's {verifier.num_layers} layers", where)


def lint_biases(passed_over: Sequence[str]) -> Iterator[Finding]:
    """Biases that are stored, and that vLLM passes over."""
    if passed_over:
        yield error(
            f"{len(passed_over)} biases are there, such as {passed_over[0]}: vLLM passes them over, and drafts "
            "without",
            "model.safetensors",
            "train without biases: the layers of this format have none",
        )


#: Keys by which vLLM's draft classes, this one or that, give their layers biases.
_BIAS_KEYS = ("attention_bias", "mlp_bias", "bias", "qkv_bias")


def lint_layers(config: Mapping[str, Any], bias_keys: Sequence[str] = _BIAS_KEYS) -> Iterator[Finding]:
    """What vLLM's decoder layers would do otherwise than ours.

    Args:
        bias_keys: those of the layers' keys by which vLLM gives them biases that the format does not have.
    """
    where = "transformer_layer_config"
    layers = layers_of(config)
    if layers.get("hidden_act", "silu") != "silu":
        yield error(f"vLLM's draft layers know silu, not {layers['hidden_act']!r}", f"{where}.hidden_act")
    if layers.get("head_dim") is None:
        yield warning(
            "head_dim is not written; vLLM derives it from hidden_size and heads", f"{where}.head_dim", "write it"
        )
    for key in bias_keys:
        if layers.get(key):
            yield error(f"{key} asks vLLM for biases that this format does not train", f"{where}.{key}", "set false")
    types = layers.get("layer_types")
    if types:
        count = int(layers.get("num_hidden_layers") or 1)
        if len(types) != count:
            yield error(f"{len(types)} layer types for {count} layers", f"{where}.layer_types")
        if "sliding_attention" in types and not layers.get("sliding_window"):
            yield error("sliding layers without a window", f"{where}.sliding_window")
    elif layers.get("sliding_window") and layers.get("use_sliding_window"):
        yield warning("a window without layer_types is ignored by vLLM", f"{where}.layer_types")


def lint_mask_token(token: int | None, config: Mapping[str, Any], verifier: VerifierFacts | None) -> Iterator[Finding]:
    """The token that stands for what is to be drafted, in types that have one."""
    where = "mask_token_id"
    if token is None:
        yield error("the mask token is missing; vLLM refuses the configuration", where)
        return
    size = layers_of(config).get("vocab_size")
    if isinstance(size, int) and not 0 <= token < size:
        yield error(f"{token} is outside the vocabulary of {size}: it has no embedding", where)
    if verifier is not None and (token in verifier.eos_token_ids or token == verifier.bos_token_id):
        yield warning(f"{token} begins or ends texts: the draft may take a word for a gap", where)


def lint_read_plainly(config: Mapping[str, Any], keys: Sequence[str]) -> Iterator[Finding]:
    """Those of *keys*, which vLLM's draft class reads of the layers without a default, that are not there."""
    layers = layers_of(config)
    for key in keys:
        if layers.get(key) is None:
            yield error(f"{key} is missing; vLLM has no default for it, and fails", f"transformer_layer_config.{key}")


def lint_against_verifier(
    config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: VerifierFacts
) -> Iterator[Finding]:
    """What the draft would share with this verifier, and how far it reaches."""
    layers = layers_of(config)
    if _EMBEDDING not in present and layers.get("hidden_size") != verifier.hidden_size:
        yield error("the verifier's embedding has another width, so it cannot be shared", _EMBEDDING)
    full = config.get("draft_vocab_size") in (None, layers.get("vocab_size"))
    if full and _HEAD not in present and not shares_head(verifier):
        yield error(
            f"vLLM has no head to share for a verifier of type {verifier.model_type!r}",
            _HEAD,
            "write it into the checkpoint",
        )
    length = layers.get("max_position_embeddings")
    if length is not None and length < verifier.max_position_embeddings:
        yield warning(
            f"the draft's longest position is {length}, the verifier's {verifier.max_position_embeddings}",
            "transformer_layer_config.max_position_embeddings",
            "write the verifier's: a smaller one wrecks acceptance on long contexts",
        )
