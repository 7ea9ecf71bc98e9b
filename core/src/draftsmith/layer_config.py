"""Configuration of a draft's decoder layers, derived from the verifier's. Torch-free.

What the draft's network is in training and what vLLM builds from the exported ``transformer_layer_config`` must be
the same thing. Everything that the two could read differently is decided here, once: the draft's rotary embedding is
an ordinary one over the whole head (partial rotation and multimodal sections are not inherited), and only those
scalings are inherited whose tables vLLM and transformers compute alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from attrs import field, fields, frozen

from draftsmith.api import Problem, VerifierFacts
from draftsmith.errors import CheckpointError, did_you_mean

__all__ = ["ROPE_TYPES", "LayerConfig", "inherited_rope", "layer_id_problems", "override_problems"]

#: rope_type → the keys that both sides read alike.
_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
#: rope_type → those of its keys that vLLM, or transformers, has no default for.
_ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": _ROPE_KEYS["llama3"],
    "yarn": ("factor", "original_max_position_embeddings"),
}
#: The scalings that a draft may have.
ROPE_TYPES = tuple(_ROPE_KEYS)


def inherited_rope(verifier: VerifierFacts) -> dict[str, Any]:
    """The rope parameters that a draft takes over from its verifier.

    Left out: ``partial_rotary_factor`` (ignored on one side only, it costs nearly all acceptance), multimodal
    sections, and scalings whose tables depend on the running length (``dynamic``, ``longrope``): the plain rotary
    embedding of the same base stands in for those.
    """
    given: Mapping[str, Any] = verifier.rope_parameters
    nested = given.get("full_attention")
    if isinstance(nested, Mapping):  # one table a layer type: full attention's is the one for long distances
        given = nested
    kind = str(given.get("rope_type") or "default")
    if kind not in _ROPE_KEYS:
        kind = "default"
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": float(given.get("rope_theta") or 10000.0)}
    rope.update({key: given[key] for key in _ROPE_KEYS[kind] if given.get(key) is not None})
    if kind == "yarn" and rope.get("factor") and "original_max_position_embeddings" not in rope:
        rope["original_max_position_embeddings"] = int(verifier.max_position_embeddings / rope["factor"])
    return rope


@frozen(kw_only=True)
class LayerConfig:
    """A stack of draft layers, in the terms of transformers' configurations.

    Attributes:
        layer_type: ``llama``, or ``qwen3`` (adds a norm per head to queries and keys).
        num_layers: draft layers.
        vocab_size: the *verifier's*: the draft's input embedding covers all of it.
        max_position_embeddings: the verifier's; a smaller one wrecks acceptance on long contexts.
        sliding_window: positions that a layer sees (None: all).
        full_attention: layers (from 0) that see all positions although there is a window; ascending.
    """

    layer_type: Literal["llama", "qwen3"]
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]
    sliding_window: int | None = None
    full_attention: tuple[int, ...] = ()
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    extra: Mapping[str, Any] = field(factory=dict)

    @classmethod
    def from_verifier(
        cls,
        verifier: VerifierFacts,
        *,
        layer_type: Literal["llama", "qwen3"],
        num_layers: int,
        hidden_size: int | None = None,
        intermediate_size: int | None = None,
        sliding_window: int | None = None,
        full_attention: tuple[int, ...] = (),
        initializer_range: float = 0.02,
    ) -> LayerConfig:
        """Layers of the verifier's shape. An expert's width says nothing about a dense layer: 3 H stands in for it.

        So it does where the draft has a width of its own (*hidden_size*); heads keep their number and dimension.
        """
        width = hidden_size or verifier.hidden_size
        is_unlike = verifier.is_mixture_of_experts or width != verifier.hidden_size
        usual = 3 * width if is_unlike else verifier.intermediate_size
        return cls(
            layer_type=layer_type,
            num_layers=num_layers,
            hidden_size=width,
            intermediate_size=intermediate_size or usual,
            num_attention_heads=verifier.num_attention_heads,
            num_key_value_heads=verifier.num_key_value_heads,
            head_dim=verifier.head_dim,
            vocab_size=verifier.vocab_size,
            rms_norm_eps=verifier.rms_norm_eps,
            max_position_embeddings=verifier.max_position_embeddings,
            rope_parameters=inherited_rope(verifier),
            sliding_window=sliding_window,
            full_attention=full_attention,
            initializer_range=initializer_range,
            bos_token_id=verifier.bos_token_id,
            eos_token_id=verifier.eos_token_ids[0] if verifier.eos_token_ids else None,
            pad_token_id=verifier.pad_token_id,
        )

    def overridden(self, overrides: Mapping[str, Any] | None) -> LayerConfig:
        """These layers with some keys of :meth:`to_dict` replaced.

        Raises:
            CheckpointError: as of :meth:`from_dict`.
        """
        return LayerConfig.from_dict({**self.to_dict(), **overrides}) if overrides else self

    def differences(self, other: LayerConfig) -> list[str]:
        """What makes weights trained under *other* those of another network: ``hidden_size is 64, the other's 128``.

        Left out is what no weight depends on: the longest position, special tokens, the spread of fresh weights.
        """
        free = {
            "initializer_range",
            "max_position_embeddings",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "extra",
        }
        pairs = {
            each.name: (getattr(self, each.name), getattr(other, each.name))
            for each in fields(LayerConfig)
            if each.name not in free
        }
        return [f"{name} is {ours}, the other's {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]

    @property
    def query_size(self) -> int:
        """Width of all query heads together; need not be the hidden size."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim

    def slides(self, layer: int) -> bool:
        """Whether layer *layer* (from 0) sees the positions of the window only."""
        return self.sliding_window is not None and layer not in self.full_attention

    def to_dict(self) -> dict[str, Any]:
        """``transformer_layer_config``: every key that vLLM or transformers would else fill with a default."""
        return {
            "model_type": self.layer_type,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "layer_types": [
                "sliding_attention" if self.slides(i) else "full_attention" for i in range(self.num_layers)
            ],
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_bias": False,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": dict(self.rope_parameters),
            "sliding_window": self.sliding_window,
            # transformers' Qwen3 drops the window unless it is switched on as well.
            "use_sliding_window": self.sliding_window is not None,
            "max_window_layers": 0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": self.vocab_size,
            **self.extra,
        }

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> LayerConfig:
        """The inverse of :meth:`to_dict`; also reads configurations that other projects wrote.

        Raises:
            CheckpointError: a size is missing or no number, or the layer type is one that vLLM has no draft for.
        """
        try:
            return cls._from_dict(config)
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"a value is not of its kind: {error}", where="transformer_layer_config", hint="write sizes as numbers"
            ) from error

    @classmethod
    def _from_dict(cls, config: Mapping[str, Any]) -> LayerConfig:
        kind = config.get("model_type") or "llama"
        if kind not in ("llama", "qwen3"):
            raise CheckpointError(
                f"the draft's layers are of type {kind!r}",
                where="transformer_layer_config.model_type",
                hint="vLLM has drafts of type llama and qwen3",
            )
        needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        missing = [key for key in needed if config.get(key) is None]
        if missing:
            raise CheckpointError(
                f"{', '.join(missing)} missing", where="transformer_layer_config", hint="write every size explicitly"
            )
        heads = int(config["num_attention_heads"])
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope = {
            "rope_type": rope.get("rope_type") or rope.get("type") or "default",
            "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            **{key: value for key, value in rope.items() if key not in ("rope_type", "type", "rope_theta")},
        }
        types = config.get("layer_types") or ()
        sliding = "sliding_attention"
        window = config.get("sliding_window") if sliding in types else None
        return cls(
            layer_type=cast(Literal["llama", "qwen3"], kind),
            num_layers=int(config.get("num_hidden_layers") or 1),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
            rope_parameters=rope,
            sliding_window=window,
            full_attention=() if window is None else tuple(i for i, each in enumerate(types) if each != sliding),
            initializer_range=float(config.get("initializer_range") or 0.02),
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=config.get("eos_token_id"),
            pad_token_id=config.get("pad_token_id"),
        )


