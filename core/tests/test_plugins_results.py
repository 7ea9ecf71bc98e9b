"""What plugins return of another type, shape or dtype than their interface says: named, with what was expected."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith import api
from draftsmith.capture.address import open_reader, open_transport, open_writer
from draftsmith.capture.plan import Plan
from draftsmith.checkpoint.exported import open_format
from draftsmith.cli import main
from draftsmith.errors import PluginError
from draftsmith.interfaces import HiddenStateSample, StateLayout
from draftsmith.losses.divergence import ForwardKL
from draftsmith.losses.weighted import WeightedSum
from draftsmith.masks.forms import dense_mask, document_slots, flex_block_mask
from draftsmith.plugins.results import check_ids, check_metrics, check_sample
from draftsmith.serving.simulator import replay, simulate
from draftsmith.train.setup import build_draft
from draftsmith.train.step import score_row

TINY = Path(__file__).parent / "tiny"
LAYOUT = StateLayout(fingerprint="0" * 64, layer_ids=(1, 2), hidden_size=4, dtype="float32")


@pytest.fixture
def tiny(monkeypatch):
    """The package of that name, and what its tests build."""
    monkeypatch.syspath_prepend(str(TINY))
    return importlib.import_module("draftsmith_tiny.case")


@pytest.fixture
def odd(site, tiny):
    """A function of a class's text (its bases, and its body): the class, of a plugin ``odd`` 2.0 that is installed."""

    def make(bases: str, body: str):
        source = "\n".join(
            [
                "import torch",
                "from draftsmith import interfaces",
                "from draftsmith.interfaces import *",
                "from draftsmith.losses.base import ProbabilityLoss",
                "from draftsmith.losses.divergence import ForwardKL",
                "from draftsmith_tiny.algorithm import Tiny, TinyDraft, TinyDrafter, TinyFormat",
                "from draftsmith_tiny.transport import Files, FilesReader",
                "import attrs",
                f"class Odd({bases}):",
                textwrap.indent(textwrap.dedent(body).strip(), "    "),
            ]
        )
        site.install("draftsmith-odd", {"odd": "fake_odd"}, version="2.0", modules={"fake_odd": source})
        return importlib.import_module("fake_odd").Odd

    return make


def named(caught, function: str, *said: str) -> None:
    """The error tells the plugin, its version, the function, its place, what came and what was expected."""
    error = caught.value
    assert error.what.startswith("plugin 'odd' of draftsmith-odd 2.0 returns "), error.what
    assert f" from {function}(), expected " in error.what
    for each in said:
        assert each in error.what
    assert "fake_odd.py:" in error.where
    assert "draftsmith-odd" in error.hint


# --- losses -----------------------------------------------------------------------------------------------------

KL = "(teacher.log_p.exp() * (teacher.log_p - torch.log_softmax(logits, -1))).sum(-1)"
VALUE = "def value(self, logits, teacher): return {}"
BOTH = "def value_and_grad(self, logits, teacher): return {}"
OF_LOG_Q = "def of_log_q(self, log_q, teacher): return {}"
WITH_GRADIENT = "def with_gradient(self, draft, teacher): return {}"
LOSSES = {
    "a column": ("PositionLoss", VALUE.format(f"{KL}[:, None]"), "value", "a tensor float32 ["),
    "one number": ("PositionLoss", VALUE.format(f"{KL}.mean()"), "value", "a tensor float32 []"),
    "integers": ("PositionLoss", VALUE.format("teacher.top"), "value", "a tensor int64 ["),
    "nothing": ("PositionLoss", VALUE.format("None"), "value", "None"),
    "no gradient": ("PositionLoss", VALUE.format(f"{KL}.detach()"), "value", "differentiable"),
    "no pair": ("ForwardKL", WITH_GRADIENT.format("draft.q"), "with_gradient", "a pair of tensors"),
    "a gradient of one column": (
        "ForwardKL",
        WITH_GRADIENT.format("(draft.q.sum(-1), draft.q[:, :1])"),
        "with_gradient",
        "the gradient as its second value",
    ),
    "a gradient of the loss": (
        "PositionLoss",
        f"{VALUE.format(KL)}\n{BOTH.format('(logits.sum(-1), logits.sum(-1))')}",
        "value_and_grad",
        "the gradient as its second value",
    ),
}


