"""What the installed vLLM can do, read from its source. Imports neither vLLM nor torch.

A draft that reads hidden states needs a verifier whose class hands them out. vLLM finds out when the engine has loaded
the weights; here it takes some milliseconds, before anything is captured or trained.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from draftsmith.errors import did_you_mean
from draftsmith.serving.vllm_process import missing_v2_runner, vllm_version

__all__ = [
    "hands_out_hidden_states",
    "speculative_keys",
    "speculative_methods",
    "unknown_keys",
    "unknown_method",
    "unsampled_here",
]

#: The vLLM that all of this is written for: what is not known to be in an earlier one is in this.
WRITTEN_FOR = "0.32"
#: The method of the interface through which an engine asks a model for the states of some layers.
_METHOD = "set_aux_hidden_state_layers"
#: Classes that inherit the method, and whose own forward leaves the states out.
_INHERITED_ONLY = frozenset({"MiMoForCausalLM"})
#: Steps from a class to its furthest ancestor.
_DEEPEST = 8


def hands_out_hidden_states(architectures: Iterable[str]) -> bool | None:
    """Whether the installed vLLM can tap the layers of a model of the first of *architectures* that it knows.

    None where that cannot be said: no vLLM, none of the architectures in its registry, or a source that reads
    otherwise than expected.
    """
    folder = _models_folder()
    if folder is None:
        return None
    registry = _source(folder / "registry.py")
    for name in architectures:
        entry = re.search(rf'"{re.escape(name)}":\s*\(\s*"(\w+)",\s*"(\w+)"', registry)
        if entry is not None and name in _INHERITED_ONLY:
            return False
        if entry is not None:
            return _has_method(folder, entry[1], entry[2], _DEEPEST)
    return None


def speculative_methods() -> frozenset[str] | None:
    """The methods that the installed vLLM's ``speculative_config`` takes; None where that cannot be said."""
    aliases = {
        node.targets[0].id: node.value
        for node in _speculative_source()
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return frozenset(_literals(aliases.get("SpeculativeMethod"), aliases)) or None


def speculative_keys() -> frozenset[str] | None:
    """The keys that the installed vLLM's ``speculative_config`` takes; None where that cannot be said."""
    classes = [node for node in _speculative_source() if isinstance(node, ast.ClassDef)]
    fields = [
        statement.target.id
        for node in classes
        if node.name == "SpeculativeConfig"
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]
    return frozenset(fields) or None


def unknown_method(method: str, since: str | None = None) -> str | None:
    """Why the installed vLLM does not take a method; None: it does, or there is none to ask.

    Args:
        since: the release of vLLM that it came with; None: not known.
    """
    known = speculative_methods()
    if known is None or method in known:
        return None
    what = f"vLLM {vllm_version()} does not know the method {method!r}"
    hint = did_you_mean(method, known) if since is None else f"vLLM {since} and later do"
    return f"{what}; {hint}" if hint else what


def unknown_keys(keys: Iterable[str], since: str = WRITTEN_FOR) -> str | None:
    """Why the installed vLLM's ``speculative_config`` does not take all of *keys*; None as of :func:`unknown_method`.

    Args:
        since: a release of vLLM that takes them.
    """
    known = speculative_keys()
    missing = [] if known is None else [key for key in keys if key not in known]
    if not missing:
        return None
    return (
        f"vLLM {vllm_version()} does not take {', '.join(missing)} in its speculative_config; "
        f"vLLM {since} and later do"
    )


def unsampled_here(*, gpu: bool | None = None) -> str | None:
    """Why the installed vLLM cannot sample on this machine where tokens are drafted; None: it can, or that cannot be
    said.

    A kernel of Triton's hands the temperature and top-p of each request to its drafted tokens. What vLLM 0.32 has in
    its place on CPUs without Triton (``cpu_triton_utils.py``, ``_expand_kernel_impl``) fills a copy in integers, and
    drops it: the logits are then divided by whatever lay in memory. Greedy answers do not pass through there.

    Args:
        gpu: as of :func:`~draftsmith.serving.vllm_process.missing_v2_runner`, which needs Triton as well.
    """
    folder = _models_folder()
    module = None if folder is None else _module(folder.parent.parent / "utils" / "cpu_triton_utils.py")
    kernel = None if module is None else module.functions.get("_expand_kernel_impl")
    if kernel is None or "_ensure_int64(output)" not in ast.unparse(kernel) or "copy_(" in ast.unparse(kernel):
        return None
    if missing_v2_runner(gpu=gpu) is None:
        return None
    return (
        f"vLLM {vllm_version()} cannot sample on a CPU where tokens are drafted: temperature and top-p do not reach "
        "them. It can be greedy (temperature 0), or run on a GPU"
    )


def _speculative_source() -> list[ast.stmt]:
    """The top level of the module that defines vLLM's ``speculative_config``; nothing where it cannot be read."""
    folder = _models_folder()
    if folder is None:
        return []
    try:
        return ast.parse((folder.parent.parent / "config" / "speculative.py").read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []


def _literals(node: ast.AST | None, aliases: Mapping[str, ast.expr]) -> Iterator[str]:
    """The strings of a ``Literal[…]`` that may name others."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name):
        yield from _literals(aliases.get(node.id), aliases)
    elif isinstance(node, ast.Subscript):
        yield from _literals(node.slice, aliases)
    elif isinstance(node, ast.Tuple):
        for each in node.elts:
            yield from _literals(each, aliases)


def _models_folder() -> Path | None:
    found = importlib.util.find_spec("vllm")
    places = found.submodule_search_locations if found is not None else None
    return next((Path(place) / "model_executor" / "models" for place in places or ()), None)


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


class _Module(NamedTuple):
    """One module of vLLM: classes and functions by name, and name in it → (module of vLLM's models, name there)."""

    classes: Mapping[str, ast.ClassDef]
    functions: Mapping[str, ast.FunctionDef]
    imported: Mapping[str, tuple[str, str]]


@functools.cache
def _module(path: Path) -> _Module | None:
    try:
        nodes = list(_statements(ast.parse(path.read_text(encoding="utf-8"))))
    except (OSError, SyntaxError, ValueError):
        return None
    return _Module(
        classes={node.name: node for node in nodes if isinstance(node, ast.ClassDef)},
        functions={node.name: node for node in nodes if isinstance(node, ast.FunctionDef)},
        imported=_imported(nodes),
    )


def _statements(module: ast.Module) -> Iterator[ast.stmt]:
    """Those of the module's top level, and those below an ``if`` or a ``try`` there."""
    pending: list[ast.AST] = [module]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.stmt):
                yield node
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                pending.append(node)


def _has_method(folder: Path, module: str, name: str, depth: int) -> bool | None:
    """Whether class *name* of *module*, or a class that it derives from, has the method; None: a base is not found."""
    source = _module(folder / f"{module}.py")
    if source is None or depth == 0:
        return None
    if name not in source.classes:
        return None
    found = source.classes[name]
    if any(isinstance(node, ast.FunctionDef) and node.name == _METHOD for node in found.body):
        return True
    answers: list[bool | None] = []
    for base in found.bases:
        own = ast.unparse(base).partition("[")[0]
        if own in source.classes:
            answers.append(_has_method(folder, module, own, depth - 1))
        elif own in source.imported:
            answers.append(_has_method(folder, *source.imported[own], depth - 1))
        # Anything else comes from outside of vLLM's models (torch's Module, Protocol), and has no such method.
    if True in answers:
        return True
    return None if None in answers else False


def _imported(nodes: Iterable[ast.stmt]) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            package, _, module = node.module.rpartition(".")
            if package.endswith("model_executor.models") or (node.level == 1 and not package):
                found.update({alias.asname or alias.name: (module, alias.name) for alias in node.names})
    return found
