"""Exceptions that a plugin's code did not mean to raise: the run stops, and says whose they are."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest

from draftsmith.capture.endpoints.engine import EngineEndpoint
from draftsmith.capture.engines import Request
from draftsmith.cli import main
from draftsmith.config.load import load_recipe
from draftsmith.config.resolve import resolve
from draftsmith.errors import PluginError
from draftsmith.interfaces import PositionLoss
from draftsmith.pipeline import run_all
from draftsmith.plugins import load_plugins, load_reference
from draftsmith.plugins.blame import naming_plugins, plugin_error
from draftsmith.testing.verifiers import make_tiny_verifier

TINY = Path(__file__).parent / "tiny"

#: One item of every kind, each of which fails when it is used.
FAULTY = """
    from draftsmith import api
    from draftsmith.hookspecs import hookimpl
    from draftsmith_tiny.options import FilesOptions, TinyOptions


    def item(cls, **values):
        part = f"draftsmith_faulty.parts:{cls.__name__}"
        return [cls(name="faulty", summary="fails", implementation=part, **values)]


    @hookimpl
    def draftsmith_losses():
        return item(api.Loss)


    @hookimpl
    def draftsmith_masks():
        return item(api.Mask)


    @hookimpl
    def draftsmith_draft_architectures():
        return item(api.DraftArchitecture)


    @hookimpl
    def draftsmith_checkpoint_schemas():
        return item(api.CheckpointSchema)


    @hookimpl
    def draftsmith_transports():
        kept = api.TransportGuarantees(persistent=True, random_access=True, concurrent_writers=True)
        return item(api.Transport, options=FilesOptions, guarantees=kept)


    @hookimpl
    def draftsmith_algorithms():
        return item(
            api.Algorithm,
            options=TinyOptions,
            architecture="tiny",
            loss="kl_div",
            mask="causal",
            schema="tiny",
            requirements=lambda options, verifier: api.CaptureRequirements(layer_ids=(1, verifier.num_layers - 1)),
            max_speculative_tokens=lambda options: options.steps,
        )
"""

PARTS = """
    from draftsmith import interfaces
    from draftsmith_tiny.algorithm import Tiny, TinyDraft, TinyFormat
    from draftsmith_tiny.transport import Files, FilesWriter


    class Loss(interfaces.PositionLoss):
        def value(self, logits, teacher):
            return {}["weight"]


    class Mask(interfaces.MaskRule):
        def __init__(self, window=None):
            raise ValueError(f"no window of {window}")

        def __call__(self, q, k):
            return True


    class DraftArchitecture(TinyDraft):
        def step(self, hidden, token_ids):
            return hidden.transpose(7, 8)  # torch raises, and the plugin called it


    class CheckpointSchema(TinyFormat):
        def tensors(self, model, context):
            raise AttributeError("no head")


    class Algorithm(Tiny):
        def make_batch(self, row, generator):
            import nowhere_to_be_found


    class Transport(Files):
        def writer(self, layout):
            return Writer(self._folder(layout), layout)


    class Writer(FilesWriter):
        def put(self, sample):
            raise OSError(5, "input/output error")
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """The recipe of a tiny run, with the states of its rows."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TINY))
        case = importlib.import_module("draftsmith_tiny.case")
        verifier = make_tiny_verifier(folder / "verifier", "llama")
        recipe = case.write_recipe(folder, verifier, conversations=8, train={"epochs": 1})
        case.prepare_and_capture(recipe)
        yield recipe


@pytest.fixture
def faulty(site, monkeypatch):
    """A distribution with one item of every kind, each of which raises what is no error of draftsmith's."""
    monkeypatch.setenv("DRAFTSMITH_PLUGINS", "tiny faulty")
    (site.folder / "draftsmith_faulty").mkdir()
    modules = {"draftsmith_faulty/plugin": FAULTY, "draftsmith_faulty/parts": PARTS}
    site.install("draftsmith-faulty", {"faulty": "draftsmith_faulty.plugin"}, version="3.1", modules=modules)
    yield site
    for name in [each for each in sys.modules if each.startswith("draftsmith_faulty")]:
        del sys.modules[name]


