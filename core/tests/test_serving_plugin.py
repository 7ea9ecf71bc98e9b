"""The entry point that vLLM calls: every algorithm's registration, once, and no failure of one stops the rest.

In a real vLLM: tests/test_plugins_in_vllm.py.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
import types

import pytest

from draftsmith.plugins import manager
from draftsmith.serving import vllm_plugin

ALGORITHM = """
    from attrs import frozen
    from draftsmith import api
    from draftsmith.hookspecs import hookimpl

    calls = []

    @frozen
    class Options:
        pass

    @hookimpl
    def draftsmith_algorithms():
        return [
            api.Algorithm(
                name="{name}", summary="an algorithm", implementation="nowhere:X", options=Options, architecture="x",
                loss="ce", mask="causal", schema="x", requirements=None, max_speculative_tokens=None,
                vllm_registration="fake_{name}:register",
            )
        ]

    def register():
        calls.append(1)
        {body}
"""

SCHEMA = """
    @hookimpl
    def draftsmith_checkpoint_schemas():
        types = ("{name}-one", "{name}-two")
        files = "nowhere:X"
        return [api.CheckpointSchema(name="{name}", summary="files", implementation=files, speculators_types=types)]
"""


@pytest.fixture
def install(site, monkeypatch):
    """Installs an algorithm whose registration does *body*; nothing else that asks vLLM for something is there."""
    monkeypatch.setattr(vllm_plugin, "_done", set())
    monkeypatch.setattr(vllm_plugin, "_claims", {})
    make, names = logging.getLogRecordFactory(), []

    def one(name, body):
        source = {f"fake_{name}": ALGORITHM.format(name=name, body=body)}
        site.install(f"draftsmith-{name}", {name: f"fake_{name}"}, version="0.3", modules=source)
        names.append(name)
        monkeypatch.setenv(manager.ALLOW_VARIABLE, " ".join(names))

    yield one
    logging.setLogRecordFactory(make)


def calls(name):
    return len(importlib.import_module(f"fake_{name}").calls)


def test_each_is_registered_once_and_a_broken_one_is_logged_with_its_name(install, caplog):
    install("a", "raise RuntimeError('vLLM has moved it')")
    install("b", "pass")
    vllm_plugin.register()
    vllm_plugin.register()
    assert (calls("a"), calls("b")) == (2, 1)
    assert "algorithm 'a' of draftsmith-a 0.3 cannot be registered with vLLM" in caplog.text
    assert "plugin 'a' of draftsmith-a 0.3 fails in register(): RuntimeError: vLLM has moved it" in caplog.text


def test_from_then_on_an_exception_that_is_logged_says_whose_it_is(install, caplog):
    """vLLM logs what ends an engine or a worker in another process, and tells the one that waits no more than that."""
    install("a", "pass")
    vllm_plugin.register()
    install("b", "{}['weight']")
    for broken in (importlib.import_module("fake_b").register, lambda: int("x")):
        try:
            broken()
        except Exception:
            logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "EngineCore failed to start: plugin 'b' of draftsmith-b 0.3 fails in register(): KeyError: 'weight'"
    )
    assert second == "EngineCore failed to start."


@pytest.fixture
def models(monkeypatch):
    """What vLLM keeps its models in."""
    module, entries = types.ModuleType("registry"), {"Own": "vLLM's"}
    module.ModelRegistry = types.SimpleNamespace(models=entries)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.registry", module)
    return entries


PUT = "import sys; sys.modules['vllm.model_executor.models.registry'].ModelRegistry.models.update({})"


def test_a_name_of_vllms_that_two_register_is_neithers(install, models, caplog):
    install("a", PUT.format("{'Draft': 'fake_a:Net', 'Own': 'fake_a:Own', 'Alone': 'fake_a:Net'}"))
    install("b", PUT.format("{'Draft': 'fake_b:Net'}"))
    vllm_plugin.register()
    # vLLM's own, which a plugin may well replace, is there.
    assert models == {"Own": "fake_a:Own", "Alone": "fake_a:Net"}
    assert (
        "the model architecture of vLLM 'Draft' is claimed by plugin 'a' of draftsmith-a 0.3 and plugin 'b' of "
        "draftsmith-b 0.3; switch one off where vLLM runs, by DRAFTSMITH_DISABLE_PLUGINS=a or "
        "DRAFTSMITH_DISABLE_PLUGINS=b" in caplog.text
    )


def test_a_network_is_registered_for_the_types_of_its_schema(install, monkeypatch):
    """With the first of the algorithm's methods, and once."""
    calls = []
    monkeypatch.setattr(vllm_plugin, "register_network", lambda *arguments: calls.append(arguments))
    source = ALGORITHM.replace('schema="x"', 'schema="{name}", vllm_methods=("first", "second")').replace(
        "fake_{name}:register", "package:Network"
    )
    monkeypatch.setattr(
        sys.modules[__name__], "ALGORITHM", source.replace("vllm_registration", "vllm_network") + SCHEMA
    )
    install("net", "pass")
    vllm_plugin.register()
    vllm_plugin.register()
    assert calls == [("package:Network", ("net-one", "net-two"), "first")]


def test_plugins_that_cannot_be_loaded_do_not_stop_vllm(monkeypatch, caplog):
    def fail(**keywords):
        raise RuntimeError("conflict")

    make = logging.getLogRecordFactory()
    monkeypatch.setattr("draftsmith.plugins.load_plugins", fail)
    vllm_plugin.register()
    logging.setLogRecordFactory(make)
    assert "cannot be loaded" in caplog.text


def test_vllm_finds_the_entry_point():
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="draftsmith")
    assert {each.load() for each in found} == {vllm_plugin.register}
