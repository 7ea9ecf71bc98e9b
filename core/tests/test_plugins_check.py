"""`draftsmith plugins check`: the kit on what is installed, by name, with a verdict for each check."""

from __future__ import annotations

import importlib.util

import pytest

from draftsmith.cli import main
from draftsmith.errors import PluginError
from draftsmith.testing.runner import run_checks

LOSS = """
    import torch
    from draftsmith import api
    from draftsmith.hookspecs import hookimpl
    from draftsmith.interfaces import PositionLoss

    class Loss(PositionLoss):
        def value(self, logits, teacher):
            return {value}

    @hookimpl
    def draftsmith_losses():
        return [api.Loss(name="fancy", summary="a loss", implementation="fake_fancy:Loss"{more})]

    @hookimpl
    def draftsmith_observers():
        return [api.Observer(name="watcher", summary="sees", implementation="fake_fancy:Loss")]
"""
KL = "(teacher.log_p.exp() * (teacher.log_p - torch.log_softmax(logits, -1))).sum(-1)"


def install(site, value=KL, more=""):
    site.install(
        "draftsmith-fancy", {"fancy": "fake_fancy"}, modules={"fake_fancy": LOSS.format(value=value, more=more)}
    )


def check(capsys, *arguments):
    code = main(["plugins", "check", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_each_check_has_a_verdict(site, capsys):
    install(site)
    code, out, _ = check(capsys, "fancy")
    assert "loss fancy  (draftsmith-fancy 1.0)" in out
    assert "ok      gradient is that of the value" in out
    assert "plugin fancy  (draftsmith-fancy 1.0)" in out
    # It imports torch in its module, and its metadata do not ask for draftsmith.
    assert "FAILED  its module imports nothing heavy" in out
    assert "importing fake_fancy imports" in out
    assert "FAILED  it says which draftsmith it needs" in out
    assert "12 checks, 2 failed" in out
    assert code == 1


def test_a_failure_says_what_is_wrong_and_where(site, capsys):
    install(site, value=f"0.1 + {KL}")
    code, out, _ = check(capsys, "fancy")
    assert code == 1
    lines = [line.strip() for line in out.splitlines()]
    at = lines.index("FAILED  zero where the draft is the teacher")
    assert "says zero_at_teacher = False in its item's conformance class" in lines[at + 1]
    assert "Tensor-likes are not close" in lines[at + 2]
    assert "losses.py:" in lines[at + 2]
    assert "--details" in out
    assert "assert_close" not in out
    assert "torch.testing.assert_close(value, torch.zeros_like(value)" in check(capsys, "fancy", "--details")[1]


def test_what_the_kit_must_know_stands_in_the_class_that_the_item_names(site, capsys):
    install(site, value="-torch.log_softmax(logits, -1).gather(-1, teacher.top[:, None]).squeeze(-1)")
    assert [each.check for each in run_checks("loss", "fancy") if each.outcome == "failed"] == [
        "zero where the draft is the teacher"
    ]
    site.modules.append("fake_conformance")
    (site.folder / "fake_conformance.py").write_text(
        "from draftsmith.testing.check import LossCheck\nclass FancyCheck(LossCheck):\n    zero_at_teacher = False\n"
    )
    (site.folder / "draftsmith_fancy-1.0.dist-info" / "entry_points.txt").write_text(
        "[draftsmith.v1]\nfancy = fake_two\n"
    )
    source = (site.folder / "fake_fancy.py").read_text()
    named = source.replace('fake_fancy:Loss")]', 'fake_fancy:Loss", conformance="fake_conformance:FancyCheck")]', 1)
    (site.folder / "fake_two.py").write_text(named)
    site.modules.append("fake_two")
    assert not [each.check for each in run_checks("loss", "fancy") if each.outcome == "failed"]


def test_a_class_that_is_not_there_is_an_error_that_names_it(site):
    install(site, more=', conformance="fake_fancy:Nowhere"')
    with pytest.raises(PluginError, match="fake_fancy:Nowhere"):
        run_checks("loss", "fancy")


@pytest.mark.parametrize("name", ["tensorboard", "watcher"])
def test_what_has_no_checks_says_so(site, capsys, name):
    install(site)
    code, _, err = check(capsys, name)
    assert code == 2
    assert f"the kit has no checks for the observer {name!r}" in err


def test_an_unknown_name_is_the_users_mistake(site, capsys):
    install(site)
    code, _, err = check(capsys, "fanci")
    assert code == 2
    assert "did you mean 'fancy'" in err


def test_settings_of_the_callers_pytest_are_not_the_kits(site, monkeypatch):
    install(site)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    monkeypatch.chdir(site.folder)
    (site.folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (site.folder / "conftest.py").write_text("raise RuntimeError('not the kit')\n")
    verdicts = run_checks("loss", "fancy")
    assert len(verdicts) == 7
    assert {each.outcome for each in verdicts} == {"passed"}
    assert {each.group for each in verdicts} == {"What every PositionLoss must satisfy"}


def test_verdicts_come_one_by_one(site):
    install(site)
    seen = []
    assert run_checks("loss", "fancy", seen.append) == seen
    assert all(each.seconds >= 0 and not each.reason for each in seen)


def test_everything_built_in_passes(capsys):
    code, out, _ = check(capsys, "builtin")
    assert code == 0, out
    for item in ("loss ce", "loss sum", "mask anchored", "mask chained"):
        assert f"{item}  (draftsmith " in out
    assert "plugin builtin" not in out


@pytest.mark.parametrize(
    ("gone", "said"),
    [({"torch", "transformers"}, "torch and transformers, which are"), ({"pytest"}, "pytest, which is")],
)
def test_what_the_kit_needs_is_told_where_it_is_missing(site, capsys, monkeypatch, gone, said):
    install(site)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in gone else found(name, *rest))
    assert main(["plugins", "check", "fancy"]) == 2
    printed = capsys.readouterr().err
    assert f"the conformance kit needs {said} not installed" in printed
    assert "pip install 'draftsmith[train,test]'" in printed
    assert "Traceback" not in printed
