"""Plain data as YAML text that `document` reads back to the same values, optionally with a remark after each line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from bigsci_launch.config.document import KeyPath, Scalar, resolve_plain

Remark = Callable[[KeyPath], str]

_BARE = re.compile(r"\.?[A-Za-z_/][A-Za-z0-9_./+=|-]*")
# Text in YAML 1.2; quoted so that readers of YAML 1.1 agree.
_OLD_BOOLEANS = frozenset(("y", "n", "yes", "no", "on", "off"))
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
REMARK_COLUMN = 60


def render_yaml(data: dict[str, Any], remark: Remark | None = None) -> str:
    """Return `data` as YAML text; `remark` returns the comment after a line, by key path."""
    lines = list(_entries(data, (), ""))
    if remark is None:
        return "".join(f"{line}\n" for line, _ in lines)
    remarks = [(line, remark(path) if path else "") for line, path in lines]
    return "".join(f"{line:<{REMARK_COLUMN}}  # {text}\n" if text else f"{line}\n" for line, text in remarks)


def _entries(data: dict[str, Any], path: KeyPath, indent: str) -> Iterator[tuple[str, KeyPath]]:
    """Yield the lines of a mapping, each with the key path of its value (empty if it only opens a section)."""
    for key, value in data.items():
        here = (*path, key)
        if isinstance(value, dict) and value:
            yield f"{indent}{render_scalar(key)}:", ()
            yield from _entries(value, here, indent + "  ")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield f"{indent}{render_scalar(key)}:", ()
            yield from _items(value, here, indent + "  ")
        else:
            yield f"{indent}{render_scalar(key)}: {_flow(value)}", here


def _items(items: list[Any], path: KeyPath, indent: str) -> Iterator[tuple[str, KeyPath]]:
    for index, item in enumerate(items):
        lines = list(_entries(item, (*path, index), indent + "  "))
        first, first_path = lines[0]
        yield f"{indent}- {first.lstrip()}", first_path
        yield from lines[1:]


def _flow(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_flow(item) for item in value)}]"
    return "{}" if isinstance(value, dict) else render_scalar(value)


def render_scalar(value: Scalar) -> str:
    """Return one scalar: plain if that is unambiguous, else in double quotes with unprintable characters escaped."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    if _BARE.fullmatch(value) and resolve_plain(value) == "str" and value.lower() not in _OLD_BOOLEANS:
        return value
    return f'"{"".join(_escape(char) for char in value)}"'


def _float(value: float) -> str:
    """Return a float that readers of YAML 1.1 take for one too: to them, `1e-05` is text and `1.0e-05` a number."""
    mantissa, exponent, power = repr(value).partition("e")
    return f"{mantissa}{'' if '.' in mantissa or not exponent else '.0'}{exponent}{power}"


def _escape(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char == " " or char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
