"""Dumps of weights as torch prints them: `name=Parameter containing:` and `tensor([[...` for each parameter.

Of a large tensor, torch prints only the first and last three indices along each dimension, at four digits: 36 elements
of a matrix. Equal texts prove only that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.weights.files.json_text import shown
from bigsci_launch.weights.files.mapped import UnreadableFile, open_file, read_small_file
from bigsci_launch.weights.files.sources import Contents, Source
from bigsci_launch.weights.files.tensors import NotRead, Segment, StoredTensor
from bigsci_launch.weights.formats.torch_objects import TORCH_DTYPES

ENTRY = re.compile(r"^([^\s=]+)=(?:Parameter containing:\s*)?tensor\(", re.MULTILINE)
TOKEN = re.compile(r"\[|\]|\.\.\.|[-+]?(?:nan|inf|\d+\.?\d*(?:e[-+]?\d+)?)|True|False")
DTYPE = re.compile(r"dtype=torch\.(\w+)")
# debug-805-pp11-tp1-dp4-global369-after-iteration-377074.txt
MOMENT = re.compile(r"(?:^|[-_])(\d+)[-_].*?(before|after)")
START_BYTES = 4096
# 10,000 matrices have 8 MB.
MAX_BYTES = 16 << 20
MAX_TENSORS = 100_000
MAX_DEPTH = 64
BRACKET = re.compile(r"\[|\]|\.\.\.")
PRINTED = re.compile(r"[-+\w.,\s\[\]]*")
# No number that torch prints has 32 characters, or four digits in its exponent.
LONG_NUMBER = re.compile(r"[-+\w.]{32}|e[-+]?\d{4}")
# What torch prints after the elements: `, device='cuda:1', dtype=torch.bfloat16,\n       requires_grad=True)`.
END = re.compile(r"(?:,\s*\w+=(?:\([^()]*\)|[^\s,()]*))*\)")
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
        with open_file(path) as stream:
            return ENTRY.search(stream.read(START_BYTES).decode("utf-8", "replace")) is not None
    except (OSError, UnreadableFile):
        return False


def moment_of(stem: str) -> tuple[int, str] | None:
    """Return the step and `before` or `after` from a file's name; None if it has no step."""
    match = MOMENT.search(stem)
    return (int(match[1]), match[2]) if match else None


def read_text_dump(source: Source) -> Contents:
    """Read the tensors of a dump. Their shapes are unknown.

    Raises:
        UnreadableFile: the file cannot be read, or contains no printed tensor.
    """
    path, place = source.path, source.place
    raw = read_small_file(path, MAX_BYTES)
    if raw.count(b"tensor(") > MAX_TENSORS:
        raise UnreadableFile(path, f"contains more than {MAX_TENSORS:,} printed tensors")
    text = raw.decode("utf-8", "replace")
    starts = list(ENTRY.finditer(text))
    if not starts:
        raise UnreadableFile(path, "contains no printed tensor" if raw else "empty file")
    ends = [*(match.start() for match in starts[1:]), len(text)]
    tensors: list[StoredTensor] = []
    not_read = list(_other_text(path, "the text before the first tensor", text[: starts[0].start()]))
    for match, end in zip(starts, ends, strict=True):
        name, body = match[1], text[match.end() : end]
        while name.startswith("module."):
            name = name[len("module.") :]
        printed = _elements(path, name, body)
        tail = END.match(body, len(printed))
        if LONG_NUMBER.search(printed) or not PRINTED.fullmatch(printed) or tail is None or "size=" in tail[0]:
            not_read.append(NotRead(name, "tensor", path, "it is not printed as a dense tensor is"))
            continue
        found = DTYPE.search(tail[0])
        dtype = TORCH_DTYPES.get(found[1], found[1]) if found else "F32"
        tensors.append(StoredTensor(name, "weight", place, dtype, (), (Segment(path, 0, 0),), printed=printed))
        not_read += _other_text(path, f"the text after {name}", body[tail.end() :])
    return Contents(tuple(tensors), not_read=tuple(not_read))


def _other_text(path: Path, name: str, text: str) -> Iterator[NotRead]:
    if text.strip():
        yield NotRead(name, "text", path, "it is not a tensor as torch prints it")


def _elements(path: Path, name: str, body: str) -> str:
    """Return the text of an entry's elements.

    Raises:
        UnreadableFile: its brackets do not match, as in a file that was cut.
    """
    close = body.rfind("]") + 1
    printed = body[:close] if close else re.split("[,)]", body, maxsplit=1)[0].rstrip()
    depth = 0
    for match in BRACKET.finditer(printed):
        depth += {"[": 1, "]": -1}.get(match[0], 0)
        if not 0 <= depth <= MAX_DEPTH or (match[0] == "..." and not depth):
            raise UnreadableFile(path, f"the brackets of {shown(name)} are not those of a tensor")
    if depth:
        raise UnreadableFile(path, f"truncated: the brackets of {shown(name)} do not match")
    return printed


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
