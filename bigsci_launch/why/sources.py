"""Finds and reads what a job has left: one file, or all logs in a folder, each with whom its name belongs to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bigsci_launch.endings.lines import Speaker
from bigsci_launch.endings.statements import Statement, read_statements
from bigsci_launch.endings.words import EndWords, read_words
from bigsci_launch.errors import EvidenceError
from bigsci_launch.safe_files import open_stream, parse_json

TAIL_BYTES = 4 << 20
"""Of each file, its last bytes: an end is at the end."""
ALL_BYTES = 64 << 20
"""Of all files together, so that a folder of a thousand ranks takes seconds."""
HEADER = "Traceback (most recent call last):\n"
MOST_FILES = 5000
DEEPEST = 6
LOG_NAMES = re.compile(
    r"(?:\.(?:log|out|err|txt|json|\d+)|^(?:stdout|stderr|log|output)[^.]*|^slurm-\S+)$", re.IGNORECASE
)
RANK_NAME = re.compile(r"(?:^|[^a-z])(?:global[-_]?)?rank[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE)
TASK_NAME = re.compile(r"(?:^|[-_.])(?:task|proc)[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE)
LOCAL_NAME = re.compile(r"(?:^|/)(?:attempt_\d+/(\d{1,4})/(?:stdout|stderr|error)|local[-_]rank[-_]?(\d{1,4}))")
"""torchrun's folder of logs: `attempt_0/3/stderr.log`."""


@dataclass(frozen=True, slots=True)
class Material:
    """What was read: all statements, the ranks whose output it holds, and the files."""

    statements: tuple[Statement, ...] = ()
    ranks: frozenset[int] = frozenset()
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: Material) -> Material:
        return Material(
            self.statements + other.statements,
            self.ranks | other.ranks,
            self.files + other.files,
            self.notes + other.notes,
        )


def read_material(paths: Sequence[Path]) -> Material:
    """Return what the files, and the logs in the folders, say.

    Raises:
        EvidenceError: there is no such file, or no log in a folder.
    """
    files = [found for path in paths for found in files_of(path)]
    words, size = read_words(), min(TAIL_BYTES, ALL_BYTES // max(1, len(files)))
    material = Material()
    for path, name in files:
        material += _read_file(path, name, size, words)
    return material


def files_of(path: Path) -> list[tuple[Path, str]]:
    """Return a file, or the logs in a folder, each with the name that a person reads.

    Raises:
        EvidenceError: it does not exist, or has no logs.
    """
    try:
        if path.is_file():
            return [(path, str(path))]
        found = [(each, str(each)) for each in _logs_in(path, DEEPEST)] if path.is_dir() else None
    except OSError as error:
        raise EvidenceError(f"{path}: {(error.strerror or 'it cannot be read').lower()}") from error
    if found is None:
        raise EvidenceError(
            f"{path}: no such file or folder", hint="`bsl why` takes a run, the ID of a job, a folder of logs, or logs"
        )
    if not found:
        raise EvidenceError(f"{path}: no log in this folder", hint="logs end with .log, .out, .err, .txt or .json")
    return found[:MOST_FILES]


def _logs_in(folder: Path, depth: int) -> Iterator[Path]:
    with suppress(OSError):
        for each in sorted(folder.iterdir()):
            if each.is_symlink() and each.is_dir():
                continue
            if each.is_dir() and depth:
                yield from _logs_in(each, depth - 1)
            elif LOG_NAMES.search(each.name) and each.is_file():
                yield each


def _read_file(path: Path, name: str, size: int, words: EndWords) -> Material:
    text, skipped = _text_of(path, size)
    if "\0" in text[:1024]:
        return Material(notes=(f"{name}: no text",))
    text = elastic_text(text) if path.suffix == ".json" else text
    if not text:
        return Material()
    told = read_statements(text, name, speaker_of(path), words)
    statements = tuple(replace(each, line=each.line + skipped) for each in told.statements)
    notes = (f"{name}: only its last lines were read, from line {skipped + 1} on",) if skipped else ()
    return Material(statements, told.ranks, (name,), notes)


def _text_of(path: Path, size: int) -> tuple[str, int]:
    """Return the last bytes of a file, from the beginning of a line, and how many lines are before it."""
    skipped, last = 0, b""
    with suppress(OSError), open_stream(path, follow=True) as stream:
        start = max(0, stream.seek(0, os.SEEK_END) - size)
        stream.seek(0)
        while start and (chunk := stream.read(min(start, size))):
            start, skipped, last = start - len(chunk), skipped + chunk.count(b"\n"), chunk[-1:]
        content = stream.read(size)
        if last not in (b"", b"\n"):
            content, skipped = content.partition(b"\n")[2], skipped + 1
        return content.decode("utf-8", "replace").replace("\r\n", "\n"), skipped
    return "", 0


def speaker_of(path: Path) -> Speaker:
    """Return whose output a file is, as far as its name says it."""
    if found := LOCAL_NAME.search(path.as_posix()):
        return Speaker(local_rank=int(found[1] or found[2]))
    found = RANK_NAME.search(path.name) or TASK_NAME.search(path.name)
    return Speaker(rank=int(found[1])) if found else Speaker()


def elastic_text(text: str) -> str:
    """Return the traceback in an error file of torch elastic; nothing for another document."""
    try:
        document = parse_json(text)
    except ValueError:
        return ""
    message = document.get("message") if isinstance(document, dict) else None
    if isinstance(message, str):
        return f"{HEADER}{message}"
    if not isinstance(message, dict) or not isinstance(message.get("message"), str):
        return ""
    extra = message.get("extraInfo")
    calls = extra.get("py_callstack") if isinstance(extra, dict) else None
    return calls if isinstance(calls, str) else f"{HEADER}{message['message']}"