@pytest.mark.parametrize("wrong", LOSSES)
@pytest.mark.parametrize("part", [False, True], ids=["alone", "in a sum"])
def test_a_loss(odd, tiny, verifier_folder, wrong, part):
    bases, body, function, said = LOSSES[wrong]
    loss = odd(bases, body)()
    if part:
        loss = WeightedSum({"odd": 0.5, "kl_div": 0.5}, [loss, ForwardKL()])
    setup = tiny.setup(verifier_folder)
    objective = tiny.objective(setup, loss=loss)
    with pytest.raises(PluginError) as caught:
        score_row(objective, tiny.row(setup), torch.Generator().manual_seed(0))
    named(caught, f"Odd.{function}", said)


@pytest.mark.parametrize(
    ("bases", "body", "function"),
    [
        ("PositionLoss", VALUE.format(f"{KL}[:, None]"), "value"),
        ("ForwardKL", OF_LOG_Q.format("log_q.sum()"), "of_log_q"),
    ],
)
def test_a_loss_of_validation_where_no_gradient_is_wanted(odd, tiny, verifier_folder, bases, body, function):
    setup = tiny.setup(verifier_folder)
    objective = tiny.objective(setup, loss=odd(bases, body)())
    with torch.no_grad(), pytest.raises(PluginError) as caught:
        score_row(objective, tiny.row(setup), torch.Generator().manual_seed(0))
    named(caught, f"Odd.{function}", "the loss of each position")


# --- masks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("(query.position >= key.position).float()", "a tensor float32 [6, 6]"),
        ("query.position >= 0", "a tensor bool [6, 1]"),
        ("True", "a value of type bool"),
    ],
)
def test_a_mask(odd, returned, said):
    rule, rows = odd("MaskRule", f"def __call__(self, query, key): return {returned}")(), document_slots([6])
    with pytest.raises(PluginError) as caught:
        dense_mask(rule, rows, rows)
    named(caught, "Odd.__call__", said, "who sees whom, a bool tensor [6, 6]")


def test_a_mask_for_flex_attention(odd):
    rule, rows = odd("MaskRule", "def __call__(self, query, key): return query.position")(), document_slots([6])
    with pytest.raises(PluginError) as caught:
        flex_block_mask(rule, rows, rows)
    named(caught, "Odd.__call__", "a tensor int64 [1]")


# --- algorithms -------------------------------------------------------------------------------------------------

FORWARD = "def forward(self, model, batch):\n    slots = super().forward(model, batch)\n    return {}"
CHANGED = FORWARD.format("attrs.evolve(slots, {})")
STEPS = {
    "no slots": (FORWARD.format("slots.terms"), "forward", "a value of type list", "DraftSlots"),
    "narrow rows": (CHANGED.format("teacher_row=slots.teacher_row.int()"), "forward", "int32", "int64 [N]"),
    "too few steps": (CHANGED.format("step=slots.step[1:]"), "forward", "DraftSlots with step, int64"),
    "no chains": (CHANGED.format("chain=None"), "forward", "None", "DraftSlots with chain"),
    "weights as a column": (CHANGED.format("weight=slots.weight[:, None]"), "forward", "with weight, a float tensor"),
    "weights that are integers": (CHANGED.format("weight=slots.step"), "forward", "a tensor int64", "with weight"),
    "no terms": (CHANGED.format("terms=[]"), "forward", "one pair (x, weight) at least"),
    "hidden states alone": (CHANGED.format("terms=[slots.terms[0][0]]"), "forward", "pairs (x, weight)"),
    "too few hidden states": (
        CHANGED.format("terms=[(slots.terms[0][0][1:], slots.terms[0][1])]"),
        "forward",
        "DraftSlots with x [",
    ),
    "a head the other way round": (
        CHANGED.format("terms=[(slots.terms[0][0], slots.terms[0][1].T)]"),
        "forward",
        "draft vocabulary by its width",
    ),
    "no weights": ("def weights(self, slots, scored, counted): return None", "weights", "None", "position weights"),
    "one weight": (
        "def weights(self, slots, scored, counted): return slots.weight.sum()",
        "weights",
        "a tensor float32 []",
    ),
    "a loss alone": ("def objective(self, slots, scored, loss): return loss", "objective", "a pair: a scalar tensor"),
    "a loss of each slot": (
        "def objective(self, slots, scored, loss): return scored.loss, {}",
        "objective",
        "a scalar tensor",
    ),
    "metrics without counts": (
        "def objective(self, slots, scored, loss): return loss, {'spread': loss.detach()}",
        "objective",
        "a tensor [2] (sum, count) as the metric 'spread'",
    ),
}


