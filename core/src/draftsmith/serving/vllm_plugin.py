"""draftsmith's ``vllm.general_plugins`` entry point: makes algorithms known to vLLM that it does not know by itself.

vLLM calls :func:`register` in each of its processes, before it reads a model's configuration, and perhaps more than
once. Each installed algorithm that names a ``vllm_network`` has it registered, and each that names a
``vllm_registration`` is given its call. From then on vLLM's log says of an exception that a plugin's code has raised
whose it is: the network is called by vLLM, and nobody of ours is in between.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.api import Algorithm
    from draftsmith.plugins import Provider
    from draftsmith.plugins.manager import PluginRegistry

__all__ = ["register", "register_network"]

_done: set[str] = set()
#: vLLM's method for each type of :func:`register_network`.
_methods: dict[str, str] = {}
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
    """Register every installed algorithm that asks for it, once a process.

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
        provider = registry.algorithms.provider(algorithm.name)
        for reference in (algorithm.vllm_network, algorithm.vllm_registration):
            if reference is None or reference in _done:
                continue
            try:
                with _claimed_by(provider):
                    _register(algorithm, reference, provider, registry)
                _done.add(reference)
            except Exception:
                log.exception(
                    "algorithm %r of %s cannot be registered with vLLM (%s)", algorithm.name, provider, reference
                )
    for conflict in registry.algorithms.conflicts():
        log.error("%s", conflict)


def _register(algorithm: Algorithm, reference: str, provider: Provider, registry: PluginRegistry) -> None:
    from draftsmith.plugins import load_reference

    if reference == algorithm.vllm_registration:
        load_reference(reference, provider=provider)()
        return
    types = registry.schemas.get(algorithm.schema).speculators_types
    register_network(reference, types, algorithm.vllm_methods[0])


def register_network(reference: str, types: Iterable[str], method: str) -> None:
    """Make vLLM 0.32 serve checkpoints of *types* by its *method*, with the network that *reference* names.

    Nothing is patched but the function that turns a type into a method, which has no place to register at.

    Args:
        reference: ``"module:class"``, imported by vLLM when it builds the network; its draft's ``hf_config`` has the
            exported config.json as ``exported_config``.
        types: ``speculators_model_type``s.
        method: one of vLLM's own.
    """
    from vllm import ModelRegistry
    from vllm.transformers_utils.configs.speculators.algos import register_speculator
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    def fill_in(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
        # vLLM takes `transformer_layer_config` for the draft's configuration, and this. The reference is the
        # architecture's name: no other class has it.
        pre_trained_config["exported_config"] = deepcopy(config_dict)
        pre_trained_config["architectures"] = [reference]

    ModelRegistry.register_model(reference, reference)
    if not _methods:
        build = SpeculatorsConfig.build_vllm_speculative_config

        def build_vllm_speculative_config(config_dict: dict[str, Any]) -> dict[str, Any]:
            result: dict[str, Any] = build(config_dict=config_dict)
            return {**result, "method": _methods.get(result["method"], result["method"])}

        SpeculatorsConfig.build_vllm_speculative_config = staticmethod(build_vllm_speculative_config)
    for kind in types:
        register_speculator(kind)(fill_in)
        _methods[kind] = method


@contextlib.contextmanager
def _claimed_by(provider: Provider) -> Iterator[None]:
    """What is registered meanwhile is the plugin's; what that overwrites of another one's is undone."""
    from draftsmith.plugins.catalog import conflict_error
    from draftsmith.plugins.manager import BLOCK_VARIABLE

    before = {kind: dict(entries) for kind, entries in _registries()}
    yield
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
