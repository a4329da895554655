"""Reads pickles as descriptions: what they contain, without running anything that they name.

A pickle is a program for a machine with a stack. This machine executes every operation of protocols 0 to 5 (CPython's
`pickletools` documents them), but where Python would call a function it writes down the call. It never hashes what a
pickle made, it needs no recursion, and it stops after a number of operations, so no file can make it slow or large.
"""

from __future__ import annotations

import codecs
import gc
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bigsci_launch.weights.objects.effects import (
    MAX_ARGUMENTS,
    as_named,
    copied,
    extend,
    make_builtin,
    set_items,
    with_state,
)
from bigsci_launch.weights.objects.nodes import BadPickle, Dictionary, Elements, Instance, Named

# A pickle of so many operations describes 35,000 tensors. It takes the machine half a second and 150 MB.
MAX_OPERATIONS = 1_000_000
# One of so many operations may make an object that is larger than a list.
OPERATIONS_PER_OBJECT = 4
# Bytes that calls may copy: one object in the file can be the argument of many calls.
MAX_COPIED = 64 << 20
# Text with characters above U+00FF may need four times as much memory as in the file.
MAX_WIDE_TEXT = 8 << 20
WIDE = re.compile(rb"[\xc4-\xff]")
MAX_LINE, LINE_BYTES = 16 << 20, 4096
MAX_NUMBER_BYTES = 1 << 16
MAX_DIGITS = 4300
MAX_PROTOCOL = 5


def _no_object(named: Named, args: tuple[Any, ...]) -> Any:
    return None


