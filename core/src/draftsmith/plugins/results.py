"""What plugins return, held against their interfaces: the type, and of tensors the shape and dtype.

Python takes anything, and torch broadcasts: a loss of shape [C, 1] would train, and on something else. So what comes
from a plugin is looked at on arrival, by its attributes alone, and the error says whose it is, what was expected and
what came. Imports no torch itself.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

from draftsmith.errors import PluginError
from draftsmith.plugins.blame import describe, provider_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from draftsmith import api
    from draftsmith.interfaces import (
        DraftAlgorithm,
        DraftSlots,
        HiddenStateSample,
        MaskRule,
        PositionLoss,
        StateLayout,
    )

__all__ = [
    "check_draft",
    "check_drafted",
    "check_gradient",
    "check_ids",
    "check_items",
    "check_json",
    "check_losses",
    "check_metrics",
    "check_objective",
    "check_sees",
    "check_sample",
    "check_slots",
    "check_tensor",
    "check_weights",
    "check_window",
    "checked",
    "wrong_result",
]

T = TypeVar("T")


def wrong_result(function: Callable[..., Any], returned: Any, expected: str) -> PluginError:
    """The error for a *function* of a plugin that returns another thing than *expected*, which ends a sentence."""
    plain: Any = function.func if isinstance(function, functools.partial) else getattr(function, "__func__", function)
    module, name = str(getattr(plain, "__module__", "")), getattr(plain, "__qualname__", repr(plain))
    provider, code = provider_of(module), getattr(plain, "__code__", None)
    owner = f"package {module.partition('.')[0]}" if provider is None else f"plugin {provider.plugin!r} of {provider}"
    return PluginError(
        f"{owner} returns {describe(returned)} from {name}(), expected {expected}",
        where=None if code is None else f"{code.co_filename}:{code.co_firstlineno}",
        hint=f"report it to the authors of {'that package' if provider is None else provider.distribution}",
    )


def checked(
    function: Callable[..., Any], returned: T, kind: type | tuple[type, ...], expected: str, *, of: type | None = None
) -> T:
    """*returned* by *function*, if it is a *kind*; and if, of a mapping, each value is an *of*.

    Raises:
        PluginError: it is not.
    """
    if not isinstance(returned, kind):
        raise wrong_result(function, returned, expected)
    for each in returned.values() if isinstance(returned, Mapping) else ():
        if of is not None and not isinstance(each, of):
            raise wrong_result(function, each, f"{expected}, and no other values")
    return returned


def check_items(function: Callable[..., Any], returned: Any, kind: type[T]) -> list[T]:
    """What a *function* of a plugin lists, each of which must be a *kind*.

    Raises:
        PluginError: it is no list (or other iterable) of these.
    """
    expected = f"a list of {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping):
        raise wrong_result(function, returned, expected)
    found = list(returned)
    for each in found:
        if not isinstance(each, kind):
            raise wrong_result(function, each, f"{expected}, and in it nothing else")
    return found


def check_tensor(
    function: Callable[..., Any], returned: Any, shape: Sequence[int | None], expected: str, *, dtype: str = "float"
) -> Any:
    """*returned*, if it is a tensor of that *shape* (None: any length) and *dtype*.

    Args:
        dtype: ``float``, of any width, or torch's name of one.

    Raises:
        PluginError: it is not.
    """
    import torch

    if not isinstance(returned, torch.Tensor) or len(returned.shape) != len(shape):
        raise wrong_result(function, returned, expected)
    if any(wanted not in (None, length) for wanted, length in zip(shape, returned.shape, strict=True)):
        raise wrong_result(function, returned, expected)
    if not (returned.is_floating_point() if dtype == "float" else returned.dtype == getattr(torch, dtype)):
        raise wrong_result(function, returned, expected)
    return returned


def check_json(function: Callable[..., Any], returned: Any, expected: str) -> Any:
    """*returned*, if it is a dict that JSON can carry.

    Raises:
        PluginError: it is not.
    """
    checked(function, returned, dict, expected)
    try:
        json.dumps(returned)
    except (TypeError, ValueError) as error:
        raise wrong_result(function, returned, f"{expected}: {error}") from error
    return returned


def check_window(algorithm: api.Algorithm, options: Any) -> int | None:
    """The window of the mask that *algorithm* has with *options*.

    Raises:
        PluginError: it is neither a number nor None.
    """
    return checked(algorithm.window, algorithm.window(options), (int, NoneType), "a number of tokens, or None")


# --- losses and masks -------------------------------------------------------------------------------------------


def check_losses(function: Callable[..., Any], returned: Any, rows: int) -> Tensor:
    """The loss of each of *rows* positions.

    Raises:
        PluginError: it is no float tensor [rows].
    """
    found: Tensor = check_tensor(function, returned, (rows,), f"the loss of each position, a float tensor [{rows}]")
    return found


def check_gradient(loss: PositionLoss, method: str, returned: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """What ``value_and_grad`` or ``with_gradient`` of *loss* returns for *logits* [C, V_d].

    Raises:
        PluginError: it is no pair of float tensors [C] and [C, V_d].
    """
    function = getattr(loss, method)
    rows, size = logits.shape
    pair = isinstance(returned, tuple) and len(returned) == 2
    if not pair:
        raise wrong_result(function, returned, f"a pair of tensors [{rows}] and [{rows}, {size}]")
    value, gradient = returned
    check_losses(function, value, rows)
    check_tensor(
        function, gradient, (rows, size), f"the gradient as its second value, a float tensor [{rows}, {size}]"
    )
    return value, gradient


def check_sees(rule: MaskRule, returned: Any, shape: Sequence[int]) -> Tensor:
    """Who sees whom, of the slots' broadcast *shape*.

    Raises:
        PluginError: it is no bool tensor of that shape.
    """
    expected = f"who sees whom, a bool tensor {list(shape)}"
    found: Tensor = check_tensor(type(rule).__call__, returned, shape, expected, dtype="bool")
    return found


# --- transports -------------------------------------------------------------------------------------------------


def check_ids(function: Callable[..., Any], returned: Any) -> Set[str]:
    """The ids of complete samples, as a reader's ``complete_ids`` returns them.

    Raises:
        PluginError: they are no set.
    """
    return checked(function, returned, Set, "a frozenset of sample ids")


def check_sample(function: Callable[..., Any], returned: Any, tokens: int, layout: StateLayout) -> HiddenStateSample:
    """A sample of *tokens* tokens, as a reader's ``get`` returns it.

    Raises:
        PluginError: it is no sample, or its states are not of *layout*.
    """
    from draftsmith.interfaces import HiddenStateSample

    found: HiddenStateSample = checked(
        function, returned, HiddenStateSample, "a draftsmith.interfaces.HiddenStateSample"
    )
    shape = (tokens, len(layout.layer_ids), layout.hidden_size)
    expected = f"a sample whose hidden_states are {layout.dtype} {list(shape)}"
    check_tensor(function, found.hidden_states, shape, expected, dtype=layout.dtype)
    return found


# --- algorithms -------------------------------------------------------------------------------------------------


def check_slots(algorithm: DraftAlgorithm, slots: Any, draft_size: int) -> DraftSlots:
    """What ``forward`` returns, of a draft that proposes *draft_size* tokens.

    Raises:
        PluginError: it is no ``DraftSlots``, or its tensors do not belong together.
    """
    from draftsmith.interfaces import DraftSlots

    function = algorithm.forward
    found: DraftSlots = checked(function, slots, DraftSlots, "draftsmith.interfaces.DraftSlots")
    rows = check_tensor(function, found.teacher_row, (None,), "DraftSlots with teacher_row, int64 [N]", dtype="int64")
    count = rows.shape[0]
    for name in ("step", "chain"):
        expected = f"DraftSlots with {name}, int64 [{count}] as teacher_row"
        check_tensor(function, getattr(found, name), (count,), expected, dtype="int64")
    check_tensor(function, found.weight, (count,), f"DraftSlots with weight, a float tensor [{count}] as teacher_row")
    if not isinstance(found.terms, Sequence) or not found.terms:
        raise wrong_result(function, found.terms, "DraftSlots with terms, one pair (x, weight) at least")
    for term in found.terms:
        if not isinstance(term, Sequence) or len(term) != 2:
            raise wrong_result(function, term, "DraftSlots whose terms are pairs (x, weight)")
        expected = f"DraftSlots with x [{count}, d] in each of its terms, a float tensor"
        width = check_tensor(function, term[0], (count, None), expected).shape[1]
        expected = f"DraftSlots with a weight [{draft_size}, {width}] beside such an x, draft vocabulary by its width"
        check_tensor(function, term[1], (draft_size, width), expected)
    return found


def check_weights(algorithm: DraftAlgorithm, returned: Any, slots: DraftSlots) -> Tensor:
    """The position weights of *slots*, as ``weights`` returns them.

    Raises:
        PluginError: they are no float tensor [N].
    """
    count = slots.teacher_row.shape[0]
    found: Tensor = check_tensor(algorithm.weights, returned, (count,), f"position weights, a float tensor [{count}]")
    return found


def check_objective(algorithm: DraftAlgorithm, returned: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """What ``objective`` returns.

    Raises:
        PluginError: it is no pair of a scalar and metrics, name → tensor [2].
    """
    function, expected = algorithm.objective, "a scalar tensor, and metrics as name → tensor [2] (sum, count)"
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise wrong_result(function, returned, f"a pair: {expected}")
    value, metrics = returned
    check_tensor(function, value, (), expected)
    for name, pair in checked(function, metrics, Mapping, expected).items():
        check_tensor(function, pair, (2,), f"a tensor [2] (sum, count) as the metric {name!r}")
    return value, metrics


def check_draft(algorithm: DraftAlgorithm, returned: Any) -> nn.Module:
    """What ``build_model`` returns, with what its ``shared_tensors`` and ``vocabulary_tensors`` do.

    Raises:
        PluginError: it is no network of a draft architecture.
    """
    from torch import Tensor, nn

    from draftsmith.interfaces import DraftArchitecture

    expected = "a torch.nn.Module that is a DraftArchitecture"
    model: nn.Module = checked(algorithm.build_model, returned, nn.Module, expected)
    network: Any = checked(algorithm.build_model, model, DraftArchitecture, expected)
    shared = network.shared_tensors()
    checked(network.shared_tensors, shared, Mapping, "names → tensors of the verifier's", of=Tensor)
    by_token = network.vocabulary_tensors()
    if by_token is not None:
        expected = "names of tensors, or None"
        checked(network.vocabulary_tensors, by_token, (list, tuple, set, frozenset, dict), expected)
    return model


def check_drafted(function: Callable[..., Any], returned: Any, shape: Sequence[int | None]) -> Tensor:
    """Logits of drafted positions, with V_d as the last of *shape*, or None where that is not known.

    Raises:
        PluginError: they are no such float tensor.
    """
    lengths = ", ".join("V_d" if each is None else str(each) for each in shape)
    found: Tensor = check_tensor(function, returned, shape, f"draft logits, a float tensor [{lengths}]")
    return found


def check_metrics(function: Callable[..., Any], returned: Any) -> dict[str, float]:
    """Figures by name, as ``finish`` returns them.

    Raises:
        PluginError: it is no mapping of numbers.
    """
    found = checked(function, returned, Mapping, "figures by name")
    try:
        return {name: float(value) for name, value in found.items()}
    except (TypeError, ValueError) as error:
        raise wrong_result(function, dict(found), f"numbers by name: {error}") from error
