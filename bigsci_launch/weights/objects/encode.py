"""One form in bytes for each value, so that two values are equal exactly if their forms are."""

from __future__ import annotations

import struct
from typing import Any

from bigsci_launch.weights.objects.arrays import PickledArray, array_of
from bigsci_launch.weights.objects.nodes import Dictionary, Elements, Instance, Named, OddKey

# A value that no dictionary or list of a checkpoint comes near to.
MAX_DEPTH = 200
MAX_PARTS = 300_000


class NotPlain(Exception):
    """The value contains something that has no form: a tensor, an object outside the pickle, or itself."""


def encode(value: Any, max_parts: int = MAX_PARTS) -> bytes:
    """Return the form of a value. Kinds of sequence and of dictionary are alike; kinds of number are not.

    Raises:
        NotPlain: the value contains a tensor, refers to itself, or is nested too deep.
    """
    return _Encoder(max_parts).form(value, 0)


class _Encoder:
    def __init__(self, max_parts: int) -> None:
        self._parts_left = max_parts

    def form(self, value: Any, depth: int) -> bytes:
        self._parts_left -= 1
        if depth > MAX_DEPTH or self._parts_left < 0:
            raise NotPlain("it is nested too deep, or too large")
        plain = _plain_form(value)
        if plain is not None:
            return plain
        if isinstance(value, (list, tuple)):
            return _joined(b"[", [self.form(item, depth + 1) for item in value])
        if isinstance(value, Elements):
            return _joined(b"{", sorted(self.form(item, depth + 1) for item in value.elements))
        if isinstance(value, dict):
            form = self._pairs(list(value.items()), depth)
            states = value.states if isinstance(value, Dictionary) else ()
            return _joined(b"@", [form, self.form(states, depth + 1)]) if states else form
        if isinstance(value, OddKey):
            return self.form(value.key, depth + 1)
        if isinstance(value, Instance):
            array = array_of(value)
            if array is not None:
                return self._array(array, depth)
            parts = [value.made_by, value.args, value.kwargs, value.states, value.elements]
            forms = [self.form(part, depth + 1) for part in parts]
            return _joined(b"o", [*forms, self._pairs(value.items, depth)])
        raise NotPlain(f"it contains a {type(value).__name__}")

    def _array(self, array: PickledArray, depth: int) -> bytes:
        forms = [self.form(part, depth + 1) for part in (array.made_by, array.dtype, array.shape)]
        return _joined(b"a", [*forms, array.data])

    def _pairs(self, pairs: list[tuple[Any, Any]], depth: int) -> bytes:
        forms = [_joined(b":", [self.form(key, depth + 1), self.form(value, depth + 1)]) for key, value in pairs]
        return _joined(b"d", sorted(forms))


def _joined(tag: bytes, forms: list[bytes]) -> bytes:
    return b"".join([tag, struct.pack("<Q", len(forms)), *(struct.pack("<Q", len(form)) + form for form in forms)])


def _plain_form(value: Any) -> bytes | None:
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"1" if value else b"0"
    if isinstance(value, int):
        return b"i" + value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    if isinstance(value, (bytes, bytearray)):
        return b"b" + value
    if isinstance(value, Named):
        return b"c" + str(value).encode("utf-8", "surrogatepass")
    return None
