"""From names to objects, and every check that is made before anything heavy starts."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from draftsmith.cli import main
from draftsmith.config.load import load_recipe
from draftsmith.config.resolve import resolve
from draftsmith.errors import ConfigError, PluginError, UnknownNameError, UserError
from draftsmith.plugins import load_plugins


def run_of(recipe: Path, *overrides: str):
    return resolve(load_recipe(recipe, overrides, strict=False), load_plugins())


def failure_of(recipe: Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        run_of(recipe, *overrides)
    return caught.value


def problems_of(recipe: Path, *overrides: str) -> list[str]:
    return [str(each) for each in failure_of(recipe, *overrides).problems]


@pytest.fixture(autouse=True)
def _installed(tinker):
    return tinker


def test_everything_is_looked_up(recipe, tmp_path):
    run = run_of(recipe, "algorithm.options.steps=5")
    assert run.algorithm.name == "tinker"
    assert run.algorithm_options.steps == 5
    assert (run.architecture.name, run.mask.name, run.schema.name) == ("tinker", "causal", "tinker")
    assert run.requirements.ids(run.verifier.num_layers) == (1, 2, run.verifier.num_layers)
    assert run.speculative_tokens == 5
    assert run.base == tmp_path
    assert run.folders.output == tmp_path / "out"
    assert run.verifier.vocab_size > 0


def test_the_algorithms_loss_comes_with_its_options_and_another_does_not(recipe):
    run = run_of(recipe)
    assert (run.loss.name, run.loss_options) == ("sum", {"terms": {"ce": 0.5, "tv": 0.5}})
    run = run_of(recipe, "loss={name: sum, options: {terms: {kl_div: 2}}}")
    assert run.loss_options == {"terms": {"kl_div": 2.0}}
    run = run_of(recipe, "loss=kl_div")
    assert (run.loss.name, run.loss_options) == ("kl_div", {})
    run = run_of(recipe, "loss={name: lk_hybrid, options: {eta: 2}}")
    assert run.loss_options == {"eta": 2.0}


FOCAL = """
    from attrs import field, frozen

    from draftsmith import api
    from draftsmith.hookspecs import hookimpl


    @frozen(kw_only=True)
    class Options:
        gamma: float = field(metadata={"help": "focus on what is hard"})


    @hookimpl
    def draftsmith_losses():
        loss = "fake_focal_loss:Focal"
        return [api.Loss(name="focal", summary="a loss", implementation=loss, options=Options)]
"""
FOCAL_LOSS = """
    import torch

    from draftsmith.interfaces import PositionLoss


    class Focal(PositionLoss):
        def __init__(self, gamma):
            self.gamma = gamma

        def value(self, logits, teacher):
            picked = torch.log_softmax(logits, -1).gather(-1, teacher.top[:, None]).squeeze(-1)
            return -((1 - picked.exp()) ** self.gamma) * picked
"""


@pytest.fixture
def focal(site, monkeypatch):
    """Somebody's loss, with an option that has no default."""
    modules = {"fake_focal": FOCAL, "fake_focal_loss": FOCAL_LOSS}
    site.install("draftsmith-focal", {"focal": "fake_focal"}, version="0.3", modules=modules)
    monkeypatch.setenv("DRAFTSMITH_PLUGINS", "tinker focal")


def test_a_sum_adds_up_losses_of_any_plugin_with_their_options(recipe, focal, capsys):
    from draftsmith.train.setup import build_loss

    terms = "loss={name: sum, options: {terms: {tv: 0.25, focal: {weight: 2, options: {gamma: 1.5}}}}}"
    run = run_of(recipe, terms)
    assert run.resolved_recipe()["loss"]["options"] == {
        "terms": {"tv": 0.25, "focal": {"weight": 2.0, "options": {"gamma": 1.5}}}
    }
    loss = build_loss(run.registry.losses, "sum", run.resolved_recipe()["loss"]["options"])
    assert [(type(each).__name__, weight) for each, weight in loss.terms] == [("TotalVariation", 0.25), ("Focal", 2.0)]
    assert loss.terms[1][0].gamma == 1.5
    assert main(["run", str(recipe), "--explain", "--set", terms]) == 0
    assert "part of the loss: focal, provided by draftsmith-focal 0.3" in capsys.readouterr().out


