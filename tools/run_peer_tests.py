#!/usr/bin/env python3
"""Hold our checkpoints against the peer's: tests that need speculators, which gets an environment of its own.

`.venv-peer` is made once (see PEER for what is in it); then the tests marked `peer` run in the repository's own
environment, and start the peer's Python where they need it. Further arguments go to pytest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from setup_environment import (
    STAMP,
    TORCH_COMPANIONS,
    TORCH_INDEX,
    Environment,
    SetupError,
    install_torch,
    read_stamp,
    say,
    write_stamp,
)

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-peer"
#: The library that our formats are compared with, and the part of it that is a distribution of its own. What they ask
#: for is installed too, but for builds that go with another torch and that no text model needs.
PEER = ("speculators==0.9.0", "hs-connectors==0.9.0")
#: Names the Python of the peer's environment to the tests.
PEER_PYTHON = "DRAFTSMITH_PEER_PYTHON"


def wanted(requirements: list[str]) -> list[str]:
    """Of *requirements* (as in a distribution's metadata) those that the peer needs beside torch."""
    left_out = {"torch", *TORCH_COMPANIONS, *(name.split("==")[0] for name in PEER)}
    found = []
    for requirement in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name and name[0].lower().replace("_", "-") not in left_out and "extra ==" not in requirement:
            found.append(requirement)
    return found


def requirements_of_peer(environment: Environment) -> list[str]:
    """What the installed peer's metadata asks for."""
    names = [name.split("==")[0] for name in PEER]
    code = f"import importlib.metadata as m, json; print(json.dumps([m.requires(n) or [] for n in {names!r}]))"
    done = subprocess.run([environment.python, "-c", code], capture_output=True, text=True, check=True)
    return [requirement for each in json.loads(done.stdout) for requirement in each]


def set_up(venv: Path) -> Environment:
    """The peer's environment in *venv*, made where it is missing or other than this script would make it."""
    environment = Environment(venv)
    inputs = hashlib.sha256(Path(__file__).read_bytes() + sys.version.encode()).hexdigest()
    if read_stamp(venv).get("inputs") == inputs and environment.works():
        return environment
    begun = time.monotonic()
    environment.create()
    (venv / STAMP).unlink(missing_ok=True)
    install_torch(environment, os.environ.get(TORCH_INDEX) or None)
    environment.pip("install", "--no-deps", *PEER, what=f"installing {PEER[0]}")
    held = venv / "constraints.txt"
    held.write_text(f"torch=={environment.installed()['torch']}\n", encoding="utf-8")
    environment.pip(
        *("install", "--constraint", str(held), *wanted(requirements_of_peer(environment))),
        what="installing what it needs",
    )
    write_stamp(venv, {"inputs": inputs})
    say(f"ready in {time.monotonic() - begun:.0f} s: {venv}")
    return environment


def main(arguments: list[str]) -> int:
    named = os.environ.get(PEER_PYTHON)
    try:
        python = named or str(set_up(VENV).python)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "pytest", "-m", "peer", "tests", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, PEER_PYTHON: python}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
