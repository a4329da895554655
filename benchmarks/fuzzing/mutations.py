"""Ways to damage bytes and documents, as disks, terminals, other versions and bad luck do, and worse."""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

NUMBERS = (
    *(b"0", b"-1", b"1", b"2147483648", b"99999999999999999999", b"1e308", b"1e999", b"-1e999", b"NaN", b"Infinity"),
    *(b"0.1", b"1_0", b"0x7f", b"9" * 5000, b"", "\u0665".encode()),
)
WORDS = (
    b"\0",
    b"\xed\xa0\x80",
    b"\xff",
    b"\x1b[31m",
    b"\x1b]0;x\x07",
    b"\r",
    b"\r\n",
    b"\t",
    b"\xe2\x80\xae",
    b"%s",
    b"{who}",
    b"../..",
)
VALUES: tuple[Any, ...] = (
    *(None, True, "", "x", "\ud800", "\0", "rank 3", -1, 0, 1 << 31, 1 << 70, 1e308, float("nan"), float("inf"), 0.5),
    *([], {}, [[]], [None], {"": None}, "9" * 5000, "x" * 70_000),
)
NUMBER = re.compile(rb"\d+")
DEEP = 40_000
MOST = 1 << 21
"""Bytes of a damaged file: more of the same is the subject of `floods`."""


def damaged(data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """Return the bytes after one to four mutations."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        data = draw.choice(MUTATIONS)(data, others, draw)[:MOST]
    return data


def _flipped(data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    found = bytearray(data or b"\0")
    for _ in range(draw.choice((1, 1, 3, 30))):
        found[draw.randrange(len(found))] = draw.randrange(256)
    return bytes(found)


def _random(_data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    return draw.randbytes(draw.choice((0, 1, 2, 10, 1000, 20_000)))


def _cut(data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _behead(data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    return data[draw.randrange(len(data) + 1) :]


def _without_a_part(data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    begin, end = _span(data, draw)
    return data[:begin] + data[end:]


def _repeated_part(data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    begin, end = _span(data, draw)
    times = draw.choice((2, 3, 100, 3000))
    return data[:end] + data[begin:end] * min(times, 1 + (MOST >> 1) // max(1, end - begin)) + data[end:]


def _spliced(data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    other = draw.choice(others)
    begin, end = _span(other, draw)
    at = draw.randrange(len(data) + 1)
    return data[:at] + other[begin:end] + data[at + draw.choice((0, end - begin)) :]


def _other_number(data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    found = list(NUMBER.finditer(data))
    if not found:
        return data
    match = draw.choice(found)
    return data[: match.start()] + draw.choice(NUMBERS) + data[match.end() :]


def _inserted(data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice(WORDS) * draw.choice((1, 1, 50)) + data[at:]


def _nested(data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice((b"[", b"{", b"(", b'{"a":', b"- ", b"<", b"> ", b"[[", b"a:\n ")) * DEEP + data[at:]


def _long_line(data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    """A line of a million characters: of one kind, or of the words of a line that is there."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    part = draw.choice(
        (b"x", b" ", b"1", b"(", b"a.", b"1 ", b'"', lines[at] or b"-", (lines[at].split() or [b"="])[0])
    )
    lines[at] += part * (1_000_000 // len(part))
    return b"\n".join(lines)


def _swapped_lines(data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    for _ in range(draw.choice((1, 5))):
        a, b = draw.randrange(len(lines)), draw.randrange(len(lines))
        lines[a], lines[b] = lines[b], lines[a]
    return b"\n".join(lines)


def _reencoded(data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    text = data.decode("utf-8", "replace")
    code = draw.choice(("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "latin-1", "cp037", "utf-7"))
    return text.encode(code, "replace")


def _wrapped(data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    """What people and tools put around the lines of a text."""
    label = draw.choice(
        (b"> ", b"3: ", b"[node-0] ", b"    ", b"12:34:56 ", b"(Worker pid=3, ip=1.2.3.4) ", b"\x1b[2m")
    )
    return b"".join(label + line + draw.choice((b"\n", b"\r\n")) for line in data.split(b"\n")[:20_000])


def _packed(data: bytes, _others: Sequence[bytes], draw: random.Random) -> bytes:
    packed = gzip.compress(data[:200_000], draw.choice((1, 9)), mtime=0)
    return packed if draw.random() < 0.5 else packed[: draw.randrange(len(packed))]


def _span(data: bytes, draw: random.Random) -> tuple[int, int]:
    begin = draw.randrange(len(data) + 1)
    return begin, min(len(data), begin + draw.choice((1, 5, 50, 500, 5000)))


MUTATIONS: tuple[Callable[[bytes, Sequence[bytes], random.Random], bytes], ...] = (
    *(_flipped, _cut, _behead, _without_a_part, _repeated_part, _spliced, _other_number, _other_number, _inserted),
    *(_swapped_lines, _reencoded, _wrapped, _random, _nested, _long_line, _packed),
)


def changed(document: Any, draw: random.Random) -> Any:
    """Return a document in which one to four values are another one, of any type, are missing, or are there twice."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        document = _changed_at(document, draw)
    return document


def _changed_at(node: Any, draw: random.Random) -> Any:
    if isinstance(node, dict) and node and draw.random() < 0.9:
        key = draw.choice(list(node))
        kind = draw.random()
        if kind < 0.1:
            return {name: each for name, each in node.items() if name != key}
        if kind < 0.2:
            return {(str(draw.choice(VALUES)) if name == key else name): each for name, each in node.items()}
        return {**node, key: _changed_at(node[key], draw)}
    if isinstance(node, list) and node and draw.random() < 0.9:
        at, kind = draw.randrange(len(node)), draw.random()
        if kind < 0.1:
            return [*node[:at], *node[at + 1 :]]
        if kind < 0.2:
            return [*node, node[at]] * draw.choice((1, 2, 50))
        return [*node[:at], _changed_at(node[at], draw), *node[at + 1 :]]
    return draw.choice(VALUES)
