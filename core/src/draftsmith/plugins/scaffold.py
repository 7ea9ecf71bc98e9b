"""``draftsmith plugins new``: a package with one plugin, which installs and passes the conformance kit as it is.

The templates are files in ``draftsmith/templates``, one folder a kind and one that all share. Their names and texts
have placeholders such as ``@NAME@``.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from draftsmith import __version__
from draftsmith.api import API_MAJOR, PROJECT_NAME
from draftsmith.errors import OutputError, UserError
from draftsmith.plugins.discovery import normalize

__all__ = ["KINDS", "check_name", "placeholders", "write_package"]

#: Kinds of plugins that can be begun from a template.
KINDS = ("algorithm", "loss", "mask", "transport")

_TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")


def check_name(name: str) -> None:
    """Raises:
    UserError: no plugin can be named so.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot be the name of a plugin",
            hint="lower case letters and digits, a letter first, and single '_' or '-' between them, such as my_idea",
        )
    if normalize(name).startswith(f"{PROJECT_NAME}-") or name == PROJECT_NAME:
        raise UserError(
            f"{name!r} is the name of a distribution",
            hint=f"leave {PROJECT_NAME!r} away: the package that is written will have it",
        )


def placeholders(name: str, kind: str) -> dict[str, str]:
    """Placeholder → text, for a plugin of that name.

    Raises:
        UserError: no plugin can be named so.
    """
    check_name(name)
    words = re.split("[-_]", name)
    return {
        "@NAME@": name,
        "@KIND@": kind,
        "@DISTRIBUTION@": f"{PROJECT_NAME}-{normalize(name)}",
        "@PACKAGE@": f"{PROJECT_NAME}_{name.replace('-', '_')}",
        "@CLASS@": "".join(word.capitalize() for word in words),
        "@TESTS@": "tests",  # a wheel has no folder of that name
        "@API@": str(API_MAJOR),
        "@BOUNDS@": _bounds(__version__),
    }


def _bounds(version: str) -> str:
    major, minor = version.split(".")[:2]
    return f">={major}.{minor},<{int(major) + 1}"


def write_package(name: str, kind: str, folder: Path | None = None) -> list[Path]:
    """Write the package of a new plugin, whole or not at all.

    Args:
        kind: one of :data:`KINDS`.
        folder: where; None: a folder in the working directory, named after the distribution.

    Returns:
        The files, relative to the folder that is first.

    Raises:
        UserError: the name cannot be one.
        OutputError: the folder is there already, or cannot be written.
    """
    texts = placeholders(name, kind)
    folder = Path(texts["@DISTRIBUTION@"]) if folder is None else folder
    if folder.exists():
        raise OutputError(
            f"there is a {folder} already", where=str(folder), hint="choose another --folder, or remove it"
        )
    aside = folder.with_name(f".{folder.name}.new")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        for source in ("common", kind):
            _fill(_TEMPLATES / source, aside, texts)
        os.replace(aside, folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise OutputError(f"cannot be written: {error.strerror or error}", where=str(folder)) from error
    return [folder, *sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())]


def _fill(template: Path, target: Path, texts: dict[str, str]) -> None:
    """Copy *template*'s files to *target* with the placeholders filled in, names included."""
    for source in sorted(template.rglob("*.in")):
        relative = source.relative_to(template).as_posix().removesuffix(".in")
        written, text = relative, source.read_text(encoding="utf-8")
        for placeholder, value in texts.items():
            written, text = written.replace(placeholder, value), text.replace(placeholder, value)
        path = target / written
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
