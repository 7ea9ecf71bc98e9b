"""``draftsmith plugins check NAME``: the conformance kit on what is installed, one line a check."""

from __future__ import annotations

import gc
import importlib.util
import time
from typing import TYPE_CHECKING

from draftsmith.api import PROJECT_NAME
from draftsmith.cli.plugins import unknown
from draftsmith.errors import UserError
from draftsmith.plugins.discovery import normalize
from draftsmith.plugins.manager import FACETS

if TYPE_CHECKING:
    from rich.console import Console

    from draftsmith.plugins import PluginRegistry, Provider
    from draftsmith.testing.runner import Verdict

__all__ = ["check", "targets"]

#: What the kit imports, and the core alone does not need.
_NEEDED = ("torch", "transformers", "pytest")


def targets(registry: PluginRegistry, name: str) -> list[tuple[str, str, Provider]]:
    """What there is to check under *name*, as (kind, name, who provides it): a plugin's package, and its items.

    Raises:
        UserError: there is nothing that the kit has tests for.
        UnknownNameError, PluginError: nothing is named so, or it is not in use.
    """
    from draftsmith.testing.runner import CHECKED_KINDS

    plugins = [each for each in registry.plugins if each.provider.answers_to(name)]
    own = normalize(PROJECT_NAME)  # the core is no package of a plugin
    found = [("plugin", each.name, each.provider) for each in plugins if normalize(each.provider.distribution) != own]
    others = [facet.kind for facet in FACETS if facet.kind not in CHECKED_KINDS and name in registry.catalog(facet)]
    for facet in FACETS:
        catalog = registry.catalog(facet)
        names = {item.name for plugin in plugins for item in catalog.of(plugin.provider)}
        names |= {name} if name in catalog else set()
        if facet.kind in CHECKED_KINDS:
            found += [(facet.kind, each, catalog.provider(each)) for each in sorted(names)]
    if not found and (plugins or others):
        what = others[0] if others else "plugin"
        raise UserError(
            f"the kit has no checks for the {what} {name!r}",
            hint=f"it has some for each {', '.join(CHECKED_KINDS)}; networks and formats take part in those",
        )
    if not found:
        raise unknown(name, registry)
    return found


def check(registry: PluginRegistry, name: str, *, details: bool = False) -> int:
    """Run all checks and print a verdict each; returns the exit code: 1 where one fails."""
    from rich.console import Console

    _require_the_kit()
    from draftsmith.testing.runner import run_checks

    gc.enable()
    begun = time.monotonic()
    console = Console(highlight=False, soft_wrap=True)
    verdicts: list[Verdict] = []
    for kind, each, provider in targets(registry, name):
        console.print(f"{kind} {each}  ({provider})", style="bold", markup=False)
        printer = _Printer(console)
        verdicts += run_checks(kind, each, printer.verdict)
    failed = [each for each in verdicts if each.outcome == "failed"]
    if details:
        for verdict in failed:
            console.print(f"\n{verdict.check}\n{verdict.details}", markup=False)
    skipped = sum(each.outcome == "skipped" for each in verdicts)
    counted = f"{len(verdicts)} checks, {len(failed)} failed" + (f", {skipped} skipped" if skipped else "")
    console.print(f"\n{counted}, in {time.monotonic() - begun:.1f} s", markup=False)
    if failed and not details:
        console.print("--details shows where each of them failed", markup=False)
    return int(bool(failed))


def _require_the_kit() -> None:
    """Whether what the kit imports is there.

    Raises:
        UserError: something of it is not installed.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        raise UserError(
            f"the conformance kit needs {needed}, which {'are' if len(missing) > 1 else 'is'} not installed",
            hint=f"pip install '{PROJECT_NAME}[train,test]'",
        )


class _Printer:
    """A heading a group, and a line a check, as soon as it is done."""

    _STYLES = {"passed": ("ok", "green"), "failed": ("FAILED", "red"), "skipped": ("skipped", "yellow")}  # noqa: RUF012

    def __init__(self, console: Console) -> None:
        self.console, self.group = console, ""

    def verdict(self, verdict: Verdict) -> None:
        from rich.text import Text

        if verdict.group != self.group:
            self.group = verdict.group
            self.console.print(f"  {verdict.group}", markup=False)
        word, style = self._STYLES[verdict.outcome]
        line = Text("    ").append(f"{word:<8}", style=style).append(verdict.check)
        if verdict.seconds >= 1:
            line.append(f"  {verdict.seconds:.1f} s", style="dim")
        self.console.print(line)
        if verdict.outcome == "failed":
            for remark in filter(None, (verdict.about, verdict.reason)):
                self.console.print(f"            {remark}", markup=False)
