"""The model families whose multi-token-prediction head vLLM serves: how each is told, named and fed. Torch-free.

A family is a value, :class:`MtpFamily`. Those of this package are at the end; another package adds its own by an entry
point of the group :data:`ENTRY_POINT_GROUP`, whose value names an :class:`MtpFamily`.

All heads have the same skeleton, and names of their own for it: two norms (of the embedding and of the hidden state),
a projection of both side by side, one decoder layer, and a norm before the verifier's head. *Own* names are those of
this package's networks: :data:`SKELETON`, and ``layer.…`` for what is in the decoder layer.

Contract: ``vllm/config/speculative.py`` (which configurations have a head), ``vllm/model_executor/models/*_mtp.py``
(names, order, norms) and each family's own model there (which hidden state it hands over).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from typing import Any, Literal

from attrs import field, frozen

from draftsmith.errors import PluginError, VerifierError

__all__ = [
    "ENTRY_POINT_GROUP",
    "FAMILIES",
    "SKELETON",
    "MtpFamily",
    "families",
    "family_named",
    "family_of",
    "text_config",
]

#: Entry points of further families: ``name = "package.module:VALUE"``.
ENTRY_POINT_GROUP = "draftsmith_mtp.families.v1"
#: Own names of what is outside the decoder layer.
SKELETON = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
_LAYER = "layer."


@frozen(kw_only=True)
class MtpFamily:
    """One family's head.

    Attributes:
        name: what it is called in options, configurations and messages.
        architectures: names in ``architectures`` of config.json that tell it.
        model_types: values of ``model_type`` that tell it too; of a nested text configuration where there is one.
        layers_key: key of the (text) configuration with the number of layers of the head.
        default_layers: the number where the key is missing.
        prefix: of the names of layer *index*, with ``{index}`` and ``{layer}`` (= num_hidden_layers + index); what
            belongs to the head begins with it.
        names: own name of the skeleton → name below the prefix.
        layer: where the decoder layer's tensors stand below the prefix, such as ``layers.{index}.`` or nothing.
        copies: names below the prefix of tensors that repeat the model's embedding or head. vLLM takes the model's,
            so they are neither trained nor written.
        exact: names below the decoder layer of tensors that are not trained, and written as the model has them: the
            biases by which a router chooses, rounded as the trained ones are, would choose other experts.
        concatenation: the order in which the projection reads its two inputs.
        feeds: which hidden state vLLM hands the head: the last layer's output as it is (``raw``), or after the
            model's final norm (``normed``).
        recycles: which of its own hidden states it is handed in later steps: before (``raw``) or after (``normed``)
            the norm before the verifier's head.
        zeroes_first: the embedding is zero in the row at position 0.
        needs_v2_runner: vLLM's model runner V1, which is what CPUs have, dies of it.
        network: ``module:Class`` of the network that trains it, a ``draftsmith_mtp.model.MtpHead``; None: the head is
            recognised, extracted and stitched, and cannot be trained yet.
        summary: one line for people.
    """

    name: str
    summary: str
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    layers_key: str = "num_nextn_predict_layers"
    default_layers: int = 0
    prefix: str
    names: Mapping[str, str]
    layer: str = ""
    copies: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    concatenation: Literal["embedding_hidden", "hidden_embedding"] = "embedding_hidden"
    feeds: Literal["raw", "normed"] = "normed"
    recycles: Literal["raw", "normed"] = "normed"
    zeroes_first: bool = False
    needs_v2_runner: bool = False
    network: str | None = None
    _own: dict[str, str] = field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        missing = set(SKELETON) ^ set(self.names)
        if missing:
            raise ValueError(f"names of {self.name} must be given for {', '.join(SKELETON)}")
        object.__setattr__(self, "_own", {theirs: own for own, theirs in self.names.items()})

    def tells(self, config: Mapping[str, Any]) -> bool:
        """Whether a model of this configuration is of the family. It may have no head all the same."""
        text = text_config(config)
        if set(self.architectures) & set(config.get("architectures") or ()):
            return True
        return bool({config.get("model_type"), text.get("model_type")} & set(self.model_types))

    def num_layers(self, config: Mapping[str, Any]) -> int:
        """Layers of the head, as configured; 0: the model has none."""
        value = text_config(config).get(self.layers_key)
        return self.default_layers if value is None else int(value)

    def prefix_of(self, config: Mapping[str, Any], index: int = 0) -> str:
        """What the names of the head's layer *index* begin with in the model's files."""
        return self.prefix.format(index=index, layer=int(text_config(config)["num_hidden_layers"]) + index)

    def belongs(self, name: str, config: Mapping[str, Any]) -> bool:
        """Whether the model's tensor *name* is one of the head's, copies of the embedding and head included."""
        prefixes = {self.prefix_of(config, index) for index in range(max(self.num_layers(config), 1))}
        return any(name.startswith(prefix) for prefix in prefixes)

    def is_copy(self, name: str, config: Mapping[str, Any]) -> bool:
        """Whether the head's tensor *name* repeats the model's embedding or head."""
        return self.belongs(name, config) and any(name.endswith(f".{copy}") for copy in self.copies)

    def own_name(self, name: str, config: Mapping[str, Any], index: int = 0) -> str | None:
        """The own name of the model's tensor *name*; None: not of the head's layer *index*, or a copy."""
        prefix = self.prefix_of(config, index)
        if not name.startswith(prefix) or self.is_copy(name, config):
            return None
        below = name.removeprefix(prefix)
        module, _, last = below.rpartition(".")
        if module in self._own:
            return f"{self._own[module]}.{last}"
        layer = self.layer.format(index=index)
        return _LAYER + below.removeprefix(layer) if below.startswith(layer) else None

    def is_exact(self, name: str, config: Mapping[str, Any]) -> bool:
        """Whether the head's tensor *name* is written in the dtype that the model has it in."""
        own = self.own_name(name, config)
        return own is not None and own.removeprefix(_LAYER) in self.exact

    def model_name(self, own: str, config: Mapping[str, Any], index: int = 0) -> str:
        """The model's name of what is *own* here; the inverse of :meth:`own_name`."""
        prefix = self.prefix_of(config, index)
        if own.startswith(_LAYER):
            return prefix + self.layer.format(index=index) + own.removeprefix(_LAYER)
        module, _, last = own.rpartition(".")
        return f"{prefix}{self.names[module]}.{last}"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's own keys, over those of the outer level, where config.json nests them."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def family_of(config: Mapping[str, Any], known: Iterable[MtpFamily] | None = None) -> MtpFamily:
    """The family of a model, from its config.json; further ones before those of this package.

    Raises:
        VerifierError: none tells it; the known ones are listed.
    """
    candidates = list(families().values() if known is None else known)
    for family in candidates:
        if family.tells(config):
            return family
    kind = next(iter(config.get("architectures") or ()), None) or config.get("model_type")
    names = ", ".join(sorted(each.name for each in candidates))
    raise VerifierError(
        f"no family of multi-token-prediction heads is known for {kind}; known are {names}",
        where="config.json: architectures",
        hint=f"a package can add one: an entry point of the group {ENTRY_POINT_GROUP}",
    )


