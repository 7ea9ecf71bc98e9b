"""The command line as a user meets it: what it prints, its exit codes, how fast it answers, what it imports."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith import __version__
from draftsmith.cli import main
from draftsmith.cli.app import COMMANDS
from draftsmith.plugins.manager import RESERVED_COMMANDS
from draftsmith.stages import STAGES

HEAVY = ("torch", "transformers", "datasets", "numpy", "vllm", "rich", "typer")


@pytest.fixture(autouse=True)
def _installed(tinker):
    return tinker


def environment(site) -> dict[str, str]:
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**variables, "PYTHONPATH": str(site.folder), "DRAFTSMITH_PLUGINS": "tinker"}


def problems(capsys, *arguments: object) -> str:
    """Output on stderr of a command that must fail for the user's fault."""
    assert main([str(each) for each in arguments]) == 2
    return capsys.readouterr().err


# --- the first impression ---------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help(command, capsys):
    assert main([command, "--help"]) == 0
    assert command in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"draftsmith {__version__}"


def test_there_is_a_command_for_every_stage_and_every_command_is_reserved():
    assert set(STAGES) < set(COMMANDS)
    assert {each.partition(" ")[0] for each in COMMANDS} == set(RESERVED_COMMANDS)


CHECK_MODULES = (
    "import sys; from draftsmith.cli import main; code = main(sys.argv[1:]); "
    f"print(code, *[m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["plugins", "list"], 0),
        (["plugins", "show", "tinker"], 0),
        (["run", "RECIPE", "--check"], 0),
        (["run", "RECIPE", "--explain"], 0),
        (["run", "RECIPE", "--set", "algorithm.options.stps=1"], 2),
        (["train", "RECIPE", "--set", "verifier=/nowhere"], 2),
        (["prepare", "missing.yaml"], 2),
        (["lint", "/nowhere"], 2),
    ],
)
def test_nothing_heavy_is_imported(site, recipe, arguments, code):
    given = [str(recipe) if each == "RECIPE" else each for each in arguments]
    done = subprocess.run(
        [sys.executable, "-c", CHECK_MODULES, *given],
        env=environment(site),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.splitlines()[-1] == str(code)


def cpu_seconds(arguments: list[str], variables: dict[str, str], rounds: int = 3) -> float:
    """The least processor time of a command; the clock on the wall would measure the machine's other work too."""
    best = float("inf")
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


@pytest.mark.parametrize("arguments", [["--help"], ["run", "RECIPE", "--set", "train.epoch=1"]])
def test_help_and_configuration_errors_answer_in_less_than_three_tenths_of_a_second(site, recipe, arguments, tmp_path):
    given = [str(recipe) if each == "RECIPE" else each for each in arguments]
    # Compiled modules are what a user has after the first start; a checkout may be read-only or told not to keep them.
    variables = {**environment(site), "PYTHONPYCACHEPREFIX": str(tmp_path / "cache")}
    # A processor shared with others runs everything slower; an interpreter that does nothing tells by how much.
    slowness = max(1.0, cpu_seconds(["-c", "pass"], variables) / 0.015)
    assert cpu_seconds(["-m", "draftsmith", *given], variables) < 0.3 * slowness


def test_fifty_installed_plugins_do_not_slow_the_help_beyond_half_a_second(site, tmp_path):
    for number in range(50):
        site.install_loss(f"draftsmith-fake{number}", f"fake{number}", f"loss{number}")
    variables = {**environment(site), "PYTHONPYCACHEPREFIX": str(tmp_path / "cache")}
    variables.pop("DRAFTSMITH_PLUGINS", None)
    listed = subprocess.run(
        [sys.executable, "-m", "draftsmith", "plugins", "list"],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed.stdout.count("(draftsmith-fake") == 50
    slowness = max(1.0, cpu_seconds(["-c", "pass"], variables) / 0.015)
    assert cpu_seconds(["-m", "draftsmith", "--help"], variables) < 0.5 * slowness


# --- plugins ----------------------------------------------------------------------------------------------------


def test_plugins_list_shows_items_versions_and_reasons(capsys, site, monkeypatch):
    site.install("draftsmith-broken", {"broken": "fake_broken"}, version="0.9", modules={"fake_broken": "1 / 0"})
    site.install("draftsmith-future", {"future": "fake_future"}, group="draftsmith.v2")
    site.install_loss("draftsmith-focal", "focal", "focal_loss")
    monkeypatch.setenv("DRAFTSMITH_PLUGINS", "tinker broken focal")
    assert main(["plugins", "list", "--no-plugin", "focal"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "tinker  (draftsmith-tinker 2.5)",
        "transport:          shelf, stream",
        "broken  (draftsmith-broken 0.9)  quarantined: cannot be imported: ZeroDivisionError",
        "future  (draftsmith-future 1.0)  other API: made for plugin API v2",
        "focal  (draftsmith-focal 1.0)  switched off: by --no-plugin focal",
    ):
        assert text in printed
    assert main(["--no-plugin", "focal", "plugins", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["plugin"] for each in listed["quarantined"]] == ["broken"]
    assert [each["plugin"] for each in listed["switched_off"] if "--no-plugin" in each["reason"]] == ["focal"]


def test_plugins_list_shows_conflicts_instead_of_failing(capsys, site, monkeypatch):
    site.install_loss("draftsmith-focal", "focal", "ce")
    monkeypatch.setenv("DRAFTSMITH_PLUGINS", "focal")
    assert main(["plugins", "list"]) == 0
    assert "conflict: the loss 'ce' is claimed by" in capsys.readouterr().out


def test_plugins_show_has_options_with_type_default_and_description(capsys):
    assert main(["plugins", "show", "tinker"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "plugin tinker  (draftsmith-tinker 2.5)",
        "steps: integer, default 3\n            steps that are trained",
        "layer_ids: list[integer], default [1, 2]",
        "flavour: plain | spicy, default plain",
        "scale: number | null, default null",
        "guarantees:     persistent, random_access, concurrent_writers",
        "fsync: true | false, default true",
    ):
        assert text in printed


def test_plugins_show_takes_the_name_of_an_item(capsys):
    assert main(["plugins", "show", "lk_hybrid"]) == 0
    assert "eta: number, default 3.0" in capsys.readouterr().out
    assert "did you mean 'lk_hybrid'" in problems(capsys, "plugins", "show", "lk_hybird")


def test_a_plugin_adds_a_command(capsys, site, monkeypatch):
    source = """
        from draftsmith import api
        from draftsmith.hookspecs import hookimpl

        def greet(name: str, loud: bool = False):
            '''Say hello.'''
            print(name.upper() if loud else name)

        @hookimpl
        def draftsmith_commands():
            return [api.Command(name="greet", summary="say hello", implementation="fake_greet:greet")]
    """
    site.install("draftsmith-greet", {"greet": "fake_greet"}, modules={"fake_greet": source})
    monkeypatch.setenv("DRAFTSMITH_PLUGINS", "greet")
    assert main(["--help"]) == 0
    assert re.search(r"^  greet +say hello$", capsys.readouterr().out, re.MULTILINE)
    assert main(["greet", "world", "--loud"]) == 0
    assert capsys.readouterr().out == "WORLD\n"
    assert main(["greet"]) == 2
    assert "did you mean 'greet'" in problems(capsys, "gret")
    assert "unknown command 'greet'" in problems(capsys, "--no-plugin", "greet", "greet")


def test_a_plugin_cannot_take_a_command_of_the_core(capsys, site, monkeypatch):
    source = """
        from draftsmith import api
        from draftsmith.hookspecs import hookimpl

        @hookimpl
        def draftsmith_commands():
            return [api.Command(name="run", summary="mine", implementation="fake_run:run")]
    """
    site.install("draftsmith-grab", {"grab": "fake_grab"}, modules={"fake_grab": source})
    monkeypatch.setenv("DRAFTSMITH_PLUGINS", "grab")
    message = problems(capsys, "lint", "/nowhere")
    assert "'run' is claimed by plugin" in message
    assert "draftsmith-grab 1.0" in message
    assert "--no-plugin grab" in message


# --- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["rum"], ["unknown command 'rum'", "did you mean 'run'"]),
        (["run"], ["RECIPE", "draftsmith run --help"]),
        (["run", "RECIPE", "--overwite"], ["--overwite", "did you mean '--overwrite'"]),
        (["run", "RECIPE", "--until", "trian"], ["--until", "train"]),
        (["--no-plugin", "tinkr", "plugins", "list"], ["unknown plugin 'tinkr'", "did you mean 'tinker'"]),
        (["run", "RECIPE", "--no-plugin", "tinker"], ["draftsmith-tinker 2.5", "switched off", "--no-plugin tinker"]),
        (["run", "RECIPE", "--set", "algorithm=tinkre"], ["unknown algorithm 'tinkre'", "did you mean 'tinker'"]),
        (["run", "RECIPE", "--set", "transport=telepathy"], ["'telepathy'", "pip install draftsmith-telepathy"]),
        (["run", "RECIPE", "--set", "plugins=[nothing]"], ["'nothing'", "pip install draftsmith-nothing"]),
    ],
)
def test_what_where_and_what_to_do(capsys, recipe, arguments, texts):
    message = problems(capsys, *[recipe if each == "RECIPE" else each for each in arguments])
    for text in texts:
        assert text in message
    assert "Traceback" not in message


def test_all_problems_of_a_recipe_are_printed(capsys, recipe):
    message = problems(capsys, "run", recipe, "--set", "train.epoch=1", "--set", "loss=kl_dvi", "--set", "plugins=3")
    assert message.startswith("error: 3 problems; nothing was started\n")
    assert message.count("→") == 3


def test_a_traceback_only_with_debug(capsys, site, recipe):
    # An algorithm whose check is broken: not the user's mistake.
    source = site.folder / "fake_tinker.py"
    source.write_text(source.read_text().replace("if options.layer_ids", "raise RuntimeError('bug')\n    if options"))
    assert main(["run", str(recipe)]) == 1
    message = capsys.readouterr().err
    assert "RuntimeError: bug" in message
    assert "--debug" in message
    assert "Traceback" not in message
    assert main(["run", str(recipe), "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_is_told_as_such(capsys, recipe, monkeypatch):
    import errno

    def full(path, value):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("draftsmith.pipeline.write_json_atomically", full)
    message = problems(capsys, "prepare", recipe)
    assert "the disk is full" in message
    assert "make room" in message


# --- explain ----------------------------------------------------------------------------------------------------


def test_explain_says_where_each_value_came_from(capsys, recipe):
    assert (
        main(["run", str(recipe), "--explain", "--set", "train.epochs=7", "--set", "algorithm.options.steps=5"]) == 0
    )
    rows = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert rows["train.epochs"].split() == ["train.epochs", "7", "--set"]
    assert rows["algorithm.name"].split() == ["algorithm.name", "tinker", "recipe.yaml:2"]
    assert rows["algorithm.options.steps"].split() == ["algorithm.options.steps", "5", "--set"]
    assert rows["algorithm.options.flavour"].endswith("default of tinker")
    assert rows["loss.options.terms.ce"].endswith("default of tinker (draftsmith-tinker 2.5)")
    assert rows["train.seed"].endswith("default")
    assert not (recipe.parent / "out").exists()


def test_explain_says_what_null_comes_to(capsys, recipe, verifier_folder):
    layers = json.loads((verifier_folder / "config.json").read_text())["num_hidden_layers"]
    assert main(["run", str(recipe), "--explain"]) == 0
    out = capsys.readouterr().out
    assert f"algorithm.options.scale comes to {layers / 2}\n" in out
    assert "algorithm.options.steps comes to" not in out  # it is given
    assert main(["run", str(recipe), "--explain", "--set", "algorithm.options.scale=3"]) == 0
    assert "comes to" not in capsys.readouterr().out


# --- running ----------------------------------------------------------------------------------------------------


def test_flags_of_a_stage_are_overrides(recipe, monkeypatch):
    seen = []
    monkeypatch.setattr("draftsmith.pipeline.run_all", lambda run, console, **more: seen.append((run, more)))
    assert main(["prepare", str(recipe), "--responses", "regenerate"]) == 0
    assert main(["capture", str(recipe), "--ignore-disk-space", "--overwrite"]) == 0
    assert main(["run", str(recipe), "--until", "train"]) == 0
    assert seen[0][0].recipe.data.responses == "regenerate"
    assert seen[0][0].provenance["data.responses"] == "--set"
    assert seen[1][0].recipe.capture.ignore_disk_space is True
    assert [more["overwrite"] for _, more in seen] == [False, True, False]
    assert [list(more["stages"]) for _, more in seen] == [["prepare"], ["capture"], ["prepare", "capture", "train"]]


def test_an_output_with_something_else_in_it_is_left_alone(capsys, recipe):
    out = recipe.parent / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("do not lose me")
    message = problems(capsys, "prepare", recipe)
    assert "not empty" in message
    assert [each.name for each in out.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_a_command_with_one_line(site, number, code):
    source = """
        import time
        from draftsmith import api
        from draftsmith.hookspecs import hookimpl

        def wait():
            try:
                print("ready", flush=True)
                time.sleep(600)
            except Exception:
                print("swallowed")
            finally:
                print("cleaned up", flush=True)

        @hookimpl
        def draftsmith_commands():
            return [api.Command(name="wait", summary="wait", implementation="fake_wait:wait")]
    """
    site.install("draftsmith-wait", {"wait": "fake_wait"}, modules={"fake_wait": source})
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith", "wait"],
        env={**environment(site), "DRAFTSMITH_PLUGINS": "wait"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell lets what it starts in the background ignore SIGINT, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code
    assert out == "cleaned up\n"
    assert err.startswith(f"stopped: by {signal.Signals(number).name}")
    assert "goes on where it stopped" not in err  # of a plugin's command the core cannot say that
    assert "Traceback" not in err


def test_a_reader_that_goes_away_is_no_error(site):
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m draftsmith plugins show tinker | true"],
        env=environment(site),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


def test_the_module_runs(site):
    done = subprocess.run(
        [sys.executable, "-m", "draftsmith", "--version"], env=environment(site), capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.strip() == f"draftsmith {__version__}"
    assert Path(sys.executable).exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.ELOOP])
def test_what_the_system_refuses_is_for_the_user_to_mend(capsys, recipe, monkeypatch, number):
    def refuse(run, console, **more):
        raise OSError(number, os.strerror(number), "/there/file")

    monkeypatch.setattr("draftsmith.pipeline.run_all", refuse)
    message = problems(capsys, "prepare", recipe)
    assert "/there/file" in message
    assert "should not happen" not in message


@pytest.mark.parametrize("key", ["output", "verifier"])
def test_a_name_that_is_too_long_is_for_the_user_to_mend(capsys, recipe, key):
    message = problems(capsys, "run", recipe, "--check", "--set", f"{key}={'n' * 300}")
    assert "File name too long" in message
    assert "should not happen" not in message


def test_an_item_that_is_not_installed_says_what_to_install(capsys):
    assert "pip install draftsmith-medusa" in problems(capsys, "plugins", "show", "medusa")


def test_a_verifier_named_to_lint_must_be_there(capsys, tmp_path):
    assert "no such verifier" in problems(capsys, "lint", tmp_path, "--verifier", "/nowhere")


LEAVING = """
import atexit, os, sys, threading, time
from draftsmith import cli

class Loud:
    def __del__(self):
        os.write(2, b"taken apart")

kept = Loud()
atexit.register(lambda: print("at exit"))
leave, leaving = cli._leave, threading.Event()
cli._leave = lambda code: (leaving.set(), leave(code))
threading.Thread(target=lambda: (leaving.wait(), time.sleep(0.2), print("thread"))).start()
sys.argv = ["draftsmith", *sys.argv[1:]]
sys.exit(cli.main())
"""


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["run"], 2)])
def test_the_script_ends_once_all_is_closed_and_takes_nothing_apart(site, arguments, code):
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, *arguments], env=environment(site), capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert done.stdout.splitlines()[-2:] == ["thread", "at exit"]
    assert "taken apart" not in done.stderr
    assert "Traceback" not in done.stderr
