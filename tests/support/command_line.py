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


def assert_served_as_simulated(found: dict[str, Any]) -> None:
    """vLLM's answers are the verifier's alone, and it accepted what the simulator did, but for a round cut short."""
    assert found["ways"]["with_draft"]["identical"] == found["ways"]["with_draft"]["prompts"] > 0
    served, simulated = found["served"]["all"], found["simulated"]["all"]
    assert abs(served["drafts"] - simulated["drafts"]) <= 1
    pairs = zip(served["accepted_per_position"], simulated["accepted_per_position"], strict=True)
    assert all(abs(vllms - ours) <= 1 for vllms, ours in pairs)


def assert_served_as_model(found: dict[str, Any]) -> None:
    """The checkpoint's folder, served as the model, answers and accepts what the draft beside its verifier does."""
    as_model = found["ways"]["as_model"]
    assert as_model["identical"] == as_model["prompts"] > 0
    assert as_model["served"] == as_model["served_with_draft"]


def verification(output: Path) -> dict[str, Any]:
    """The figures of a run's last stage."""
    found: dict[str, Any] = json.loads((output / "verification" / "verification.json").read_text())
    return found
