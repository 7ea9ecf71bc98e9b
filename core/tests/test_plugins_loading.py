"""Fake distributions on disk, in every state that a plugin can be in."""

from __future__ import annotations

import pickle
import re
import shutil
import sys

import pytest

from draftsmith import api
from draftsmith.errors import PluginConflictError, PluginError, UnknownNameError, UserError
from draftsmith.interfaces import PositionLoss
from draftsmith.losses.divergence import ForwardKL
from draftsmith.plugins import discovery, load_plugins, load_reference
from draftsmith.plugins.discovery import discover

HEADER = """
from draftsmith import api
from draftsmith.hookspecs import hookimpl
"""


def quarantined(name, registry=None):
    registry = registry or load_plugins()
    (found,) = [each for each in registry.quarantined if each.name == name]
    return found


def test_the_core_registers_its_own_items_like_a_plugin():
    registry = load_plugins()
    assert {"kl_div", "ce", "rkl", "jsd", "tv", "nla", "lk_hybrid", "sum"} <= set(registry.losses.names())
    assert registry.losses.provider("ce").plugin == "builtin"
    assert registry.losses.provider("ce").distribution == "draftsmith"
    assert "tensorboard" in registry.observers
    assert "causal" in registry.masks


def test_a_plugin_is_found_and_answers_by_name(site):
    site.install_loss("draftsmith-focal", "focal", "focal_loss", version="3.1")
    registry = load_plugins()
    assert registry.losses.get("focal_loss").summary == "a loss"
    provider = registry.losses.provider("focal_loss")
    assert (provider.distribution, provider.version, provider.plugin) == ("draftsmith-focal", "3.1", "focal")


def test_an_unknown_name_has_the_nearest_names_and_the_place(site):
    site.install_loss("draftsmith-focal", "focal", "focal_loss")
    with pytest.raises(UnknownNameError) as caught:
        load_plugins().losses.get("focal_los", where="recipe.yaml:3: loss")
    assert caught.value.where == "recipe.yaml:3: loss"
    assert "did you mean 'focal_loss'" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("kind", ["algorithms", "transports"])
def test_an_unknown_algorithm_or_transport_names_the_distribution_to_install(kind):
    with pytest.raises(UnknownNameError, match=r"pip install draftsmith-my-idea"):
        getattr(load_plugins(), kind).get("my_idea")


def test_two_distributions_with_one_name_are_an_error_that_names_both(site):
    site.install_loss("draftsmith-one", "one", "focal_loss", version="1.1")
    site.install_loss("draftsmith-two", "two", "focal_loss", version="2.2")
    with pytest.raises(PluginConflictError) as caught:
        load_plugins()
    for text in ("draftsmith-one 1.1", "draftsmith-two 2.2", "focal_loss", "--no-plugin one"):
        assert text in str(caught.value)
    assert caught.value.exit_code == 2
    assert load_plugins(disabled=["two"]).losses.provider("focal_loss").distribution == "draftsmith-one"


def test_a_conflict_that_is_only_listed_leaves_the_name_without_an_owner(site):
    site.install_loss("draftsmith-one", "one", "focal_loss")
    site.install_loss("draftsmith-two", "two", "focal_loss")
    registry = load_plugins(raise_conflicts=False)
    assert len(registry.conflicts) == 1
    with pytest.raises(PluginConflictError):
        registry.losses.get("focal_loss")


def test_two_distributions_with_one_plugin_name_are_an_error_that_names_both(site):
    site.install_loss("draftsmith-one", "twin", "loss_one")
    site.install_loss("draftsmith-two", "twin", "loss_two")
    with pytest.raises(PluginConflictError, match=r"draftsmith-one 1\.0.*draftsmith-two 1\.0") as caught:
        load_plugins()
    assert "--no-plugin draftsmith-one" in caught.value.hint
    assert "loss_two" in load_plugins(disabled=["draftsmith-one"]).losses


