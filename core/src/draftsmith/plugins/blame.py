"""Whose error it is: an exception that a plugin did not mean to raise, told with the plugin's name and version.

Facets are called from many places, and in other threads. What all of these have in common is the traceback: the frame
nearest to where the exception was raised that runs a plugin's code says whose it is.
"""

from __future__ import annotations

import contextlib
import errno
import re
import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from draftsmith.api import PROJECT_NAME
from draftsmith.errors import DraftsmithError, PluginError
from draftsmith.plugins.discovery import Provider, discover, normalize

__all__ = ["describe", "line_of", "naming_plugins", "plugin_error", "provider_of"]

#: What the system refuses: no plugin's fault, and the command line says what to do about each.
_OF_THE_SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
#: How Python begins a complaint about the arguments of a call: with the qualified name of the function or class.
_CALL = re.compile(r"([A-Za-z_][\w.]*)\(\) ")


class _Place(NamedTuple):
    """A line of a plugin's code that was running."""

    provider: Provider
    function: str
    line: str


@contextlib.contextmanager
def naming_plugins() -> Iterator[None]:
    """Raise what a plugin's code raises, unless it is one of draftsmith's own errors, as an error with its name.

    Raises:
        PluginError: an exception of another kind came out of a plugin's code.
    """
    try:
        yield
    except Exception as error:
        found = plugin_error(error)
        if found is None:
            raise
        raise found from error


def plugin_error(error: BaseException) -> PluginError | None:
    """*error* as that of the installed plugin whose code raised it; None where no plugin's did, or it was meant.

    Signals, full or forbidden disks and too little memory are nobody's mistake, and are left as they are.
    """
    if isinstance(error, DraftsmithError | MemoryError) or not isinstance(error, Exception):
        return None
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not to be imported here
        return None
    if isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM:
        return None
    modules = _modules()
    place = _innermost(error.__traceback__, modules) or _called(error, modules)
    if place is None:
        return None
    provider = place.provider
    hint = f"report it to the authors of {provider.distribution}; --debug shows the whole traceback"
    if isinstance(error, ModuleNotFoundError):
        hint = f"install what {provider.distribution} needs: pip install --force-reinstall {provider.distribution}"
    return PluginError(
        f"plugin {provider.plugin!r} of {provider} fails in {place.function}(): {type(error).__name__}: {error}",
        where=place.line,
        hint=hint,
    )


def provider_of(module: str) -> Provider | None:
    """The installed plugin whose package the module of that name belongs to; None: no plugin's."""
    return _owner(module, _modules())


def line_of(error: BaseException) -> str | None:
    """``file:line`` in the plugin's code that *error* came out of; None: it came out of none."""
    place = _innermost(error.__traceback__, _modules())
    return None if place is None else place.line


def describe(value: Any) -> str:
    """What *value* is, for a message about what a plugin returned."""
    if value is None:
        return "None"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a value of type {type(value).__name__}"


def _modules() -> dict[str, Provider]:
    """Module of an entry point → plugin, of all that are installed but the core's own."""
    return {
        each.reference.partition(":")[0]: each.provider
        for each in discover().candidates
        if normalize(each.provider.distribution) != normalize(PROJECT_NAME)
    }


def _innermost(traceback: TracebackType | None, modules: Mapping[str, Provider]) -> _Place | None:
    """The last frame of *traceback* that runs a plugin's code."""
    found = None
    while traceback is not None:
        frame = traceback.tb_frame
        provider = _owner(str(frame.f_globals.get("__name__", "")), modules)
        if provider is not None:
            code = frame.f_code
            found = _Place(provider, code.co_qualname, f"{code.co_filename}:{traceback.tb_lineno}")
        traceback = traceback.tb_next
    return found


def _called(error: Exception, modules: Mapping[str, Provider]) -> _Place | None:
    """The plugin's function that takes other arguments than the core gave it: Python raises that in the caller."""
    match = _CALL.match(str(error)) if isinstance(error, TypeError) else None
    if match is None:
        return None
    for name, module in list(sys.modules.items()):
        provider = _owner(name, modules)
        value: Any = module
        for part in match[1].split(".") if provider is not None else ():
            value = getattr(value, part, None)
        if provider is not None and getattr(value, "__module__", None) == name:
            return _Place(provider, match[1], str(getattr(module, "__file__", name)))
    return None


def _owner(module: str, modules: Mapping[str, Provider]) -> Provider | None:
    """The plugin whose module shares the most of its dotted name with *module*, and its package at least."""
    shared = {each: _shared(module, each) for each in modules}
    best = max(shared, key=lambda each: shared[each], default=None)
    return None if best is None or not shared[best] else modules[best]


def _shared(first: str, second: str) -> int:
    """How many parts two dotted names begin with in common."""
    count = 0
    for left, right in zip(first.split("."), second.split("."), strict=False):
        if left != right:
            break
        count += 1
    return count
