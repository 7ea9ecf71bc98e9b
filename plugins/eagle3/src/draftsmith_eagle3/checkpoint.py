"""The exported format: speculators' ``eagle3`` config.json and tensors, as vLLM 0.32 loads them.

Contract: ``vllm/transformers_utils/configs/speculators`` (which keys are read, and their defaults when missing) and
``vllm/model_executor/models/{llama,qwen3}_eagle3.py`` (which tensors). vLLM does not check that a checkpoint is
complete, so everything that it would fill with a default or leave uninitialised is written here, or found by lint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from attrs import evolve

from draftsmith.api import PROJECT_NAME, CaptureRequirements, Problem, ServingPlan, VerifierFacts
from draftsmith.errors import CheckpointError
from draftsmith.interfaces import CheckpointFormat, ExportContext, Finding, TensorSpec
from draftsmith.layer_config import LayerConfig
from draftsmith_eagle3.options import Eagle3Options, default_layer_ids, layer_config

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Eagle3Checkpoint"]

#: The format's version that is written; vLLM does not read it.
SPECULATORS_VERSION = "0.9.0"
#: flag → what vLLM takes where the key is missing
_FLAGS = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
#: What a checkpoint's layers may have otherwise than its verifier.
_OVERRIDES = (
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
)
#: Tensors that vLLM's loader passes over: tables of old checkpoints, and the input of parallel drafting.
_SKIPPED = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "mask_hidden",
)
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: Verifiers whose class in vLLM has no ``lm_head`` that a draft could share.
_WITHOUT_SHARED_HEAD = ("cohere", "gemma2")


class Eagle3Checkpoint(CheckpointFormat):
    """Reads, writes and checks EAGLE-3 drafts. What all speculators formats share is linted by the core."""

    # --- writing ------------------------------------------------------------------------------------------------

    def config(self, context: ExportContext) -> dict[str, Any]:
        setup = context.setup
        options: Eagle3Options = setup.options
        layers = layer_config(options, setup.verifier).to_dict()
        # vLLM's Llama class takes three tapped layers for granted unless this stands among the layers' keys.
        layers["num_aux_hidden_states"] = len(setup.capture.layer_ids)
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": SPECULATORS_VERSION,
            "dtype": "bfloat16",
            "draft_vocab_size": setup.vocabulary.draft_size,
            "target_hidden_size": setup.verifier.hidden_size,
            "norm_before_residual": options.norm_before_residual,
            "norm_before_fc": options.norm_before_fc,
            "fc_norm": options.fc_norm,
            "norm_output": options.norm_output,
            "eagle_aux_hidden_state_layer_ids": list(setup.capture.layer_ids),
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": context.speculative_tokens,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {
                    "name_or_path": context.verifier_name,
                    "architectures": list(setup.verifier.architectures),
                },
            },
            "transformer_layer_config": layers,
        }

    def tensors(self, model: nn.Module, context: ExportContext) -> dict[str, Tensor]:
        vocabulary = context.setup.vocabulary
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        if not context.include_embedding:
            del tensors["embed_tokens.weight"]  # vLLM shares the verifier's
        if vocabulary.is_identity:
            if _shares_head(context.setup.verifier):
                del tensors["lm_head.weight"]
        else:
            tensors["d2t"], tensors["t2d"] = vocabulary.d2t, vocabulary.t2d
        return tensors

    def expected_tensors(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        layers = LayerConfig.from_dict(_layers(config))
        width, target_width, taps = layers.hidden_size, _target_width(config), _num_taps(config)
        draft_size = _draft_size(config)
        reduced = draft_size != layers.vocab_size
        specs = {
            "fc.weight": TensorSpec(shape=(width, taps * target_width)),
            "norm.weight": TensorSpec(shape=(width,)),
            "lm_head.weight": TensorSpec(
                shape=(draft_size, width),
                required=reduced,
                why="with a reduced vocabulary vLLM cannot share the verifier's head, and does not miss it",
            ),
            "embed_tokens.weight": TensorSpec(
                shape=(layers.vocab_size, width), required=False, why="vLLM shares the verifier's"
            ),
            "t2d": TensorSpec(shape=(layers.vocab_size,), dtype="BOOL", required=False, why="vLLM skips it"),
        }
        if reduced:
            specs["d2t"] = TensorSpec(
                shape=(draft_size,), dtype="I64", why="without it vLLM proposes draft ids as if they were target ids"
            )
        # Without the flag vLLM passes it over, which lint reports as what it is.
        specs["input_norm.weight"] = TensorSpec(
            shape=(taps * target_width,), required=_flag(config, "norm_before_fc"), why="norm_before_fc asks for it"
        )
        if _flag(config, "fc_norm"):
            specs.update({f"fc_norm.{tap}.weight": TensorSpec(shape=(target_width,)) for tap in range(taps)})
        for index in range(layers.num_layers):
            specs.update({f"layers.{index}.{name}": spec for name, spec in _layer_tensors(layers, index == 0)})
        return specs

    # --- reading ------------------------------------------------------------------------------------------------

    def load(self, model: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        import torch

        state = model.state_dict()
        layers = LayerConfig.from_dict(_layers(config))
        given = {
            part.name: tensor[part.begin : part.end]
            for name, tensor in tensors.items()
            for part in _parts(name.removeprefix("model."), int(tensor.shape[0]), layers)
        }
        mapping = {name: given.pop(name) for name in ("d2t", "t2d") if name in given}
        problems = {
            "unknown": sorted(set(given) - set(state)),
            "missing": sorted(set(state) - set(given) - {"embed_tokens.weight", "lm_head.weight"}),
        }
        found = [f"{len(names)} {kind}, such as {names[0]}" for kind, names in problems.items() if names]
        if found:
            raise CheckpointError(
                f"tensors: {'; '.join(found)}",
                where="model.safetensors",
                hint="do configuration and tensors belong together? `draftsmith lint` compares all of them",
            )
        draft_size = state["lm_head.weight"].shape[0]
        if "d2t" in mapping and mapping["d2t"].shape[0] != draft_size:
            raise CheckpointError(
                f"d2t maps {mapping['d2t'].shape[0]} draft tokens, the draft has {draft_size}", where="d2t"
            )
        with torch.no_grad():
            for name, tensor in given.items():
                if tensor.shape != state[name].shape:
                    raise CheckpointError(
                        f"{name} has shape {list(tensor.shape)}, the configuration makes it {list(state[name].shape)}",
                        where="model.safetensors",
                    )
                if name in ("embed_tokens.weight", "lm_head.weight"):
                    _replace_frozen(model, name, tensor)
                else:
                    state[name].copy_(tensor)

    def warm_start_problems(
        self, config: Mapping[str, Any], options: Any, verifier: VerifierFacts
    ) -> Sequence[Problem]:
        flags = {name: (getattr(options, name), _flag(config, name)) for name in _FLAGS}
        different = [
            f"{name} is {ours}, the other's {theirs}" for name, (ours, theirs) in flags.items() if ours != theirs
        ]
        different += layer_config(options, verifier).differences(LayerConfig.from_dict(_layers(config)))
        return [
            Problem(f"the draft is another network: {each}", hint="set algorithm.options to what it was trained with")
            for each in different
        ]

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        layers = LayerConfig.from_dict(_layers(config))
        plain = layers.to_dict()
        ids = _layer_ids(config)
        return {
            "ttt_steps": _trained_steps(config) or _speculative_tokens(config) or 1,
            "num_layers": layers.num_layers,
            "layer_type": layers.layer_type,
            "intermediate_size": layers.intermediate_size,
            **{name: _flag(config, name) for name in _FLAGS},
            "layer_ids": None if ids is None else tuple(sorted(set(ids))),
            "sliding_window": layers.sliding_window,
            "layer_overrides": {key: plain[key] for key in _OVERRIDES},
        }

    def capture(self, config: Mapping[str, Any], verifier: VerifierFacts) -> CaptureRequirements:
        ids = _layer_ids(config) or default_layer_ids(verifier.num_layers)
        return CaptureRequirements(layer_ids=tuple(sorted(set(ids))))

    def serving(self, config: Mapping[str, Any]) -> ServingPlan:
        tokens = _speculative_tokens(config)
        if tokens is None:
            raise CheckpointError(
                "the number of speculative tokens is missing",
                where="speculators_config.proposal_methods[0].speculative_tokens",
                hint="vLLM refuses a configuration without it",
            )
        return ServingPlan(method="eagle3", num_speculative_tokens=tokens)

    # --- checking -----------------------------------------------------------------------------------------------

    def as_loaded(self, config: Mapping[str, Any], present: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        layers = LayerConfig.from_dict(_layers(config))
        return {
            part.name: evolve(spec, shape=(part.end - part.begin, *spec.shape[1:])) if spec.shape else spec
            for name, spec in present.items()
            for part in _parts(name, spec.shape[0] if spec.shape else 0, layers)
        }

    def lint(
        self, config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: VerifierFacts | None
    ) -> Sequence[Finding]:
        findings = [
            *_lint_flags(config, present),
            *_lint_layer_ids(config, verifier),
            *_lint_layers(config),
        ]
        if verifier is not None:
            findings += _lint_against(config, present, verifier)
        return findings


# --- reading a configuration ------------------------------------------------------------------------------------


def _layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The layers' configuration; the first EAGLE-3 checkpoints (yuhuili's) have it at the top level."""
    nested = config.get("transformer_layer_config")
    return nested if isinstance(nested, Mapping) else config


