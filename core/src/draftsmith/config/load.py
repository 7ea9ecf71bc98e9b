"""Reading a recipe: file, then ``--set`` on top, defaults below; where each value came from is kept.

No torch, and no rich: a wrong recipe must answer at once.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import attrs
import yaml
from attrs import field, frozen

from draftsmith.config.schema import NamedConfig, Recipe
from draftsmith.config.structure import INVALID, Structurer, field_types, plain
from draftsmith.errors import ConfigError, Problem

__all__ = ["DEFAULT", "LoadedRecipe", "load_recipe"]

#: Provenance of a value that neither the file nor a flag gives.
DEFAULT = "default"

#: libyaml's loader where PyYAML was built with it: several times faster.
_Loader: Any = type("_Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
# A date, such as a chat template's, stays as it is written: no JSON file could hold it otherwise.
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)


@frozen(kw_only=True)
class LoadedRecipe:
    """A recipe, and where its values came from.

    Attributes:
        provenance: key path of each value (``train.epochs``) → ``recipe.yaml:12``, ``--set``, or ``default``.
        folder: folder of the file; data paths are relative to it.
        path: the file.
        problems: what is wrong with it (empty unless it was loaded with ``strict=False``).
        broken: key paths of those problems; the values there are defaults or placeholders.
    """

    recipe: Recipe
    provenance: Mapping[str, str]
    folder: Path
    path: Path
    problems: tuple[Problem, ...] = ()
    broken: frozenset[str] = field(factory=frozenset)

    def locate(self, key: str) -> str:
        """Where a key stands, for messages: ``recipe.yaml:12: train.epochs``."""
        return _locate(key, self.provenance, self.path)


def load_recipe(path: str | Path, overrides: Iterable[str] = (), *, strict: bool = True) -> LoadedRecipe:
    """Read a YAML recipe and apply ``key.path=value`` overrides (values are YAML).

    Args:
        strict: False keeps the problems in the result, with defaults in place of the values concerned, so that
            :func:`draftsmith.config.resolve.resolve` can report them together with its own.

    Raises:
        ConfigError: the file is missing or not YAML; or, when strict, anything is wrong with a key or value. Holds
            all problems, not only the first.
    """
    path = Path(path)
    data, lines, problems = _read(path)
    provenance = {key: f"{path.name}:{line}" for key, line in lines.items()}
    for override in overrides:
        problems += _apply(override, data, provenance)
    structurer = Structurer(lambda key: _locate(key, provenance, path), _elsewhere)
    missing = {"verifier": "", "algorithm": NamedConfig(name=""), "output": ""}
    recipe = structurer.build(Recipe, data, missing=missing)
    problems += structurer.problems
    if recipe is INVALID:
        raise ConfigError(problems)
    if strict and problems:
        raise ConfigError(problems)
    return LoadedRecipe(
        recipe=recipe,
        provenance={key: _origin(key, provenance) for key, _ in leaves(plain(recipe))},
        folder=path.absolute().parent,
        path=path,
        problems=tuple(problems),
        broken=frozenset(structurer.broken),
    )


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key path, value) of everything in a nested mapping; an empty mapping counts as a value."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from leaves(each, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, value


def _origin(key: str, provenance: Mapping[str, str]) -> str:
    """Provenance of a key: its own, or that of the value around it (``algorithm`` for ``algorithm.name``)."""
    while key:
        if key in provenance:
            # A mapping in the file does not give the keys that it leaves out.
            return provenance[key]
        key, _, last = key.rpartition(".")
        if last != "name":
            break
    return DEFAULT


def _locate(key: str, provenance: Mapping[str, str], path: Path) -> str:
    inner = next((each for each in provenance if each.startswith(f"{key}.")), None)
    outer = key
    while outer and outer not in provenance:
        outer = outer.rpartition(".")[0]
    place = provenance.get(key) or provenance.get(inner or outer) or DEFAULT
    return f"{path.name if place == DEFAULT else place}: {key}"


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int], list[Problem]]:
    """The file's values, the line of each key path, and problems that are no syntax errors."""
    where = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError([Problem("there is no such recipe", where=where, hint=_near_files(path))]) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError([Problem(f"the recipe cannot be read: {reason}", where=where)]) from error
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _refuse_loops(node, where)
        data = {} if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        what = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError([Problem(f"the recipe is not valid YAML: {what}", where=place)]) from error
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        hint = "a recipe is a mapping: verifier, algorithm, output, …"
        raise ConfigError([Problem("the recipe must be a mapping of keys to values", where=where, hint=hint)])
    lines: dict[str, int] = {}
    problems: list[Problem] = []
    if node is not None:
        _walk(node, "", path, lines, problems)
    return data, lines, problems


