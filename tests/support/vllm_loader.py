"""vLLM's own loader of a draft, asked what it makes of tensors under any names; beside lint's answer and ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoint.card import speculative_config
from draftsmith.checkpoint.export import write_export
from draftsmith.errors import CheckpointError
from draftsmith.interfaces import ExportContext, TensorSpec
from draftsmith.testing.algorithm import make_material, tiny_case

__all__ = ["Change", "Loader", "Tensors", "fused", "midlayer", "one", "open_loader", "prefixed", "renamed"]

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Tensors]


class Loader:
    """vLLM's draft class, built as for serving, and the same draft of ours.

    Args:
        folder: for the verifier and the checkpoint.
        algorithm: name of ours.
        options: its options.
        layers: keys of ``transformer_layer_config`` that the checkpoint has otherwise than exported.
    """

    def __init__(
        self, folder: Path, algorithm: str, options: dict[str, Any], layers: Mapping[str, Any] | None = None
    ) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import get_model_architecture

        material = make_material(folder / "verifier", "llama")
        self.case = tiny_case(material, algorithm, options=options, draft_size=64)
        context = ExportContext(
            setup=self.case.algorithm.setup,
            verifier_name=str(material.facts.path),
            speculative_tokens=self.case.num_steps,
        )
        model = self.case.algorithm.build_model()
        checkpoint = folder / "checkpoint"
        self.config, _ = write_export(checkpoint, self.case.format, model, context, {})
        self.config["transformer_layer_config"].update(layers or {})
        (checkpoint / "config.json").write_text(json.dumps(self.config))
        self.tensors: Tensors = self.case.format.tensors(model, context)
        plan = self.case.format.serving(self.config)
        arguments = EngineArgs(
            model=str(material.facts.path),
            dtype="float32",
            max_model_len=256,
            enforce_eager=True,
            speculative_config=speculative_config(plan, str(checkpoint)),
        )
        engine = arguments.create_engine_config()
        with set_current_vllm_config(engine):
            init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
            kind, _ = get_model_architecture(engine.speculative_config.draft_model_config)
            self.theirs = kind(vllm_config=engine)

    def load_theirs(self, tensors: Tensors) -> Tensors | None:
        """What the parameters of vLLM's draft are then; -1 where nothing was loaded. None: it fails."""
        with torch.no_grad():
            for parameter in self.theirs.parameters():
                parameter.fill_(-1)
        try:
            self.theirs.load_weights(tensors.items())
        except (ValueError, AssertionError):
            return None
        return {name: parameter.detach().clone() for name, parameter in self.theirs.named_parameters()}

    def load_ours(self, tensors: Tensors) -> Tensors | None:
        model = self.case.algorithm.build_model()
        try:
            self.case.format.load(model, tensors, self.config)
        except CheckpointError:
            return None
        return model.state_dict()

    def unknown(self, tensors: Tensors) -> set[str]:
        """What lint says that vLLM fails at."""
        present = {name: TensorSpec(shape=tuple(each.shape)) for name, each in tensors.items()}
        as_loaded = self.case.format.as_loaded(self.config, present)
        return as_loaded.keys() - self.case.format.expected_tensors(self.config).keys()


@contextmanager
def open_loader(
    folder: Path, algorithm: str, options: dict[str, Any], layers: Mapping[str, Any] | None = None
) -> Iterator[Loader]:
    """A :class:`Loader`, and what vLLM keeps of it in this process removed at the end."""
    from vllm.distributed import cleanup_dist_env_and_memory

    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
            patch.setenv(name, "1")
        yield Loader(folder, algorithm, options, layers)
        cleanup_dist_env_and_memory()


# --- tensors under other names ------------------------------------------------------------------------------------


def fused(tensors: Tensors) -> Tensors:
    for whole, parts in {"self_attn.qkv": ["q", "k", "v"], "mlp.gate_up": ["gate", "up"]}.items():
        module = whole.partition(".")[0]
        rows = [tensors.pop(f"layers.0.{module}.{part}_proj.weight") for part in parts]
        tensors[f"layers.0.{whole}_proj.weight"] = torch.cat(rows)
    return tensors


def midlayer(tensors: Tensors) -> Tensors:
    return {name.replace("layers.0.", "midlayer."): each for name, each in tensors.items()}


def prefixed(prefix: str) -> Change:
    return lambda tensors: {prefix + name: each for name, each in tensors.items()}


def one(name: str, *shape: int) -> Change:
    return lambda tensors: {**tensors, name: torch.ones(shape)}


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {new if name == old else name: each for name, each in tensors.items()}
