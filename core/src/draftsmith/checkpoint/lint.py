"""``draftsmith lint``: would vLLM load this checkpoint, and draft what was trained?

vLLM's loader does not check that a draft is complete: without a norm, or without its vocabulary map, it loads, runs
and drafts nonsense. Here every tensor, flag and id is checked against what the loader does with it, without starting
vLLM and without torch. What belongs to one format alone is asked of its schema
(:meth:`draftsmith.interfaces.CheckpointFormat.lint`); everything else is here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.api import PROJECT_NAME, VerifierFacts
from draftsmith.checkpoint.exported import (
    CONFIG,
    OWN_KEY,
    TRAINED_AS,
    WEIGHTS,
    StoredTensor,
    open_format,
    read_config,
    read_header,
    read_tensor,
    schema_for,
    unread_files,
    verifier_of,
)
from draftsmith.config.load import leaves
from draftsmith.config.structure import plain
from draftsmith.errors import CheckpointError, DraftsmithError, UnknownNameError, VerifierError
from draftsmith.interfaces import CheckpointFormat, Finding, TensorSpec
from draftsmith.serving.vllm_models import hands_out_hidden_states

if TYPE_CHECKING:
    from draftsmith.plugins import PluginRegistry

__all__ = ["has_errors", "lint_checkpoint"]

_FLOATS = ("BF16", "F16", "F32", "F64")


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether vLLM would fail, or draft nonsense."""
    return any(finding.severity == "error" for finding in findings)


def lint_checkpoint(folder: Path, registry: PluginRegistry, *, verifier: str | None = None) -> list[Finding]:
    """All findings on the checkpoint in *folder*, errors first. Empty: vLLM loads it and drafts what was trained.

    What is wrong with the checkpoint becomes a finding, not an exception, a missing or damaged file included.
    """
    try:
        config = read_config(folder)
    except CheckpointError as error:
        return [_from_error(error, CONFIG)]
    findings = []
    format_: CheckpointFormat | None = None
    try:
        format_ = open_format(schema_for(config, registry, CONFIG))
    except UnknownNameError as error:
        findings.append(_from_error(error, f"{CONFIG}: speculators_model_type"))
    except DraftsmithError as error:
        findings.append(_from_error(error, CONFIG))
    native = format_ is not None and format_.native
    findings += [*_check_top_level(config, native), *_check_speculators_config(config)]
    facts, about_verifier = _verifier(config, verifier)
    findings += about_verifier
    header: dict[str, StoredTensor] | None = None
    try:
        header = read_header(folder)
    except CheckpointError as error:
        findings.append(_from_error(error, WEIGHTS))
    if not native:
        findings += _check_layers(config)
        if facts is not None:
            findings += _check_against_verifier(config, facts)
    if header is not None:
        if not native:
            findings += _check_vocabulary(config, header, facts)
        if format_ is not None:
            findings += _check_format(config, header, format_, facts)
            findings += _check_files(folder, config, format_)
    unique = list(dict.fromkeys(findings))
    return sorted(unique, key=lambda finding: finding.severity != "error")


def _from_error(error: DraftsmithError, where: str) -> Finding:
    return Finding(severity="error", what=error.what, where=where, hint=error.hint or "")


def _error(what: str, where: str, hint: str = "") -> Finding:
    return Finding(severity="error", what=what, where=where, hint=hint)


def _warning(what: str, where: str, hint: str = "") -> Finding:
    return Finding(severity="warning", what=what, where=where, hint=hint)


# --- config.json ------------------------------------------------------------------------------------------------


def _check_top_level(config: Mapping[str, Any], native: bool) -> Iterator[Finding]:
    if not native and config.get("model_type") not in (None, "speculators"):
        yield _error(
            f"a top-level model_type ({config['model_type']!r}) makes vLLM read this as a model of that type, "
            "not as a speculator",
            f"{CONFIG}: model_type",
            "remove the key; the draft layers' type stands in transformer_layer_config.model_type",
        )
    for key in ("quantization_config", "compression_config"):
        for where, part in (("", config), ("transformer_layer_config.", config.get("transformer_layer_config"))):
            if isinstance(part, Mapping) and part.get(key) is not None:
                yield _error(
                    f"{key} was inherited from a quantised verifier; the draft's tensors are not quantised",
                    f"{CONFIG}: {where}{key}",
                    "remove the key",
                )


