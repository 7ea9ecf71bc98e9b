"""Where vLLM's model runner V2 runs, and how it is made to run on a machine without a GPU; and Qwen3.5 on it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from draftsmith.serving.vllm_process import missing_v2_runner

__all__ = ["qwen3_5_environment", "v2_environment", "vision_environment"]

#: Folders of tests/ that stand in for what is not installed.
_INTERPRETER, _VISION = "interpreted_triton", "without_vision"


def v2_environment() -> dict[str, str]:
    """Variables with which V2 runs here: on a CPU its Triton kernels go through Triton's interpreter."""
    return _environment(_INTERPRETER)


def vision_environment() -> dict[str, str]:
    """Variables with which vLLM imports its Qwen3.5, which asks for torchvision where a model is of text alone too."""
    return _environment(_VISION)


def qwen3_5_environment() -> dict[str, str]:
    """Variables with which vLLM serves a Qwen3.5 with its head here; on a CPU V1's process dies of it."""
    return {"VLLM_USE_V2_MODEL_RUNNER": "1", **_environment(_INTERPRETER, _VISION)}


def _environment(*folders: str) -> dict[str, str]:
    """Those of *folders* of this tree on PYTHONPATH whose place nothing installed takes."""
    needed = {_INTERPRETER: missing_v2_runner() is not None, _VISION: find_spec("torchvision") is None}
    tests = Path(__file__).resolve().parent.parent
    paths = [str(tests / folder) for folder in folders if needed[folder]]
    if not paths:
        return {}
    found = os.environ.get("PYTHONPATH")
    variables = {"PYTHONPATH": os.pathsep.join([*paths, found] if found else paths)}
    return variables | ({"TRITON_INTERPRET": "1"} if str(tests / _INTERPRETER) in paths else {})
