"""What a test may ask of a sentence: the parts that vary. Its words are free."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

CheckText = Callable[..., None]
"""The fixture `check_text` of tests/conftest.py."""


def has_parts(text: str, *parts: object) -> bool:
    """Whether `text` names each of `parts`: numbers, ranks, nodes, keys, paths."""
    return all(str(part) in text for part in parts)


SPAN = r"(?:\d+ (?:d|h|min) )*[\d.]+ (?:d|h|min|s)\b"


def without_ages(text: str) -> str:
    """`text` with AGE for how long ago or for how long, WHEN for moments, and HOST for this machine."""
    text = re.sub(rf"\b{re.escape(socket.gethostname())}(?= from )", "HOST", text)
    text = re.sub(rf"{SPAN}(?= ago\b|, since )", "AGE", text)
    text = re.sub(rf"(for +|since it started ){SPAN}", r"\1AGE", text)
    return re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?Z?", "WHEN", text)
