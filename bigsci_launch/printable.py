"""Makes untrusted text harmless to a terminal, and unable to pass for another line."""

from __future__ import annotations

import re

_ACTIVE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_=>])")


def printable(text: str) -> str:
    """Return a text whose characters do nothing to a terminal: all that people read passes here.

    Names of files, output of ranks and records may come from any user. Line ends and tabs stay. Other control
    characters, those that turn the direction of text or end a line, and half characters become visible escapes.
    """
    shown = _ACTIVE.sub(_as_escape, text) if _ACTIVE.search(text) else text
    return shown.encode("utf-8", "backslashreplace").decode()


def one_line(text: str) -> str:
    """Return a text as `printable` does, with its line ends and tabs as escapes too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def without_escapes(text: str) -> str:
    """Return a text without the sequences with which a program sets colours, titles and the cursor of a terminal."""
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def _as_escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
