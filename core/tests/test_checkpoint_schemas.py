"""Which plugin reads a checkpoint: the one that its type or its own note names, and never one of two by chance."""

from __future__ import annotations

import sys

import pytest

from draftsmith.checkpoint.exported import algorithm_for, schema_for
from draftsmith.errors import PluginConflictError, PluginError, UnknownNameError
from draftsmith.plugins import load_plugins

SCHEMA = """
    from attrs import frozen
    from draftsmith import api
    from draftsmith.hookspecs import hookimpl

    @frozen
    class Options:
        pass

    @hookimpl
    def draftsmith_checkpoint_schemas():
        return [
            api.CheckpointSchema(
                name="{name}", summary="a format", implementation="nowhere:X", speculators_types=("shared", "{name}"),
            )
        ]

    @hookimpl
    def draftsmith_algorithms():
        return [
            api.Algorithm(
                name="{name}", summary="an algorithm", implementation="nowhere:X", options=Options, architecture="x",
                loss="ce", mask="causal", schema="one", requirements=None, max_speculative_tokens=None,
            )
        ]
"""
SHARED = {"speculators_model_type": "shared"}


@pytest.fixture
def both(site, monkeypatch):
    """Two distributions whose schemas both read the type ``shared``."""
    for name, version in (("one", "1.1"), ("two", "2.2")):
        modules = {f"fake_{name}": SCHEMA.format(name=name)}
        site.install(f"draftsmith-{name}", {name: f"fake_{name}"}, version=version, modules=modules)
    monkeypatch.setenv("DRAFTSMITH_PLUGINS", "one two")


def test_a_type_that_two_read_is_an_error_that_names_both_and_says_what_to_do(both):
    with pytest.raises(PluginConflictError) as caught:
        schema_for(SHARED, load_plugins(), "config.json")
    error = caught.value
    assert error.exit_code == 2
    assert error.where == "config.json"
    assert error.what == (
        "speculators_model_type 'shared' is claimed by plugin 'one' of draftsmith-one 1.1 (checkpoint schema 'one') "
        "and plugin 'two' of draftsmith-two 2.2 (checkpoint schema 'two')"
    )
    assert "switch one off, --no-plugin one or --no-plugin two" in error.hint
    assert "schema: one" in error.hint


def test_nobody_else_is_harmed(both):
    assert schema_for({"speculators_model_type": "two"}, load_plugins()).name == "two"


def test_with_one_switched_off_the_other_reads_it(both):
    assert schema_for(SHARED, load_plugins(disabled=["one"])).name == "two"


def test_a_checkpoint_that_says_which_wrote_it_is_read_by_that(both):
    noted = {**SHARED, "draftsmith": {"schema": "two"}}
    assert schema_for(noted, load_plugins()).name == "two"
    # A note of one that does not read the type at all helps nobody.
    with pytest.raises(PluginConflictError):
        schema_for({**SHARED, "draftsmith": {"schema": "three"}}, load_plugins())


def test_of_two_algorithms_that_export_to_a_schema_none_is_taken_by_chance(both):
    registry = load_plugins()
    schema = registry.schemas.get("one")
    with pytest.raises(PluginConflictError, match=r"of draftsmith-one 1\.1 \(algorithm 'one'\) and plugin 'two' of "):
        algorithm_for(SHARED, schema, registry)
    assert algorithm_for({**SHARED, "draftsmith": {"algorithm": "two"}}, schema, registry).name == "two"
    assert algorithm_for({"speculators_model_type": "one"}, schema, registry).name == "one"


@pytest.mark.parametrize(
    ("noted", "package"),
    [
        ({}, "draftsmith-my-idea"),
        ({"package": "acme-drafts"}, "acme-drafts"),
        # Written by whoever made the checkpoint, and shown as part of a command.
        ({"package": "x; rm -rf ~"}, "draftsmith-my-idea"),
        ({"package": 3}, "draftsmith-my-idea"),
    ],
)
def test_a_checkpoint_of_an_unknown_type_names_the_package_that_wrote_it(noted, package):
    with pytest.raises(UnknownNameError) as caught:
        schema_for({"speculators_model_type": "my_idea", "draftsmith": noted}, load_plugins())
    assert caught.value.hint.endswith(f"pip install {package}")


def test_a_checkpoint_of_a_plugin_that_is_not_in_use_says_why(both, site):
    config = {"speculators_model_type": "two", "draftsmith": {"package": "draftsmith-two"}}
    with pytest.raises(PluginError, match=r"draftsmith-two 2\.2 is switched off: by --no-plugin two"):
        schema_for(config, load_plugins(disabled=["two"]))
    (site.folder / "fake_two.py").write_text("1 / 0")
    sys.modules.pop("fake_two", None)
    with pytest.raises(PluginError, match=r"draftsmith-two 2\.2 cannot be imported: ZeroDivisionError"):
        schema_for(config, load_plugins())
