"""Reads pickles as descriptions: what they contain, without running anything that they name.

A pickle is a program for a machine with a stack. This machine executes every operation of protocols 0 to 5 (CPython's
`pickletools` documents them), but where Python would call a function it writes down the call. It never hashes what a
pickle made, it needs no recursion, and it stops after a number of operations, so no file can make it slow or large.
"""

from __future__ import annotations

import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from typing import Any

from bigsci_launch.weights.objects.nodes import (
    Dictionary,
    DressedTensor,
    Elements,
    Instance,
    Named,
    OddKey,
    StorageNode,
    TensorNode,
)

# A pickle of so many operations describes 40,000 tensors. It takes the machine half a second and 200 MB.
MAX_OPERATIONS = 1_000_000
MAX_KEY_PARTS = 64
# Larger numbers can be chosen so that all have one hash.
MAX_KEY = 1 << 60
MAX_DIGITS = 4300
MAX_PROTOCOL = 5


class BadPickle(Exception):
    """The pickle is damaged, or larger than a reader accepts; the message says what is wrong."""


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
        self._data = data
        self._at = start
        self._refer = refer
        self._make = make
        self._max_operations = max_operations
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    @property
    def end(self) -> int:
        return self._at

    def run(self) -> Any:
        """Return the object that the pickle describes.

        Raises:
            BadPickle: the pickle is damaged or too large.
        """
        try:
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
        first = self._at
        last = first
        while self._data[last] != 0x0A:
            last += 1
        self._at = last + 1
        return bytes(self._data[first:last]).decode("utf-8", "surrogateescape")

    def _number(self, code: str) -> int:
        (found,) = struct.unpack(code, self._take(struct.calcsize(code)))
        return int(found)

    def _push(self, value: Any) -> None:
        self._stack.append(value)

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
        self._push(float(self._line()))

    def _string_line(self) -> None:
        text = self._line()
        if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
            raise BadPickle("a text of its pickle is not quoted")
        self._push(text[1:-1].encode("latin-1", "replace").decode("unicode_escape"))

    def _unicode_line(self) -> None:
        first = self._at
        self._line()
        self._push(bytes(self._data[first : self._at - 1]).decode("raw-unicode-escape"))

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
        _extend(self._stack[-1], [value])

    def _appends(self) -> None:
        values = self._since_mark()
        _extend(self._stack[-1], values)

    def _dict(self) -> None:
        values = self._since_mark()
        made = Dictionary()
        _set_items(made, values)
        self._push(made)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        _set_items(self._stack[-1], [key, value])

    def _set_items(self) -> None:
        values = self._since_mark()
        _set_items(self._stack[-1], values)

    def _frozen_set(self) -> None:
        self._push(Elements(self._since_mark()))

    def _global_line(self) -> None:
        module = self._line()
        self._push(_named(module, self._line()))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise BadPickle("its pickle names a class by something that is not text")
        self._push(_named(module, name))

    def _extension(self, code: str) -> None:
        self._push(Named("copyreg", f"extension {self._number(code)}"))

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
        named = _named(module, self._line())
        self._call(named, tuple(self._since_mark()), {})

    def _call(self, callee: Any, args: Any, kwargs: Any) -> None:
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise BadPickle("its pickle makes a call without arguments")
        if not isinstance(callee, Named):
            self._push(Instance(Named("", "the result of a call"), (callee, *args), kwargs))
            return
        made = None if kwargs else _make_builtin(callee, args)
        if made is None and not kwargs:
            made = self._make(callee, args)
        self._push(Instance(callee, args, dict(kwargs)) if made is None else made)

    def _build(self) -> None:
        state = self._stack.pop()
        self._stack[-1] = _with_state(self._stack[-1], state)

    def _get(self, index: int) -> None:
        self._push(self._memo[index])

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _out_of_band(self) -> None:
        raise BadPickle("its pickle keeps buffers outside the file")


def _named(module: str, name: str) -> Named:
    """Return what a pickle names, by the name that newer versions of Python and numpy give it.

    Protocols 0 to 2, torch's own among them, use the names of Python 2.
    """
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    head, _, rest = module.partition(".")
    if head == "numpy" and (rest == "core" or rest.startswith("core.")):
        module = f"numpy._core{rest.removeprefix('core')}"
    if module == "pathlib._local":
        module = "pathlib"
    return Named(module, name)


