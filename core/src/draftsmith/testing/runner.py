"""Runs the checks of one installed item with pytest, and tells what came of each. The kit is not imported here."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from attrs import frozen

from draftsmith.errors import PluginError

__all__ = ["CHECKED_KINDS", "Verdict", "run_checks"]

#: Kinds that the kit has tests for; what else a plugin registers takes part in its algorithms'.
CHECKED_KINDS = ("algorithm", "loss", "mask", "transport")
#: Modules with tests.
_KIT = ("algorithm", "losses", "masks", "plugin", "training", "transport")


@frozen(kw_only=True)
class Verdict:
    """What came of one check.

    Attributes:
        group: the class of the kit that has the check, and what that class says it is about.
        check: its name as words, with its parameters.
        about: the first line of its docstring.
        reason: why it failed, in a line; empty where it did not.
        details: the traceback.
    """

    group: str
    check: str
    about: str
    outcome: Literal["passed", "failed", "skipped"]
    seconds: float
    reason: str = ""
    details: str = ""


def run_checks(kind: str, name: str, on_verdict: Callable[[Verdict], None] = lambda verdict: None) -> list[Verdict]:
    """Put one installed item, or a plugin's package, to the kit.

    Args:
        kind: one of :data:`CHECKED_KINDS`, or ``plugin``.
        on_verdict: called after each check.

    Raises:
        KeyboardInterrupt: somebody pressed Ctrl-C.
        PluginError: the tests that the item names cannot be loaded.
    """
    reporter = _Reporter(on_verdict)
    with tempfile.TemporaryDirectory(prefix="draftsmith-check-") as scratch, _without_other_plugins():
        # A name of its own: pytest takes a module of a known name for the one that it has imported before.
        module = Path(scratch) / f"test_{Path(scratch).name.replace('-', '_')}.py"
        module.write_text(
            "from draftsmith.plugins import load_plugins\n"
            "from draftsmith.testing.check import check_class\n\n"
            f"TestChecks = check_class({kind!r}, {name!r}, load_plugins(raise_conflicts=False))\n",
            encoding="utf-8",
        )
        settings = Path(scratch) / "pytest.ini"
        settings.write_text("[pytest]\n", encoding="utf-8")
        quiet = ("-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:warnings", "--import-mode=importlib")
        basetemp = f"--basetemp={Path(scratch) / 'tmp'}"
        code = pytest.main(["-c", str(settings), basetemp, *quiet, str(module)], plugins=[reporter])
        sys.modules.pop(module.stem, None)
    if reporter.collection:
        raise PluginError(f"the checks of the {kind} {name!r} cannot be made: {reporter.collection}")
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return reporter.verdicts


class _without_other_plugins:  # noqa: N801  # a context manager, named as one reads it
    """pytest's plugins of whoever calls are not the kit's, such as one that runs tests in parallel."""

    _VARIABLES: ClassVar[Mapping[str, str | None]] = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": None}

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in self._VARIABLES}
        self._set(self._VARIABLES)

    def __exit__(self, *exc: object) -> None:
        self._set(self.before)

    @staticmethod
    def _set(variables: Mapping[str, str | None]) -> None:
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Reporter:
    """A pytest plugin that turns reports into verdicts."""

    def __init__(self, on_verdict: Callable[[Verdict], None]) -> None:
        self.on_verdict = on_verdict
        self.verdicts: list[Verdict] = []
        self.collection = ""
        self._texts: dict[str, tuple[str, str, str]] = {}
        self._reports: dict[str, list[pytest.TestReport]] = {}

    def pytest_configure(self) -> None:
        # Before the kit is imported: a failing check then shows both sides of its comparison.
        pytest.register_assert_rewrite(*(f"draftsmith.testing.{each}" for each in _KIT))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collection = list(_lines(report.longreprtext))[-1]

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        function, parent = item.obj, item.getparent(pytest.Class)  # type: ignore[attr-defined]
        owner = _owner(parent.obj, item.originalname) if parent else None  # type: ignore[attr-defined]
        group = (_first_line(owner) or owner.__name__) if owner else ""
        words = item.name.removeprefix("test_").replace("_", " ", item.name.partition("[")[0].count("_"))
        self._texts[item.nodeid] = (group, words, _first_line(function))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.setdefault(report.nodeid, []).append(report)
        if report.when == "teardown":
            verdict = self._verdict(self._reports.pop(report.nodeid))
            self.verdicts.append(verdict)
            self.on_verdict(verdict)

    def _verdict(self, reports: list[pytest.TestReport]) -> Verdict:
        group, check, about = self._texts[reports[0].nodeid]
        seconds = sum(each.duration for each in reports)
        failed = next((each for each in reports if each.failed), None)
        if failed is not None:
            return Verdict(
                group=group, check=check, about=about, outcome="failed", seconds=seconds,
                reason=_reason(failed), details=failed.longreprtext,
            )  # fmt: skip
        outcome: Literal["passed", "skipped"] = "skipped" if any(each.skipped for each in reports) else "passed"
        return Verdict(group=group, check=check, about=about, outcome=outcome, seconds=seconds)


def _owner(cls: type, test: str) -> type | None:
    """The class that has a test; of one that a plugin overrides, the kit's."""
    owners = [each for each in cls.__mro__ if test in vars(each)]
    return owners[-1] if owners else None


def _first_line(documented: Any) -> str:
    text = " ".join((documented.__doc__ or "").split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?([^`.]+)`", r"\1", text).replace("``", "")
    return text.partition(". ")[0].rstrip(".")


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return next(_lines(report.longreprtext), "failed")
    first = next(_lines(crash.message), "failed")
    return f"{first} ({Path(crash.path).name}:{crash.lineno})"


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.splitlines() if line.strip())
