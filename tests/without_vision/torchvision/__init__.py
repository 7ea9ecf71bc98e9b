"""The names that are imported of torchvision where vLLM loads Qwen3.5, for text models, which use none of them.

vLLM's ``qwen3_5.py`` imports ``qwen3_vl.py``, and that transformers' processors of images and videos, whose modules
import torchvision at their top. Put the folder above this package on PYTHONPATH where torchvision is not installed.
Whatever would look at an image fails.
"""

from __future__ import annotations

from typing import Any, NoReturn

__version__ = "0.28.0"


def no_vision(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("torchvision is not installed; these are its names alone")
