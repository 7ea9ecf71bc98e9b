"""Fixtures and settings for every test of the repository, in whichever package it lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Set before anything imports torch, transformers or vLLM: no test reaches for a network, or reports to anybody.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent

# A busy machine is not a failure; in CI the examples are the same at every run.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct (`make model`), or the model named by DRAFTSMITH_TEST_MODEL."""
    path = Path(os.environ.get("DRAFTSMITH_TEST_MODEL") or ROOT / "models" / "SmolLM2-135M-Instruct")
    if not (path / "config.json").exists():
        pytest.fail(f"{path} is not a model: run `make model`, or name one with DRAFTSMITH_TEST_MODEL", pytrace=False)
    return path