def _is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config


def _flag(config: Mapping[str, Any], name: str) -> bool:
    """The flag as vLLM takes it. In checkpoints older than the format all four are off."""
    default = _FLAGS[name] if _is_speculators(config) else False
    value = config.get(name)
    return default if value is None else bool(value)


def _layer_ids(config: Mapping[str, Any]) -> list[int] | None:
    eagle = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    return [int(each) for each in ids] if ids else None


def _num_taps(config: Mapping[str, Any]) -> int:
    ids = _layer_ids(config)
    return len(set(ids)) if ids else int(_layers(config).get("num_aux_hidden_states") or 3)


def _target_width(config: Mapping[str, Any]) -> int:
    return int(config.get("target_hidden_size") or _layers(config)["hidden_size"])


def _draft_size(config: Mapping[str, Any]) -> int:
    return int(config.get("draft_vocab_size") or _layers(config)["vocab_size"])


def _speculative_tokens(config: Mapping[str, Any]) -> int | None:
    try:
        return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _trained_steps(config: Mapping[str, Any]) -> int | None:
    """As the core noted at export; the format itself has no place for it."""
    own = config.get(PROJECT_NAME)
    steps = own.get("trained_speculative_tokens") if isinstance(own, Mapping) else None
    return None if steps is None else int(steps)


