"""vLLM's own loaders of native heads, in a process of their own: which parameters they fill from a head's tensors.

``python native_loader.py ORDER RESULT``. ORDER is a JSON file: kind → {"model": folder, "head": folder}. RESULT
becomes one: kind → {"unfilled": names of parameters left as they were, "filled": elements of all others}, or
{"error": text}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["load_heads"]


def load_heads(
    heads: Mapping[str, tuple[Path, Path]], folder: Path, environment: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """What came of each of *heads* (kind → folders of model and head), with *environment* besides this process's."""
    order, result = folder / "order.json", folder / "result.json"
    order.write_text(
        json.dumps({kind: {"model": str(model), "head": str(head)} for kind, (model, head) in heads.items()})
    )
    command = [sys.executable, __file__, str(order), str(result)]
    subprocess.run(command, check=True, env={**os.environ, **environment})
    found: dict[str, dict[str, Any]] = json.loads(result.read_text())
    return found


def _load(model: str, head: str) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import get_model_architecture

    engine = EngineArgs(
        model=model,
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        speculative_config={"method": "mtp", "model": head, "num_speculative_tokens": 3},
    ).create_engine_config()
    # As its proposers build it: the class is that of the head's configuration, the sizes are read from the model's.
    with set_current_vllm_config(engine):
        kind, _ = get_model_architecture(engine.speculative_config.draft_model_config)
        built = kind(vllm_config=engine)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.fill_(-7)
        tensors = load_file(Path(head) / "model.safetensors")
        built.load_weights(iter([(name, tensor.float()) for name, tensor in tensors.items()]))
    parameters = dict(built.named_parameters())
    unfilled = sorted(name for name, parameter in parameters.items() if bool((parameter == -7).all()))
    filled = sum(parameter.numel() for name, parameter in parameters.items() if name not in unfilled)
    return {"unfilled": unfilled, "filled": filled}


def _main(order: Path, result: Path) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as meeting, set_current_vllm_config(VllmConfig()):
        # Its layers ask for process groups when they are built.
        init_distributed_environment(1, 0, f"file://{meeting}/place", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        for kind, folders in json.loads(order.read_text()).items():
            try:
                found[kind] = _load(**folders)
            except Exception:
                found[kind] = {"error": traceback.format_exc()}
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    _main(*map(Path, sys.argv[1:]))
