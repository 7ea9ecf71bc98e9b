"""Where, when and with what an evaluation was made: enough to tell why two of them differ."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftsmith import __version__
from draftsmith.api import VerifierFacts
from draftsmith.checkpoint.warm_start import checkpoint_digest
from draftsmith.serving.vllm_process import vllm_version

__all__ = ["provenance"]

_LIBRARIES = ("torch", "transformers")


def provenance(
    command: Sequence[str],
    verifier: VerifierFacts | None,
    checkpoints: Iterable[Path],
    environment: Iterable[str] = (),
) -> dict[str, Any]:
    """Versions, machine, command and fingerprints, as plain values. Imports neither torch nor vLLM.

    Args:
        command: as it was typed.
        checkpoints: folders of drafts, each fingerprinted.
        environment: names of variables whose values matter, where they are set.
    """
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "versions": {"draftsmith": __version__, "vllm": vllm_version(), "python": platform.python_version()}
        | {name: _version(name) for name in _LIBRARIES},
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": _cores(),
            "accelerators": _accelerators(),
        },
        "environment": {name: os.environ[name] for name in environment if name in os.environ},
        "verifier": {"path": str(verifier.path), "fingerprint": verifier.fingerprint} if verifier else None,
        "checkpoints": {str(each): checkpoint_digest(each) for each in checkpoints},
    }


def _version(name: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    """Names of the GPUs that torch sees, where torch is loaded already: it is not loaded for this."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
