"""Takes off what a text was wrapped in on its way here: compression, colours, quotes, line numbers, labels, indents.

    3:     barrier (torch/distributed/distributed_c10d.py:2784)            srun --label
    [node-0] Thread 1234 (active): "MainThread"                            clush -B, kubectl logs --prefix, ..
    > Process 1234: python train.py                                        a quote in an issue

A label that many lines share is kept: it says which task, rank or node they are from, and lines of several come mixed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from bigsci_launch.printable import without_escapes

MOST_LINE = 2000
"""Characters of a line that are read."""
MOST_LABELS = 2
"""Labels in front of each other: of srun, and of torch below it."""
GZIP = b"\x1f\x8b"
COMPRESSED = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd", b"PK\x03\x04": "zip"}
"""The beginning of files that the standard tools unpack."""
WIDE = (b"\xff\xfe", b"\xfe\xff")

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufeff\u200b]")
NOISE = (
    re.compile(r"^ ?(?:> ?)+"),
    re.compile(r"^\[?(?:(?:\d{4}-)?\d\d-\d\d[T ])?\d\d:\d\d:\d\d[\d.,:+Z-]{0,20}\]?(?:: |:$| |$)"),
)
"""What is taken off the beginning of lines: quotes, and times."""
LABELS = (
    re.compile(r"^ *(\d{1,7})(?:[:|](?!\d) ?|  |$)"),
    re.compile(r"^\[([^\]\s]{1,80})\](?:<std(?:out|err)>)?:? ?"),
    re.compile(r"^([A-Za-z/.][\w./-]{0,80}): ?"),
    re.compile(r"^([\w.-]{1,80}) *\| ?"),
    re.compile(r"^\(([\w:.]{1,80} pid=\d{1,9}(?:, ip=[\w.:]{1,60})?)\) ?"),
)


@dataclass(frozen=True, slots=True)
class Passage:
    """Lines from one place. `labels` is what each of them began with, outermost first, such as `3` or `node-0`."""

    labels: tuple[str, ...]
    lines: tuple[str, ...]


def unpack(data: bytes, limit: int) -> bytes:
    """Return what a file holds that gzip has compressed, at most `limit` bytes of it; any other file as it is."""
    if not data.startswith(GZIP):
        return data
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        return unpacker.decompress(data, limit)
    except zlib.error:
        return data


def compression_of(data: bytes) -> str | None:
    """Return the name of a compression that is not read here, or None."""
    return next((name for start, name in COMPRESSED.items() if data.startswith(start)), None)


def passages_of(data: bytes) -> list[Passage]:
    """Return the lines of a text without what they were wrapped in, those of each label together."""
    wide = data[: len(data) & ~1].decode("utf-16", "replace") if data.startswith(WIDE) else None
    text = data.decode("utf-8", "replace") if wide is None else wide
    text = CONTROL.sub("", without_escapes(text.replace("\r\n", "\n").replace("\r", "\n")))
    lines = [line[:MOST_LINE].replace("\xa0", " ").expandtabs(4).rstrip() for line in text.split("\n")]
    return list(_unwrap(Passage((), tuple(lines))))


def _unwrap(passage: Passage) -> Iterator[Passage]:
    lines = _without_indent(passage.lines)
    noise = next((form for form in NOISE if _share(form, lines)), None)
    if noise is not None:
        yield from _unwrap(Passage(passage.labels, tuple(noise.sub("", line) for line in lines)))
        return
    form = next((form for form in LABELS if _share(form, lines)), None)
    if form is None or len(passage.labels) == MOST_LABELS:
        yield Passage(passage.labels, lines)
        return
    parts = _by_label(form, lines)
    if len(parts) > max(1, sum(map(bool, lines)) // 3):  # numbers of lines, or times
        parts = {"": [form.sub("", line) for line in lines]}
    for label, part in parts.items():
        yield from _unwrap(Passage((*passage.labels, label), tuple(part)))


def _share(form: re.Pattern[str], lines: tuple[str, ...]) -> bool:
    """Whether most of the lines begin with the form, one after the other."""
    written = [line for line in lines if line]
    return len(written) > 1 and 5 * sum(form.match(line) is not None for line in written) >= 4 * len(written)


def _by_label(form: re.Pattern[str], lines: tuple[str, ...]) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    for line in lines:
        if words := form.match(line):
            parts.setdefault(words[1], []).append(line[words.end() :])
        elif line:
            parts.setdefault("", []).append(line)
    return parts


def _without_indent(lines: tuple[str, ...]) -> tuple[str, ...]:
    common = min((len(line) - len(line.lstrip(" ")) for line in lines if line), default=0)
    return tuple(line[common:] for line in lines) if common else lines
