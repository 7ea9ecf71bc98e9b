"""One catalog for each kind of item: by name, with who provides it, and with near names for an unknown one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from draftsmith.api import PROJECT_NAME, Item
from draftsmith.errors import DraftsmithError, PluginConflictError, UnknownNameError
from draftsmith.plugins.discovery import Provider, normalize

__all__ = ["Catalog", "conflict_error"]

T = TypeVar("T", bound=Item)

#: (kind, name, known names, where) → the error to raise for a name that is not in the catalog.
Explain = Callable[[str, str, Sequence[str], str | None], DraftsmithError]


def _unknown(kind: str, name: str, known: Sequence[str], where: str | None) -> DraftsmithError:
    return UnknownNameError(kind, name, known, where=where)


def conflict_error(kind: str, name: str, providers: Sequence[Provider]) -> PluginConflictError:
    """The error for a name that several providers claim; names all of them."""
    claims = " and ".join(f"plugin {each.plugin!r} of {each}" for each in providers)
    # Two plugins may share their entry point's name, and then only the distribution tells them apart.
    same_plugin = len({each.plugin for each in providers}) < len(providers)
    others = [each for each in providers if normalize(each.distribution) != PROJECT_NAME] or providers
    off = [each.distribution if same_plugin else each.plugin for each in others]
    return PluginConflictError(
        f"the {kind} {name!r} is claimed by {claims}",
        hint="switch one off, " + " or ".join(f"--no-plugin {each}" for each in off) + ", or uninstall it",
    )


class Catalog(Generic[T]):
    """Items of one *kind* (``"loss"``, ``"algorithm"``, …) by name."""

    def __init__(self, kind: str, explain: Explain = _unknown) -> None:
        self.kind = kind
        self._explain = explain
        self._items: dict[str, T] = {}
        self._providers: dict[str, list[Provider]] = {}

    def add(self, item: T, provider: Provider) -> None:
        """Register. A second claim of a name leaves the name without an owner; see :meth:`conflicts`."""
        self._items[item.name] = item
        self._providers.setdefault(item.name, []).append(provider)

    def reserve(self, name: str, provider: Provider) -> None:
        """Claim a name for something that is not in the catalog."""
        self._providers.setdefault(name, []).append(provider)

    def conflicts(self) -> list[PluginConflictError]:
        """One error for each name with more than one claim."""
        return [conflict_error(self.kind, name, claims) for name, claims in self._providers.items() if len(claims) > 1]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._items)

    def get(self, name: str, where: str | None = None) -> T:
        """The item of that name. *where* (a file and key) is repeated in the error.

        Raises:
            UnknownNameError: nothing provides it; the hint has the nearest names.
            PluginError: a plugin that could not be loaded provides it.
            PluginConflictError: several distributions claim it.
        """
        if name not in self._items:
            raise self._explain(self.kind, name, self.names(), where)
        if len(self._providers[name]) > 1:
            raise conflict_error(self.kind, name, self._providers[name])
        return self._items[name]

    def provider(self, name: str) -> Provider:
        """Who provides the item of that name. Raises like :meth:`get`."""
        self.get(name)
        return self._providers[name][0]

    def of(self, provider: Provider) -> list[T]:
        """What this provider registered here, in order of name."""
        return [self._items[name] for name in self.names() if provider in self._providers[name]]

    def uncontested(self) -> list[T]:
        """The items whose name only one provider claims, in order of name."""
        return [item for item in self if len(self._providers[item.name]) == 1]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[T]:
        return iter(self._items[name] for name in self.names())

    def __len__(self) -> int:
        return len(self._items)
