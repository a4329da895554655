"""What `bsl.pyz` has in the place of pydantic, which is compiled: models of content that a test of `bsl` has checked.

It makes objects of JSON by the annotations of their classes. Of what may be wrong in a file it finds unknown and
missing keys only; files of a user's own are checked by an installed `bsl`.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Callable
from typing import Any

MISSING: Any = object()


class ValidationError(ValueError):
    """Content that does not fit its class."""

    def errors(self, **_options: Any) -> list[dict[str, Any]]:
        return [{"type": "value_error", "loc": (), "msg": str(self), "input": None, "ctx": {}}]


class _Field:
    def __init__(self, default: Any = MISSING, **_checks: Any) -> None:
        self.default = default


class BeforeValidator:
    """Makes the value before its type is looked at."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make


def Field(default: Any = MISSING, **checks: Any) -> Any:
    return _Field(default, **checks)


def ConfigDict(**settings: Any) -> dict[str, Any]:
    return settings


def AfterValidator(_check: Callable[[Any], Any]) -> None:
    return None


def WrapValidator(_check: Callable[[Any, Any, Any], Any]) -> None:
    return None


def WithJsonSchema(_schema: Any) -> None:
    return None


def model_validator(*_fields: str, **_when: Any) -> Callable[[Any], Any]:
    return lambda check: check


field_validator = model_serializer = model_validator
ValidationInfo = SerializerFunctionWrapHandler = Any
PositiveInt = NonNegativeInt = int
PositiveFloat = NonNegativeFloat = float


class BaseModel:
    """An object whose attributes are the keys of its class."""

    def __init__(self, **values: Any) -> None:
        kinds = _kinds_of(type(self))
        if unknown := sorted(values.keys() - kinds.keys()):
            raise ValidationError(f"unknown key {unknown[0]}")
        self.model_fields_set = set(values)
        for name, kind in kinds.items():
            default = getattr(type(self), name, MISSING)
            value = values.get(name, default.default if isinstance(default, _Field) else default)
            if value is MISSING:
                raise ValidationError(f"the key {name} is required")
            self.__dict__[name] = _made(kind, value) if name in values else value

    @classmethod
    def model_validate_json(cls, text: str) -> Any:
        return cls(**json.loads(text))


def _kinds_of(model: type) -> dict[str, Any]:
    found = typing.get_type_hints(model, include_extras=True)
    return {name: kind for name, kind in found.items() if name != "model_config"}


def _made(kind: Any, value: Any) -> Any:
    """Return the value as its annotation wants it."""
    makers = [each.make for each in getattr(kind, "__metadata__", ()) if isinstance(each, BeforeValidator)]
    if makers:
        return makers[0](value)
    kind = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Union or type(kind).__name__ == "UnionType":
        return None if value is None else _made(next(each for each in of if each is not type(None)), value)
    if origin is tuple:
        return tuple(_made(of[0], each) for each in value)
    if origin is dict:
        return {_made(of[0], name): _made(of[1], each) for name, each in value.items()}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind(**value)
    return kind(value) if hasattr(kind, "__members__") else value