def test_nobody_replaces_a_loss_of_the_core(site):
    site.install_loss("draftsmith-better", "better", "ce")
    with pytest.raises(PluginConflictError, match=r"draftsmith-better 1\.0"):
        load_plugins()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_module_that_is_not_there", "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("def broken(:\n    pass", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_plugin_that_does_not_import_is_quarantined_with_its_reason(site, source, reason):
    site.install("draftsmith-broken", {"broken": "fake_broken"}, version="0.9", modules={"fake_broken": source})
    site.install_loss("draftsmith-sound", "sound", "sound_loss")
    registry = load_plugins()
    assert "sound_loss" in registry.losses
    broken = quarantined("broken", registry)
    assert reason in broken.reason
    assert str(broken.provider) == "draftsmith-broken 0.9"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("x = 1\n1 / 0\n", 2),
        ("import a_module_that_is_not_there\n", 1),
        (HEADER + "@hookimpl\ndef draftsmith_losses():\n    return [{}['a']]\n", 6),
        # What is raised in draftsmith's own code was asked for by a line of the plugin's.
        (HEADER + "@hookimpl\ndef draftsmith_losses():\n    return [api.Loss(name='No Name', summary='')]\n", 6),
    ],
)
def test_the_line_of_a_plugins_mistake_is_named(site, source, line):
    site.install("draftsmith-broken", {"broken": "fake_broken"}, modules={"fake_broken": source})
    assert f"{site.folder / 'fake_broken.py'}:{line})" in quarantined("broken").reason


def test_a_quarantined_plugin_fails_when_the_run_asks_for_it(site):
    site.install("draftsmith-broken", {"broken": "fake_broken"}, version="0.9", modules={"fake_broken": "1 / 0"})
    with pytest.raises(PluginError, match=r"draftsmith-broken 0\.9.*ZeroDivisionError") as caught:
        load_plugins(only=["broken"])
    assert caught.value.exit_code == 1
    with pytest.raises(PluginError, match=r"draftsmith-broken 0\.9.*ZeroDivisionError"):
        load_plugins().algorithms.get("broken")


def test_a_missing_entry_point_module_is_quarantined(site):
    site.install("draftsmith-empty", {"empty": "no_such_module_at_all"})
    assert "no_such_module_at_all" in quarantined("empty").reason


def test_block_list_keeps_a_plugin_from_being_imported(site, monkeypatch):
    site.install_loss("draftsmith-focal", "focal", "focal_loss")
    for name in ("focal", "draftsmith-focal", "DRAFTSMITH_focal"):
        registry = load_plugins(disabled=[name])
        assert "focal_loss" not in registry.losses
        assert [each.name for each in registry.switched_off] == ["focal"]
        assert "--no-plugin" in registry.switched_off[0].reason
    monkeypatch.setenv("DRAFTSMITH_DISABLE_PLUGINS", "other, focal")
    registry = load_plugins()
    assert "DRAFTSMITH_DISABLE_PLUGINS" in registry.switched_off[0].reason
    assert "fake_focal_draftsmith_focal" not in sys.modules


def test_allow_list_keeps_all_others_from_being_imported_but_not_the_core(site, monkeypatch):
    site.install_loss("draftsmith-focal", "focal", "focal_loss")
    site.install_loss("draftsmith-other", "other", "other_loss")
    registry = load_plugins(only=["focal"])
    assert "focal_loss" in registry.losses
    assert "ce" in registry.losses
    assert "other_loss" not in registry.losses
    assert "fake_other_draftsmith_other" not in sys.modules
    monkeypatch.setenv("DRAFTSMITH_PLUGINS", "")
    assert [each.name for each in load_plugins().plugins] == ["builtin"]


@pytest.mark.parametrize("pin", ["focal == 3.1", "draftsmith-focal==3.1", "focal"])
def test_a_plugin_of_the_version_that_is_asked_for_is_taken(site, pin):
    site.install_loss("draftsmith-focal", "focal", "focal_loss", version="3.1")
    assert "focal_loss" in load_plugins(only=[pin]).losses


def test_a_plugin_of_another_version_is_refused_and_says_what_to_install(site):
    site.install_loss("draftsmith-focal", "focal", "focal_loss", version="3.1")
    site.install_loss("draftsmith-other", "other", "other_loss", version="3.0")
    with pytest.raises(PluginError) as caught:
        load_plugins(only=["focal==3.0", "other==3.0"])
    for text in ("draftsmith-focal 3.1", "version 3.0", "pip install 'draftsmith-focal==3.0'", "plugins: "):
        assert text in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_version_of_what_is_not_installed_asks_for_the_plugin(site):
    with pytest.raises(UnknownNameError, match="pip install draftsmith-focal"):
        load_plugins(only=["focal==3.1"])


def test_blocking_or_allowing_what_is_not_installed_is_an_error(site):
    site.install_loss("draftsmith-focal", "focal", "focal_loss")
    with pytest.raises(UnknownNameError, match="did you mean 'focal'"):
        load_plugins(disabled=["foca"])
    with pytest.raises(UnknownNameError, match="pip install draftsmith-quite-new"):
        load_plugins(only=["quite_new"])