def _layer_tensors(layers: LayerConfig, is_first: bool) -> Iterator[tuple[str, TensorSpec]]:
    width, inner = layers.hidden_size, layers.intermediate_size
    inputs = 2 * width if is_first else width
    norms = ["input_layernorm", "post_attention_layernorm"] + (["hidden_norm"] if is_first else [])
    for name in norms:
        yield f"{name}.weight", TensorSpec(shape=(width,), why="vLLM does not miss it, and drafts nonsense")
    for name, size in (("q", layers.query_size), ("k", layers.key_value_size), ("v", layers.key_value_size)):
        yield f"self_attn.{name}_proj.weight", TensorSpec(shape=(size, inputs))
    yield "self_attn.o_proj.weight", TensorSpec(shape=(width, layers.query_size))
    if layers.layer_type == "qwen3":
        for name in ("q_norm", "k_norm"):
            yield f"self_attn.{name}.weight", TensorSpec(shape=(layers.head_dim,))
    yield "mlp.gate_proj.weight", TensorSpec(shape=(inner, width))
    yield "mlp.up_proj.weight", TensorSpec(shape=(inner, width))
    yield "mlp.down_proj.weight", TensorSpec(shape=(width, inner))


class _Part(NamedTuple):
    """Rows [begin, end) of a stored tensor, under the name that they have in the network."""

    name: str
    begin: int
    end: int


def _parts(name: str, rows: int, layers: LayerConfig) -> Iterator[_Part]:
    """What vLLM's loader makes of a stored tensor of so many rows: nothing of one that it skips, one part of most.

    ``midlayer.`` is the first layer in the first EAGLE-3 checkpoints. Projections may be stored fused, as vLLM holds
    them; wrong sizes then show in the first part.
    """
    if any(each in name for each in _SKIPPED):
        return
    name = name.replace("midlayer.", "layers.0.")
    for fused, names in _FUSED.items():
        if fused in name:
            later = [layers.key_value_size] * 2 if fused == "qkv_proj" else [layers.intermediate_size]
            begin = 0
            for part, size in zip(names, [rows - sum(later), *later], strict=True):
                yield _Part(name.replace(fused, part), begin, begin + size)
                begin += size
            return
    yield _Part(name, 0, rows)


def _shares_head(verifier: VerifierFacts) -> bool:
    return not verifier.model_type.startswith(_WITHOUT_SHARED_HEAD)


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


# --- lint -------------------------------------------------------------------------------------------------------


def _error(what: str, where: str, hint: str = "") -> Finding:
    return Finding(severity="error", what=what, where=where, hint=hint)