@pytest.mark.parametrize("wrong", STEPS)
def test_a_step_of_an_algorithm(odd, tiny, verifier_folder, wrong):
    body, function, *said = STEPS[wrong]
    setup = tiny.setup(verifier_folder)
    algorithm = odd("Tiny", body)(setup)
    objective = tiny.objective(setup, algorithm=algorithm)
    with pytest.raises(PluginError) as caught:
        score_row(objective, tiny.row(setup), torch.Generator().manual_seed(0))
    named(caught, f"Odd.{function}", *said)


NETWORKS = {
    "nothing": ("Tiny", "def build_model(self): pass", "None", "a torch.nn.Module that is a DraftArchitecture"),
    "another network": ("Tiny", "def build_model(self): return torch.nn.Linear(2, 2)", "Linear", "DraftArchitecture"),
    "nothing to train": (
        "Tiny",
        "def build_model(self): return super().build_model().requires_grad_(False)",
        "TinyDraft",
        "a trainable parameter",
    ),
    "names of shared tensors": (
        "TinyDraft",
        "def shared_tensors(self): return ['head.weight']",
        "a value of type list",
        "names → tensors",
    ),
    "shared tensors of another kind": (
        "TinyDraft",
        "def shared_tensors(self): return {'head.weight': 'lm_head'}",
        "a value of type str",
        "names → tensors",
    ),
    "one table's name": ("TinyDraft", "def vocabulary_tensors(self): return 'head'", "type str", "names of tensors"),
}


@pytest.mark.parametrize("wrong", NETWORKS)
def test_a_network(odd, tiny, verifier_folder, wrong):
    bases, body, *said = NETWORKS[wrong]
    setup, made = tiny.setup(verifier_folder), odd(bases, body)
    algorithm = (
        made(setup) if bases == "Tiny" else sys.modules["draftsmith_tiny.algorithm"].Tiny(_with_network(setup, made))
    )
    with pytest.raises(PluginError) as caught:
        build_draft(algorithm, torch.device("cpu"), seed=0)
    named(caught, f"Odd.{body.split('(')[0].removeprefix('def ')}", *said)


def _with_network(setup, network):
    import attrs

    return attrs.evolve(setup, architecture=network)


@pytest.mark.parametrize("returned", ["[0.5]", "{'temperature': 'high'}"])
def test_figures_of_the_last_hand(odd, tiny, verifier_folder, returned):
    algorithm = odd("Tiny", f"def finish(self, model, validation): return {returned}")(tiny.setup(verifier_folder))
    with pytest.raises(PluginError) as caught:
        check_metrics(algorithm.finish, algorithm.finish(None, ()))
    named(caught, "Odd.finish", "by name")


