"""The command line in a process of its own, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Runs the command line as on a machine where vLLM was never installed.
_WITHOUT_VLLM = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "vllm" else find_spec(name, *rest)
from draftsmith.cli import main
sys.exit(main())
"""


def draftsmith(*arguments: object, without_vllm: bool = False, environment: Mapping[str, str] | None = None) -> str:
    """What ``draftsmith ARGUMENTS`` prints; it must succeed."""
    start = ["-c", _WITHOUT_VLLM] if without_vllm else ["-m", "draftsmith"]
    done = subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        capture_output=True, text=True, timeout=800, check=False, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def verification(output: Path) -> dict[str, Any]:
    """The figures of a run's last stage."""
    found: dict[str, Any] = json.loads((output / "verification" / "verification.json").read_text())
    return found
