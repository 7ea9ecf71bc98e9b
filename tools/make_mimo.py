#!/usr/bin/env python3
"""Make a model with a native multi-token-prediction head, for the demo and the tests.

No small model of the kind is published. A Llama model with a random head becomes one of MiMo's layout: qwen2 layers
(zero biases make them compute what the Llama's do), and the head's tensors beside them. Its answers are the Llama's,
bit by bit; its head knows nothing, until it is trained. The folder appears complete or not at all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from draftsmith.errors import VerifierError
from draftsmith_mtp.random_head import add_head

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "models" / "SmolLM2-135M-Instruct"
TARGET = ROOT / "models" / "SmolLM2-135M-MiMo"


def make(source: Path, target: Path, seed: int) -> None:
    if (target / "config.json").exists():
        return
    if not (source / "config.json").exists():
        raise SystemExit(f"model: {source} is not there; run `make model`")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        folder = Path(scratch) / target.name
        shutil.copytree(source, folder)
        try:
            add_head(folder, seed)
        except VerifierError as error:
            raise SystemExit(f"model: {error}") from error
        os.replace(folder, target)
    print(f"model: {target} is ready", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Make a model of MiMo's layout from a Llama model, with a random head."
    )
    parser.add_argument("--source", type=Path, default=SOURCE, help="the Llama model (default: models/SmolLM2…)")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder to make (default: models/…-MiMo)")
    parser.add_argument("--seed", type=int, default=0, help="of the head's weights")
    arguments = parser.parse_args()
    make(arguments.source.absolute(), arguments.target.absolute(), arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
