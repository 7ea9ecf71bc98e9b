"""Options of MTP, what they ask of the capture, and what is wrong with the verifier's head. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from attrs import field, frozen
from attrs.validators import and_, ge, gt, le

from draftsmith.api import CaptureRequirements, DataFacts, Problem, VerifierFacts
from draftsmith.errors import DraftsmithError
from draftsmith.layer_config import ROPE_TYPES
from draftsmith.verifier import tensor_specs
from draftsmith_mtp.families import MtpFamily, family_of
from draftsmith_mtp.head import head_tensors

__all__ = ["MtpOptions", "check", "check_data", "max_speculative_tokens", "requirements"]


_FLOATS = ("BF16", "F16", "F32")
#: Those of which one element is one number. Others are packed: their shapes say nothing of the matrix.
_UNPACKED = (*_FLOATS, "F64", "F8_E4M3", "F8_E5M2")
#: The model's tensors within a decoder layer: its number, and the name below.
_IN_A_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@frozen(kw_only=True)
class MtpOptions:
    """The network is the verifier's own head; only its recursion has options.

    Source: FastMTP (arXiv 2509.18362) for the three steps and their weights of 0.51, 0.31 and 0.18.
    """

    num_steps: int = field(
        default=3,
        validator=ge(1),
        metadata=_help("tokens that the head is trained to draft, one after the other; written as served K"),
    )
    step_decay: float = field(
        default=0.6,
        validator=and_(gt(0), le(1)),
        metadata=_help("weight of step k in the loss is step_decay ** k, divided by the sum of all"),
    )


def requirements(options: MtpOptions, verifier: VerifierFacts) -> CaptureRequirements:
    """The last layer's output: the head reads it, and the teacher's logits are made of it."""
    return CaptureRequirements(layer_ids=(verifier.num_layers,), last_hidden=True)


def max_speculative_tokens(options: MtpOptions) -> int:
    """Serving more tokens than were trained extrapolates, and degrades."""
    return options.num_steps


def check(options: MtpOptions, verifier: VerifierFacts) -> Sequence[Problem]:
    """All that keeps this verifier's head from being trained, found before torch is imported."""
    try:
        family = family_of(verifier.text_config)
        problems = list(_head_problems(family, verifier))
    except DraftsmithError as error:
        return [Problem(each.what, where=f"verifier: {each.where}", hint=each.hint) for each in error.problems]
    return problems


def check_data(options: MtpOptions, verifier: VerifierFacts, data: DataFacts) -> Sequence[Problem]:
    """Whether some answer reaches every step."""
    return data.unreached(options.num_steps, option="num_steps")


def _head_problems(family: MtpFamily, verifier: VerifierFacts) -> Iterator[Problem]:
    text, where = verifier.text_config, f"verifier: {verifier.path}"
    try:
        count = family.num_layers(text)
    except (TypeError, ValueError):
        yield Problem(
            f"{family.layers_key} is {text.get(family.layers_key)!r}, which is no number of layers",
            where=where,
            hint="take the model's config.json as its makers published it",
        )
        return
    found = head_tensors(family, text, tensor_specs(verifier.path))
    if count < 1 or not found:
        why = (
            f"{family.layers_key} is {text.get(family.layers_key)!r}"
            if count < 1
            else "its files hold no tensor of it"
        )
        yield Problem(
            f"the verifier has no multi-token-prediction head: {why}",
            where=where,
            hint="use a model that comes with one; another kind of draft can be trained for this one",
        )
        return
    if count > 1:
        yield Problem(
            f"the head has {count} layers, each for a token of its own; training knows heads of one layer",
            where=where,
            hint="use a model whose head has one layer",
        )
        return
    if family.network is None:
        yield Problem(
            f"heads of the family {family.name} are known by name and cannot be trained yet",
            where=where,
            hint="they can be taken out of their model and put back into it",
        )
        return
    quantised = sorted(name for name, spec in found.items() if spec.dtype not in _FLOATS)
    if quantised:
        first = quantised[0]
        yield Problem(
            f"{len(quantised)} tensors of the head are quantised, such as {first} ({found[first].dtype})",
            where=where,
            hint="train on the model as it was before its head was quantised",
        )
        return
    yield from _shape_problems(family, verifier, {name: spec.shape for name, spec in found.items()}, where)
    yield from _rope_problems(verifier, where)


def _shape_problems(
    family: MtpFamily, verifier: VerifierFacts, found: Mapping[str, tuple[int, ...]], where: str
) -> Iterator[Problem]:
    text, width = verifier.text_config, verifier.hidden_size
    wanted: dict[str, tuple[int, ...]] = {"input_proj.weight": (width, 2 * width)}
    wanted |= {f"{name}.weight": (width,) for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
    for own, shape in wanted.items():
        name = family.model_name(own, text)
        if name not in found:
            yield Problem(f"the head's tensor {name} is missing", where=where, hint="download the model again")
        elif found[name] != shape:
            yield _other_shape(name, found[name], shape, where)
    layers = _layer_shapes(family, verifier)
    for name, shape in found.items():
        below = str(family.own_name(name, text)).removeprefix("layer.")
        if layers.get(below, shape) != shape:
            yield _other_shape(name, shape, layers[below], where)


def _other_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...], where: str) -> Problem:
    return Problem(
        f"the head's tensor {name} has shape {list(found)}, the model makes it {list(wanted)}",
        where=where,
        hint="the head belongs to another model",
    )


def _layer_shapes(family: MtpFamily, verifier: VerifierFacts) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's own decoder layers, which its head's layer has too, by the names below a layer's prefix.

    Where layers differ, the last one of a name counts: families whose first layers are dense have a sparse head.
    """
    shapes: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, spec in tensor_specs(verifier.path).items():
        place = _IN_A_LAYER.fullmatch(name)
        if place is None or spec.dtype not in _UNPACKED or family.belongs(name, verifier.text_config):
            continue
        number, below = int(place[1]), place[2]
        if number >= shapes.get(below, (0, ()))[0]:
            shapes[below] = number, spec.shape
    return {below: shape for below, (_, shape) in shapes.items()}


def _rope_problems(verifier: VerifierFacts, where: str) -> Iterator[Problem]:
    kind = str(verifier.rope_parameters.get("rope_type") or "default")
    if kind not in ROPE_TYPES:
        yield Problem(
            f"the rotary scaling {kind!r} is not one that training and vLLM compute alike",
            where=where,
            hint=f"known are {', '.join(ROPE_TYPES)}",
        )
