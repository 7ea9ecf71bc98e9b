"""Device and dtype: what `auto` answers, and what cannot be had."""

from __future__ import annotations

import os

import pytest
import torch

from draftsmith.device import deterministic_algorithms, fast_bfloat16, resolve_device, resolve_dtype
from draftsmith.errors import ConfigError

CPU = torch.device("cpu")


def test_auto_is_a_gpu_where_there_is_one():
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == CPU


def test_cublas_is_told_to_repeat_itself_before_its_first_product(monkeypatch):
    """Not when training begins: the capture before it, in the same process, has multiplied on the GPU already."""
    variable = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(variable, "")  # so that what is set here is undone
    monkeypatch.delenv(variable)
    resolve_device("cpu")
    assert variable not in os.environ
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto").type == "cuda"
    assert os.environ[variable] == ":4096:8"
    monkeypatch.setenv(variable, ":16:8")
    resolve_device("cuda")
    assert os.environ[variable] == ":16:8"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_a_mistake_of_the_recipe():
    with pytest.raises(ConfigError, match="no GPU"):
        resolve_device("cuda")


def test_auto_is_bfloat16_only_where_it_is_fast():
    assert fast_bfloat16(CPU) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert resolve_dtype("auto", CPU) == (torch.bfloat16 if fast_bfloat16(CPU) else torch.float32)
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16


@pytest.mark.parametrize("name", ["int64", "bf15", "nn"])
def test_what_is_no_floating_point_dtype_is_refused(name):
    with pytest.raises(ConfigError, match="no floating point dtype"):
        resolve_dtype(name, CPU)


def test_deterministic_mode_is_given_back():
    before = torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms():
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == before
