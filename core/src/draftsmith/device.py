"""Where a run computes, and in which dtype. ``auto`` answers with what the hardware is fast at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from draftsmith.errors import ConfigError, Problem

if TYPE_CHECKING:
    from draftsmith.config.schema import TrainConfig

__all__ = ["deterministic_algorithms", "fast_bfloat16", "resolve_device", "resolve_dtype", "training_device"]


def resolve_device(name: str) -> torch.device:
    """The device called *name*; ``auto`` is the GPU where there is one.

    Whoever computes in this process asks here first, so here cuBLAS is told to repeat its results: it looks at its
    variable once, at its first product, which of a whole run is one of the capture's.

    Raises:
        ConfigError: a GPU is asked for and torch sees none.
    """
    found = torch.cuda.is_available()
    device = torch.device("cuda" if found else "cpu") if name == "auto" else torch.device(name)
    if device.type == "cuda":
        if not found:
            raise ConfigError(
                [Problem("torch sees no GPU here", where="train.device", hint="use device: auto or cpu")]
            )
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return device


def training_device(config: TrainConfig) -> torch.device:
    """The device that *config* trains on.

    Raises:
        ConfigError: there is none, or it cannot train in the attention form asked for.
    """
    device = resolve_device(config.device)
    if config.attention == "flex" and device.type == "cpu":
        what, hint = "flex attention has no backward pass on CPUs", "use attention: auto or linear"
        raise ConfigError([Problem(what, where="train.attention", hint=hint)])
    return device


def fast_bfloat16(device: torch.device) -> bool:
    """Whether *device* multiplies bfloat16 matrices at least as fast as float32 ones.

    On CPUs this asks oneDNN, which needs AVX-512 at least: with AVX2 alone bfloat16 is several times *slower*.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The compute dtype called *name* (``float32``, ``bfloat16``, …); ``auto`` is bfloat16 where it is fast."""
    if name == "auto":
        return torch.bfloat16 if fast_bfloat16(device) else torch.float32
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError([Problem(f"{name!r} is no floating point dtype", hint="auto, bfloat16 or float32")])
    return dtype


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Ask torch for kernels that give the same bits every time, and restore what was set before.

    Kernels without such a variant only warn. Filling fresh memory, which torch adds to the mode, costs bandwidth
    and proves nothing here, so it is switched off. cuBLAS needs a variable as well, which :func:`resolve_device` sets.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