def test_a_resolved_run_knows_the_defaults_of_losses_within_losses(recipe):
    terms = "{terms: {ce: 0.1, nla: 0.5, sum: {options: {terms: {lk_hybrid: 1}}}}}"
    parts = {
        part.where: (part.name, part.options)
        for part in run_of(recipe, f"loss={{name: sum, options: {terms}}}").loss_parts
    }
    inner = "loss.options.terms.sum.options.terms.lk_hybrid"
    assert parts["loss.options.terms.ce"] == ("ce", {})
    assert parts["loss.options.terms.nla"] == ("nla", {"floor": 1e-5})
    assert parts[inner] == ("lk_hybrid", {"eta": 3.0})


@pytest.mark.parametrize(
    ("terms", "place", "message"),
    [
        ("{kl_dvi: 1}", "terms.kl_dvi", "unknown loss 'kl_dvi'\n  → did you mean 'kl_div'?"),
        ("{focal: 1}", "terms.focal.options.gamma", "is missing"),
        ("{focal: {options: {gama: 1}}}", "terms.focal.options.gama", "unknown key 'gama'\n  → did you mean 'gamma'?"),
        ("{focal: {wait: 1}}", "terms.focal.wait", "unknown key 'wait'\n  → did you mean 'weight'?"),
        ("{focal: much}", "terms.focal", "must be number | {weight, options}, got 'much'"),
        ("{sum: {options: {terms: {ec: 1}}}}", "terms.sum.options.terms.ec", "unknown loss 'ec'"),
        ("{}", "terms", "terms must name at least one loss"),
        ("{ce: .nan}", "terms", "the weight of ce must be a finite number, got nan"),
        ("{nla: {weight: -.inf}}", "terms", "the weight of nla must be a finite number, got -inf"),
    ],
)
def test_terms_of_a_sum_are_checked_like_all_else(recipe, focal, terms, place, message):
    found = problems_of(recipe, f"loss={{name: sum, options: {{terms: {terms}}}}}")
    assert any(each.startswith(f"--set: loss.options.{place}: {message}") for each in found), found


def test_the_only_transport_that_keeps_its_samples_is_the_default(recipe):
    run = run_of(recipe)
    assert run.transport.name == "shelf"
    assert run.transport_options.fsync is True
    assert run.provenance["transport.name"] == "the only installed one that fits"


def test_several_fitting_transports_must_be_chosen_from(recipe, site, monkeypatch):
    source = (site.folder / "fake_tinker.py").read_text()
    source = source.replace('"shelf"', '"drawer"').replace('"stream"', '"river"').replace('name="tinker"', 'name="t2"')
    site.install("draftsmith-more", {"more": "fake_more"}, modules={"fake_more": source})
    monkeypatch.setenv("DRAFTSMITH_PLUGINS", "tinker more")
    (problem,) = problems_of(recipe)
    assert "drawer, shelf" in problem
    assert run_of(recipe, "transport=drawer").transport.name == "drawer"


def test_a_transport_that_forgets_cannot_carry_a_stage(recipe):
    (problem,) = problems_of(recipe, "transport=stream")
    assert "does not keep its samples" in problem


def test_all_problems_of_all_kinds_at_once(recipe, tmp_path):
    found = problems_of(
        recipe,
        "algorithm.options.stps=4",
        "algorithm.options.flavour=sour",
        "loss=kl_dvi",
        "transport={name: shelf, options: {fsink: 1}}",
        "mask=causa",
        "observers=[tensorbord]",
        "data.sources=[chat.jsonl]",
        "vocabulary.draft_size=100000",
        "verify.prompts=nothing.jsonl",
        "train.epoch=1",
    )
    expected = [
        "--set: train.epoch: unknown key 'epoch'\n  → did you mean 'epochs'?",
        "--set: algorithm.options.stps: unknown key 'stps'\n  → did you mean 'steps'?",
        "--set: algorithm.options.flavour: cannot be 'sour'",
        "--set: loss.name: unknown loss 'kl_dvi'\n  → did you mean 'kl_div'?",
        "--set: transport.options.fsink: unknown key 'fsink'\n  → did you mean 'fsync'?",
        "--set: mask: unknown mask 'causa'\n  → did you mean 'causal'?",
        "--set: observers.0: unknown observer 'tensorbord'\n  → did you mean 'tensorboard'?",
        f"--set: data.sources.0: there is no file {tmp_path}/chat.jsonl\n  → in that folder: chats.jsonl",
        f"--set: verify.prompts: there is no file {tmp_path}/nothing.jsonl",
        "--set: vocabulary.draft_size: the draft's vocabulary (100000) is larger than the verifier's",
    ]
    for text in expected:
        assert any(each.startswith(text) for each in found), text
    assert len(found) == len(expected)


