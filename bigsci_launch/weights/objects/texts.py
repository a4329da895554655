"""Values as readable text, in one short line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bigsci_launch.weights.objects.arrays import DTYPE, array_of, array_text, dtype_text, scalar_text
from bigsci_launch.weights.objects.nodes import Elements, Instance, Named, OddKey

SHOWN = 60
SHOWN_ITEMS = 8
# Characters of one part of a path.
MAX_PART = 4096
# A call that is one value: at most this many arguments, and calls inside it to this depth.
MAX_ARGUMENTS = 8
MAX_CALLS = 4


def is_scalar(value: Any) -> bool:
    """Whether a value is a single number, text, or name."""
    return value is None or isinstance(value, (bool, int, float, str, bytes, Named))


def is_call(node: Instance, depth: int = 0) -> bool:
    """Whether an object is one call with plain arguments, and thereby one value: a date, a path, an enum."""
    is_bare = not (node.states or node.items or node.elements or node.kwargs)
    return is_bare and len(node.args) <= MAX_ARGUMENTS and all(_is_plain(arg, depth) for arg in node.args)


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, tuple):
        return len(value) <= MAX_ARGUMENTS and all(map(is_scalar, value))
    return is_scalar(value) or (isinstance(value, Instance) and depth < MAX_CALLS and is_call(value, depth + 1))


def show(value: Any) -> str:
    """Return a value in at most `SHOWN` characters."""
    return _short(_text(value, 0))


def _text(value: Any, depth: int) -> str:
    if isinstance(value, str):
        return value[: SHOWN * 2].__repr__()
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * SHOWN:
        return f"a number of {value.bit_length():,} bits"
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value):,} bytes"
    if isinstance(value, Elements):
        is_short = len(value.elements) <= SHOWN_ITEMS and all(map(is_scalar, value.elements))
        value = sorted(value.elements, key=lambda item: _text(item, 0)) if is_short else value.elements
    if isinstance(value, (list, tuple)) and value:
        if len(value) > SHOWN_ITEMS or not all(map(is_scalar, value)):
            return f"{len(value):,} values"
        return f"[{', '.join(_text(item, depth) for item in value)}]"
    if isinstance(value, (list, tuple, dict)):
        return "empty" if not value else f"{len(value):,} entries"
    if isinstance(value, OddKey):
        return _text(value.key, depth)
    return _instance_text(value, depth) if isinstance(value, Instance) else str(value)


def _instance_text(node: Instance, depth: int) -> str:
    array = array_of(node)
    if array is not None:
        return array_text(array)
    scalar = scalar_text(node)
    if scalar is not None:
        return scalar
    if node.made_by == DTYPE:
        return f"dtype {dtype_text(node)}"
    if depth > MAX_CALLS or not is_call(node):
        return str(node.made_by)
    known = _KNOWN.get((node.made_by.module, node.made_by.name))
    text = known(node.args) if known else None
    if text is not None:
        return text
    name = str(node.made_by).removeprefix("builtins.")
    return f"{name}({', '.join(_text(arg, depth + 1) for arg in node.args)})"


def _path_text(args: tuple[Any, ...]) -> str | None:
    if not args or not all(isinstance(part, str) and len(part) <= MAX_PART for part in args):
        return None
    first: str = args[0]
    return first + "/" * (not first.endswith("/") and len(args) > 1) + "/".join(args[1:])


def _time_text(args: tuple[Any, ...]) -> str | None:
    """Return a date, or a date and a time of `datetime`, whose pickled form is one byte for each field."""
    raw = args[0] if len(args) == 1 else None
    if not isinstance(raw, bytes) or len(raw) not in (4, 10):
        return None
    date = f"{raw[0] * 256 + raw[1]:04d}-{raw[2] & 127:02d}-{raw[3]:02d}"
    if len(raw) == 4:
        return date
    micros = int.from_bytes(raw[7:], "big")
    return f"{date} {raw[4]:02d}:{raw[5]:02d}:{raw[6]:02d}" + (f".{micros:06d}" if micros else "")


_KNOWN: dict[tuple[str, str], Callable[[tuple[Any, ...]], str | None]] = {
    ("datetime", "datetime"): _time_text,
    ("datetime", "date"): _time_text,
    ("pathlib", "PosixPath"): _path_text,
    ("pathlib", "PurePosixPath"): _path_text,
}


def _short(text: str) -> str:
    text = text.encode("ascii", "backslashreplace").decode() if not text.isprintable() else text
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
