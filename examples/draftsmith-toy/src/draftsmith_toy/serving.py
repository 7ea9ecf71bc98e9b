"""What makes the draft known to vLLM 0.32: its type, the proposer that drives it, and the network. Nothing is patched
but the function that turns a type into a method, which has no place to register at."""

from __future__ import annotations

from typing import Any

TYPE, ARCHITECTURE = "toy", "ToyDraftModel"


def fill_in(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
    """What vLLM takes for the draft's configuration: ``transformer_layer_config``, and this."""
    pre_trained_config["architectures"] = [ARCHITECTURE]


def register() -> None:
    """Called by draftsmith in each of vLLM's processes, before a configuration is read."""
    from vllm import ModelRegistry
    from vllm.transformers_utils.configs.speculators.algos import register_speculator
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    register_speculator(TYPE)(fill_in)
    ModelRegistry.register_model(ARCHITECTURE, "draftsmith_toy.network:ServedToy")
    build = SpeculatorsConfig.build_vllm_speculative_config

    def build_vllm_speculative_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = build(config_dict=config_dict)
        return {**result, "method": "eagle"} if result["method"] == TYPE else result

    SpeculatorsConfig.build_vllm_speculative_config = staticmethod(build_vllm_speculative_config)
