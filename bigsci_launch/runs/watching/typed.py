"""Records of JSON as dataclasses: a value of another type than its field is refused, and so is an absurd number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

LARGEST_FLOAT = 1e11
"""No time of a record is later, and no duration longer."""
LARGEST_INT = 1 << 62

_Kind = TypeVar("_Kind")


def typed(kind: type[_Kind], record: Any) -> _Kind:
    """Return a record as a `kind`; names that it does not know are left out.

    Raises:
        ValueError: it is not a mapping, a field is missing, or a value is not of the type of its field.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"not a record: {str(record)[:40]!r}")
    hints = _hints(kind)  # type: ignore[arg-type]
    names = [each.name for each in fields(kind) if each.name in record]  # type: ignore[arg-type]
    try:
        return kind(**{name: _value(hints[name], record[name]) for name in names})
    except TypeError as error:
        raise ValueError(f"not a record: {error}") from error


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return None if value is None and NoneType in arguments else _value(arguments[0], value)
    if origin is tuple:
        return tuple(_value(arguments[0], each) for each in _require(isinstance(value, (list, tuple)), value))
    if origin is Literal:
        return _require(value in arguments, value)
    if isinstance(hint, type) and is_dataclass(hint):
        return typed(hint, value)
    if issubclass(hint, Enum):
        return hint(value)
    if hint is float:
        return float(_require(_is_number(value, (int, float)) and abs(value) <= LARGEST_FLOAT, value))
    if hint is int:
        return _require(_is_number(value, int) and abs(value) <= LARGEST_INT, value)
    return _require(isinstance(value, hint), value)


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _require(is_so: bool, value: Any) -> Any:
    if not is_so:
        raise ValueError(f"not of its type: {str(value)[:40]!r}")
    return value
