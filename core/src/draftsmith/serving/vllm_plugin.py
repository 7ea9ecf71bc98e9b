"""draftsmith's ``vllm.general_plugins`` entry point: makes algorithms known to vLLM that it does not know by itself.

vLLM calls :func:`register` in each of its processes, before it reads a model's configuration, and perhaps more than
once. Each installed algorithm that names a ``vllm_registration`` is given its call. From then on vLLM's log says of an
exception that a plugin's code has raised whose it is: the network is called by vLLM, and nobody of ours is in between.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.plugins import Provider

__all__ = ["register"]

_done: set[str] = set()
#: (registry of vLLM, key in it) → the plugin that has put it there.
_claims: dict[tuple[str, str], Provider] = {}

#: What vLLM keeps by name, and overwrites without a word: its name in messages, the module, where it is in it.
_REGISTRIES: tuple[tuple[str, str, Callable[[Any], MutableMapping[str, Any]]], ...] = (
    (
        "model architecture of vLLM",
        "vllm.model_executor.models.registry",
        lambda module: module.ModelRegistry.models,
    ),
    (
        "speculators type of vLLM",
        "vllm.transformers_utils.configs.speculators.algos",
        lambda module: module.SUPPORTED_SPECULATORS_TYPES,
    ),
)


def register() -> None:
    """Call every installed algorithm's ``vllm_registration``, once a process.

    A plugin that fails is logged with its name and left out: it must not keep vLLM from serving other models. A name
    of vLLM's that two plugins register is logged with both, and is neither's: vLLM then refuses what asks for it.
    """
    from draftsmith.plugins import load_plugins

    log = logging.getLogger(__name__)
    _name_plugins_in_logs()
    try:
        registry = load_plugins(raise_conflicts=False)
    except Exception:
        log.exception("draftsmith's plugins cannot be loaded in this vLLM process")
        return
    for algorithm in registry.algorithms.uncontested():
        reference = algorithm.vllm_registration
        if reference is None or reference in _done:
            continue
        provider = registry.algorithms.provider(algorithm.name)
        try:
            _call(reference, provider)
            _done.add(reference)
        except Exception:
            log.exception(
                "algorithm %r of %s cannot be registered with vLLM (%s)", algorithm.name, provider, reference
            )
    for conflict in registry.algorithms.conflicts():
        log.error("%s", conflict)


def _call(reference: str, provider: Provider) -> None:
    """Call a registration, and undo what it overwrites of another plugin's."""
    from draftsmith.plugins import load_reference
    from draftsmith.plugins.catalog import conflict_error
    from draftsmith.plugins.manager import BLOCK_VARIABLE

    function = load_reference(reference, provider=provider)
    before = {kind: dict(entries) for kind, entries in _registries()}
    function()
    for kind, entries in _registries():
        for key in [each for each in entries if entries[each] is not before.get(kind, {}).get(each)]:
            first = _claims.setdefault((kind, key), provider)
            if first != provider:
                del entries[key]
                what = conflict_error(kind, key, [first, provider]).what
                either = " or ".join(f"{BLOCK_VARIABLE}={each.plugin}" for each in (first, provider))
                logging.getLogger(__name__).error("%s; switch one off where vLLM runs, by %s", what, either)


def _registries() -> list[tuple[str, MutableMapping[str, Any]]]:
    """Those of vLLM's. It imports them as they are needed, which a registration would do as well."""
    for _, module, _ in _REGISTRIES if "vllm" in sys.modules else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    return [(kind, where(sys.modules[module])) for kind, module, where in _REGISTRIES if module in sys.modules]


class _NamesPlugins:
    """A factory of log records that adds to a logged exception whose plugin's it is.

    vLLM logs what ends an engine or a worker, which run in processes of their own. A handler's filter would be lost
    where vLLM sets up its handlers anew.
    """

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *arguments: Any, **keywords: Any) -> logging.LogRecord:
        from draftsmith.plugins.blame import plugin_error

        record = self._make(*arguments, **keywords)
        error = record.exc_info[1] if record.exc_info else None
        found = None if error is None else plugin_error(error)
        if found is not None:
            record.msg, record.args = f"{record.getMessage().rstrip('.')}: {found.what}", ()
        return record


def _name_plugins_in_logs() -> None:
    make = logging.getLogRecordFactory()
    if not isinstance(make, _NamesPlugins):
        logging.setLogRecordFactory(_NamesPlugins(make))
