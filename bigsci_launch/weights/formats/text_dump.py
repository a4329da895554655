"""Dumps of weights as torch prints them: `name=Parameter containing:` and `tensor([[...` for each parameter.

Of a large tensor, torch prints only the first and last three indices along each dimension, at four digits: 36 elements
of a matrix. Equal texts prove only that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.weights.files.tensors import Place, Segment, StoredTensor, UnreadableFile, os_reason
from bigsci_launch.weights.formats.torch_objects import TORCH_DTYPES

ENTRY = re.compile(r"^([^\s=]+)=(?:Parameter containing:\s*)?tensor\(", re.MULTILINE)
TOKEN = re.compile(r"\[|\]|\.\.\.|[-+]?(?:nan|inf|\d+\.?\d*(?:e[-+]?\d+)?)|True|False")
DTYPE = re.compile(r"dtype=torch\.(\w+)")
# debug-805-pp11-tp1-dp4-global369-after-iteration-377074.txt
MOMENT = re.compile(r"(?:^|[-_])(\d+)[-_].*?(before|after)")
START_BYTES = 4096
# Counters continue from this value after `...`; the closing bracket then shows how many elements follow the gap.
AFTER_GAP = -(1 << 40)


@dataclass(frozen=True, slots=True)
class PrintedElement:
    """A printed element: its index (negative counts from the end), its value, and half a unit of its last digit."""

    index: tuple[int, ...]
    value: float
    slack: float


def is_text_dump(path: Path) -> bool:
    """Whether a text file begins like such a dump."""
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            return ENTRY.search(stream.read(START_BYTES)) is not None
    except OSError:
        return False


def moment_of(stem: str) -> tuple[int, str] | None:
    """Return the step and `before` or `after` from a file's name; None if it has no step."""
    match = MOMENT.search(stem)
    return (int(match[1]), match[2]) if match else None


def read_text_dump(path: Path, place: Place) -> tuple[StoredTensor, ...]:
    """Read the tensors of a dump. Their shapes are unknown.

    Raises:
        UnreadableFile: the file cannot be read, or contains no printed tensor.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UnreadableFile(path, os_reason(error)) from error
    starts = list(ENTRY.finditer(text))
    if not starts:
        raise UnreadableFile(path, "contains no printed tensor")
    ends = [*(match.start() for match in starts[1:]), len(text)]
    return tuple(
        _tensor(path, place, match[1], text[match.end() : end]) for match, end in zip(starts, ends, strict=True)
    )


def _tensor(path: Path, place: Place, name: str, body: str) -> StoredTensor:
    while name.startswith("module."):
        name = name[len("module.") :]
    found = DTYPE.search(body)
    dtype = TORCH_DTYPES.get(found[1], "F32") if found else "F32"
    close = body.rfind("]")
    printed = body[: close + 1] if close >= 0 else body.partition(",")[0].rstrip(")\n ")
    if printed.count("[") != printed.count("]"):
        raise UnreadableFile(path, f"truncated: the brackets of {name} do not match")
    return StoredTensor(name, "weight", place, dtype, (), (Segment(path, 0, 0),), printed=printed)


def printed_elements(tensor: StoredTensor) -> list[PrintedElement]:
    """Return the elements that a printed tensor shows, in order. Its brackets must match."""
    found: list[tuple[list[int], float, float]] = []
    counters: list[int] = []
    sizes: dict[tuple[int, ...], int] = {}
    for match in TOKEN.finditer(tensor.printed or ""):
        token = match[0]
        if token == "[":
            counters.append(0)
        elif token == "]":
            _close_level(counters, sizes)
        elif token == "...":
            counters[-1] = AFTER_GAP
        else:
            found.append((list(counters), _value(token), _slack(token)))
            if counters:
                counters[-1] += 1
    return [PrintedElement(_index(at, sizes), value, slack) for at, value, slack in found]


def _close_level(counters: list[int], sizes: dict[tuple[int, ...], int]) -> None:
    count = counters.pop()
    sizes[tuple(counters)] = count
    if counters:
        counters[-1] += 1


def _index(at: Sequence[int], sizes: dict[tuple[int, ...], int]) -> tuple[int, ...]:
    """Convert counters that started at `AFTER_GAP` to indices from the end (negative)."""
    return tuple(
        position if position >= 0 else position - sizes[tuple(at[:depth])] for depth, position in enumerate(at)
    )


def _value(token: str) -> float:
    return float(token == "True") if token in ("True", "False") else float(token)


def _slack(token: str) -> float:
    """Return half a unit of the last printed digit; 0 for whole numbers, which torch prints exactly."""
    mantissa, _, exponent = token.partition("e")
    digits = mantissa.partition(".")[2]
    return 0.5 * 10.0 ** (int(exponent or 0) - len(digits)) if digits else 0.0


def printed_constant(tensor: StoredTensor) -> float | None:
    """Return the value that all printed elements of a tensor share; None if they differ."""
    values = {element.value for element in printed_elements(tensor)}
    return next(iter(values)) if len(values) == 1 else None
