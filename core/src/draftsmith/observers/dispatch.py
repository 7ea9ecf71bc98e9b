"""Events of a run, to the observer hooks of all plugins and to the trackers that the recipe names.

An observer watches; whatever goes wrong in it must not cost the run anything. The first exception of an observer is
logged, and the observer hears nothing more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from draftsmith import api, hookspecs
from draftsmith.errors import PluginError
from draftsmith.plugins import load_reference
from draftsmith.plugins.manager import EVENTS

if TYPE_CHECKING:
    from draftsmith.config.resolve import ResolvedRun

__all__ = ["Dispatcher", "open_observers"]

_log = logging.getLogger(__name__)

#: event name → the function to call with the event.
_Handlers = dict[str, Callable[[Any], None]]


def handlers_of(observer: Any) -> _Handlers:
    """The observer hooks of a module or object (functions decorated with ``hookimpl``).

    Raises:
        PluginError: a hook has a wrong name or signature, or there is none.
    """
    manager = pluggy.PluginManager(api.PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(observer)
        manager.check_pending()
    except (ValueError, pluggy.PluginValidationError) as error:
        raise PluginError(f"observer {observer!r} has a wrong hook: {error}") from error
    handlers: _Handlers = {}
    for name in EVENTS:
        for implementation in getattr(manager.hook, name).get_hookimpls():
            handlers[name] = _handler(implementation)
    if not handlers:
        raise PluginError(f"observer {observer!r} implements no observer hook", hint="decorate with @hookimpl")
    return handlers


def _handler(implementation: pluggy.HookImpl) -> Callable[[Any], None]:
    function: Callable[..., Any] = implementation.function
    if implementation.argnames:
        return lambda event: function(event)
    return lambda event: function()  # a hook may leave out the argument it does not need


class Dispatcher:
    """Passes events on. Never raises because of an observer."""

    def __init__(self, observers: Sequence[tuple[str, _Handlers]] = ()) -> None:
        self._observers = list(observers)

    @property
    def names(self) -> list[str]:
        """Who is listening."""
        return [name for name, _ in self._observers]

    def run_started(self, event: api.RunStarted) -> None:
        self._send("draftsmith_run_started", event)

    def step_finished(self, event: api.StepFinished) -> None:
        self._send("draftsmith_step_finished", event)

    def checkpoint_saved(self, event: api.CheckpointSaved) -> None:
        self._send("draftsmith_checkpoint_saved", event)

    def run_finished(self, event: api.RunFinished) -> None:
        self._send("draftsmith_run_finished", event)

    def _send(self, hook: str, event: object) -> None:
        for entry in list(self._observers):
            name, handlers = entry
            handler = handlers.get(hook)
            if handler is None:
                continue
            try:
                handler(event)
            except Exception as error:
                _switched_off(name, f"fails in {hook}", error)
                self._observers.remove(entry)


def _switched_off(name: str, what: str, error: Exception) -> None:
    _log.warning("observer %s %s and is switched off: %s: %s", name, what, type(error).__name__, error)
    _log.debug("observer %s", name, exc_info=error)


def open_observers(run: ResolvedRun) -> Dispatcher:
    """The observers of a run: the plugins that implement observer hooks, then the trackers of ``observers:``."""
    observers: list[tuple[str, _Handlers]] = []
    for plugin in run.registry.plugins:
        if plugin.events:
            observers.append((f"of plugin {plugin.name!r} ({plugin.provider})", handlers_of(plugin.module)))
    for name in run.recipe.observers:
        item = run.registry.observers.get(name)
        described = f"{name!r} ({run.registry.observers.provider(name)})"
        try:
            observers.append((described, _open(item, run.folders.output)))
        except Exception as error:
            _switched_off(described, "cannot be opened", error)
    return Dispatcher(observers)


def _open(item: api.Observer, output: Path) -> _Handlers:
    return handlers_of(load_reference(item.implementation)(output))
