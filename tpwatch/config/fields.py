"""Sections of knobs as frozen dataclasses: conversion, limits, unknown keys, JSON Schema.

Knows types and field docstrings, not a single knob. A field's type says what is legal (`Literal`
choices, `Annotated[int, AtLeast(1)]`), the docstring under it says what it is for.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from tpwatch.errors import ConfigError, brief

S = TypeVar("S", bound="Section")

LARGEST = 10**18
"""Whole numbers below it have room everywhere: in a tensor, in JSON, in a message."""

LONGEST_NAME = 100
"""Characters of a misspelt name that are compared with the names there are."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Lower limit of a number; `exclusive` leaves the limit itself out."""

    limit: int
    exclusive: bool = False

    def __str__(self) -> str:
        return f"{'above' if self.exclusive else 'at least'} {self.limit}"

    def holds(self, value: float) -> bool:
        """True if `value` respects the limit."""
        return value > self.limit if self.exclusive else value >= self.limit


class Section:
    """A group of knobs: values are converted and checked when it is built, however it is built."""

    __slots__ = ()
    PREFIX: ClassVar[str] = ""
    """Dotted path of the section within the configuration, for messages."""

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            value = convert(self.PREFIX + name, hint, getattr(self, name))
            object.__setattr__(self, name, value)


def hints(cls: type[Any]) -> dict[str, Any]:
    """Resolved type of each field, limits included."""
    resolved = get_type_hints(cls, include_extras=True)
    return {f.name: resolved[f.name] for f in fields(cls)}


def is_section(hint: object) -> TypeGuard[type[Section]]:
    """True if a field of this type is a section, not a knob."""
    return isinstance(hint, type) and issubclass(hint, Section)


def knobs(cls: type[Section]) -> dict[str, Any]:
    """Dotted name to type of every knob of a section and its sub-sections."""
    found: dict[str, Any] = {}
    for name, hint in hints(cls).items():
        found |= knobs(hint) if is_section(hint) else {cls.PREFIX + name: hint}
    return found


def build(cls: type[S], values: Mapping[str, Any]) -> S:
    """A section from a mapping; a key that is no knob is an error with the nearest one that is."""
    valid = [cls.PREFIX + name for name in hints(cls)]
    for key, value in values.items():
        if (name := f"{cls.PREFIX}{as_text(key)}") not in valid:
            raise unknown(name, value, "unknown key", valid)
    return cls(**values)


def unknown(name: str, value: object, rule: str, valid: Sequence[str]) -> ConfigError:
    """The error for a name that does not exist."""
    return ConfigError(name, value, rule, nearest(name, valid))


def nearest(name: str, valid: Sequence[str]) -> str:
    """What to do about a name that does not exist: the nearest one that does, or all of them."""
    near = difflib.get_close_matches(name[:LONGEST_NAME], valid, n=1)
    return f"Did you mean {near[0]}?" if near else f"Valid: {', '.join(valid)}."


def as_text(value: object) -> str:
    """Text as it is, anything else that YAML may hold in short."""
    return value if isinstance(value, str) else brief(value)


# --------------------------------------------------------------------------------- conversion


def convert(knob: str, hint: object, value: object) -> Any:  # noqa: ANN401 - of type `hint`
    """`value` as the type `hint` asks for.

    Raises:
        ConfigError: it is of another type, beyond its limit, or none of the choices.
    """
    origin = get_origin(hint)
    if origin is not None:
        return _COMPOSED[origin](knob, get_args(hint), value)
    if is_section(hint):
        return _section(knob, hint, value)
    return _SCALARS[hint](knob, value)


def _optional(knob: str, args: tuple[Any, ...], value: object) -> object:
    inner = next(a for a in args if a is not type(None))
    return None if value is None else convert(knob, inner, value)


def _limited(knob: str, args: tuple[Any, ...], value: object) -> object:
    base, limit = args
    number = convert(knob, base, value)
    if not limit.holds(number):
        raise ConfigError(knob, value, f"must be {limit}", "Choose another number.")
    return number


def _choice(knob: str, choices: tuple[Any, ...], value: object) -> object:
    # YAML 1.1 reads a bare `off` as a boolean, and True == 1: only text is a choice.
    if isinstance(value, str) and value in choices:
        return value
    rule = f"must be one of {', '.join(choices)}"
    raise ConfigError(knob, value, rule, nearest(as_text(value), choices))


def _texts(knob: str, _args: tuple[Any, ...], value: object) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ConfigError(knob, value, "must be a list of text", "Write it as a list: [a, b].")


def _rules(knob: str, args: tuple[Any, ...], value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        rule = "must map patterns to rules"
        raise ConfigError(knob, value, rule, "Write pairs: {PATTERN: RULE}.")
    return {as_text(k): convert(f"{knob}[{brief(k)}]", args[1], item) for k, item in value.items()}


def _section(knob: str, cls: type[S], value: object) -> S:
    if isinstance(value, cls):
        return value
    if value is None:  # a YAML section of which every line is commented out
        return cls()
    if isinstance(value, Mapping):
        return build(cls, value)
    raise ConfigError(knob, value, "must be a section of keys", "Indent its keys below it.")


def _bool(knob: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigError(knob, value, "must be true or false", "Write one of the two.")


def _int(knob: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST:
        return value
    raise ConfigError(knob, value, "must be a whole number of at most 18 digits", "Write digits without quotes.")


def _float(knob: str, value: object) -> float:
    number = math.nan
    # Text is accepted because YAML 1.1 reads 1e-3 as text: it wants 1.0e-3.
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if math.isfinite(number):
        return number
    raise ConfigError(knob, value, "must be a finite number", "Write it as 0.001 or 1e-3.")


def _str(knob: str, value: object) -> str:
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    raise ConfigError(knob, value, "must be text", "Put it in quotes.")


_SCALARS: Mapping[object, Callable[[str, object], object]] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
}
_COMPOSED: Mapping[object, Callable[[str, tuple[Any, ...], object], object]] = {
    Union: _optional,
    UnionType: _optional,
    Annotated: _limited,
    Literal: _choice,
    tuple: _texts,
    Mapping: _rules,
}


# ------------------------------------------------------------------------------------- schema


def describe(cls: type[Any]) -> dict[str, Any]:
    """JSON Schema of a section: types, limits, choices, defaults; docstrings are descriptions."""
    docs, types = field_docs(cls), hints(cls)
    properties = {}
    for item in fields(cls):
        entry = _type_schema(types[item.name]) | {"description": docs[item.name]}
        if item.default is not MISSING:
            is_list = isinstance(item.default, tuple)
            entry["default"] = list(item.default) if is_list else item.default
        properties[item.name] = entry
    return {"type": "object", "additionalProperties": False, "properties": properties}


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The docstring under each field, on one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    found: dict[str, str] = {}
    for node, below in pairwise(getattr(definition, "body", [])):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
            found[ast.unparse(node.target)] = " ".join(ast.literal_eval(below.value).split())
    return found


def _type_schema(hint: object) -> dict[str, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if is_section(hint):
        return describe(hint)
    if origin in (Union, UnionType):
        return {"anyOf": [_type_schema(a) for a in args]}
    if origin is Annotated:
        key = "exclusiveMinimum" if args[1].exclusive else "minimum"
        return {**_type_schema(args[0]), key: args[1].limit}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _type_schema(args[1])}
    return dict(_JSON_TYPES[origin or hint])


_JSON_TYPES: Mapping[object, Mapping[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    tuple: {"type": "array", "items": {"type": "string"}},
    type(None): {"type": "null"},
}
