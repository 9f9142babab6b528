"""Frozen dataclasses to JSON text and back, driven by their type hints.

A field that the text lacks takes its default, and one that the class lacks is skipped, so a
database written by the previous version can be read.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_Reader = Callable[[Any], Any]


def dumps(value: object) -> str:
    """JSON text of a dataclass, or of a tuple or mapping of such."""
    return json.dumps(value, default=_plain, separators=(",", ":"))


def loads(hint: type[_T], text: str) -> _T:
    """The value of the hinted type that `dumps` wrote."""
    shape: Any = hint
    value: _T = _reader(shape)(json.loads(text))
    return value


def loads_optional(hint: type[_T], text: str | None) -> _T | None:
    """The same where the column may be NULL."""
    return None if text is None else loads(hint, text)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in _field_names(type(value))}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form here")


@cache
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


@cache
def _reader(hint: Any) -> _Reader:
    """How to make a value of the hinted type out of parsed JSON."""
    origin = get_origin(hint)
    if origin in {Union, types.UnionType}:
        (inner,) = (_reader(arg) for arg in get_args(hint) if arg is not type(None))
        return lambda data: None if data is None else inner(data)
    if origin is tuple:
        item = _reader(get_args(hint)[0])
        return lambda data: tuple(item(value) for value in data)
    if origin is Mapping:
        item = _reader(get_args(hint)[1])
        return lambda data: {key: item(value) for key, value in data.items()}
    if is_dataclass(hint):
        return _dataclass_reader(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint
    return lambda data: data


def _dataclass_reader(cls: Any) -> _Reader:
    hints = get_type_hints(cls)
    readers = {name: _reader(hints[name]) for name in _field_names(cls)}

    def read(data: Any) -> Any:
        return cls(
            **{name: readers[name](value) for name, value in data.items() if name in readers}
        )

    return read