def _check_speculators_config(config: Mapping[str, Any]) -> Iterator[Finding]:
    where = f"{CONFIG}: speculators_config"
    part = config.get("speculators_config")
    if not isinstance(part, Mapping):
        yield _error("speculators_config is missing; vLLM refuses the checkpoint", where, "export again")
        return
    methods = part.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    where = f"{where}.proposal_methods[0].speculative_tokens"
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        yield _error(f"the number of speculative tokens is {tokens!r}; vLLM needs an integer of at least 1", where)
        return
    own = config.get(OWN_KEY)
    trained = own.get("trained_speculative_tokens") if isinstance(own, Mapping) else None
    if isinstance(trained, int) and tokens > trained:
        yield _warning(
            f"{tokens} tokens are drafted per round, {trained} were trained: the later ones extrapolate and are "
            "mostly rejected, while each still costs a pass",
            where,
            f"write {trained}, or serve with num_speculative_tokens {trained}",
        )


def _check_layers(config: Mapping[str, Any]) -> Iterator[Finding]:
    where = f"{CONFIG}: transformer_layer_config"
    part = config.get("transformer_layer_config")
    if not isinstance(part, Mapping):
        yield _error("transformer_layer_config is missing; vLLM builds the draft from it", where, "export again")
        return
    if "model_type" not in part:
        yield _error("the draft layers have no model_type; loaders guess different ones", f"{where}.model_type")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        value = part.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield _error(f"{key} is {value!r}; an integer of at least 1 is needed", f"{where}.{key}")
    yield from _check_rope(part, where)


