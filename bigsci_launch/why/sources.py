"""Finds and reads what a job has left: one file, or all logs in a folder, each with whom its name belongs to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bigsci_launch.endings.lines import Speaker
from bigsci_launch.endings.statements import Statement, read_statements, with_ranks
from bigsci_launch.endings.words import EndWords, read_words
from bigsci_launch.errors import EvidenceError
from bigsci_launch.safe_files import open_stream, parse_json

TAIL_BYTES = 4 << 20
"""Of each file, its last bytes: an end is at the end."""
ALL_BYTES = 64 << 20
"""Of all files together, so that a folder of a thousand ranks takes seconds."""
MOST_LINES = 300_000
"""Of each file. Lines of a few characters, or none, take as long to understand as others."""
COUNTED = 16
"""Lines are counted in a file of up to so many times what is read of it: to count more takes longer than to read it."""
HEADER = "Traceback (most recent call last):\n"
BLOCK_BYTES = 1 << 20
PEEKED = 4096
"""Characters in which a tenth of zeros is no text; a file server may leave some where a node was lost."""
MOST_FILES = 5000
DEEPEST = 6
LOG_NAMES = re.compile(
    r"(?:\.(?:log|out|err|txt|json|ya?ml|[oe]?\d+)|^(?:stdout|stderr|log|out|output|err|messages|dmesg|syslog)[^.]*"
    r"|^slurm-\S+)$",
    re.IGNORECASE,
)
"""PBS and Grid Engine write `name.o1234` and `name.e1234`."""
RANK_NAME = re.compile(r"(?:^|[^a-z])(?:global[-_]?)?rank[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE)
TASK_NAME = re.compile(r"(?:^|[-_.])(?:task|proc(?:ess)?)[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE)
WORKER_NAME = re.compile(r"(?:^|[-_.])worker[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE)
PROCESS_WORKERS = ("jax", "mindspore", "mindformers")
"""There, a worker is one process; elsewhere it is a node."""
NODE_LOG = re.compile(
    r"^(?:dmesg|kern(?:el)?|messages|syslog|journal(?:ctl)?|slurmd)[-_.](?P<node>[a-z][\w-]{0,60}\d[\w-]{0,9})(?:\.\w{1,8})?$"
    r"|^(?P<node2>[a-z][\w-]{0,60}\d)[-_.](?:dmesg|kern(?:el)?|messages|syslog|journal(?:ctl)?)(?:\.\w{1,8})?$",
    re.IGNORECASE,
)
"""Logs of a node's kernel or daemons, as people name them when they collect them."""
POD = re.compile(
    r"^(?:Name: +| {2}name: )(?P<pod>[a-z0-9][\w.-]{0,80})$|^(?P<node>Node: +|  nodeName: )\S", re.MULTILINE
)
"""In what `kubectl describe` and `kubectl get -o yaml` say of a pod. Its name is what its processes take for a node."""
LONGEST_DOCUMENT = 1 << 17
LOCAL_NAME = re.compile(r"(?:^|/)(?:attempt_\d+/(\d{1,4})/(?:stdout|stderr|error)|local[-_]rank[-_]?(\d{1,4}))")
"""torchrun's folder of logs: `attempt_0/3/stderr.log`."""


@dataclass(frozen=True, slots=True)
class Material:
    """What was read: all statements, the ranks whose output it holds, and the files."""

    statements: tuple[Statement, ...] = ()
    ranks: frozenset[int] = frozenset()
    members: frozenset[Speaker] = frozenset()
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: Material) -> Material:
        return Material(
            self.statements + other.statements,
            self.ranks | other.ranks,
            self.members | other.members,
            self.files + other.files,
            self.notes + other.notes,
        )


