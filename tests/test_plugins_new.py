"""`draftsmith plugins new`: what it writes installs, passes the conformance kit, and is trained and exported."""

from __future__ import annotations

import importlib
import json
import tomllib
from pathlib import Path

import pytest
import yaml
from chats import write_chats
from command_line import assert_served_as_model, assert_served_as_simulated
from outsider import Outsider
from outsider_runs import serve_what_it_learnt
from packaging.requirements import Requirement

import draftsmith
from draftsmith.cli import main
from draftsmith.interfaces import StateLayout
from draftsmith.plugins.scaffold import KINDS, placeholders, write_package
from draftsmith.testing.verifiers import make_tiny_verifier


def begin(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code, and all that is printed."""
    code = main(["plugins", "new", *arguments])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize("kind", KINDS)
def test_every_placeholder_is_filled_in(tmp_path: Path, kind: str) -> None:
    folder, *files = write_package("my-idea", kind, tmp_path / "package")
    assert {"pyproject.toml", "README.md", "tests/test_draftsmith_my_idea.py"} <= {str(each) for each in files}
    for path in files:
        text = (folder / path).read_text(encoding="utf-8")
        assert "@" not in str(path)
        assert not [word for word in ("@NAME@", "@PACKAGE@", "@CLASS@", "@KIND@", "@API@", "@BOUNDS@") if word in text]
    assert not [path for path in tmp_path.iterdir() if path != folder]


@pytest.mark.parametrize("kind", KINDS)
def test_the_package_says_with_which_versions_it_works(tmp_path: Path, kind: str) -> None:
    folder = write_package("my-idea", kind, tmp_path / "package")[0]
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "draftsmith-my-idea"
    assert project["entry-points"] == {"draftsmith.v1": {"my-idea": "draftsmith_my_idea.plugin"}}
    (requirement,) = map(Requirement, project["dependencies"])
    assert requirement.name == "draftsmith"
    assert requirement.extras == {"train"}
    assert requirement.specifier.contains(draftsmith.__version__)
    assert not requirement.specifier.contains(f"{int(draftsmith.__version__.partition('.')[0]) + 1}.0")


def test_the_transport_removes_what_killed_writers_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_package("left-over", "transport", tmp_path / "package")[0]
    monkeypatch.syspath_prepend(folder / "src")
    texts = placeholders("left-over", "transport")
    written = importlib.import_module(f"{texts['@PACKAGE@']}.transport")
    (transport_item,) = importlib.import_module(f"{texts['@PACKAGE@']}.plugin").draftsmith_transports()
    place = tmp_path / "place"
    transport = getattr(written, texts["@CLASS@"])(transport_item.options(), place)
    layout = StateLayout(fingerprint="f", layer_ids=(1,), hidden_size=4, dtype="float32")
    with transport.writer(layout):
        left = [place / f".{1:032x}.safetensors.17", place / ".layout.17"]
        for path in left:
            path.touch()
    transport.remove_all([f"{1:032x}"])
    assert all(path.exists() for path in left)  # another writer may be at them
    transport.remove_all()
    assert not list(place.iterdir())


@pytest.mark.parametrize("name", ["MyIdea", "1st", "my__idea", "my_", "-x", "a b", "../up", "ä", "a.b", ""])
def test_a_name_that_no_plugin_can_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = begin(capsys, "--kind", "loss", "--", name)
    assert code == 2
    assert "cannot be the name of a plugin" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["draftsmith", "draftsmith-idea", "draftsmith_idea"])
def test_the_distributions_name_is_not_the_plugins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, said = begin(capsys, name, "--kind", "loss", "--folder", str(tmp_path / "new"))
    assert code == 2
    assert "leave 'draftsmith' away" in said


def test_a_name_that_is_taken_says_by_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = begin(capsys, "ce", "--kind", "loss", "--folder", str(tmp_path / "new"))
    assert code == 2
    assert f"the loss 'ce' is there already, of draftsmith {draftsmith.__version__}" in said
    assert not (tmp_path / "new").exists()
    assert begin(capsys, "ce", "--kind", "mask", "--folder", str(tmp_path / "new"))[0] == 0


@pytest.mark.parametrize("name", ["hs_file", "hs-file", "builtin"])
def test_the_name_of_an_installed_package_is_taken_whatever_it_provides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, said = begin(capsys, name, "--kind", "loss", "--folder", str(tmp_path / "new"))
    assert code == 2
    assert f"the plugin {name.replace('-', '_')!r} is there already, of draftsmith" in said
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    code, said = begin(capsys, "idea", "--kind", "loss", "--folder", str(tmp_path))
    assert code == 2
    assert str(tmp_path) in said
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_the_folder_is_named_after_the_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = begin(capsys, "my_idea", "--kind", "algorithm")
    assert code == 0
    assert "pip install -e" in said
    assert (tmp_path / "draftsmith-my-idea" / "src" / "draftsmith_my_idea" / "step.py").is_file()


def test_the_algorithm_is_a_small_package(tmp_path: Path) -> None:
    folder = write_package("idea", "algorithm", tmp_path / "package")[0]
    lines = [
        line
        for path in (folder / "src").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]
    assert len(lines) < 150


# --- installed ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outsider(tmp_path_factory: pytest.TempPathFactory) -> Outsider:
    """An environment in which one package of each kind is written, and installed."""
    environment = Outsider(tmp_path_factory.mktemp("outsider"))
    for kind in KINDS:
        begun = environment.draftsmith("plugins", "new", f"my_{kind}", "--kind", kind)
        assert begun.returncode == 0, begun.stderr
    environment.install(*(environment.folder / f"draftsmith-my-{kind}" for kind in KINDS))
    return environment


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_passes_its_own_tests(outsider: Outsider, kind: str) -> None:
    done = outsider.pytest(outsider.folder / f"draftsmith-my-{kind}" / "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.slow
def test_what_is_written_is_listed(outsider: Outsider) -> None:
    listed = outsider.draftsmith("plugins", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    found = {each["plugin"]: each for each in json.loads(listed.stdout)["plugins"]}
    for kind in KINDS:
        assert found[f"my_{kind}"]["distribution"] == f"draftsmith-my-{kind}"
        assert found[f"my_{kind}"]["items"][kind] == [f"my_{kind}"]
        assert not found[f"my_{kind}"]["warnings"]


@pytest.mark.slow
def test_a_run_can_be_made_of_what_is_written(outsider: Outsider) -> None:
    """All four in one run, from conversations to an exported checkpoint that the linter takes for what it is."""
    folder = outsider.folder
    verifier = make_tiny_verifier(folder / "verifier")
    write_chats(folder / "chats.jsonl")
    recipe = {
        "verifier": str(verifier),
        "output": str(folder / "run"),
        "algorithm": "my_algorithm",
        "transport": "my_transport",
        "loss": {"name": "my_loss", "options": {"temperature": 2.0}},
        "mask": "my_mask",
        "data": {"sources": ["chats.jsonl"], "max_length": 128},
        "capture": {"engine": "transformers"},
        "train": {"epochs": 2, "tokens_per_row": 256},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    done = outsider.draftsmith("run", "recipe.yaml", "--until", "export")
    assert done.returncode == 0, done.stdout + done.stderr
    config = json.loads((folder / "run" / "checkpoint" / "config.json").read_text(encoding="utf-8"))
    assert config["speculators_model_type"] == "my_algorithm"
    assert config["draftsmith"]["package"] == "draftsmith-my-algorithm"
    card = (folder / "run" / "checkpoint" / "README.md").read_text(encoding="utf-8")
    assert "vLLM must have draftsmith and draftsmith-my-algorithm installed beside it" in card
    linted = outsider.draftsmith("lint", "run/checkpoint")
    assert "0 errors, 0 warnings" in linted.stdout, linted.stdout


@pytest.mark.slow
@pytest.mark.parametrize("facet", ["architecture", "schema"])
def test_the_network_and_the_format_that_are_written_are_refused_to_other_algorithms(
    outsider: Outsider, tmp_path: Path, facet: str
) -> None:
    write_chats(tmp_path / "chats.jsonl")
    recipe = {
        "verifier": str(make_tiny_verifier(tmp_path / "verifier")),
        "output": str(tmp_path / "run"),
        "algorithm": "eagle3",
        "transport": "hs_file",
        "data": {"sources": [str(tmp_path / "chats.jsonl")]},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert outsider.draftsmith("run", str(path), "--check").returncode == 0
    refused = outsider.draftsmith("run", str(path), "--check", "--set", f"{facet}=my_algorithm")
    assert refused.returncode == 2
    assert f"{facet}: the " in refused.stderr
    assert "my_algorithm" in refused.stderr


@pytest.mark.slow
@pytest.mark.vllm
def test_what_is_written_is_served_by_vllm(outsider: Outsider, tmp_path: Path) -> None:
    """Unchanged, beside its verifier and as the model: the verifier's own output, and what the simulator accepts."""
    found = serve_what_it_learnt(outsider, tmp_path, "my_algorithm")
    assert_served_as_simulated(found)
    assert_served_as_model(found)
    assert found["served"]["all"]["accepted_per_position"][0] > 0