def test_a_variable_that_names_what_is_not_installed_is_remarked_on(site, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_PLUGINS", "builtin nothing")
    monkeypatch.setenv("DRAFTSMITH_DISABLE_PLUGINS", "less-than-nothing")
    assert load_plugins().notes == [
        "DRAFTSMITH_DISABLE_PLUGINS names 'less-than-nothing', which is not installed",
        "DRAFTSMITH_PLUGINS names 'nothing', which is not installed",
    ]


@pytest.mark.parametrize(
    ("variables", "lists", "who", "remedy"),
    [
        ({}, {"disabled": ["focal"]}, "--no-plugin focal", "leave that option out"),
        ({}, {"only": ["other"]}, "not in the recipe's list of plugins", "add focal to that list"),
        ({"DRAFTSMITH_PLUGINS": "other"}, {}, "not in DRAFTSMITH_PLUGINS", "add focal to that list"),
        ({"DRAFTSMITH_DISABLE_PLUGINS": "focal"}, {}, "by DRAFTSMITH_DISABLE_PLUGINS", "take it off that list"),
    ],
)
def test_asking_for_a_plugin_that_is_switched_off_says_who_did_it_and_what_lets_it_in(
    site, monkeypatch, variables, lists, who, remedy
):
    site.install_loss("draftsmith-focal", "focal", "focal_loss")
    site.install_loss("draftsmith-other", "other", "other_loss")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PluginError, match=who) as caught:
        load_plugins(**lists).algorithms.get("focal")
    assert caught.value.exit_code == 2
    assert caught.value.hint == f"{remedy}, or choose something else"


@pytest.mark.parametrize("entry", ["focal>=3", "focal~=3.1", "focal==", "focal other", ""])
def test_an_entry_that_is_neither_a_name_nor_a_version_says_what_to_write(site, entry):
    site.install_loss("draftsmith-focal", "focal", "focal_loss", version="3.1")
    with pytest.raises(UserError) as caught:
        load_plugins(only=[entry])
    assert caught.value.where == "plugins"
    assert repr(entry) in caught.value.what
    assert "NAME==VERSION" in caught.value.hint


def test_a_misspelt_entry_has_the_nearest_name_though_that_plugin_is_not_on_the_list(site):
    site.install_loss("draftsmith-focal", "focal", "focal_loss")
    with pytest.raises(UnknownNameError, match="did you mean 'focal'"):
        load_plugins(only=["focl"])


def test_a_misspelt_hook_is_refused_with_the_nearest_name(site):
    source = HEADER + "@hookimpl\ndef draftsmith_looses():\n    return []\n"
    site.install("draftsmith-typo", {"typo": "fake_typo"}, modules={"fake_typo": source})
    reason = quarantined("typo").reason
    assert "'draftsmith_looses'" in reason
    assert "did you mean 'draftsmith_losses'" in reason


def test_a_misspelt_hook_does_not_hide_behind_a_correct_one(site):
    source = (
        HEADER
        + "@hookimpl\ndef draftsmith_masks():\n    return []\n"
        + "@hookimpl\ndef draftsmith_run_statred(event):\n    pass\n"
    )
    site.install("draftsmith-typo", {"typo": "fake_typo"}, modules={"fake_typo": source})
    site.install_loss("draftsmith-sound", "zsound", "sound_loss")  # loaded after it: one typo spoils nobody else
    registry = load_plugins()
    assert "draftsmith_run_statred" in quarantined("typo", registry).reason
    assert "sound_loss" in registry.losses


def test_a_hook_with_a_wrong_argument_is_refused(site):
    source = HEADER + "@hookimpl\ndef draftsmith_losses(config):\n    return []\n"
    site.install("draftsmith-args", {"args": "fake_args"}, modules={"fake_args": source})
    assert "wrong signature" in quarantined("args").reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1", "implements no hook"),
        (HEADER + "def draftsmith_losses():\n    return []\n", "draftsmith_losses lack the decorator"),
    ],
)
def test_a_plugin_without_any_hook_is_refused(site, source, reason):
    site.install("draftsmith-idle", {"idle": "fake_idle"}, modules={"fake_idle": source})
    assert reason in quarantined("idle").reason