WRONG = {
    "loss": ("train", "Loss.value", "KeyError: 'weight'"),
    "mask": ("train", "Mask.__init__", "ValueError: no window of None"),
    "architecture": ("train", "DraftArchitecture.step", "IndexError: Dimension out of range"),
    "schema": ("export", "CheckpointSchema.tensors", "AttributeError: no head"),
    "algorithm": ("train", "Algorithm.make_batch", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
    "transport": ("capture", "Writer.put", "OSError: [Errno 5] input/output error"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRONG)
def test_a_facet_that_raises_stops_the_run_with_its_name_and_version(captured, faulty, tmp_path, capsys, kind):
    stage, function, reason = WRONG[kind]
    output = tmp_path / "run"
    shutil.copytree(captured.parent / "run", output)
    if kind == "schema":
        run_all(resolve(load_recipe(captured, [f"output={output}"]), load_plugins()), None, stages=["train"])
    overrides = ["--set", f"output={output}", "--set", f"{kind}=faulty"]
    assert main([stage, str(captured), *overrides, "--overwrite"]) == 1
    said = capsys.readouterr().err
    assert f"plugin 'faulty' of draftsmith-faulty 3.1 fails in {function}(): {reason}" in said
    assert f"{faulty.folder / 'draftsmith_faulty' / 'parts.py'}:" in said
    assert "draftsmith-faulty; --debug" in said or "pip install --force-reinstall draftsmith-faulty" in said
    assert "Traceback" not in said


def test_a_function_of_an_algorithm_that_raises_is_told_as_well(tinker, recipe, capsys):
    path = tinker.folder / "fake_tinker.py"
    path.write_text(path.read_text().replace("options.layer_ids[-1] > verifier", "options.layers[-1] > verifier"))
    assert main(["run", str(recipe), "--explain"]) == 1
    said = capsys.readouterr().err
    assert "plugin 'tinker' of draftsmith-tinker 2.5 fails in check(): AttributeError: " in said


@pytest.mark.parametrize(
    ("raised", "named"),
    [
        ("KeyError('x')", True),
        ("OSError(5, 'input/output error')", True),
        ("draftsmith.errors.DataError('meant so')", False),
        ("OSError(28, 'no space left on device')", False),
        ("MemoryError()", False),
        ("KeyboardInterrupt()", False),
        ("type('OutOfMemoryError', (RuntimeError,), {})()", False),
    ],
)
def test_what_is_no_mistake_of_the_plugins_is_left_as_it_is(site, raised, named):
    source = f"import draftsmith.errors\ndef use():\n    raise {raised}"
    site.install("draftsmith-odd", {"odd": "fake_odd"}, version="2.0", modules={"fake_odd": source})
    use = importlib.import_module("fake_odd").use
    with pytest.raises(BaseException) as caught, naming_plugins():  # noqa: PT011
        use()
    assert isinstance(caught.value, PluginError) == named
    if named:
        assert "plugin 'odd' of draftsmith-odd 2.0 fails in use()" in caught.value.what
        assert caught.value.where == f"{site.folder / 'fake_odd.py'}:3"
        assert caught.value.__cause__ is not None


def test_what_no_plugins_code_raises_is_nobodys(site):
    site.install("draftsmith-odd", {"odd": "fake_odd"}, modules={"fake_odd": "def use(given): return given()"})
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    assert plugin_error(caught.value) is None


def test_of_two_plugins_in_one_package_that_is_named_whose_module_it_is(site):
    (site.folder / "fake_both" / "one").mkdir(parents=True)
    (site.folder / "fake_both" / "two").mkdir()
    source = "def use(): raise KeyError"
    modules = {"fake_both/one/plugin": "", "fake_both/two/plugin": "", "fake_both/two/parts": source}
    points = {"one": "fake_both.one.plugin", "two": "fake_both.two.plugin"}
    site.install("draftsmith-both", points, modules=modules)
    with pytest.raises(PluginError, match="plugin 'two' of draftsmith-both"), naming_plugins():
        importlib.import_module("fake_both.two.parts").use()


SIGNATURES = """
    class Part:
        def __init__(self, size): pass

        def make(self, row): pass


    class Bare: pass


    def free(): pass
"""


@pytest.mark.parametrize(
    ("call", "function"),
    [
        ("Part()", "Part.__init__"),
        ("Part(1).make(2, 3)", "Part.make"),
        ("Bare(size=1)", "Bare"),
        ("free(1)", "free"),
    ],
)
def test_a_function_that_takes_other_arguments_than_the_core_gives_is_the_plugins_mistake(site, call, function):
    """Python raises that in the caller, where no frame is the plugin's."""
    site.install("draftsmith-odd", {"odd": "fake_odd"}, modules={"fake_odd": SIGNATURES})
    module = importlib.import_module("fake_odd")
    with pytest.raises(PluginError) as caught, naming_plugins():
        eval(call, vars(module) | {"__name__": __name__})
    assert f"plugin 'odd' of draftsmith-odd 1.0 fails in {function}(): TypeError: {function}() " in caught.value.what


def test_a_class_that_lacks_methods_is_refused_by_name(site):
    source = """
        from draftsmith.interfaces import PositionLoss

        class Half(PositionLoss):
            pass
    """
    site.install("draftsmith-odd", {"odd": "fake_odd"}, modules={"fake_odd": source})
    with pytest.raises(PluginError, match=r"of draftsmith-odd 1\.0 lacks methods of .*PositionLoss: value"):
        load_reference("fake_odd:Half", expected=PositionLoss)


class Engine:
    """An engine of this process whose transport is a plugin's, and raises."""

    slots = 1

    def __init__(self, use):
        self.use = use

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None

    def capture(self, requests):
        self.use()


def test_a_plugin_that_raises_while_training_captures_is_not_asked_again(site):
    site.install("draftsmith-odd", {"odd": "fake_odd"}, modules={"fake_odd": "def use(): raise KeyError('put')"})
    endpoint = EngineEndpoint(Engine(importlib.import_module("fake_odd").use))
    endpoint.open()
    with pytest.raises(PluginError, match=r"plugin 'odd' of draftsmith-odd 1\.0 fails in use"):
        endpoint.capture(Request("0" * 32, [1, 2]))
    endpoint.close()
