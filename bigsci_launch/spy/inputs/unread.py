"""Says what a file is that no reader knows, for the error: what it begins with, and whether it is a log."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bigsci_launch.printable import one_line
from bigsci_launch.spy.inputs.layout import compression_of, passages_of

LOOKED_AT = 1 << 16
"""Bytes at the beginning of a file that show what it is."""
SHOWN_LINES, SHOWN_LETTERS = 2, 60
LOG = re.compile(
    rb"\[rank\d{1,7}\]|ProcessGroupNCCL|Traceback \(most recent call last\)|slurmstepd: |srun: error|NCCL (?:INFO|WARN)"
    rb"|iteration +\d+/|^.{0,60}\b(?:WARNING|ERROR|INFO)[\]: |]|^\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Unread:
    """`words` completes `the file ...`; `is_log` means that it looks like what a program has printed."""

    words: str
    is_log: bool = False


def describe(data: bytes) -> Unread:
    """Return what the file is that begins with `data`."""
    start = data[:LOOKED_AT]
    if not start.strip():
        return Unread("is empty")
    if name := compression_of(start):
        return Unread(f"is compressed with {name}: unpack it first")
    if start.count(0) * 3 > len(start):
        return Unread("is no text")
    lines = [line.strip() for passage in passages_of(start) for line in passage.lines if line.strip()]
    if not lines:
        return Unread("is no text")
    shown = " / ".join(one_line(line[:SHOWN_LETTERS]) for line in lines[:SHOWN_LINES])
    return Unread(f'begins with "{shown}"', LOG.search(start) is not None)