def test_the_algorithms_own_check_is_reported_with_its_key(recipe):
    (problem,) = problems_of(recipe, "algorithm.options.layer_ids=[1, 99]")
    assert problem.startswith("--set: algorithm.options.layer_ids: there is no layer 99")


def test_layer_ids_that_are_refused_by_the_requirements(recipe):
    (problem,) = problems_of(recipe, "algorithm.options.layer_ids=[2, 1]")
    assert "distinct, ascending" in problem


def test_layer_ids_are_checked_even_where_the_algorithm_does_not(recipe, site):
    source = site.folder / "fake_tinker.py"
    source.write_text(source.read_text().replace("check=check,", ""))
    (problem,) = problems_of(recipe, "algorithm.options.layer_ids=[1, 99]")
    assert "layer ids [99] do not exist" in problem


def test_more_speculative_tokens_than_trained(recipe):
    (problem,) = problems_of(recipe, "export.speculative_tokens=4")
    assert "4 is more than the 3 tokens" in problem
    assert run_of(recipe, "export.speculative_tokens=2").speculative_tokens == 2


def test_options_for_something_without_options(recipe):
    (problem,) = problems_of(recipe, "loss={name: ce, options: {x: 1}}")
    assert problem == "--set: loss.options.x: 'ce' has no options"


@pytest.mark.parametrize("value", ["/nowhere/at/all", "org/never-downloaded"])
def test_a_missing_verifier_does_not_hide_other_problems(recipe, value):
    found = problems_of(recipe, f"verifier={value}", "loss=nothing_like_it")
    assert any("no such verifier" in each and value in each for each in found)
    assert any("unknown loss" in each for each in found)


def test_the_hint_at_a_missing_verifier_leads_to_what_the_recipe_says_of_it(recipe):
    missing = "verifier=models/made-by-hand"
    assert not any("comment" in each.hint for each in failure_of(recipe, missing).problems)
    recipe.write_text("# `make it` makes the verifier.\n" + recipe.read_text())
    (problem,) = failure_of(recipe, missing).problems
    assert problem.hint.endswith(f"the comment at the top of {recipe.name} may say how it is made")
    (recipe.parent / "empty").mkdir()
    (problem,) = failure_of(recipe, f"verifier={recipe.parent / 'empty'}").problems
    assert "comment" not in problem.hint  # it is there, and something else is wrong with it


def test_a_folder_that_is_no_model(recipe, tmp_path):
    (problem,) = problems_of(recipe, f"verifier={tmp_path}")
    assert "holds no model" in problem


def test_an_unknown_algorithm_names_the_distribution(recipe):
    with pytest.raises(UnknownNameError, match="pip install draftsmith-grand-idea"):
        run_of(recipe, "algorithm=grand_idea")


def test_a_broken_plugin_that_is_asked_for_keeps_its_own_error(recipe, site, monkeypatch):
    site.install("draftsmith-broken", {"broken": "fake_broken"}, modules={"fake_broken": "1 / 0"})
    monkeypatch.setenv("DRAFTSMITH_PLUGINS", "tinker broken")
    assert run_of(recipe).algorithm.name == "tinker"
    with pytest.raises(PluginError, match=r"draftsmith-broken 1\.0.*ZeroDivisionError"):
        run_of(recipe, "algorithm=broken")


def test_no_data_at_all(recipe):
    (problem,) = problems_of(recipe, "data.sources=[]")
    assert "no conversations" in problem


