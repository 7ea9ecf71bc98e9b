"""draftsmith's ``vllm.general_plugins`` entry point: makes algorithms known to vLLM that it does not know by itself.

vLLM calls :func:`register` in each of its processes, before it reads a model's configuration, and perhaps more than
once. Each installed algorithm that names a ``vllm_network`` has it registered, and each that names a
``vllm_registration`` is given its call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from draftsmith.api import Algorithm
from draftsmith.plugins.manager import PluginRegistry

__all__ = ["register", "register_network"]

_done: set[str] = set()
#: vLLM's method for each type of :func:`register_network`.
_methods: dict[str, str] = {}


def register() -> None:
    """Register every installed algorithm that asks for it, once a process.

    A plugin that fails is logged with its name and left out: it must not keep vLLM from serving other models.
    """
    from draftsmith.plugins import load_plugins

    log = logging.getLogger(__name__)
    try:
        registry = load_plugins(raise_conflicts=False)
    except Exception:
        log.exception("draftsmith's plugins cannot be loaded in this vLLM process")
        return
    for algorithm in registry.algorithms:
        for reference in (algorithm.vllm_network, algorithm.vllm_registration):
            if reference is None or reference in _done:
                continue
            try:
                _register(algorithm, reference, registry)
                _done.add(reference)
            except Exception:
                log.exception("algorithm %r cannot be registered with vLLM (%s)", algorithm.name, reference)


def _register(algorithm: Algorithm, reference: str, registry: PluginRegistry) -> None:
    from draftsmith.plugins import load_reference

    if reference == algorithm.vllm_registration:
        load_reference(reference)()
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