def _rope(part: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters in either spelling (transformers 5: rope_parameters; before: rope_scaling and rope_theta)."""
    parameters = part.get("rope_parameters")
    if isinstance(parameters, Mapping):
        return dict(parameters)
    scaling = part.get("rope_scaling")
    rope = dict(scaling) if isinstance(scaling, Mapping) else {}
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    rope.setdefault("rope_type", "default")
    if part.get("rope_theta") is not None:
        rope["rope_theta"] = part["rope_theta"]
    return rope


def _check_rope(part: Mapping[str, Any], where: str) -> Iterator[Finding]:
    rope = _rope(part)
    where_rope = f"{where}.{'rope_parameters' if 'rope_parameters' in part else 'rope_scaling'}"
    theta = rope.get("rope_theta")
    if not isinstance(theta, int | float) or theta <= 0:
        yield _error(
            "rope_theta is missing; vLLM falls back to a value of its own, which depends on the class, and the draft "
            "attends at other angles than trained",
            f"{where_rope}.rope_theta",
            "write the value that the draft was trained with",
        )
    for place, values in ((where_rope, rope), (where, part)):
        factor = values.get("partial_rotary_factor", values.get("partial_rotary"))
        if isinstance(factor, int | float) and factor != 1:
            yield _error(
                f"partial rotary ({factor}) is inherited from the verifier: vLLM would rotate only a part of each "
                "head, the draft was trained with all of it rotated",
                f"{place}.partial_rotary_factor",
                "remove the key, unless the draft was trained with it",
            )
        for key in ("mrope_section", "mrope_interleaved"):
            if values.get(key):
                yield _error(
                    f"{key} is inherited from a vision verifier; vLLM refuses a draft with M-RoPE", f"{place}.{key}"
                )


# --- the verifier -----------------------------------------------------------------------------------------------


def _verifier(config: Mapping[str, Any], given: str | None) -> tuple[VerifierFacts | None, list[Finding]]:
    from draftsmith.verifier import read_verifier

    where = f"{CONFIG}: speculators_config.verifier.name_or_path"
    try:
        name = given or verifier_of(config)
    except CheckpointError as error:
        return None, [_error(f"{error.what}; `vllm serve CHECKPOINT` takes the verifier from it", where)]
    if Path(name).expanduser().is_absolute() or Path(name).is_dir():
        try:
            return read_verifier(name), []
        except VerifierError as error:
            return None, [_error(f"the verifier cannot be read: {error.what}", f"{where} ({name})", error.hint or "")]
    try:
        return read_verifier(name), []
    except VerifierError:
        return None, [
            _warning(
                f"the verifier {name!r} is not on this machine: widths, vocabulary and layer ids are not compared",
                where,
                "download it, or lint where it is served",
            )
        ]


def _check_against_verifier(config: Mapping[str, Any], facts: VerifierFacts) -> Iterator[Finding]:
    part = config.get("transformer_layer_config")
    if not isinstance(part, Mapping):
        return
    where = f"{CONFIG}: transformer_layer_config"
    if part.get("vocab_size") != facts.vocab_size:
        yield _error(
            f"vocab_size is {part.get('vocab_size')!r}, the verifier's is {facts.vocab_size}; vLLM shares the "
            "verifier's embedding with the draft",
            f"{where}.vocab_size",
            "write the verifier's; the size of a reduced vocabulary is draft_vocab_size",
        )
    target = config.get("target_hidden_size")
    width = target if target is not None else part.get("hidden_size")
    if width != facts.hidden_size:
        yield _error(
            f"the draft expects hidden states of width {width!r}, the verifier's are {facts.hidden_size} wide",
            f"{CONFIG}: target_hidden_size" if target is not None else f"{where}.hidden_size",
            "write target_hidden_size where the draft is of another width than its verifier",
        )
    longest = part.get("max_position_embeddings")
    if isinstance(longest, int) and longest < facts.max_position_embeddings:
        yield _warning(
            f"max_position_embeddings is {longest}, the verifier's is {facts.max_position_embeddings}: beyond "
            f"{longest} tokens the draft is slower than none where vLLM does not raise it",
            f"{where}.max_position_embeddings",
            "write the verifier's",
        )
    theta, own = _rope(part).get("rope_theta"), facts.rope_parameters.get("rope_theta")
    if isinstance(theta, int | float) and isinstance(own, int | float) and not math.isclose(theta, own):
        yield _warning(
            f"rope_theta is {theta}, the verifier's is {own}; right only if the draft was trained so",
            f"{where}.rope_parameters.rope_theta",
        )


# --- tensors ----------------------------------------------------------------------------------------------------


def _check_format(
    config: Mapping[str, Any],
    header: Mapping[str, StoredTensor],
    format_: CheckpointFormat,
    facts: VerifierFacts | None,
) -> Iterator[Finding]:
    try:
        expected = format_.expected_tensors(config)
        present = format_.as_loaded(config, {name: tensor.spec for name, tensor in header.items()})
    except CheckpointError as error:
        yield _from_error(error, f"{CONFIG}: {error.where or ''}".rstrip(": "))
        return
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        yield _error(
            f"the config does not say which tensors the draft has: {type(error).__name__} {error}",
            CONFIG,
            "export again",
        )
        return
    yield from _compare_tensors(expected, present)
    try:
        # The last layer's output is what every engine has in hand; layers before it must be tapped.
        if facts is not None and any(each < facts.num_layers for each in format_.capture(config, facts).layer_ids):
            yield from _check_taps(facts)
        yield from format_.lint(config, present, facts)
        yield from _check_unchanged(config, format_)
        yield from _check_servable(config, format_)
    except CheckpointError as error:
        yield _from_error(error, f"{CONFIG}: {error.where or ''}".rstrip(": "))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        yield _error(f"the config is malformed: {type(error).__name__} {error}", CONFIG, "export again")


def _check_unchanged(config: Mapping[str, Any], format_: CheckpointFormat) -> Iterator[Finding]:
    """What the config says otherwise than when it was exported: no loader can tell, the weights fit as well."""
    own = config.get(OWN_KEY)
    noted = own.get(TRAINED_AS) if isinstance(own, Mapping) else None
    if not isinstance(noted, Mapping):
        return  # of another project
    try:
        now = dict(leaves(plain(format_.options(config))))
    except CheckpointError:
        return  # what cannot be read has been reported
    was = dict(leaves(noted))
    for key in sorted(now.keys() | was.keys()):
        if now.get(key) != was.get(key):
            yield _error(
                f"{key} is {now.get(key)!r} by the config, and was {was.get(key)!r} when the draft was exported: "
                "vLLM would serve what was not trained",
                CONFIG,
                f"write back what it was; if the change is meant, change {OWN_KEY}.{TRAINED_AS} as well",
            )


def _check_servable(config: Mapping[str, Any], format_: CheckpointFormat) -> Iterator[Finding]:
    try:
        reason = format_.serving(config).unservable
    except CheckpointError:
        return  # what is missing there has been reported with the config
    if reason is not None:
        yield _error(reason, CONFIG, "it can be simulated, trained on, and served by another runtime")


def _check_files(folder: Path, config: Mapping[str, Any], format_: CheckpointFormat) -> Iterator[Finding]:
    for unread in unread_files(folder, config, format_):
        yield _warning(unread, str(folder), "it is served, and can be neither simulated nor trained on")


def _check_taps(facts: VerifierFacts) -> Iterator[Finding]:
    if hands_out_hidden_states(facts.architectures) is False:
        yield _warning(
            f"the installed vLLM does not hand out the hidden states of {facts.architectures[0]}: it refuses a draft "
            "that reads them",
            f"{CONFIG}: speculators_config.verifier",
            "serve with a version of vLLM whose class of that name does",
        )


def _compare_tensors(expected: Mapping[str, TensorSpec], present: Mapping[str, TensorSpec]) -> Iterator[Finding]:
    for name, spec in expected.items():
        found = present.get(name)
        if found is None:
            if spec.required:
                unnoticed = "vLLM does not notice, and drafts with whatever that memory holds"
                yield _error(
                    f"tensor {name} {list(spec.shape)} is missing; "
                    f"{'vLLM refuses the checkpoint' if spec.refused else unnoticed}",
                    f"{WEIGHTS}: {name}",
                    spec.why or "export again",
                )
            continue
        if found.shape != spec.shape:
            yield _error(
                f"tensor {name} has shape {list(found.shape)}, the config makes it {list(spec.shape)}",
                f"{WEIGHTS}: {name}",
                spec.why,
            )
        yield from _check_dtype(name, spec, found)
    for name in sorted(present.keys() - expected.keys()):
        yield _error(
            f"tensor {name} is unknown to vLLM's loader, which then fails",
            f"{WEIGHTS}: {name}",
            "tensor names carry no 'model.' prefix" if name.startswith("model.") else "remove it, or mend the config",
        )


def _check_dtype(name: str, spec: TensorSpec, found: TensorSpec) -> Iterator[Finding]:
    where = f"{WEIGHTS}: {name}"
    if spec.dtype in (None, *_FLOATS):
        if found.dtype not in _FLOATS:
            yield _error(f"tensor {name} is {found.dtype}, a float is needed", where, "export again, unquantised")
        elif found.dtype != "BF16" and spec.dtype in (None, "BF16"):
            yield _warning(f"tensor {name} is {found.dtype}; BF16 is what vLLM serves", where, "export again")
    elif found.dtype != spec.dtype:
        yield _error(f"tensor {name} is {found.dtype}, {spec.dtype} is needed", where, "export again")


def _check_vocabulary(
    config: Mapping[str, Any], header: Mapping[str, StoredTensor], facts: VerifierFacts | None
) -> Iterator[Finding]:
    """``d2t[i] = target id - i`` for ascending target ids; ``t2d`` marks the same ids."""
    part = config.get("transformer_layer_config")
    target = facts.vocab_size if facts else part.get("vocab_size") if isinstance(part, Mapping) else None
    size = config.get("draft_vocab_size")
    d2t = header.get("d2t")
    where = f"{WEIGHTS}: d2t"
    if isinstance(size, int) and isinstance(target, int):
        if size > target:
            yield _error(
                f"draft_vocab_size is {size}, the verifier has {target} tokens", f"{CONFIG}: draft_vocab_size"
            )
            return
        if size == target and d2t is not None:
            yield _warning(
                "d2t is the identity of a full vocabulary, and slows vLLM by a remap of the logits",
                where,
                "leave it out",
            )
    if d2t is None or d2t.spec.dtype not in ("I64", "I32"):
        return
    if isinstance(size, int) and d2t.spec.shape != (size,):
        yield _error(f"d2t has shape {list(d2t.spec.shape)}, draft_vocab_size is {size}", where)
        return
    offsets = read_tensor(d2t)
    if not offsets or not isinstance(target, int):
        return
    t2d = header.get("t2d")
    marked: list[int] | None = None
    if t2d is not None:
        if t2d.spec.dtype != "BOOL" or t2d.spec.shape != (target,):
            yield _error(
                f"t2d is {t2d.spec.dtype} {list(t2d.spec.shape)}, BOOL [{target}] is needed",
                f"{WEIGHTS}: t2d",
                "it has one flag for every token of the verifier",
            )
        else:
            marked = [index for index, flag in enumerate(read_tensor(t2d)) if flag]
    yield from _check_map(offsets, marked, target)


def _check_map(offsets: Sequence[int], marked: Sequence[int] | None, target: int) -> Iterator[Finding]:
    where = f"{WEIGHTS}: d2t"
    kept = [offset + index for index, offset in enumerate(offsets)]
    # Ids stored as such ascend strictly. Offsets do so only if no two kept ids are neighbours, which does not happen
    # in a real vocabulary; t2d, where it is there, decides.
    looks_absolute = len(offsets) > 1 and _ascending(offsets) and offsets[-1] < target and offsets[0] >= 0
    if looks_absolute and (list(offsets) == marked or (marked is None and len(offsets) >= 64)):
        yield _error(
            "d2t holds target ids; vLLM adds the draft id to it, so it must hold offsets (target id - draft id)",
            where,
            "subtract 0, 1, 2, … from it",
        )
        return
    if min(kept) < 0 or max(kept) >= target:
        yield _error(
            f"d2t leads to target ids from {min(kept)} to {max(kept)}; the verifier has 0 to {target - 1}",
            where,
            "is it the map of another verifier? Or does it hold target ids in place of offsets?",
        )
        return
    if not _ascending(kept):
        yield _error(
            "d2t does not lead to ascending, distinct target ids",
            where,
            "the draft's rows and the map belong to different vocabularies; export again",
        )
        return
    if marked is not None and marked != kept:
        yield _error(
            f"t2d marks {len(marked)} tokens, others than the {len(kept)} that d2t leads to",
            f"{WEIGHTS}: t2d",
            f"vLLM goes by d2t, training goes by t2d: run `{PROJECT_NAME} export` again",
        )


def _ascending(values: Sequence[int]) -> bool:
    return all(low < high for low, high in itertools.pairwise(values))