@pytest.mark.parametrize(("major", "advice"), [(2, "upgrade draftsmith"), (0, "upgrade draftsmith-future")])
def test_a_plugin_for_another_api_version_is_reported_without_import(site, major, advice):
    site.install(
        "draftsmith-future",
        {"future": "fake_future"},
        group=f"draftsmith.v{major}",
        modules={"fake_future": "raise RuntimeError('imported')"},
    )
    registry = load_plugins()
    (foreign,) = registry.foreign
    assert foreign.major == major
    assert f"v{major}" in foreign.reason
    assert advice in foreign.reason
    assert "fake_future" not in sys.modules
    with pytest.raises(PluginError, match=f"plugin API v{major}"):
        registry.algorithms.get("future")
    with pytest.raises(PluginError, match=r"draftsmith-future 1\.0"):
        load_plugins(only=["future"])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return None", "returns None from draftsmith_losses(), expected a list of draftsmith.api.Loss"),
        ("return 'loss'", "returns a value of type str from draftsmith_losses()"),
        ("return [1]", "returns a list with a value of type int"),
        ("return [api.Mask(name='m', summary='', implementation='a:B')]", "a list with a value of type Mask"),
        ("return [api.Loss(name='Not A Name', summary='', implementation='a:B')]", "name must be lower case"),
        ("return [api.Loss(name='good', summary='', implementation='no reference')]", "package.module:attribute"),
        ("raise RuntimeError('not today')", "fails in draftsmith_losses(): RuntimeError: not today"),
        ("return [api.Loss(name='l', summary='', implementation='a:B', options=dict)]", "not an attrs class"),
        (
            "loss = api.Loss(name='l', summary='', implementation='a:B'); return [loss, loss]",
            "registers the loss 'l' twice",
        ),
    ],
)
def test_a_wrong_return_value_is_an_error_naming_distribution_and_version(site, body, reason):
    source = (
        HEADER
        + f"@hookimpl\ndef draftsmith_losses():\n    {body}\n"
        + "@hookimpl\ndef draftsmith_masks():\n"
        + "    return [api.Mask(name='fine', summary='', implementation='a:B')]\n"
    )
    site.install("draftsmith-wrong", {"wrong": "fake_wrong"}, version="4.2", modules={"fake_wrong": source})
    registry = load_plugins()
    broken = quarantined("wrong", registry)
    assert reason in broken.reason
    with pytest.raises(PluginError, match=r"'wrong' of draftsmith-wrong 4\.2"):
        load_plugins(only=["wrong"])
    # What the plugin registered correctly is not used, and asking for it tells why.
    with pytest.raises(PluginError, match=r"draftsmith-wrong 4\.2"):
        registry.masks.get("fine")


def test_an_option_of_an_algorithm_must_have_a_default(tinker):
    source = tinker.folder / "fake_tinker.py"
    source.write_text(source.read_text().replace("steps: int = field(default=3,", "steps: int = field("))
    assert "the option 'steps' without a default" in quarantined("tinker").reason


def test_registration_hooks_are_called_once(site):
    source = (
        HEADER
        + "calls = []\n@hookimpl\ndef draftsmith_losses():\n    calls.append(1)\n"
        + "    return [api.Loss(name='counted', summary='', implementation='a:B')]\n"
    )
    site.install("draftsmith-count", {"count": "fake_count"}, modules={"fake_count": source})
    registry = load_plugins()
    registry.losses.get("counted")
    registry.losses.get("counted")
    assert sys.modules["fake_count"].calls == [1]


def test_a_plugin_that_imports_something_heavy_is_reported(site, monkeypatch):
    (site.folder / "vllm.py").write_text("")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    source = HEADER + "import vllm\n@hookimpl\ndef draftsmith_losses():\n    return []\n"
    site.install("draftsmith-slow", {"slow": "fake_slow"}, modules={"fake_slow": source})
    (slow,) = [each for each in load_plugins().plugins if each.name == "slow"]
    del sys.modules["vllm"]  # not by monkeypatch, which would put the false one back
    assert "imports vllm" in slow.warnings[0]


def test_a_plugin_that_takes_long_to_import_is_reported(site):
    busy = "import time\nbegun = time.process_time()\nwhile time.process_time() < begun + 0.4:\n    pass\n"
    loss = '@hookimpl\ndef draftsmith_losses():\n    return [api.Loss(name="l", summary="s", implementation="x:L")]\n'
    site.install("draftsmith-slow", {"slow": "fake_slow"}, modules={"fake_slow": HEADER + busy + loss})
    site.install(
        "draftsmith-quick", {"quick": "fake_quick"}, modules={"fake_quick": HEADER + loss.replace('"l"', '"m"')}
    )
    warnings = {each.name: each.warnings for each in load_plugins().plugins}
    (warning,) = warnings["slow"]
    assert re.fullmatch(r"takes 0\.[4-9] s of processor time to import when it is loaded, and every .*", warning)
    assert warnings["quick"] == ()