def _decimal(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise BadPickle("its pickle has a number of more than 4,300 digits")
    return int(text)


def _extend(owner: Any, values: list[Any]) -> None:
    if isinstance(owner, list):
        owner.extend(values)
    elif isinstance(owner, (Instance, Elements)):
        owner.elements.extend(values)
    else:
        raise BadPickle(f"its pickle appends to a {type(owner).__name__}")


def _set_items(owner: Any, values: list[Any]) -> None:
    pairs = zip(values[::2], values[1::2], strict=True)
    if isinstance(owner, dict):
        for key, value in pairs:
            owner[key if is_plain_key(key) else OddKey(key)] = value
    elif isinstance(owner, Instance):
        owner.items.extend(pairs)
    else:
        raise BadPickle(f"its pickle sets items of a {type(owner).__name__}")


def is_plain_key(key: Any) -> bool:
    """Whether a key is a plain value or a small tuple of them, so that hashing it takes no time."""
    if type(key) is int:
        return abs(key) < MAX_KEY
    if type(key) is not tuple:
        return isinstance(key, (str, bytes, bool, float, Named, Instance, StorageNode, type(None)))
    waiting, parts = [key], 0
    while waiting:
        parts += 1
        part = waiting.pop()
        if parts > MAX_KEY_PARTS:
            return False
        if type(part) is tuple:
            waiting.extend(part[: MAX_KEY_PARTS + 1])
        elif not is_plain_key(part):
            return False
    return True


def _with_state(owner: Any, state: Any) -> Any:
    """Return an object after its `__setstate__`. Attributes that are set on a function or class change nothing."""
    if isinstance(owner, Instance):
        owner.states.append(state)
    elif isinstance(owner, Dictionary):
        owner.states = (*owner.states, state)
    elif isinstance(owner, DressedTensor):
        owner.extras[f"state {len(owner.extras)}"] = state
    elif isinstance(owner, TensorNode):
        return DressedTensor(owner, {"state": state})
    elif not isinstance(owner, Named):
        return Instance(Named("", "an object with attributes"), (owner,), states=[state])
    return owner


def _bytearray(args: tuple[Any, ...]) -> Any:
    """Return the description of a bytearray, which each protocol makes by another call; None for unknown arguments."""
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        args = (args[0].encode("latin-1"),)
    if len(args) > 1 or not isinstance(args[0] if args else b"", bytes):
        return None
    return Instance(Named("builtins", "bytearray"), args or (b"",))


def _make_builtin(named: Named, args: tuple[Any, ...]) -> Any:
    """Return what a call of a built-in container makes; None for any other call."""
    module = named.module
    first = args[0] if args else ()
    if (module, named.name) == ("copyreg", "_reconstructor") and len(args) == 3 and isinstance(first, Named):
        return Instance(first, () if args[2] is None else args[2:])
    if (module, named.name) == ("_codecs", "encode") and len(args) == 2 and args[1] in ("latin1", "latin-1"):
        return first.encode("latin-1") if isinstance(first, str) else None
    if (module, named.name) == ("builtins", "bytes") and not args:
        return b""
    if (module, named.name) == ("builtins", "bytearray"):
        return _bytearray(args)
    if len(args) > 1 or not isinstance(first, (list, tuple)):
        return None
    if module == "builtins" and named.name in ("set", "frozenset"):
        return Elements(list(first))
    if module == "builtins" and named.name in ("list", "tuple"):
        return list(first) if named.name == "list" else tuple(first)
    if (module, named.name) == ("torch", "Size"):
        return tuple(first)
    if (module, named.name) in (("collections", "OrderedDict"), ("builtins", "dict")):
        made = Dictionary()
        if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in first):
            return None
        _set_items(made, [part for pair in first for part in pair])
        return made
    return None


Operation = Callable[[PickleMachine], Any]
M = PickleMachine


def _constant(value: Any) -> Operation:
    return lambda machine: machine._push(value)


def _operations() -> list[Operation | None]:
    table: dict[int | str, Operation] = {
        "I": M._int_line,
        "J": lambda m: m._push(m._number("<i")),
        "K": lambda m: m._push(m._number("<B")),
        "M": lambda m: m._push(m._number("<H")),
        "L": M._long_line,
        0x8A: lambda m: m._push(int.from_bytes(m._take(m._number("<B")), "little", signed=True)),
        0x8B: lambda m: m._push(int.from_bytes(m._take(m._number("<i")), "little", signed=True)),
        "S": M._string_line,
        "T": lambda m: m._push(m._take(m._number("<i")).decode("utf-8", "surrogateescape")),
        "U": lambda m: m._push(m._take(m._number("<B")).decode("utf-8", "surrogateescape")),
        "B": lambda m: m._push(m._take(m._number("<I"))),
        "C": lambda m: m._push(m._take(m._number("<B"))),
        0x8E: lambda m: m._push(m._take(m._number("<Q"))),
        0x96: lambda m: m._push(Instance(Named("builtins", "bytearray"), (m._take(m._number("<Q")),))),
        0x97: M._out_of_band,
        0x98: M._out_of_band,
        "N": _constant(None),
        0x88: _constant(True),
        0x89: _constant(False),
        "V": M._unicode_line,
        "X": lambda m: m._push(m._take(m._number("<I")).decode("utf-8", "surrogatepass")),
        0x8C: lambda m: m._push(m._take(m._number("<B")).decode("utf-8", "surrogatepass")),
        0x8D: lambda m: m._push(m._take(m._number("<Q")).decode("utf-8", "surrogatepass")),
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
        "}": lambda m: m._push(Dictionary()),
        "d": M._dict,
        "s": M._set_item,
        "u": M._set_items,
        0x8F: lambda m: m._push(Elements([])),
        0x90: M._appends,
        0x91: M._frozen_set,
        "0": M._pop,
        "2": M._duplicate,
        "(": M._mark,
        "1": M._since_mark,
        "g": lambda m: m._get(_decimal(m._line())),
        "h": lambda m: m._get(m._number("<B")),
        "j": lambda m: m._get(m._number("<I")),
        "p": lambda m: m._put(_decimal(m._line())),
        "q": lambda m: m._put(m._number("<B")),
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