def _warning(what: str, where: str, hint: str = "") -> Finding:
    return Finding(severity="warning", what=what, where=where, hint=hint)


def _lint_flags(config: Mapping[str, Any], present: Mapping[str, TensorSpec]) -> Iterator[Finding]:
    for name, default in _FLAGS.items():
        if config.get(name) is None:
            yield _warning(
                f"{name} is not written; vLLM takes {default}",
                name,
                "write every flag: writers' defaults and vLLM's differ",
            )
    if "input_norm.weight" in present and not _flag(config, "norm_before_fc"):
        yield _error(
            "input_norm.weight is there and norm_before_fc is off: vLLM passes it over, and drafts without the norm",
            "norm_before_fc",
            "write true, if the draft was trained with it",
        )
    if _flag(config, "norm_before_fc") and _flag(config, "fc_norm"):
        yield _error("norm_before_fc and fc_norm exclude each other; vLLM would apply both", "fc_norm")


def _lint_layer_ids(config: Mapping[str, Any], verifier: VerifierFacts | None) -> Iterator[Finding]:
    where = "eagle_aux_hidden_state_layer_ids"
    ids = _layer_ids(config)
    taps = _layers(config).get("num_aux_hidden_states")
    if ids is None:
        yield _warning("the tapped layers are not written; vLLM takes [2, n//2, n-3]", where, "write them")
        return
    if ids != sorted(set(ids)):
        yield _error(
            f"{ids} is not ascending and distinct: vLLM sorts the ids, so the features reach fc permuted",
            where,
            f"write {sorted(set(ids))} and permute fc's columns to match",
        )
    if verifier is not None and (min(ids) < 0 or max(ids) > verifier.num_layers):
        yield _error(f"{ids} reaches outside the verifier's {verifier.num_layers} layers", where)
    count = len(set(ids))
    inside = "transformer_layer_config.num_aux_hidden_states"
    if taps is None and count != 3 and _layers(config).get("model_type", "llama") == "llama":
        yield _error(f"vLLM's Llama draft assumes 3 tapped layers, there are {count}", inside, f"set it to {count}")
    if taps is not None and int(taps) != count:
        yield _error(f"it says {taps} tapped layers, the list has {count}", inside, f"set it to {count}")


def _lint_layers(config: Mapping[str, Any]) -> Iterator[Finding]:
    where = "transformer_layer_config"
    layers = _layers(config)
    if layers.get("hidden_act", "silu") != "silu":
        yield _error(f"vLLM's draft layers know silu, not {layers['hidden_act']!r}", f"{where}.hidden_act")
    if layers.get("head_dim") is None:
        yield _warning(
            "head_dim is not written; vLLM derives it from hidden_size and heads", f"{where}.head_dim", "write it"
        )
    for key in ("attention_bias", "mlp_bias", "bias", "qkv_bias"):
        if layers.get(key):
            yield _error(f"{key} asks vLLM for biases that this format does not train", f"{where}.{key}", "set false")
    types = layers.get("layer_types")
    if types:
        count = int(layers.get("num_hidden_layers") or 1)
        if len(types) != count:
            yield _error(f"{len(types)} layer types for {count} layers", f"{where}.layer_types")
        if "sliding_attention" in types and not layers.get("sliding_window"):
            yield _error("sliding layers without a window", f"{where}.sliding_window")
    elif layers.get("sliding_window") and layers.get("use_sliding_window"):
        yield _warning("a window without layer_types is ignored by vLLM", f"{where}.layer_types")


def _lint_against(
    config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: VerifierFacts
) -> Iterator[Finding]:
    layers = _layers(config)
    where = "transformer_layer_config"
    if "embed_tokens.weight" not in present and layers.get("hidden_size") != verifier.hidden_size:
        yield _error("the verifier's embedding has another width, so it cannot be shared", "embed_tokens.weight")
    full = config.get("draft_vocab_size") in (None, layers.get("vocab_size"))
    if full and "lm_head.weight" not in present and not _shares_head(verifier):
        yield _error(
            f"vLLM has no head to share for a verifier of type {verifier.model_type!r}",
            "lm_head.weight",
            "write it into the checkpoint",
        )
    length = layers.get("max_position_embeddings")
    if length is not None and length < verifier.max_position_embeddings:
        yield _warning(
            f"the draft's longest position is {length}, the verifier's {verifier.max_position_embeddings}",
            f"{where}.max_position_embeddings",
            "write the verifier's: a smaller one wrecks acceptance on long contexts",
        )