def test_of_two_installations_of_one_distribution_the_first_on_the_path_counts(site, tmp_path, monkeypatch):
    site.install_loss("draftsmith-focal", "focal", "old_loss", version="1.0")
    second = type(site)(tmp_path / "second")
    second.folder.mkdir()
    second.install_loss("draftsmith-focal", "focal", "new_loss", version="2.0")
    monkeypatch.syspath_prepend(str(second.folder))
    found = [each.provider.version for each in discover().candidates if each.name == "focal"]
    assert found == ["2.0"]


def test_a_plugin_in_a_zip_file_is_found_too(site, tmp_path, monkeypatch):
    packed = type(site)(tmp_path / "packed")
    packed.folder.mkdir()
    packed.install_loss("draftsmith-zipped", "zipped", "zipped_loss", version="6.0")
    archive = shutil.make_archive(str(tmp_path / "plugins"), "zip", packed.folder)
    monkeypatch.syspath_prepend(archive)
    registry = load_plugins()
    assert str(registry.losses.provider("zipped_loss")) == "draftsmith-zipped 6.0"
    assert "ce" in registry.losses


def test_reading_folders_finds_what_importlib_metadata_finds(site):
    site.install_loss("draftsmith-focal", "focal", "focal_loss")
    site.install("draftsmith-future", {"future": "fake_future"}, group="draftsmith.v2", version="0.3")
    fast = [(each.name, each.version, *each.entry_points()) for each in discovery._in_folders()]
    slow = [(each.name, each.version, *each.entry_points()) for each in discovery._by_importlib_metadata()]
    assert sorted(fast) == sorted(slow)
    assert ("draftsmith-future", "0.3", ("draftsmith.v2", "future", "fake_future")) in fast


def test_comments_extras_and_attributes_of_entry_points(site):
    source = (
        "from draftsmith import api\nfrom draftsmith.hookspecs import hookimpl\n"
        "class Plugin:\n    @hookimpl\n    def draftsmith_losses(self):\n"
        "        return [api.Loss(name='inside', summary='', implementation='a:B')]\nplugin = Plugin()\n"
    )
    site.install("draftsmith-odd", {"odd": "fake_odd:plugin [train]"}, modules={"fake_odd": source})
    (points,) = site.folder.glob("*.dist-info/entry_points.txt")
    points.write_text("# a comment = x\n[console_scripts]\nodd = fake_odd:main\n\n" + points.read_text())
    assert "inside" in load_plugins().losses


def test_the_registry_can_be_sent_to_another_process(site):
    site.install_loss("draftsmith-focal", "focal", "focal_loss")
    site.install_loss("draftsmith-other", "other", "other_loss")
    copy = pickle.loads(pickle.dumps(load_plugins(disabled=["other"])))
    assert "focal_loss" in copy.losses
    assert "other_loss" not in copy.losses


def test_an_observing_plugin_is_known_by_its_events(site):
    source = HEADER + "@hookimpl\ndef draftsmith_run_started(event):\n    pass\n"
    site.install("draftsmith-watch", {"watch": "fake_watch"}, modules={"fake_watch": source})
    (watch,) = [each for each in load_plugins().plugins if each.name == "watch"]
    assert watch.events == ("draftsmith_run_started",)


class TestReferences:
    def test_an_attribute_is_imported(self):
        assert load_reference("draftsmith.api:Loss") is api.Loss
        assert load_reference("draftsmith.interfaces:PositionLoss.value") is PositionLoss.value

    @pytest.mark.parametrize(
        ("reference", "reason"),
        [
            ("draftsmith_focal_absent.losses:Focal", "ModuleNotFoundError"),
            ("draftsmith.api:NoSuchThing", "AttributeError"),
        ],
    )
    def test_what_cannot_be_imported_is_an_error_naming_the_reference(self, reference, reason):
        with pytest.raises(PluginError, match=reason) as caught:
            load_reference(reference)
        assert reference in str(caught.value)

    def test_the_error_names_the_distribution(self, site):
        site.install_loss("draftsmith-focal", "focal", "focal_loss", version="7.7")
        with pytest.raises(PluginError, match=r"draftsmith-focal 7\.7"):
            load_reference(load_plugins().losses.get("focal_loss").implementation)

    def test_the_kind_is_checked(self):
        assert load_reference("draftsmith.losses.divergence:ForwardKL", expected=PositionLoss) is ForwardKL
        with pytest.raises(PluginError, match=r"lacks methods of draftsmith\.interfaces\.PositionLoss: value"):
            load_reference("draftsmith.interfaces:PositionLoss", expected=PositionLoss)
        with pytest.raises(PluginError, match=r"no subclass of draftsmith\.interfaces\.PositionLoss"):
            load_reference("draftsmith.api:Loss", expected=PositionLoss)
