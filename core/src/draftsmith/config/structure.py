"""From plain values (of YAML) to attrs classes, collecting every problem with the key it concerns.

Written by hand where cattrs would do the same for a correct recipe, for the sake of wrong ones: all problems are
found in one pass, each with its key path and the nearest known key.
"""

from __future__ import annotations

import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from draftsmith.config.schema import NamedConfig
from draftsmith.errors import Problem, did_you_mean

__all__ = ["INVALID", "Structurer", "describe_type", "field_types", "plain"]


class _Invalid:
    def __repr__(self) -> str:
        return "INVALID"


#: Stands for a value that could not be structured; the problem is recorded.
INVALID: Any = _Invalid()


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name → resolved type of an attrs class (annotations may be strings)."""
    return typing.get_type_hints(cls)


def describe_type(kind: Any) -> str:
    """A type as a user reads it: ``int``, ``'a' | 'b'``, ``list[int]``, ``number or null``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return "any value"
    if kind is type(None):
        return "null"
    if origin is Literal:
        return " | ".join(str(each) for each in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(describe_type(each) for each in arguments)
    if origin in (tuple, list, Sequence, frozenset, set):
        inner = ", ".join(describe_type(each) for each in arguments if each is not Ellipsis)
        return f"list[{inner}]"
    if origin in (dict, Mapping):
        return f"mapping[{', '.join(describe_type(each) for each in arguments)}]"
    if kind in _NAMES:
        return _NAMES[kind]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " | ".join(str(each.value) for each in kind)
    if kind is NamedConfig:
        return "name | {name, options}"
    if isinstance(kind, type) and attrs.has(kind):
        return f"{{{', '.join(each.name for each in attrs.fields(kind))}}}"
    return kind.__name__ if isinstance(kind, type) else str(kind)


_NAMES: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true | false",
    Path: "path",
    list: "list",
    tuple: "list",
    dict: "mapping",
}


def plain(value: Any) -> Any:
    """The inverse: attrs classes, tuples, paths and enums as values that YAML and JSON know."""
    if attrs.has(type(value)):
        return {each.name: plain(getattr(value, each.name)) for each in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(each) for each in value)
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Path):
        return str(value)
    return value