def read_material(paths: Sequence[Path]) -> Material:
    """Return what the files, and the logs in the folders, say.

    Raises:
        EvidenceError: there is no such file, no log in a folder, or none of them can be read.
    """
    files = [found for path in paths for found in files_of(path)]
    words, size = read_words(), min(TAIL_BYTES, ALL_BYTES // max(1, len(files)))
    material = Material()
    refusals = []
    for path, name in files:
        try:
            material += _read_file(path, name, size, words)
        except OSError as error:
            refusals.append(_refusal(name, error))
    if files and len(refusals) == len(files):
        raise EvidenceError(refusals[0])
    material += Material(notes=tuple(refusals))
    return replace(material, statements=with_ranks(material.statements, material.members))


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
        raise EvidenceError(_refusal(path, error)) from error
    if found is None:
        raise EvidenceError(
            f"{path}: no such file or folder", hint="`bsl why` takes a run, the ID of a job, a folder of logs, or logs"
        )
    if not found:
        raise EvidenceError(f"{path}: no log in this folder", hint="logs end with .log, .out, .err, .txt or .json")
    return found[:MOST_FILES]


def _refusal(name: Path | str, error: OSError) -> str:
    return f"{name}: {(error.strerror or 'it cannot be read').lower()}"


def _logs_in(folder: Path, depth: int) -> Iterator[Path]:
    with suppress(OSError):
        for each in sorted(folder.iterdir()):
            if each.is_symlink() and each.is_dir():
                continue
            if each.is_dir() and depth:
                yield from _logs_in(each, depth - 1)
            elif LOG_NAMES.search(each.name) and each.is_file():
                yield each


class LastPart(NamedTuple):
    """The last part of a file, from the beginning of a line."""

    text: str
    start: int = 0
    """Its first byte in the file."""
    lines_before: int | None = 0
    """None where they were not counted."""


def _read_file(path: Path, name: str, size: int, words: EndWords) -> Material:
    part = _last_part(path, size)
    begin = part.text[:PEEKED]
    if begin.count("\0") > len(begin) // 10:
        return Material(notes=(f"{name}: no text",))
    text = document_text(part.text) if path.suffix == ".json" else part.text
    if not text:
        return Material()
    told = read_statements(text, name, speaker_in(path, text), words)
    before = part.lines_before
    statements = tuple(
        replace(each, line=each.line + (before or 0), is_counted=before is not None) for each in told.statements
    )
    return Material(statements, told.ranks, told.members, (name,), (_note_of(name, part),) if part.start else ())


def _note_of(name: str, part: LastPart) -> str:
    if part.lines_before is None:
        return f"{name}: only its last lines were read, from byte {part.start} on, so they have no numbers here"
    return f"{name}: only its last lines were read, from line {part.lines_before + 1} on"


def _last_part(path: Path, size: int) -> LastPart:
    with open_stream(path, follow=True) as stream:
        whole = stream.seek(0, os.SEEK_END)
        start = max(0, whole - size)
        before = _count_lines(stream, start) if whole <= COUNTED * size else None
        stream.seek(max(0, start - 1))
        cut = len(stream.readline(size)) - 1 if start else 0  # the rest of a line that began before
        content = stream.read(size - cut)
        before = before + bool(cut) if before is not None else None
        if content.count(b"\n") > MOST_LINES:
            left_out = len(content.rsplit(b"\n", MOST_LINES)[0]) + 1
            before = before + content.count(b"\n", 0, left_out) if before is not None else None
            cut, content = cut + left_out, content[left_out:]
        return LastPart(content.decode("utf-8", "replace").replace("\r\n", "\n"), start + cut, before)


def _count_lines(stream: BinaryIO, size: int) -> int:
    """Return how many lines end in the first bytes of a file."""
    stream.seek(0)
    found = 0
    while size > 0 and (block := stream.read(min(size, BLOCK_BYTES))):
        found, size = found + block.count(b"\n"), size - len(block)
    return found


def speaker_of(path: Path) -> Speaker:
    """Return whose output a file is, as far as its name says it."""
    if found := LOCAL_NAME.search(path.as_posix()):
        return Speaker(local_rank=int(found[1] or found[2]))
    if found := NODE_LOG.search(path.name):
        return Speaker(node=found["node"] or found["node2"])
    found = RANK_NAME.search(path.name) or TASK_NAME.search(path.name)
    return Speaker(rank=int(found[1])) if found else Speaker()


def speaker_in(path: Path, text: str) -> Speaker:
    """Return whose output a file is, as its name and its text say it."""
    speaker, worker = speaker_of(path), WORKER_NAME.search(path.name)
    if worker and speaker.rank is None and any(each in text.lower() for each in PROCESS_WORKERS):
        speaker = replace(speaker, rank=int(worker[1]))
    return replace(speaker, node=speaker.node or pod_of(text[:LONGEST_DOCUMENT]))


def pod_of(text: str) -> str | None:
    """Return the pod that a document describes; None if it is none, or several."""
    found = list(POD.finditer(text))
    pods = {each["pod"] for each in found if each["pod"]}
    return pods.pop() if len(pods) == 1 and any(each["node"] for each in found) else None


def document_text(text: str) -> str:
    """Return what is read of a JSON document: an error file's traceback, else its lines; nothing of a long one, which
    holds data."""
    return elastic_text(text) or (text if len(text) <= LONGEST_DOCUMENT else "")


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
