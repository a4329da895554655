"""Reads JSON from a file of unknown origin: bounded, and refused if it can be read in more than one way."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

# What a text may weigh: 1 for each object, list and item, 2 for each key. Those of 100,000 tensors weigh 1.6 million.
MAX_WEIGHT = 1_800_000
WEIGHTS = {b"{": 1, b"[": 1, b",": 1, b":": 2}
MAX_DIGITS = 20
# A text with characters above U+00FF needs four times as much memory as in the file.
MAX_WIDE_BYTES = 8 << 20
WIDE = re.compile(rb"[\xc4-\xff]")
SHOWN = 60


class BadJson(Exception):
    """The text is no JSON, is ambiguous, or is larger than a reader accepts; the message says why."""


def parse_json(data: bytes) -> Any:
    """Return the value that a UTF-8 text of JSON describes.

    Raises:
        BadJson: it is not JSON, repeats a key, has numbers that are not finite, or has too many parts.
    """
    if len(data) > MAX_WIDE_BYTES and WIDE.search(data):
        raise BadJson(f"has more than {MAX_WIDE_BYTES:,} bytes, and characters that are not Latin")
    if sum(data.count(mark) * weight for mark, weight in WEIGHTS.items()) > MAX_WEIGHT:
        raise BadJson("has more parts than any checkpoint's")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise BadJson("is nested too deep") from None
    except ValueError:
        # The message of Python's reader quotes no more than a position.
        raise BadJson("is not JSON") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise BadJson(f"has {shown(key)} twice")
    return found


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise BadJson(f"has a number of {len(text):,} digits")
    return int(text)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise BadJson("has a number that is too large")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise BadJson(f"contains {name}, which is not a JSON number")


def is_length(value: object) -> bool:
    """Whether a value is a whole number from 0 to the largest of 63 bits: the length of a dimension, an offset."""
    return type(value) is int and 0 <= value < 1 << 63


def shown(value: object) -> str:
    """Return a text of unknown origin in a form that a message can quote: one line, `SHOWN` characters at most."""
    text = value if isinstance(value, str) and value.isprintable() and value else ascii(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
