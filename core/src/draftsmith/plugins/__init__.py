"""Plugins: found by their metadata, loaded once, answered for by name.

:func:`load_plugins` is the way in; :func:`load_reference` imports an implementation when a run really needs it.
"""

from __future__ import annotations

from draftsmith.plugins.catalog import Catalog
from draftsmith.plugins.discovery import Provider
from draftsmith.plugins.manager import (
    LoadedPlugin,
    PluginRegistry,
    QuarantinedPlugin,
    SwitchedOffPlugin,
    load_plugins,
    load_reference,
)

__all__ = [
    "Catalog",
    "LoadedPlugin",
    "PluginRegistry",
    "Provider",
    "QuarantinedPlugin",
    "SwitchedOffPlugin",
    "load_plugins",
    "load_reference",
]
