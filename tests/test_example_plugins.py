"""The example plugins, installed and tested as an outsider's would be: in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import assert_served_as_model, assert_served_as_simulated
from outsider import Outsider
from outsider_runs import serve_again, serve_what_it_learnt, write_recipe
from runner_v2 import v2_environment

pytestmark = pytest.mark.slow

EXAMPLES = sorted(path.parent for path in (Path(__file__).parent.parent / "examples").glob("*/pyproject.toml"))
#: Observers, and the tracker that each needs: none of this environment's, so that it is installed for the test.
TRACKERS = {"draftsmith-mlflow": "mlflow-skinny", "draftsmith-wandb": "wandb"}
#: What needs nothing else.
ALONE = [path for path in EXAMPLES if path.name not in TRACKERS]


@pytest.fixture(scope="module")
def outsider(tmp_path_factory: pytest.TempPathFactory) -> Outsider:
    environment = Outsider(tmp_path_factory.mktemp("outsider"))
    environment.install(*EXAMPLES)
    return environment


def test_there_are_examples() -> None:
    assert {"draftsmith-focal", "draftsmith-medusa", "draftsmith-toy"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("example", ALONE, ids=lambda path: path.name)
def test_its_own_tests_pass(outsider: Outsider, example: Path) -> None:
    done = outsider.pytest(example / "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("name", TRACKERS)
def test_an_observer_passes_its_own_tests_with_the_real_tracker(name: str, tmp_path: Path) -> None:
    environment = Outsider(tmp_path)
    (example,) = [each for each in EXAMPLES if each.name == name]
    environment.install(example)
    found = environment.run(
        "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1", TRACKERS[name]
    )
    if found.returncode != 0:
        pytest.skip(f"{TRACKERS[name]} cannot be installed here: {found.stderr.strip().splitlines()[-1]}")
    done = environment.pytest(example / "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_every_loss_and_mask_goes_with_the_examples_too(outsider: Outsider) -> None:
    """Theirs with our algorithms, and ours with theirs."""
    pairs = Path(__file__).with_name("test_facets.py")
    theirs = "medusa or toy or focal"
    done = outsider.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(pairs), "-k", theirs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 20


def test_medusa_heads_are_trained_with_somebody_elses_loss_and_exported(outsider: Outsider, tmp_path: Path) -> None:
    """Two packages that know nothing of each other, in one run; the linter takes the checkpoint as it is."""
    loss = {"name": "focal", "options": {"gamma": 1.0}}
    recipe = write_recipe(tmp_path, loss=loss)
    done = outsider.draftsmith("run", str(recipe), "--until", "export")
    assert done.returncode == 0, done.stdout + done.stderr
    checkpoint = tmp_path / "run" / "checkpoint"
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["num_heads"], config["original_lm_head"]) == ("medusa", 3, True)
    linted = outsider.draftsmith("lint", str(checkpoint))
    assert linted.returncode == 0, linted.stdout
    assert "0 errors, 0 warnings" in linted.stdout
    # Somebody who has neither package, as this environment, is told what to install; who switched it off, that.
    lint = ("-m", "draftsmith", "lint", str(checkpoint))
    without = subprocess.run([sys.executable, *lint], capture_output=True, text=True, check=False)
    assert "pip install draftsmith-medusa" in without.stdout
    off = outsider.run(*lint, "--no-plugin", "medusa")
    assert "draftsmith-medusa 0.1.0 is switched off: by --no-plugin medusa" in off.stdout


@pytest.mark.vllm
def test_vllm_serves_medusa_heads_as_the_simulator_says(outsider: Outsider, tmp_path: Path) -> None:
    """Greedy output is the verifier's alone, and what is accepted is what the simulator counts."""
    found = serve_what_it_learnt(outsider, tmp_path, "medusa")
    assert_served_as_simulated(found)
    assert found["served"]["all"]["acceptance_per_position"][0] > 0.1


@pytest.mark.vllm
def test_vllm_serves_a_draft_that_it_has_never_heard_of(outsider: Outsider, tmp_path: Path) -> None:
    """Beside its verifier, and as the model: draftsmith's entry point makes the package known to each process."""
    found = serve_what_it_learnt(outsider, tmp_path, "toy")
    assert_served_as_simulated(found)
    assert_served_as_model(found)
    assert found["served"]["all"]["acceptance_per_position"][0] > 0.3
    assert found["served"]["all"]["acceptance_per_position"][-1] > 0
    again = serve_again(outsider, tmp_path, {"VLLM_USE_V2_MODEL_RUNNER": "1", **v2_environment()})
    assert "Using V2 Model Runner" in (tmp_path / "run" / "verification" / "vllm" / "vllm.log").read_text()
    assert_served_as_simulated(again)
    assert_served_as_model(again)