DRAFTERS = {
    "no drafter": ("Tiny", "def drafter(self, model): return model", "drafter", "a draftsmith.interfaces.Drafter"),
    "one position": (
        "TinyDrafter",
        "def propose(self, *given, **named): return super().propose(*given, **named)[0]",
        "propose",
        "draft logits, a float tensor [3, V_d]",
    ),
    "token ids": (
        "TinyDrafter",
        "def propose(self, *given, **named): return super().propose(*given, **named).argmax(-1)",
        "propose",
        "a tensor int64 [3]",
    ),
    "starts that are not told apart": (
        "TinyDrafter",
        "def propose_each(self, *given, **named): return super().propose_each(*given, **named)[0]",
        "propose_each",
        "draft logits, a float tensor [1, 3, ",
    ),
}


@pytest.mark.parametrize("wrong", DRAFTERS)
def test_a_drafter(odd, tiny, verifier_folder, wrong):
    bases, body, function, said = DRAFTERS[wrong]
    setup, made = tiny.setup(verifier_folder), odd(bases, body)
    algorithm = made(setup) if bases == "Tiny" else sys.modules["draftsmith_tiny.algorithm"].Tiny(setup)
    if bases != "Tiny":
        algorithm.drafter = lambda model: made(algorithm, model)
    model, row = build_draft(algorithm, torch.device("cpu"), seed=0).eval(), tiny.row(setup, (12,))
    ask, where = (simulate, 4) if function == "propose_each" else (replay, [2])
    with pytest.raises(PluginError) as caught:
        ask(algorithm, model, row.input_ids, row.taps, where, 3)
    named(caught, f"Odd.{function}", said)


# --- formats ----------------------------------------------------------------------------------------------------

FORMATS = {
    "config": ("[]", "a value of type list", "config.json as a dict"),
    "tensors": ("{'norm.weight': [1.0]}", "a value of type list", "a dict of exported name → tensor"),
    "expected_tensors": ("{'norm.weight': (64,)}", "a value of type tuple", "exported name → TensorSpec"),
    "as_loaded": ("None", "None", "name → TensorSpec"),
    "lint": ("['it is wrong']", "a value of type str", "a list of draftsmith.interfaces.Finding"),
    "unread_files": ("['adapter.bin']", "a value of type list", "file name → what vLLM does with it"),
    "warm_start_problems": ("'it is too old'", "a value of type str", "a list of draftsmith.errors.Problem"),
    "warm_start": ("None", "None", "a list of str"),
    "options": ("[('steps', 3)]", "a value of type list", "a dict of the algorithm's options"),
    "capture": ("(1, 2)", "a value of type tuple", "draftsmith.api.CaptureRequirements"),
    "serving": ("{'method': 'tiny'}", "a value of type dict", "draftsmith.api.ServingPlan"),
}


@pytest.mark.parametrize("method", FORMATS)
def test_a_format(odd, method):
    returned, *said = FORMATS[method]
    odd("TinyFormat", f"def {method}(self, *given): return {returned}")
    format_ = open_format(api.CheckpointSchema(name="odd", summary="", implementation="fake_odd:Odd"))
    counts = {"lint": 3, "as_loaded": 2, "tensors": 2, "capture": 2, "unread_files": 2}
    given = [None] * (3 if method.startswith("warm_start") else counts.get(method, 1))
    with pytest.raises(PluginError) as caught:
        getattr(format_, method)(*given)
    named(caught, f"Odd.{method}", *said)


def test_a_config_that_json_cannot_carry(odd):
    odd("TinyFormat", "def config(self, context): return {'layers': {1, 2}}")
    format_ = open_format(api.CheckpointSchema(name="odd", summary="", implementation="fake_odd:Odd"))
    with pytest.raises(PluginError) as caught:
        format_.config(None)
    named(caught, "Odd.config", "Object of type set is not JSON serializable")


# --- transports -------------------------------------------------------------------------------------------------


def transport(made, tmp_path):
    described = SimpleNamespace(implementation="fake_odd:Odd")
    return open_transport(described, None, tmp_path / "states")