class Structurer:
    """Builds attrs classes from mappings. After use, :attr:`problems` and :attr:`broken` say what was wrong.

    Args:
        locate: key path → the text that says where it stands, such as ``recipe.yaml:12: train.epochs``.
        suggest: key path of an unknown key → a better hint than the nearest key beside it, or None.
    """

    def __init__(
        self, locate: Callable[[str], str] = str, suggest: Callable[[str], str | None] = lambda path: None
    ) -> None:
        self._locate = locate
        self._suggest = suggest
        self.problems: list[Problem] = []
        self.broken: set[str] = set()

    def report(self, path: str, what: str, hint: str | None = None) -> Any:
        """Record a problem at a key path; returns :data:`INVALID`."""
        self.problems.append(Problem(what, where=self._locate(path), hint=hint))
        self.broken.add(path)
        return INVALID

    def build(self, cls: type, data: Any, path: str = "", *, missing: Mapping[str, Any] | None = None) -> Any:
        """An instance of the attrs class *cls*, or :data:`INVALID`.

        Args:
            data: mapping of field names to plain values.
            missing: field → what to put in place of a required field that is missing or wrong, so that checking can
                go on after the problem is recorded.
        """
        if data is None:
            data = {}
        if not isinstance(data, Mapping):
            return self.report(path, f"must be a mapping, got {_shown(data)}", self._keys(cls))
        fields = {(each.alias or each.name): each for each in attrs.fields(cls) if each.init}
        for key in data:
            if key not in fields:
                self._unknown_key(str(key), list(fields), path)
        kinds = field_types(cls)
        arguments: dict[str, Any] = {}
        for name, attribute in fields.items():
            here = f"{path}.{name}" if path else name
            value = INVALID
            if name in data:
                value = self._field(attribute, kinds.get(attribute.name, Any), data[name], here)
            elif attribute.default is attrs.NOTHING:
                help_text = attribute.metadata.get("help")
                self.report(here, "is missing", f"{name}: {help_text}" if help_text else None)
            if value is not INVALID:
                arguments[name] = value
            elif missing is not None and name in missing:
                arguments[name] = missing[name]
        return self._construct(cls, arguments, fields, path)

    def _construct(self, cls: type, arguments: dict[str, Any], fields: Mapping[str, Any], path: str) -> Any:
        required = {name for name, each in fields.items() if each.default is attrs.NOTHING}
        if required - arguments.keys():
            return INVALID
        try:
            return cls(**arguments)
        except (ValueError, TypeError) as error:
            # Single fields were validated before; what is left concerns several together.
            return self.report(path or "recipe", _message(error))

    def _field(self, attribute: Any, kind: Any, data: Any, path: str) -> Any:
        value = self.convert(kind, data, path)
        if value is INVALID or attribute.validator is None or attribute.converter is not None:
            return value
        try:
            attribute.validator(None, attribute, value)
        except (ValueError, TypeError) as error:
            return self.report(path, _message(error), _help_of(attribute))
        except Exception:
            # A validator that looks at other fields needs the instance; constructing it runs the validator again.
            return value
        return value

    def convert(self, kind: Any, data: Any, path: str) -> Any:
        """*data* as a value of the type *kind*, or :data:`INVALID`."""
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is typing.Annotated:
            return self.convert(arguments[0], data, path)
        if kind is Any or kind is object:
            return data
        if origin in (Union, types.UnionType):
            return self._union(kind, arguments, data, path)
        if origin is Literal:
            return self._literal(arguments, data, path)
        if kind is NamedConfig:
            if data is None or data == "":
                return self.report(path, "must be a name", "write `NAME` or `{name: NAME, options: {…}}`")
            return self.build(NamedConfig, {"name": data} if isinstance(data, str) else data, path)
        if isinstance(kind, type) and attrs.has(kind):
            return self.build(kind, data, path)
        if origin in (list, Sequence) or kind is list:
            return self._list(arguments[0] if arguments else Any, data, path, kind)
        if origin is tuple or kind is tuple:
            return self._tuple(arguments or (Any, ...), data, path, kind)
        if origin in (set, frozenset):
            values = self._list(arguments[0], data, path, kind)
            return values if values is INVALID else origin(values)
        if origin in (dict, Mapping) or kind is dict:
            return self._mapping(arguments or (Any, Any), data, path, kind)
        return self._scalar(kind, data, path)

    def _scalar(self, kind: Any, data: Any, path: str) -> Any:
        if kind is float and isinstance(data, str):
            # YAML 1.1 reads 1e-4 (without a point) as text.
            try:
                return float(data)
            except ValueError:
                return self._wrong(kind, data, path)
        if kind is float and isinstance(data, int) and not isinstance(data, bool):
            return float(data)
        if kind is int and isinstance(data, float) and data.is_integer():
            return int(data)
        if kind is Path and isinstance(data, str):
            return Path(data)
        if kind is type(None):
            return None if data is None else self._wrong(kind, data, path)
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return self._literal(tuple(each.value for each in kind), data, path, make=kind)
        if not isinstance(kind, type):
            return data
        if isinstance(data, str) and "\0" in data:
            return self.report(path, f"holds a character that no name or path may have: {_shown(data)}")
        if isinstance(data, bool) and kind is not bool:
            return self._wrong(kind, data, path)
        return data if isinstance(data, kind) else self._wrong(kind, data, path)

    def _wrong(self, kind: Any, data: Any, path: str) -> Any:
        hint = "quote it if text is meant" if kind is str and data is not None else None
        return self.report(path, f"must be {describe_type(kind)}, got {_shown(data)}", hint)

    def _literal(self, choices: Sequence[Any], data: Any, path: str, make: Callable[[Any], Any] = lambda v: v) -> Any:
        for choice in choices:
            if type(choice) is type(data) and choice == data:
                return make(choice)
        names = [str(choice) for choice in choices]
        near = did_you_mean(str(data), names)
        one_of = f"one of: {', '.join(names)}"
        return self.report(path, f"cannot be {_shown(data)}", f"{near} ({one_of})" if near else one_of)

    def _union(self, kind: Any, members: Sequence[Any], data: Any, path: str) -> Any:
        if data is None and type(None) in members:
            return None
        others = [member for member in members if member is not type(None)]
        if len(others) == 1:
            return self.convert(others[0], data, path)
        keyed = [each for each in others if attrs.has(each) or (get_origin(each) or each) in (dict, Mapping)]
        if isinstance(data, Mapping) and len(keyed) == 1:
            return self.convert(keyed[0], data, path)  # nothing else is meant, and it says what is wrong with a key
        for member in others:
            attempt = Structurer()
            value = attempt.convert(member, data, path)
            if not attempt.problems:
                return value
        return self.report(path, f"must be {describe_type(kind)}, got {_shown(data)}")

    def _list(self, kind: Any, data: Any, path: str, whole: Any) -> Any:
        if not isinstance(data, list | tuple):
            return self.report(
                path, f"must be {describe_type(whole)}, got {_shown(data)}", "write [a, b] or one `- a` a line"
            )
        values = [self.convert(kind, each, f"{path}.{index}") for index, each in enumerate(data)]
        return INVALID if any(value is INVALID for value in values) else values

    def _tuple(self, kinds: Sequence[Any], data: Any, path: str, whole: Any) -> Any:
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            values = self._list(kinds[0], data, path, whole)
            return values if values is INVALID else tuple(values)
        if not isinstance(data, list | tuple) or len(data) != len(kinds):
            return self.report(path, f"must be a list of {len(kinds)} values, got {_shown(data)}")
        values = [
            self.convert(kind, each, f"{path}.{index}")
            for index, (kind, each) in enumerate(zip(kinds, data, strict=True))
        ]
        return INVALID if any(value is INVALID for value in values) else tuple(values)

    def _mapping(self, kinds: Sequence[Any], data: Any, path: str, whole: Any) -> Any:
        if not isinstance(data, Mapping):
            return self.report(path, f"must be a mapping, got {_shown(data)}", "write {key: value}")
        values = {key: self.convert(kinds[1], each, f"{path}.{key}") for key, each in data.items()}
        wrong = [key for key in data if kinds[0] is str and not isinstance(key, str)]
        for key in wrong:
            self.report(f"{path}.{key}", f"the key must be text, got {_shown(key)}", "quote it")
        return INVALID if wrong or any(value is INVALID for value in values.values()) else values

    def _unknown_key(self, key: str, known: Sequence[str], path: str) -> None:
        here = f"{path}.{key}" if path else key
        hint = did_you_mean(key, known) or self._suggest(here)
        self.report(here, f"unknown key {key!r}", hint or f"known keys: {', '.join(sorted(known)) or 'none'}")

    @staticmethod
    def _keys(cls: type) -> str:
        return f"its keys: {', '.join(each.name for each in attrs.fields(cls))}"


def _help_of(attribute: Any) -> str | None:
    text = attribute.metadata.get("help")
    return f"{attribute.name}: {text}" if text else None


def _message(error: Exception) -> str:
    """The text of an attrs validator's error (its arguments also hold the attribute and the value)."""
    return str(error.args[0]) if error.args else str(error)


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else f"{text[:57]}…"
