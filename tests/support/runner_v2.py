"""Where vLLM's model runner V2 runs, and how it is made to run on a machine without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

from draftsmith.serving.vllm_process import missing_v2_runner


def v2_environment() -> dict[str, str]:
    """Variables with which V2 runs here: on a CPU its Triton kernels go through Triton's interpreter."""
    if missing_v2_runner() is None:
        return {}
    folder = Path(__file__).resolve().parent.parent / "interpreted_triton"
    found = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{found}" if found else str(folder), "TRITON_INTERPRET": "1"}