@pytest.mark.parametrize(
    ("method", "given", "returned", "said"),
    [
        ("writer", open_writer, "None", "a draftsmith.interfaces.HiddenStateWriter"),
        ("reader", open_reader, "{}", "a draftsmith.interfaces.HiddenStateReader"),
        ("bytes_for", None, "'plenty'", "a number of bytes"),
        ("peak_bytes_for", None, "1.5", "a number of bytes"),
        ("free_bytes", None, "float('inf')", "a number of bytes, or None"),
    ],
)
def test_a_transport(odd, tmp_path, method, given, returned, said):
    made = transport(odd("Files", f"def {method}(self, *given, **named): return {returned}"), tmp_path)
    with pytest.raises(PluginError) as caught:
        given(made, LAYOUT) if given is not None else Plan.of(made, LAYOUT, [3, 4], 0)
    named(caught, f"Odd.{method}", said)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("(found.token_ids, found.hidden_states)", "a value of type tuple"),
        ("attrs.evolve(found, hidden_states=found.hidden_states.double())", "a tensor float64 [3, 2, 4]"),
        ("attrs.evolve(found, hidden_states=found.hidden_states.flatten(1))", "a tensor float32 [3, 8]"),
    ],
)
def test_a_sample(odd, tmp_path, returned, said):
    body = f"def get(self, *given, **named):\n    found = super().get(*given, **named)\n    return {returned}"
    kind = odd("FilesReader", body)
    files = sys.modules["draftsmith_tiny.transport"].Files(None, tmp_path / "states")
    sample = HiddenStateSample(sample_id="0" * 32, token_ids=torch.arange(3), hidden_states=torch.ones(3, 2, 4))
    with open_writer(files, LAYOUT) as writer:
        writer.put(sample)
    reader = kind(tmp_path / "states", LAYOUT)
    with pytest.raises(PluginError) as caught:
        check_sample(reader.get, reader.get(sample.sample_id, expected_tokens=3), 3, LAYOUT)
    named(caught, "Odd.get", said)


def test_ids_of_samples(odd, tmp_path):
    reader = odd("FilesReader", "def complete_ids(self): return ['0' * 32]")(tmp_path, LAYOUT)
    with pytest.raises(PluginError) as caught:
        check_ids(reader.complete_ids, reader.complete_ids())
    named(caught, "Odd.complete_ids", "a frozenset of sample ids")


# --- what a recipe is resolved with -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "api.CaptureRequirements(layer_ids=options.layer_ids)",
            "options.layer_ids",
            "draftsmith.api.CaptureRequirements",
        ),
        ("check=check", "check=lambda *given: None", "a list of draftsmith.errors.Problem"),
        ("check=check", "check=lambda *given: ['too deep']", "a list of draftsmith.errors.Problem"),
        ('["spicy drafts burn"] if options.flavour == "spicy" else []', '"mild"', "a list of str"),
        ('{"scale": verifier.num_layers / 2, "steps": 99}', "[]", "options by name"),
        ('"steps": 99', '"stages": 99', "options by name, and ['stages'] are none"),
        ("lambda options: options.steps", "lambda options: str(options.steps)", "a number of tokens"),
    ],
)
def test_a_function_of_an_algorithm(tinker, recipe, capsys, before, after, said):
    path = tinker.folder / "fake_tinker.py"
    source = path.read_text()
    assert before in source
    path.write_text(source.replace(before, after))
    assert main(["run", str(recipe), "--explain"]) == 1
    printed = capsys.readouterr().err
    assert "plugin 'tinker' of draftsmith-tinker 2.5 returns " in printed
    assert f", expected {said}" in printed
    assert f"{path}:" in printed


def test_what_no_plugin_returns_is_told_by_its_package(tiny, verifier_folder, monkeypatch):
    tiny_algorithm = importlib.import_module("draftsmith_tiny.algorithm").Tiny
    monkeypatch.setattr(
        importlib.import_module("draftsmith_tiny.algorithm").TinyDraft, "shared_tensors", lambda self: 1
    )
    with pytest.raises(PluginError, match=r"package \w+ returns a value of type int from .*lambda"):
        build_draft(tiny_algorithm(tiny.setup(verifier_folder)), torch.device("cpu"), seed=0)
