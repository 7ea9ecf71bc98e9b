"""Which plugins are installed: read from the metadata of distributions, importing none of them.

The major version of the plugin API is part of the entry-point group, so a plugin made for another major version is
recognised here and reported, never imported.
"""

from __future__ import annotations

import re
from typing import Any

import importlib_metadata
from attrs import field, frozen

from draftsmith.api import API_MAJOR, PROJECT_NAME

__all__ = ["Candidate", "Discovery", "ForeignPlugin", "Provider", "discover", "normalize"]

_GROUP = re.compile(rf"{PROJECT_NAME}\.v(\d+)")


def normalize(name: str) -> str:
    """A name as package indexes compare it: case, ``-``, ``_`` and ``.`` make no difference."""
    return re.sub(r"[-_.]+", "-", name).lower()


@frozen(kw_only=True)
class Provider:
    """Who provides something: a plugin, and the distribution and version that it was installed from."""

    distribution: str
    version: str
    plugin: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    def answers_to(self, name: str) -> bool:
        """Whether *name* means this plugin: the name of its entry point or of its distribution."""
        return normalize(name) in (normalize(self.plugin), normalize(self.distribution))


@frozen(kw_only=True)
class Candidate:
    """A plugin for this API version, not imported yet. *reference* is its entry point's value."""

    provider: Provider
    reference: str
    entry_point: Any = field(eq=False, repr=False)

    @property
    def name(self) -> str:
        return self.provider.plugin


@frozen(kw_only=True)
class ForeignPlugin:
    """A plugin made for another major version of the API; *major* says for which."""

    provider: Provider
    major: int

    @property
    def reason(self) -> str:
        advice = "upgrade draftsmith" if self.major > API_MAJOR else f"upgrade {self.provider.distribution}"
        return f"made for plugin API v{self.major}, this draftsmith has v{API_MAJOR}: {advice}"


@frozen(kw_only=True)
class Discovery:
    """What is installed, in order of plugin name."""

    candidates: tuple[Candidate, ...]
    foreign: tuple[ForeignPlugin, ...]


def discover() -> Discovery:
    """Read the entry points of all distributions on ``sys.path``; of two installations of one, the first counts."""
    candidates: list[Candidate] = []
    foreign: list[ForeignPlugin] = []
    seen: set[str] = set()
    for distribution in importlib_metadata.distributions():
        # Looking at the raw text first spares parsing the metadata of every installed distribution (an environment
        # with vLLM has about 200), and with it most of the time of `draftsmith --help`.
        text = distribution.read_text("entry_points.txt")
        if not text or f"{PROJECT_NAME}.v" not in text:
            continue
        name = distribution.metadata["Name"] or "unknown"
        if normalize(name) in seen:
            continue
        seen.add(normalize(name))
        for entry_point in distribution.entry_points:
            group = _GROUP.fullmatch(entry_point.group)
            if group is None:
                continue
            provider = Provider(distribution=name, version=distribution.version or "?", plugin=entry_point.name)
            if int(group[1]) == API_MAJOR:
                candidates.append(Candidate(provider=provider, reference=entry_point.value, entry_point=entry_point))
            else:
                foreign.append(ForeignPlugin(provider=provider, major=int(group[1])))
    return Discovery(
        candidates=tuple(sorted(candidates, key=lambda each: (each.name, each.provider.distribution))),
        foreign=tuple(sorted(foreign, key=lambda each: (each.provider.plugin, each.provider.distribution))),
    )
