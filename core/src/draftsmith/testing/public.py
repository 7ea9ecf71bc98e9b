"""Which modules of draftsmith a plugin may import, and what a package imports beside them. Torch-free.

    from draftsmith.testing.public import private_imports

    def test_it_imports_nothing_private():
        assert not private_imports(Path(draftsmith_myidea.__file__).parent)

What these modules list in ``__all__`` stays within a major version of the plugin API. Every other module may change in
any release, whatever its name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import draftsmith
from draftsmith.api import PROJECT_NAME

__all__ = ["PUBLIC_MODULES", "imported_modules", "is_public", "private_imports"]

#: Documented in docs/plugins/public-api.md, with what each is for.
PUBLIC_MODULES: tuple[str, ...] = (
    "draftsmith",
    "draftsmith.api",
    "draftsmith.attention",
    "draftsmith.errors",
    "draftsmith.fp8",
    "draftsmith.hookspecs",
    "draftsmith.interfaces",
    "draftsmith.layer_config",
    "draftsmith.layers",
    "draftsmith.losses",
    "draftsmith.losses.base",
    "draftsmith.losses.divergence",
    "draftsmith.losses.options",
    "draftsmith.losses.overlap",
    "draftsmith.losses.weighted",
    "draftsmith.mask_token",
    "draftsmith.masks",
    "draftsmith.masks.forms",
    "draftsmith.masks.rules",
    "draftsmith.progress",
    "draftsmith.recurrent",
    "draftsmith.recurrent.replay",
    "draftsmith.recurrent.served",
    "draftsmith.recurrent.training",
    "draftsmith.reference",
    "draftsmith.rows",
    "draftsmith.speculators",
    "draftsmith.stages",
    "draftsmith.stored_tensors",
    "draftsmith.testing",
    "draftsmith.testing.algorithm",
    "draftsmith.testing.check",
    "draftsmith.testing.losses",
    "draftsmith.testing.masks",
    "draftsmith.testing.plugin",
    "draftsmith.testing.public",
    "draftsmith.testing.training",
    "draftsmith.testing.transport",
    "draftsmith.testing.verifiers",
    "draftsmith.verifier",
    "draftsmith.verifier_weights",
)


def is_public(module: str) -> bool:
    """Whether plugins may import *module* of draftsmith."""
    return module in PUBLIC_MODULES


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """(line, module, names imported from it) of each absolute import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module, tuple(alias.name for alias in node.names)


def private_imports(package: Path) -> list[str]:
    """What the modules below *package* import of draftsmith and may not: ``file.py:line module``, in order.

    Args:
        package: a folder, or one file.
    """
    found = []
    for path in sorted(package.rglob("*.py")) if package.is_dir() else [package]:
        for line, module, names in imported_modules(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if module.partition(".")[0] == PROJECT_NAME:
                found += [f"{path.name}:{line} {each}" for each in _private(module, names)]
    return found


def _private(module: str, names: tuple[str, ...]) -> Iterator[str]:
    if not is_public(module):
        yield module
        return
    listed = _listed(module)
    for name in names:
        # `from draftsmith import api` imports a module, `from draftsmith.api import Loss` a name.
        if name not in listed and not is_public(f"{module}.{name}"):
            yield f"{module}.{name}"


def _listed(module: str) -> tuple[str, ...]:
    """``__all__`` of a public module, read without importing it; of the package itself, its version."""
    if module == PROJECT_NAME:
        return ("__version__",)
    folder = Path(draftsmith.__file__).parent.joinpath(*module.split(".")[1:])
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return tuple(ast.literal_eval(node.value))
    return ()