def family_named(name: str) -> MtpFamily:
    """The family called *name*.

    Raises:
        VerifierError: there is none; the known ones are listed.
    """
    known = families()
    if name not in known:
        raise VerifierError(
            f"no family of multi-token-prediction heads is called {name!r}; known are {', '.join(sorted(known))}",
            hint=f"a package can add one: an entry point of the group {ENTRY_POINT_GROUP}",
        )
    return known[name]


@cache
def families() -> Mapping[str, MtpFamily]:
    """All known families by name: other packages' first, then those of this one.

    Raises:
        PluginError: an entry point does not lead to a family, or two claim one name. Nothing wins silently.
    """
    found: dict[str, MtpFamily] = {}
    origin: dict[str, str] = {}
    for point in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda each: each.name):
        where = f"entry point {point.name} = {point.value}"
        try:
            family = point.load()
        except Exception as error:  # another package's module may raise anything
            raise PluginError(f"a family cannot be imported: {type(error).__name__}: {error}", where=where) from error
        if not isinstance(family, MtpFamily):
            raise PluginError(f"{type(family).__name__} is no MtpFamily", where=where)
        _add(found, origin, family, where)
    for family in FAMILIES:
        _add(found, origin, family, "draftsmith-mtp")
    return found


def _add(found: dict[str, MtpFamily], origin: dict[str, str], family: MtpFamily, where: str) -> None:
    if family.name in found:
        raise PluginError(
            f"two families are called {family.name!r}: {origin[family.name]}, and {where}",
            hint="uninstall one of the packages",
        )
    found[family.name], origin[family.name] = family, where


_DEEPSEEK_NAMES = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "shared_head.norm",
}
_QWEN_NAMES = {
    "token_layernorm": "pre_fc_norm_embedding",
    "hidden_layernorm": "pre_fc_norm_hidden",
    "input_proj": "fc",
    "final_layernorm": "norm",
}

#: Those of this package, in the order in which they are asked.
FAMILIES = (
    MtpFamily(
        name="mimo",
        summary="MiMo: a qwen2 layer on [hidden, embedding], fed the stream before the final norm",
        architectures=("MiMoForCausalLM",),
        prefix="model.mtp_layers.{index}.",
        names={name: name for name in SKELETON},
        concatenation="hidden_embedding",
        feeds="raw",
        zeroes_first=True,
        network="draftsmith_mtp.mimo:MimoHead",
    ),
    MtpFamily(
        name="qwen3_5",
        summary="Qwen3.5, dense and mixture of experts",
        model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        layers_key="mtp_num_hidden_layers",
        prefix="mtp.",
        names=_QWEN_NAMES,
        layer="layers.{index}.",
        needs_v2_runner=True,
        network="draftsmith_mtp.layers:Qwen3Head",
    ),
    MtpFamily(
        name="qwen3_next",
        summary="Qwen3-Next",
        model_types=("qwen3_next",),
        default_layers=1,  # the published configurations do not say
        prefix="mtp.",
        names=_QWEN_NAMES,
        layer="layers.{index}.",
        network="draftsmith_mtp.layers:Qwen3Head",
    ),
    MtpFamily(
        name="deepseek_v3",
        summary="DeepSeek-V3 and R1: a layer with latent attention and experts",
        model_types=("deepseek_v3",),
        prefix="model.layers.{layer}.",
        names=_DEEPSEEK_NAMES,
        copies=("embed_tokens.weight", "shared_head.head.weight"),
        exact=("mlp.gate.e_score_correction_bias",),
        zeroes_first=True,
        network="draftsmith_mtp.layers:TransformersHead",
    ),
    MtpFamily(
        name="glm4_moe",
        summary="GLM-4.5, 4.6 and 4.7 (mixture of experts)",
        architectures=("Glm4MoeForCausalLM",),
        prefix="model.layers.{layer}.",
        names=_DEEPSEEK_NAMES,
        copies=("embed_tokens.weight", "shared_head.head.weight"),
        exact=("mlp.gate.e_score_correction_bias",),
        recycles="raw",
        zeroes_first=True,
        network="draftsmith_mtp.layers:TransformersHead",
    ),
)
