"""The entry point that vLLM calls: every algorithm's registration, once, and no failure of one stops the rest."""

from __future__ import annotations

import importlib.metadata
import sys
import types

import pytest
from attrs import evolve

from draftsmith.plugins import load_plugins
from draftsmith.serving import vllm_plugin


@pytest.fixture
def registrations(monkeypatch):
    """Two algorithms that ask for registration, made from an installed one; the first fails."""
    calls = []

    def broken():
        calls.append("broken")
        raise RuntimeError("vLLM has moved it")

    module = types.ModuleType("fake_registration")
    module.broken, module.works = broken, lambda: calls.append("works")
    monkeypatch.setitem(sys.modules, "fake_registration", module)
    monkeypatch.setattr(vllm_plugin, "_done", set())
    base = next(iter(load_plugins().algorithms))
    made = [
        evolve(base, name="a", vllm_registration="fake_registration:broken"),
        evolve(base, name="b", vllm_registration="fake_registration:works"),
        evolve(base, name="c", vllm_registration=None),
    ]
    found = types.SimpleNamespace(algorithms=made)
    monkeypatch.setattr("draftsmith.plugins.load_plugins", lambda **keywords: found)
    return calls


def test_each_is_registered_once_and_a_broken_one_is_logged(registrations, caplog):
    vllm_plugin.register()
    vllm_plugin.register()
    assert registrations == ["broken", "works", "broken"]
    assert "'a'" in caplog.text
    assert "vLLM has moved it" in caplog.text


def test_a_network_is_registered_for_the_types_of_its_schema(monkeypatch):
    """With the first of the algorithm's methods, and once."""
    calls = []
    monkeypatch.setattr(vllm_plugin, "register_network", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(vllm_plugin, "_done", set())
    registry = load_plugins()
    base = next(iter(registry.algorithms))
    made = evolve(base, vllm_methods=("first", "second"), vllm_network="package.network:Network")
    found = types.SimpleNamespace(algorithms=[made], schemas=registry.schemas)
    monkeypatch.setattr("draftsmith.plugins.load_plugins", lambda **keywords: found)
    vllm_plugin.register()
    vllm_plugin.register()
    assert calls == [("package.network:Network", registry.schemas.get(base.schema).speculators_types, "first")]
    assert calls[0][1]


def test_plugins_that_cannot_be_loaded_do_not_stop_vllm(monkeypatch, caplog):
    def fail(**keywords):
        raise RuntimeError("conflict")

    monkeypatch.setattr("draftsmith.plugins.load_plugins", fail)
    vllm_plugin.register()
    assert "cannot be loaded" in caplog.text


def test_vllm_finds_the_entry_point():
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="draftsmith")
    assert {each.load() for each in found} == {vllm_plugin.register}