def _refuse_loops(node: Any, where: str, inside: tuple[int, ...] = ()) -> None:
    """An alias may name what it stands in; no recipe needs that, and nothing that reads one would come to an end."""
    if not isinstance(node, yaml.CollectionNode):
        return
    if id(node) in inside:
        place = f"{where}:{node.start_mark.line + 1}"
        raise ConfigError([Problem("a value contains itself", where=place, hint="take the alias (*name) out of it")])
    for each in node.value:
        for part in each if isinstance(each, tuple) else (each,):
            _refuse_loops(part, where, (*inside, id(node)))


def _walk(node: Any, prefix: str, path: Path, lines: dict[str, int], problems: list[Problem]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
        line = key_node.start_mark.line + 1
        if key in lines:
            # YAML itself lets the last one win, and the first vanish.
            problems.append(
                Problem(
                    "this key is given twice", where=f"{path.name}:{line}: {key}", hint=f"first in line {lines[key]}"
                )
            )
        lines[key] = line
        _walk(value_node, key, path, lines, problems)


def _near_files(path: Path) -> str | None:
    try:
        names = [each.name for each in path.parent.iterdir() if each.suffix in (".yaml", ".yml")]
    except OSError:
        return f"there is no folder {path.parent} either"
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.4) or sorted(names)[:3]
    return f"in that folder: {', '.join(near)}" if near else None


def _apply(override: str, data: dict[str, Any], provenance: dict[str, str]) -> list[Problem]:
    """Put one ``key.path=value`` into *data*."""
    key, equals, text = override.partition("=")
    where = f"--set {override}"
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return [Problem("cannot be read", where=where, hint="write --set train.epochs=5")]
    try:
        value = _value(text, where)
    except yaml.YAMLError as error:
        return [Problem(f"the value is not valid YAML: {getattr(error, 'problem', error)}", where=where)]
    except ConfigError as error:
        return list(error.problems)
    inner = data
    for depth, part in enumerate(parts[:-1]):
        outer = inner.get(part)
        if outer is None:
            outer = {}
        elif isinstance(outer, str) and depth == 0 and part in _named_keys():
            outer = {"name": outer}  # was in its short form
        elif not isinstance(outer, dict):
            path = ".".join(parts[: depth + 1])
            if isinstance(outer, list):
                what, hint = "is a list, and is set as a whole", f"write --set '{path}=[a, b]'"
            else:
                what, hint = "is a single value, and has no keys", f"write --set {path}=VALUE"
            return [Problem(f"{path} {what}", where=where, hint=hint)]
        inner[part] = outer
        inner = outer
    key = ".".join(parts)
    inner[parts[-1]] = value
    for known in [each for each in provenance if each.startswith(f"{key}.")]:
        del provenance[known]
    for path, _ in [(key, value), *leaves(value, key)]:
        provenance[path] = "--set"
    return []


def _value(text: str, where: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _refuse_loops(node, where)
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


@functools.cache
def _named_keys() -> frozenset[str]:
    """Keys whose value is a name with options."""
    kinds = field_types(Recipe)
    return frozenset(key for key, kind in kinds.items() if kind is NamedConfig or NamedConfig in get_args(kind))


def _known_keys(cls: type = Recipe, prefix: str = "") -> Iterator[str]:
    for name, kind in field_types(cls).items():
        path = f"{prefix}.{name}" if prefix else name
        yield path
        if isinstance(kind, type) and attrs.has(kind):
            yield from _known_keys(kind, path)


def _elsewhere(path: str) -> str | None:
    """For a key that is right and stands in the wrong place: where it belongs."""
    if path.startswith(("algorithm.options", "loss.options", "transport.options")):
        return None
    last = path.rpartition(".")[2]
    known: Sequence[str] = list(_known_keys())
    places = [each for each in known if each.rpartition(".")[2] == last and each != path]
    return f"did you mean {' or '.join(repr(each) for each in places)}?" if places else None