# --- what is wrong with options -----------------------------------------------------------------------------------


def layer_id_problems(ids: Sequence[int] | None, verifier: VerifierFacts) -> list[Problem]:
    """What is wrong with tapped layers *ids* given as the option ``layer_ids``; None is the algorithm's own choice."""
    if ids is None:
        return []
    where = "algorithm.options.layer_ids"
    if not ids:
        return [Problem("no layer is tapped", where=where, hint="name at least one, or null")]
    if list(ids) != sorted(set(ids)):
        return [
            Problem(
                f"{list(ids)} is not ascending and distinct: vLLM sorts the ids, and so would permute the features",
                where=where,
                hint=f"write {sorted(set(ids))}",
            )
        ]
    outside = [layer for layer in ids if not 0 <= layer < verifier.num_layers]
    if not outside:
        return []
    return [
        Problem(
            f"{outside} is outside 0 … {verifier.num_layers - 1}",
            where=where,
            hint=f"id i is the stream after i of the verifier's {verifier.num_layers} layers; "
            "the last one is the teacher's",
        )
    ]


def override_problems(
    derived: LayerConfig, overrides: Mapping[str, Any] | None, own: Mapping[str, str]
) -> list[Problem]:
    """What is wrong with the option ``layer_overrides``, or with layers as derived from the verifier.

    Args:
        derived: the layers without the overrides.
        own: key of ``transformer_layer_config`` → the option that sets it.
    """
    where = "algorithm.options.layer_overrides"
    given = overrides or {}
    problems = [
        Problem(f"{key} has an option of its own", where=where, hint=f"set {own[key]}") for key in given if key in own
    ]
    try:
        config = derived.overridden(given)
    except CheckpointError as error:
        return [*problems, *(Problem(each.what, where=where, hint=each.hint) for each in error.problems)]
    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    small = [f"{name} is {getattr(config, name)}" for name in sizes if getattr(config, name) < 1]
    if small:
        return [*problems, *(Problem(f"{each}; at least 1 is needed", where=where) for each in small)]
    if config.hidden_size != derived.hidden_size or config.vocab_size != derived.vocab_size:
        problems.append(
            Problem(
                "the draft's width and vocabulary must be the verifier's: it uses its embedding and head", where=where
            )
        )
    if config.num_attention_heads % config.num_key_value_heads:
        problems.append(
            Problem(
                f"{config.num_attention_heads} query heads do not divide among {config.num_key_value_heads} key heads",
                where=where if given else "verifier",
                hint="set num_attention_heads and num_key_value_heads so that they do",
            )
        )
    problems += _rope_problems(config, given, where)
    problems += _not_taken_over(given, config, own, where)
    if config.head_dim % 2:
        problems.append(Problem(f"a head dimension of {config.head_dim} cannot be rotated: it is odd", where=where))
    return problems


