"""What a pickle describes, as plain values: nothing here is the object that the pickle would have made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class BadPickle(Exception):
    """The pickle is damaged, or larger than a reader accepts; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function that the pickle names. It is neither imported nor called."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}".lstrip(".")


@dataclass(eq=False, slots=True)
class Instance:
    """An object of any class: what makes it, with which arguments, and all that the pickle then puts into it.

    `states` are the arguments of its `__setstate__`; `items` are set by key; `elements` are appended or added.
    """

    made_by: Named
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    states: list[Any] = field(default_factory=list)
    items: list[tuple[Any, Any]] = field(default_factory=list)
    elements: list[Any] = field(default_factory=list)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that its states set, in the forms that Python itself pickles: a dictionary, or a pair."""
        found: dict[str, Any] = {}
        for state in self.states:
            parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
            if all(part is None or is_attributes(part) for part in parts):
                for part in parts:
                    found |= part or {}
        return found


class Dictionary(dict[Any, Any]):
    """A dictionary of any built-in kind. `states` holds attributes that were set on it, as on a state dict."""

    states: tuple[Any, ...] = ()


@dataclass(eq=False, slots=True)
class Elements:
    """A set: its elements in the order of the pickle, which means nothing."""

    elements: list[Any]


@dataclass(eq=False, slots=True)
class OddKey:
    """A dictionary's key that is no plain value: hashing it could take for ever."""

    key: Any


@dataclass(frozen=True, slots=True)
class Outside:
    """An object that is stored outside the pickle, in a place that its reader does not know."""

    reference: str


@dataclass(frozen=True, slots=True)
class TensorNode:
    """A tensor inside a pickle: its storage, and its layout there (`offset` and `strides` in elements)."""

    storage: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StorageNode:
    """A storage itself: all of its elements."""

    dtype: str
    key: str


@dataclass(eq=False, slots=True)
class DressedTensor:
    """A tensor with more than its elements: attributes, a class of its own, a quantizer, a conjugate bit."""

    tensor: TensorNode
    extras: dict[str, Any]


def is_attributes(value: Any) -> bool:
    """Whether a value can be an object's `__dict__`."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)