class PickleMachine:
    """Executes one pickle.

    `refer(reference)` returns the object that a persistent reference means. `make(named, args)` returns what a call
    makes, or None if it stays an `Instance`. `start` is where the pickle begins in `data`; `end` is where it ended.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        refer: Callable[[Any], Any],
        make: Callable[[Named, tuple[Any, ...]], Any] = _no_object,
        *,
        start: int = 0,
        max_operations: int = MAX_OPERATIONS,
    ) -> None:
        self.names: set[Named] = set()
        """All that the pickle has named so far, also by getattr."""
        self.built: set[Named] = set()
        """What has made those objects whose attributes the pickle has set so far."""
        self._data = data
        self._at = start
        self._refer = refer
        self._make = make
        self._max_operations = max_operations
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._objects_left = max_operations // OPERATIONS_PER_OBJECT
        self._copied_left = MAX_COPIED
        self._wide_text_left = MAX_WIDE_TEXT

    @property
    def end(self) -> int:
        return self._at

    def run(self) -> Any:
        """Return the object that the pickle describes.

        Raises:
            BadPickle: the pickle is damaged or too large.
        """
        try:
            with _without_collector():
                return self._run()
        except (IndexError, KeyError, struct.error, UnicodeDecodeError, ValueError, TypeError) as error:
            raise BadPickle(f"damaged at byte {self._at:,} of its pickle ({type(error).__name__}: {error})") from error

    def _run(self) -> Any:
        data, operations = self._data, _OPERATIONS
        for _ in range(self._max_operations):
            code = data[self._at]
            self._at += 1
            if code == 0x2E:  # STOP
                return self._stack.pop()
            operation = operations[code]
            if operation is None:
                raise BadPickle(f"unknown operation {code:#04x} at byte {self._at - 1:,} of its pickle")
            operation(self)
        raise BadPickle(f"its pickle has more than {self._max_operations:,} operations")

    # Reading.

    def _take(self, length: int) -> bytes:
        first, last = self._at, self._at + length
        if length < 0 or last > len(self._data):
            raise BadPickle(f"its pickle ends in the middle of an operation, at byte {first:,}")
        self._at = last
        return bytes(self._data[first:last])

    def _line(self) -> str:
        return self._raw_line().decode("utf-8", "surrogateescape")

    def _raw_line(self) -> bytes:
        first = self._at
        for start in range(first, min(first + MAX_LINE, len(self._data)), LINE_BYTES):
            found = bytes(self._data[start : start + LINE_BYTES]).find(b"\n")
            if found >= 0:
                self._at = start + found + 1
                return bytes(self._data[first : self._at - 1])
        raise BadPickle(f"its pickle has a line without an end, at byte {first:,}")

    def _text(self, length: int, errors: str = "surrogatepass") -> None:
        raw = self._take(length)
        if not raw.isascii() and WIDE.search(raw):
            self._wide_text_left -= length
            if self._wide_text_left < 0:
                raise BadPickle(f"its pickle has more than {MAX_WIDE_TEXT:,} bytes of text that is not Latin")
        self._push(raw.decode("utf-8", errors))

    def _long(self, length: int) -> None:
        if length > MAX_NUMBER_BYTES:
            raise BadPickle(f"its pickle has a number of {length:,} bytes")
        self._push(int.from_bytes(self._take(length), "little", signed=True))

    def _byte(self) -> int:
        found = self._data[self._at]
        self._at += 1
        return found

    def _number(self, code: str) -> int:
        (found,) = struct.unpack(code, self._take(struct.calcsize(code)))
        return int(found)

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_object(self, made: Any) -> None:
        self._objects_left -= 1
        if self._objects_left < 0:
            raise BadPickle(f"its pickle makes more than {self._max_operations // OPERATIONS_PER_OBJECT:,} objects")
        self._stack.append(made)

    def _since_mark(self) -> list[Any]:
        found = self._stack
        self._stack = self._marks.pop()
        return found

    # Operations, in the order of pickletools.

    def _protocol(self) -> None:
        if self._number("<B") > MAX_PROTOCOL:
            raise BadPickle("its pickle has a protocol that no Python has")

    def _frame(self) -> None:
        if self._number("<Q") > len(self._data) - self._at:
            raise BadPickle("its pickle is truncated")

    def _int_line(self) -> None:
        text = self._line()
        self._push({"00": False, "01": True}.get(text) if text in ("00", "01") else _decimal(text))

    def _long_line(self) -> None:
        self._push(_decimal(self._line().rstrip("L")))

    def _persistent_line(self) -> None:
        self._push(self._refer(self._line()))

    def _persistent(self) -> None:
        self._push(self._refer(self._stack.pop()))

    def _float_line(self) -> None:
        self._push(float(_short_number(self._line())))

    def _string_line(self) -> None:
        raw = self._raw_line()
        if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
            raise BadPickle("a text of its pickle is not quoted")
        text, _ = codecs.escape_decode(raw[1:-1])
        self._push(text.decode("utf-8", "surrogateescape"))

    def _unicode_line(self) -> None:
        self._push(self._raw_line().decode("raw-unicode-escape"))

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._since_mark()

    def _duplicate(self) -> None:
        self._push(self._stack[-1])

    def _tuple(self) -> None:
        made = tuple(self._since_mark())
        self._push(made)

    def _last_as_tuple(self, length: int) -> None:
        made = tuple(self._stack[-length:])
        if len(made) < length:
            raise BadPickle("its pickle makes a tuple of objects that it does not have")
        del self._stack[-length:]
        self._push(made)

    def _list(self) -> None:
        made = self._since_mark()
        self._push(made)

    def _append(self) -> None:
        value = self._stack.pop()
        extend(self._stack[-1], [value])

    def _appends(self) -> None:
        values = self._since_mark()
        extend(self._stack[-1], values)

    def _dict(self) -> None:
        values = self._since_mark()
        made = Dictionary()
        set_items(made, values)
        self._push_object(made)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        set_items(self._stack[-1], [key, value])

    def _set_items(self) -> None:
        values = self._since_mark()
        set_items(self._stack[-1], values)

    def _frozen_set(self) -> None:
        self._push_object(Elements(self._since_mark()))

    def _named(self, module: str, name: str) -> Named:
        found = as_named(module, name)
        self.names.add(found)
        return found

    def _global_line(self) -> None:
        module = self._line()
        self._push(self._named(module, self._line()))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise BadPickle("its pickle names a class by something that is not text")
        self._push(self._named(module, name))

    def _extension(self, code: str) -> None:
        self._push(self._named("copyreg", f"extension {self._number(code)}"))

    def _reduce(self) -> None:
        args, callee = self._stack.pop(), self._stack.pop()
        self._call(callee, args, {})

    def _new_object(self) -> None:
        args, callee = self._stack.pop(), self._stack.pop()
        self._call(callee, args, {})

    def _new_object_with_keywords(self) -> None:
        kwargs, args, callee = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._call(callee, args, kwargs)

    def _object(self) -> None:
        values = self._since_mark()
        self._call(values[0], tuple(values[1:]), {})

    def _instance(self) -> None:
        module = self._line()
        named = self._named(module, self._line())
        self._call(named, tuple(self._since_mark()), {})

    def _call(self, callee: Any, args: Any, kwargs: Any) -> None:
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise BadPickle("its pickle makes a call without arguments")
        self._copied_left -= copied(args, 0) + copied(kwargs, 0)
        if self._copied_left < 0:
            raise BadPickle("its pickle copies large objects many times")
        if not isinstance(callee, Named):
            self._push_object(Instance(Named("", "the result of a call"), (callee, *args), kwargs))
            return
        is_plain = not kwargs and len(args) <= MAX_ARGUMENTS
        made = make_builtin(callee, args) if is_plain else None
        if isinstance(made, Named):
            self.names.add(made)
        if made is None and is_plain:
            made = self._make(callee, args)
        self._push_object(Instance(callee, args, dict(kwargs)) if made is None else made)

    def _build(self) -> None:
        state, owner = self._stack.pop(), self._stack.pop()
        if isinstance(owner, Instance):
            self.built.add(owner.made_by)
        made = with_state(owner, state)
        if made is owner:
            self._push(made)
        else:
            self._push_object(made)

    def _get(self, index: int) -> None:
        self._push(self._memo[index])

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _out_of_band(self) -> None:
        raise BadPickle("its pickle keeps buffers outside the file")


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keep Python from searching for cycles while a million objects are made, all of which are in use."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _decimal(text: str) -> int:
    return int(_short_number(text))


def _short_number(number: str) -> str:
    if len(number) > MAX_DIGITS:
        raise BadPickle(f"its pickle has a number of more than {MAX_DIGITS:,} digits")
    return number


Operation = Callable[[PickleMachine], Any]
M = PickleMachine


def _constant(value: Any) -> Operation:
    return lambda machine: machine._push(value)


def _operations() -> list[Operation | None]:
    table: dict[int | str, Operation] = {
        "I": M._int_line,
        "J": lambda m: m._push(m._number("<i")),
        "K": lambda m: m._push(m._byte()),
        "M": lambda m: m._push(m._number("<H")),
        "L": M._long_line,
        0x8A: lambda m: m._long(m._byte()),
        0x8B: lambda m: m._long(m._number("<i")),
        "S": M._string_line,
        "T": lambda m: m._text(m._number("<i"), "surrogateescape"),
        "U": lambda m: m._text(m._byte(), "surrogateescape"),
        "B": lambda m: m._push(m._take(m._number("<I"))),
        "C": lambda m: m._push(m._take(m._byte())),
        0x8E: lambda m: m._push(m._take(m._number("<Q"))),
        0x96: lambda m: m._push_object(Instance(Named("builtins", "bytearray"), (m._take(m._number("<Q")),))),
        0x97: M._out_of_band,
        0x98: M._out_of_band,
        "N": _constant(None),
        0x88: _constant(True),
        0x89: _constant(False),
        "V": M._unicode_line,
        "X": lambda m: m._text(m._number("<I")),
        0x8C: lambda m: m._text(m._byte()),
        0x8D: lambda m: m._text(m._number("<Q")),
        "F": M._float_line,
        "G": lambda m: m._push(struct.unpack(">d", m._take(8))[0]),
        "]": lambda m: m._push([]),
        "a": M._append,
        "e": M._appends,
        "l": M._list,
        ")": _constant(()),
        "t": M._tuple,
        0x85: lambda m: m._last_as_tuple(1),
        0x86: lambda m: m._last_as_tuple(2),
        0x87: lambda m: m._last_as_tuple(3),
        "}": lambda m: m._push_object(Dictionary()),
        "d": M._dict,
        "s": M._set_item,
        "u": M._set_items,
        0x8F: lambda m: m._push_object(Elements([])),
        0x90: M._appends,
        0x91: M._frozen_set,
        "0": M._pop,
        "2": M._duplicate,
        "(": M._mark,
        "1": M._since_mark,
        "g": lambda m: m._get(_decimal(m._line())),
        "h": lambda m: m._get(m._byte()),
        "j": lambda m: m._get(m._number("<I")),
        "p": lambda m: m._put(_decimal(m._line())),
        "q": lambda m: m._put(m._byte()),
        "r": lambda m: m._put(m._number("<I")),
        0x94: M._memoize,
        0x82: lambda m: m._extension("<B"),
        0x83: lambda m: m._extension("<H"),
        0x84: lambda m: m._extension("<i"),
        "c": M._global_line,
        0x93: M._stack_global,
        "R": M._reduce,
        "b": M._build,
        "i": M._instance,
        "o": M._object,
        0x81: M._new_object,
        0x92: M._new_object_with_keywords,
        0x80: M._protocol,
        0x95: M._frame,
        "P": M._persistent_line,
        "Q": M._persistent,
    }
    codes = {ord(code) if isinstance(code, str) else code: operation for code, operation in table.items()}
    return [codes.get(code) for code in range(256)]


_OPERATIONS = _operations()