def test_data_paths_are_relative_to_the_recipe_and_hub_names_are_left_alone(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    run_of(recipe)
    run_of(recipe, "data.sources=[chats.jsonl, some-org/some-data]")
    (problem,) = problems_of(recipe, "data.sources=[some/file.parquet]")
    assert "no file" in problem


def test_output_and_verifier_are_relative_to_the_current_folder(recipe, tmp_path, monkeypatch, verifier_folder):
    monkeypatch.chdir(verifier_folder.parent)
    run = run_of(recipe, f"verifier={verifier_folder.name}", "output=here")
    assert run.folders.output == verifier_folder.parent / "here"


def test_an_output_that_is_a_file(recipe, tmp_path):
    (tmp_path / "taken").write_text("")
    assert "is a file" in problems_of(recipe, f"output={tmp_path / 'taken'}")[0]
    assert "is a file" in problems_of(recipe, f"output={tmp_path / 'taken' / 'below'}")[0]


def test_an_output_that_cannot_be_written_to(recipe):
    # A process without privileges meets this as permissions; /proc refuses everybody.
    (problem,) = problems_of(recipe, "output=/proc/1/draftsmith")
    assert "cannot write into" in problem


def test_keys_that_are_broken_are_not_reported_twice(recipe):
    found = problems_of(recipe, "algorithm=3", "output=[1]")
    assert [each.split(":")[1].strip() for each in found] == ["algorithm", "output"]


def test_the_record_of_a_run_holds_what_was_resolved(recipe):
    record = run_of(recipe).record()
    json.dumps(record)
    assert record["recipe"]["algorithm"]["options"]["steps"] == 3
    assert record["recipe"]["loss"] == {"name": "sum", "options": {"terms": {"ce": 0.5, "tv": 0.5}}}
    assert record["recipe"]["export"]["speculative_tokens"] == 3
    assert {"plugin": "tinker", "distribution": "draftsmith-tinker", "version": "2.5"} in record["plugins"]


def test_provenance_covers_options(recipe):
    run = run_of(recipe, "algorithm.options.steps=5")
    assert run.provenance["algorithm.options.steps"] == "--set"
    assert run.provenance["algorithm.options.flavour"] == "default of tinker"
    assert run.provenance["mask"] == "default of tinker (draftsmith-tinker 2.5)"


def test_only_the_plugins_of_the_recipe(recipe, site, monkeypatch):
    site.install_loss("draftsmith-focal", "focal", "focal_loss")
    monkeypatch.delenv("DRAFTSMITH_PLUGINS")
    loaded = load_recipe(recipe, ["plugins=[tinker]"])
    registry = load_plugins(only=loaded.recipe.plugins)
    assert {each.name for each in registry.plugins} == {"builtin", "tinker"}
    assert "fake_focal_draftsmith_focal" not in sys.modules
    resolve(loaded, registry)


def test_several_problems_make_one_configuration_error(recipe):
    with pytest.raises(ConfigError) as caught:
        run_of(recipe, "loss=kl_dvi", "mask=causa")
    assert caught.value.exit_code == 2
    assert len(caught.value.problems) == 2


def test_rows_are_no_longer_than_the_verifier_knows_positions(recipe):
    run = run_of(recipe)  # 512 positions, and the default is more
    assert run.recipe.data.max_length == 512
    assert run.provenance["data.max_length"] == "positions of the verifier"
    (problem,) = problems_of(recipe, "data.max_length=513")
    assert "513" in problem
    assert "512 positions" in problem


def test_rows_that_training_will_cut_are_remarked_upon(recipe):
    assert run_of(recipe).notes == ()
    (note,) = run_of(recipe, "train.tokens_per_row=256").notes
    assert "train.tokens_per_row (256)" in note


def test_the_algorithms_notes_are_told_before_anything_starts(recipe, capsys):
    for flavour, told in (("spicy", True), ("plain", False)):
        assert main(["run", str(recipe), "--check", "--set", f"algorithm.options.flavour={flavour}"]) == 0
        assert ("note: spicy drafts burn\n" in capsys.readouterr().err) is told


def test_a_verifier_that_cannot_be_captured_fails_at_once(recipe, tmp_path):
    folder = tmp_path / "hybrid"
    shutil.copytree(run_of(recipe).verifier.path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mamba_d_state": 16}))
    (problem,) = problems_of(recipe, f"verifier={folder}")
    assert "hybrid" in problem


def test_data_of_a_kind_that_is_not_read(recipe, tmp_path):
    (tmp_path / "c.csv").write_text("question,answer\n")
    (problem,) = problems_of(recipe, "data.sources=[c.csv]")
    assert "'.csv' are not read" in problem


@pytest.fixture
def untapped(recipe, tmp_path):
    """A recipe whose verifier is of a family that the installed vLLM gives no hidden states of."""
    from draftsmith.testing.verifiers import make_tiny_verifier

    rest = recipe.read_text().partition("\n")[2]
    recipe.write_text(f"verifier: {make_tiny_verifier(tmp_path / 'gemma', 'gemma3')}\n{rest}")
    return recipe


@pytest.mark.vllm
def test_an_engine_that_cannot_tap_the_verifier_is_refused_before_anything_starts(untapped):
    (problem,) = problems_of(untapped, "capture.engine=vllm")
    assert problem.startswith("--set: capture.engine: the installed vLLM does not hand out the hidden states of Gem")
    assert "use engine: transformers" in problem
    with pytest.raises(ConfigError):
        run_of(untapped, "capture.engine=vllm")
    # Where the states were captured elsewhere, training asks nothing of this machine's vLLM.
    loaded = load_recipe(untapped, ["capture.engine=vllm"])
    assert resolve(loaded, load_plugins(), ["train"]).capture_engine == "vllm"


@pytest.mark.vllm
def test_an_automatic_engine_that_cannot_tap_the_verifier_is_another_and_says_so(untapped, capsys):
    run = run_of(untapped)
    assert run.capture_engine == "transformers"
    (note,) = run.notes
    assert "does not hand out the hidden states of Gemma3" in note
    assert "transformers captures them" in note
    assert "refuse to serve" in note
    assert main(["run", str(untapped), "--explain"]) == 0
    told = capsys.readouterr()
    assert "engine of the capture: transformers" in told.out
    assert note in told.err
    assert "transformers captures" not in run_of(untapped, "capture.engine=transformers").notes[0]


@pytest.mark.vllm
def test_an_automatic_engine_is_vllm_where_it_can_be(recipe):
    run = run_of(recipe)
    assert (run.capture_engine, run.notes) == ("vllm", ())


def test_an_engine_that_is_not_installed_is_refused_before_anything_starts(recipe, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_of(recipe).capture_engine == "transformers"
    (problem,) = problems_of(recipe, "capture.engine=vllm")
    assert problem.startswith("--set: capture.engine: vLLM is not installed")


# --- capture while training -----------------------------------------------------------------------------------------

ONLINE = "capture.mode=online"


def test_a_transport_that_forgets_is_for_online_training_alone(recipe):
    (problem,) = problems_of(recipe, "transport=stream")
    assert "does not keep its samples" in problem
    assert "capture.mode: online" in problem
    assert run_of(recipe, "transport=stream", ONLINE).transport.name == "stream"
    (problem,) = problems_of(recipe, "transport=stream", ONLINE, "online.keep=true")
    assert problem.startswith("--set")
    assert "'stream' gives a sample only once" in problem
    assert run_of(recipe, "transport=shelf", ONLINE, "online.keep=true").recipe.online.keep


def test_online_one_of_several_transports_must_be_chosen(recipe):
    (problem,) = problems_of(recipe, ONLINE)
    assert "several hidden-state transports are installed: shelf, stream" in problem


@pytest.mark.parametrize(
    ("urls", "what"),
    [
        ("[gpu1:8000]", "begins with neither http:// nor https://"),
        ("['http://']", "names no host"),
        ("['http://gpu1:port']", "Port could not be cast"),
        ("['http://gpu1:0']", "port 0 cannot be reached"),
        ("['http://gpu1:8000/v1/']", "/v1 is the path of one of its interfaces"),
        ("['http://gpu1:8000/?a=b']", "more than a host, a port and a path"),
        ("['http://gpu1:8000', 'http://GPU1:8000/']", "is named twice"),
    ],
)
def test_endpoints_are_addresses_and_named_once(recipe, urls, what):
    (problem,) = problems_of(recipe, "transport=shelf", ONLINE, f"online.endpoints={urls}")
    assert what in problem
    assert problem.startswith("--set: online.endpoints.")


def test_all_that_is_wrong_with_endpoints_is_told_at_once(recipe):
    found = problems_of(recipe, ONLINE, "transport=shelf", "online.endpoints=[a, b]", "online.ahead=0")
    assert len(found) == 3


def test_endpoints_capture_in_place_of_an_engine_of_this_machine(recipe, monkeypatch):
    from draftsmith.capture import engines

    monkeypatch.setattr(engines, "vllm_problem", lambda: "vLLM is not installed")
    wanted = ("transport=shelf", ONLINE, "capture.engine=vllm")
    (problem,) = problems_of(recipe, *wanted)
    assert "vLLM is not installed" in problem
    assert run_of(recipe, *wanted, "online.endpoints=['http://gpu1:8000']").recipe.online.endpoints
    loaded = load_recipe(recipe, wanted, strict=False)
    assert resolve(loaded, load_plugins(), ["export"]).transport.name == "shelf"


def test_what_has_no_effect_is_noted(recipe):
    assert not [note for note in run_of(recipe).notes if "online" in note]
    (note,) = run_of(recipe, "online.ahead=8", "online.endpoints=['http://a']").notes
    assert note == "without capture.mode: online, nothing comes of online.endpoints, online.ahead"
    (note,) = run_of(recipe, ONLINE, "transport=shelf", "online.ahead=8").notes
    assert "no more than 8 samples are ever asked for" in note


def test_online_keys_are_explained(recipe, capsys):
    assert main(["run", str(recipe), "--explain", "--set", ONLINE, "--set", "transport=shelf"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["online.ahead", "64"] and line.endswith("default") for line in lines)
    assert any(line.split()[:2] == ["capture.mode", "online"] and line.endswith("--set") for line in lines)
    assert any(line.startswith("engine of the capture: ") and "while the draft is trained" in line for line in lines)


# --- facets that do not fit ---------------------------------------------------------------------------------------

PARTS = """
    from draftsmith import api
    from draftsmith.hookspecs import hookimpl


    @hookimpl
    def draftsmith_draft_architectures():
        def network(name, *algorithms):
            return api.DraftArchitecture(
                name=name, summary="a network", implementation="nowhere:Network", algorithms=algorithms
            )

        return [network("of-others", "eagle9", "blocks"), network("for-tinker", "tinker"), network("for-any")]


    @hookimpl
    def draftsmith_checkpoint_schemas():
        def layout(name, *architectures):
            return api.CheckpointSchema(
                name=name, summary="a format", implementation="nowhere:Format", architectures=architectures
            )

        return [layout("of-others", "of-others"), layout("of-tinker", "tinker"), layout("of-any")]
"""


@pytest.fixture
def parts(site, monkeypatch):
    site.install("draftsmith-parts", {"parts": "fake_parts"}, modules={"fake_parts": PARTS})
    monkeypatch.setenv("DRAFTSMITH_PLUGINS", "tinker parts")


@pytest.mark.parametrize(
    ("architecture", "schema"),
    [
        ("for-tinker", None),
        ("for-any", None),
        ("for-any", "of-any"),
        (None, "of-tinker"),
        (None, "of-any"),
    ],
)
def test_facets_that_fit_or_do_not_say_are_taken(recipe, parts, architecture, schema):
    wanted = {"architecture": architecture, "schema": schema}
    run = run_of(recipe, *(f"{key}={value}" for key, value in wanted.items() if value is not None))
    assert (run.architecture.name, run.schema.name) == (architecture or "tinker", schema or "tinker")


def test_a_network_that_is_made_for_other_algorithms_is_refused(recipe, parts):
    (problem,) = problems_of(recipe, "architecture=of-others")
    assert problem.startswith("--set: architecture: ")
    assert "the draft architecture 'of-others' is made for eagle9, blocks, and not for tinker" in problem
    assert "leave it out: tinker has 'tinker'" in problem


@pytest.mark.parametrize(
    ("overrides", "key", "network"),
    [
        (["schema=of-others"], "schema", "tinker"),
        (["architecture=for-any", "schema=of-tinker"], "schema", "for-any"),
    ],
)
def test_a_format_that_holds_other_tensors_is_refused(recipe, parts, overrides, key, network):
    (problem,) = problems_of(recipe, *overrides)
    assert problem.startswith(f"--set: {key}: ")
    assert f"and not those of the draft architecture {network!r}" in problem


def test_a_network_that_the_algorithms_own_format_does_not_hold_is_refused(recipe, parts, site):
    """The format has not changed, so it is the network that has to go."""
    path = site.folder / "fake_tinker.py"
    source = path.read_text().replace('summary="a format",', 'summary="a format", architectures=("tinker",),')
    path.write_text(source)
    run_of(recipe)
    (problem,) = problems_of(recipe, "architecture=for-any")
    assert problem.startswith("--set: architecture: ")
    assert "the checkpoint schema 'tinker' holds the tensors of tinker, and not those of" in problem
    assert "leave architecture and schema out: tinker has" in problem
