"""Which plugins are installed: read from the metadata of distributions, importing none of them.

The major version of the plugin API is part of the entry-point group, so a plugin made for another major version is
recognised here and reported, never imported.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from attrs import frozen

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

    @property
    def name(self) -> str:
        return self.provider.plugin

    def load(self) -> Any:
        """Import the module (or the attribute of one) that the entry point names."""
        module, _, attribute = self.reference.partition(":")
        value: Any = importlib.import_module(module)
        for part in attribute.split(".") if attribute else ():
            value = getattr(value, part)
        return value


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
    for found in _installed():
        if normalize(found.name) in seen:
            continue
        seen.add(normalize(found.name))
        for group, plugin, reference in found.entry_points():
            match = _GROUP.fullmatch(group)
            if match is None:
                continue
            provider = Provider(distribution=found.name, version=found.version, plugin=plugin)
            if int(match[1]) == API_MAJOR:
                candidates.append(Candidate(provider=provider, reference=reference))
            else:
                foreign.append(ForeignPlugin(provider=provider, major=int(match[1])))
    return Discovery(
        candidates=tuple(sorted(candidates, key=lambda each: (each.name, each.provider.distribution))),
        foreign=tuple(sorted(foreign, key=lambda each: (each.provider.plugin, each.provider.distribution))),
    )


# --- reading metadata -------------------------------------------------------------------------------------------
#
# An environment with vLLM has some 200 distributions, of which a handful are plugins. importlib-metadata finds them
# all, and importing it alone takes a tenth of the time in which `draftsmith --help` has to answer. So where every
# entry of sys.path is a plain folder and nobody has added a finder of distributions, the folders are looked through
# directly; anything else (zip files, frozen applications) is importlib-metadata's to read.


class _Metadata(NamedTuple):
    """The texts of a distribution that mention a group of ours."""

    metadata: str
    points: str

    @property
    def name(self) -> str:
        return self._header("Name") or "unknown"

    @property
    def version(self) -> str:
        return self._header("Version") or "?"

    def _header(self, key: str) -> str | None:
        for line in self.metadata.splitlines():
            if not line.strip():
                break  # the headers end, the description begins
            if line.lower().startswith(f"{key.lower()}:"):
                return line.partition(":")[2].strip()
        return None

    def entry_points(self) -> Iterator[tuple[str, str, str]]:
        """(group, name, reference) of each, extras left out."""
        group = ""
        for raw in self.points.splitlines():
            line = raw.strip()
            if line.startswith("[") and line.endswith("]"):
                group = line[1:-1].strip()
            elif "=" in line and not line.startswith(("#", ";")):
                name, _, reference = line.partition("=")
                yield group, name.strip(), reference.partition("[")[0].strip()


def _installed() -> Iterator[_Metadata]:
    """Distributions with an entry point of ours, in order of ``sys.path``."""
    return _in_folders() if _only_folders() else _by_importlib_metadata()


def _only_folders() -> bool:
    usual = ("importlib", "_frozen_importlib", "_frozen_importlib_external", "importlib_metadata")
    for finder in sys.meta_path:
        home = getattr(finder, "__module__", None) or type(finder).__module__
        if hasattr(finder, "find_distributions") and home.partition(".")[0] not in usual:
            return False
    return not any(os.path.isfile(entry) for entry in sys.path)


def _in_folders() -> Iterator[_Metadata]:
    for entry in sys.path:
        try:
            names = sorted(os.listdir(entry or "."))
        except OSError:
            continue
        for name in names:
            if not name.endswith((".dist-info", ".egg-info")):
                continue
            folder = os.path.join(entry, name)
            points = _read(os.path.join(folder, "entry_points.txt"))
            if f"{PROJECT_NAME}.v" in points:
                metadata = "METADATA" if name.endswith(".dist-info") else "PKG-INFO"
                yield _Metadata(_read(os.path.join(folder, metadata)), points)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _by_importlib_metadata() -> Iterator[_Metadata]:
    import importlib_metadata

    for distribution in importlib_metadata.distributions():
        points = distribution.read_text("entry_points.txt") or ""
        if f"{PROJECT_NAME}.v" in points:
            metadata = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
            yield _Metadata(metadata, points)