def _rope_problems(config: LayerConfig, overrides: Mapping[str, Any], where: str) -> Iterator[Problem]:
    rope, hint = config.rope_parameters, "write rope_parameters whole"
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        what = f"the rotary scaling {kind!r} is not one that training and vLLM compute alike"
        yield Problem(what, where=where, hint=f"one of {', '.join(ROPE_TYPES)}")
        return
    for key in _ROPE_NEEDS[kind]:
        if rope.get(key) is None:
            yield Problem(f"the rotary scaling {kind!r} needs {key}", where=where, hint=hint)
    unknown = sorted(rope.keys() - {"rope_type", "rope_theta", *_ROPE_KEYS[kind]})
    if unknown:
        what = f"rope_parameters: {', '.join(unknown)}: not something that training and vLLM compute alike"
        yield Problem(what, where=where, hint="leave it out")
    if "rope_parameters" in overrides and (overrides["rope_parameters"] or {}).get("rope_theta") is None:
        yield Problem("rope_parameters: rope_theta is missing", where=where, hint=hint)


def _not_taken_over(
    overrides: Mapping[str, Any], config: LayerConfig, own: Mapping[str, str], where: str
) -> Iterator[Problem]:
    """An override that the network does not follow would be trained one way and served another, or do nothing."""
    have = config.to_dict()
    for key, value in overrides.items():
        if key in own or key == "rope_parameters" or have.get(key) == value:
            continue
        yield Problem(
            f"{key}: {value!r} is not something that the draft's layers can have"
            if key in have
            else f"the draft's layers have no {key}",
            where=where,
            hint=(did_you_mean(key, have) if key not in have else None) or "leave it out",
        )
