"""Telling trackers what happens in a run. See :mod:`draftsmith.observers.dispatch`."""

from __future__ import annotations

from draftsmith.observers.dispatch import Dispatcher, open_observers

__all__ = ["Dispatcher", "open_observers"]
