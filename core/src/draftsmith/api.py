"""The frozen values that plugins return and receive. Torch-free: importing this module costs nothing.

Implementations are named as ``"package.module:attribute"`` and imported only when a run uses them, so that the
whole run is resolved and checked before torch is loaded. What an implementation must offer is written in
:mod:`draftsmith.interfaces`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import Attribute, field, fields, frozen
from attrs.validators import optional

from draftsmith.errors import Problem

__all__ = [
    "API_MAJOR",
    "ENTRY_POINT_GROUP",
    "PROJECT_NAME",
    "Algorithm",
    "CaptureRequirements",
    "CheckpointSaved",
    "CheckpointSchema",
    "Command",
    "DataFacts",
    "DraftArchitecture",
    "Item",
    "Loss",
    "LossPart",
    "Mask",
    "Observer",
    "Problem",
    "PromptSet",
    "RunFinished",
    "RunStarted",
    "ServingPlan",
    "StepFinished",
    "Transport",
    "TransportGuarantees",
    "VerifierFacts",
]

PROJECT_NAME = "draftsmith"
#: Major version of the plugin API. It stands in the entry-point group, so that a plugin made for another major
#: version is reported without being imported.
API_MAJOR = 1
ENTRY_POINT_GROUP = f"{PROJECT_NAME}.v{API_MAJOR}"

_NAME = re.compile(r"[a-z][a-z0-9_]*(-[a-z0-9_]+)*")
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def _is_name(_: Any, attribute: Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{attribute.name} must be lower case letters, digits, '_' or '-', got {value!r}")


def _is_reference(_: Any, attribute: Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
        raise ValueError(f"{attribute.name} must read 'package.module:attribute', got {value!r}")


@frozen(kw_only=True)
class Item:
    """What every registered value has.

    Attributes:
        name: to ask for it by.
        summary: one line, without a full stop.
        conformance: ``"module:Class"``, the tests that ``draftsmith plugins check`` puts it to, where those for its
            kind need to be told more than a name: a class derived from one of ``draftsmith.testing``. Nothing else
            imports it.
    """

    name: str = field(validator=_is_name)
    summary: str
    conformance: str | None = field(default=None, validator=optional(_is_reference))


@frozen(kw_only=True)
class DraftArchitecture(Item):
    """A draft network. ``implementation`` is an ``interfaces.DraftArchitecture`` subclass.

    Attributes:
        algorithms: those whose forward it can take the place in, where a recipe asks for it by name; with any other it
            is refused before anything starts. Empty (the default): not said, and any may try.
    """

    implementation: str = field(validator=_is_reference)
    algorithms: tuple[str, ...] = ()


@frozen(kw_only=True)
class LossPart:
    """A registered loss that another one is made of.

    Attributes:
        name: what it is registered as, by whichever plugin.
        options: its own options, as plain values.
        where: the option of the other loss that asks for it, such as ``terms.ce``; named in errors.
    """

    name: str
    options: Mapping[str, Any] = field(factory=dict)
    where: str = ""


def _no_parts(options: Any) -> Sequence[LossPart]:
    return ()


@frozen(kw_only=True)
class Loss(Item):
    """A loss per position. ``implementation`` is an ``interfaces.PositionLoss`` subclass, built as ``cls(**options)``.

    Attributes:
        options: attrs class of its parameters, or None where it has none.
        parts: ``options ->`` the losses that it is made of. The core checks them with the recipe, and builds them;
            where there are any, the implementation is built as ``cls(**options, parts=[…])``, in their order.
            Torch-free.
    """

    implementation: str = field(validator=_is_reference)
    options: type | None = None
    parts: Callable[[Any], Sequence[LossPart]] = _no_parts


@frozen(kw_only=True)
class Mask(Item):
    """An attention rule. ``implementation`` is an ``interfaces.MaskRule`` subclass (built with ``window=…``)."""

    implementation: str = field(validator=_is_reference)


@frozen(kw_only=True)
class CheckpointSchema(Item):
    """An exported format. ``implementation`` is an ``interfaces.CheckpointFormat`` subclass.

    Attributes:
        architectures: the draft networks whose tensors it holds; where a recipe puts another one and this format
            together, it is refused before anything starts. Empty (the default): not said, and any may try.
        speculators_types: the values of ``speculators_model_type`` in config.json that this schema reads.
        warm_start_types: further values, of checkpoints that are no drafts of this kind and that training can begin
            from all the same (``train.warm_start``).
    """

    implementation: str = field(validator=_is_reference)
    architectures: tuple[str, ...] = ()
    speculators_types: tuple[str, ...] = ()
    warm_start_types: tuple[str, ...] = ()


@frozen(kw_only=True)
class TransportGuarantees:
    """What a transport promises; the core chooses by these, never by a name.

    Attributes:
        persistent: samples survive the processes that wrote them, so that capture can be a stage of its own.
        random_access: a sample can be read many times, in any order.
        concurrent_writers: several producers may write at once.
    """

    persistent: bool
    random_access: bool
    concurrent_writers: bool


@frozen(kw_only=True)
class Transport(Item):
    """A hidden-state transport. ``implementation`` is an ``interfaces.HiddenStateTransport`` subclass.

    ``lossy`` names the options that decide the values that readers get, such as a narrower encoding: with others a
    training is another one. All else may differ between two starts of a training that captures for itself.
    """

    implementation: str = field(validator=_is_reference)
    options: type
    guarantees: TransportGuarantees
    lossy: Sequence[str] = ()

    def __attrs_post_init__(self) -> None:
        unknown = set(self.lossy) - {each.name for each in fields(self.options)}
        if unknown:
            raise ValueError(f"lossy names options that {self.name!r} does not have: {', '.join(sorted(unknown))}")


@frozen(kw_only=True)
class VerifierFacts:
    """What a verifier's own files say about it, read without torch. Widths in elements, ids as tokens.

    Attributes:
        path: folder of the model.
        fingerprint: hex digest over its configuration and weights (see ``draftsmith.verifier``).
        text_config: the (text) model's configuration, as in config.json, with nested ``text_config`` unwrapped.
        architectures: as published in config.json.
        rope_parameters: ``{"rope_type", "rope_theta", …}``, whichever spelling the file used.
        is_mixture_of_experts: the feed-forward layers are experts (their width is not the draft's).
        logit_softcap, logit_scale: post-processing of the logits that the teacher must repeat.
    """

    path: Path
    fingerprint: str
    architectures: tuple[str, ...]
    model_type: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]
    tie_word_embeddings: bool
    is_mixture_of_experts: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    text_config: Mapping[str, Any] = field(factory=dict, repr=False)


@frozen(kw_only=True)
class CaptureRequirements:
    """What must be captured of every token (the layer-id convention of vLLM's ``eagle_aux_hidden_state_layer_ids``).

    id 0 is the embedding output, id i the residual stream after i decoder layers, id n (n layers) the stream after
    the last layer *before* the final norm.

    Attributes:
        layer_ids: the tapped layers, ascending and distinct: vLLM sorts them, and so fixes the order of features.
            Id n may be one of them: it is then a feature too, and captured once.
        last_hidden: whether id n is needed as well (the teacher's logits are recomputed from it).
    """

    layer_ids: tuple[int, ...]
    last_hidden: bool = True

    def __attrs_post_init__(self) -> None:
        if list(self.layer_ids) != sorted(set(self.layer_ids)) or (self.layer_ids and self.layer_ids[0] < 0):
            raise ValueError(f"layer ids must be distinct, ascending and not negative, got {self.layer_ids}")

    def ids(self, num_layers: int) -> tuple[int, ...]:
        """All ids to capture: the taps, then id n where needed. Shape of a sample: [tokens, len(ids), hidden]."""
        return tuple(dict.fromkeys((*self.layer_ids, num_layers))) if self.last_hidden else self.layer_ids

    def last_is_extra(self, num_layers: int) -> bool:
        """Whether the last captured id is id n and no tap."""
        return len(self.ids(num_layers)) > len(self.layer_ids)


def _leaves_to_core(_: Any, attribute: Attribute[Any], value: Mapping[str, Any]) -> None:
    reserved = {"model", "speculative_config"} & set(value)
    if reserved:
        raise ValueError(f"{attribute.name} must leave {', '.join(sorted(reserved))} to the caller")


@frozen(kw_only=True)
class DataFacts:
    """What the prepared rows are like, those of validation included. Rows are counted as training cuts them.

    Attributes:
        token_ids: every token that occurs, in prompts too.
        longest_row: tokens of the longest row.
        longest_answer: the most supervised tokens that follow one another in a row.
    """

    token_ids: frozenset[int] = field(repr=False)
    longest_row: int
    longest_answer: int

    def unreached(self, count: int, *, option: str, name: str = "steps") -> Sequence[Problem]:
        """What is wrong where no answer reaches the last of the steps, each of which needs a token more.

        Args:
            count: of steps, as the algorithm's *option* says.
            name: what the algorithm calls its steps.
        """
        needed, most = count + 1, self.longest_answer - 1
        if self.longest_answer >= needed:
            return []
        return [
            Problem(
                f"{count} {name} need {needed} tokens that the verifier wrote one after the other, and no "
                f"answer has more than {self.longest_answer}: the last {name} would never be trained",
                where=f"algorithm.options.{option}",
                hint=f"choose at most {most}, or prepare longer answers" if most >= 1 else "prepare longer answers",
            )
        ]


@frozen(kw_only=True)
class ServingPlan:
    """How vLLM is told to serve an exported checkpoint as a draft.

    Attributes:
        method: ``speculative_config["method"]``; always passed, since vLLM else guesses it from the path.
        num_speculative_tokens: the number written in the checkpoint.
        extra: further keys of ``speculative_config``.
        since: the release of vLLM that the method and these keys came with, for whoever has an earlier one; None: not
            known.
        engine: further engine arguments, by the names of ``vllm.LLM``'s keywords (``vllm serve`` spells them
            ``--like-this``); plain values. ``model`` and ``speculative_config`` are not among them.
        environment: variables that vLLM's processes must be started with.
        as_model: the checkpoint's folder can be served as the model itself (``vllm serve CHECKPOINT``).
        needs_v2_runner: only vLLM's model runner V2 serves it. Where that cannot run, verification says so and
            leaves the counting to the simulator.
        notes: what else whoever serves it must know, a sentence each; they stand in the model card.
        unservable: why no vLLM serves it, wherever it runs; None: it does. Such a draft is exported all the same, for
            other runtimes and for the simulator, which then does the counting; the linter reports it as an error.
    """

    method: str
    num_speculative_tokens: int
    extra: Mapping[str, Any] = field(factory=dict)
    since: str | None = None
    engine: Mapping[str, Any] = field(factory=dict, validator=_leaves_to_core)
    environment: Mapping[str, str] = field(factory=dict)
    as_model: bool = True
    needs_v2_runner: bool = False
    notes: tuple[str, ...] = ()
    unservable: str | None = None


def _no_problems(options: Any, verifier: VerifierFacts) -> Sequence[Problem]:
    return ()


def _no_notes(options: Any, verifier: VerifierFacts) -> Sequence[str]:
    return ()


def _nothing_derived(options: Any, verifier: VerifierFacts) -> Mapping[str, Any]:
    return {}


def _no_window(options: Any) -> int | None:
    return None


def _not_said(options: Any) -> str | None:
    return None


@frozen(kw_only=True)
class Algorithm(Item):
    """The bundle that makes "by name" work.

    Attributes:
        implementation: an ``interfaces.DraftAlgorithm`` subclass.
        options: attrs class of the algorithm's own options; every field has a default, a type, and
            ``metadata={"help": "…"}``.
        architecture, loss, mask, schema: names of the default facets; a recipe can override each.
        loss_options: default options of the default loss.
        reduction: the paper's loss reduction: ``masked_mean``, ``weighted_mean`` or ``local_mean``.
        requirements: ``(options, verifier) -> CaptureRequirements``; torch-free.
        check: ``(options, verifier) -> problems``, found before anything heavy starts; torch-free.
        check_data: ``(options, verifier, data) -> problems``, found once the data are prepared; torch-free. None
            (the default): any data will do.
        notes: ``(options, verifier) ->`` what works and may surprise, such as a draft that no vLLM serves: a sentence
            each, without its full stop, told before anything starts. Asked once ``check`` finds nothing; torch-free.
        derived: ``(options, verifier) ->`` what options come to whose null stands for a choice, by name: shown by
            ``--explain`` and in the model card. Asked once ``check`` finds nothing; torch-free.
        max_speculative_tokens: ``options -> K``, the number of tokens that the trained draft may serve.
        window: ``options -> W`` of the mask rule, or None (the default): no window.
        served_mask: ``options ->`` the name of the mask by which vLLM serves its drafts, whatever they are trained
            with. A recipe's mask that shows a query anything else is trained all the same; it is told before anything
            is made, and in the model card. None (the default): not said.
        vllm_methods: the methods of vLLM's ``speculative_config`` that its drafts are served by; a vLLM must have them
            all. ``draftsmith doctor`` compares them with what is installed. Empty (the default): not said.
        full_vocabulary: the draft proposes every token of the verifier's; a recipe that reduces it is refused.
        vllm_network: for an algorithm unknown to vLLM: ``"module:class"`` of its network as vLLM runs it. Draftsmith
            registers it in vLLM's processes for the types of *schema* (``CheckpointSchema.speculators_types``), to be
            driven by the first of *vllm_methods*.
        vllm_registration: ``"module:function"`` called in vLLM's processes, where *vllm_network* does not do.
    """

    implementation: str = field(validator=_is_reference)
    options: type
    architecture: str
    loss: str
    mask: str
    schema: str
    requirements: Callable[[Any, VerifierFacts], CaptureRequirements]
    max_speculative_tokens: Callable[[Any], int]
    check: Callable[[Any, VerifierFacts], Sequence[Problem]] = _no_problems
    check_data: Callable[[Any, VerifierFacts, DataFacts], Sequence[Problem]] | None = None
    notes: Callable[[Any, VerifierFacts], Sequence[str]] = _no_notes
    derived: Callable[[Any, VerifierFacts], Mapping[str, Any]] = _nothing_derived
    loss_options: Mapping[str, Any] = field(factory=dict)
    reduction: Literal["masked_mean", "weighted_mean", "local_mean"] = "masked_mean"
    window: Callable[[Any], int | None] = _no_window
    served_mask: Callable[[Any], str | None] = _not_said
    full_vocabulary: bool = False
    vllm_registration: str | None = None
    vllm_methods: tuple[str, ...] = ()
    vllm_network: str | None = field(default=None, validator=optional(_is_reference))

    def __attrs_post_init__(self) -> None:
        if self.vllm_network is not None and not self.vllm_methods:
            raise ValueError("vllm_network needs vllm_methods: the first of them is the one that drives it")


@frozen(kw_only=True)
class Observer(Item):
    """A tracker. ``implementation`` is a class built with the run's output folder; its methods are observer hooks."""

    implementation: str = field(validator=_is_reference)


@frozen(kw_only=True)
class Command(Item):
    """A further command of the command line. ``implementation`` is a function that typer can wrap, or a
    ``typer.Typer`` with commands: ``draftsmith NAME COMMAND …``."""

    implementation: str = field(validator=_is_reference)


@frozen(kw_only=True)
class PromptSet(Item):
    """Prompts that ``draftsmith evaluate --prompts NAME`` measures with.

    ``implementation`` is a function without arguments that returns (or yields) rows: mappings with ``messages``,
    ``conversations``, ``turns`` (of a user, one after the other), ``question``, ``instruction`` or ``prompt``, and
    with ``category`` where the set has some. Answers at the end of a row are left out. What it cannot read is a
    ``draftsmith.errors.DataError`` that says what to install or download.
    """

    implementation: str = field(validator=_is_reference)


@frozen(kw_only=True)
class RunStarted:
    """Before the first step. ``recipe`` is the resolved configuration as plain values."""

    output: Path
    recipe: Mapping[str, Any]
    total_steps: int
    first_step: int
    trainable_parameters: int
    frozen_parameters: int


@frozen(kw_only=True)
class StepFinished:
    """After an optimiser step, after a validation, or after the algorithm's last hand on the trained draft.

    Attributes:
        step: optimiser steps done so far.
        tokens: real (not padding) tokens trained so far.
        metrics: name → value, already divided (sum / count).
    """

    step: int
    tokens: int
    phase: Literal["train", "validation", "finish"]
    metrics: Mapping[str, float]


@frozen(kw_only=True)
class CheckpointSaved:
    """After a training checkpoint is complete. ``best`` says whether it is the best so far by validation."""

    step: int
    path: Path
    best: bool


@frozen(kw_only=True)
class RunFinished:
    """At the end of training. ``outcome``: ``completed``, ``stopped`` (a signal) or ``failed``."""

    step: int
    outcome: Literal["completed", "stopped", "failed"]
    seconds: float
