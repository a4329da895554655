"""The records of a run as lines of JSON: those of its owner, which its processes go by, and those of colleagues.

The author of a line is the owner of the file that holds it, whatever the line claims. A line that is not a record is
skipped, with a remark. What colleagues have left is for people to read: nothing is done because of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.ownership import owner_of
from bigsci_launch.runs.watching.places import colleagues, is_owner, open_of, open_to_write, open_watch, require_own
from bigsci_launch.safe_files import append_line, parse_json, read_file_of

SCHEMA_VERSION = 1
LONGEST_LINE = 1 << 18
MOST_OF_COLLEAGUE = 1 << 20
"""Bytes of the largest file of a colleague that is read."""


@dataclass(frozen=True, slots=True)
class Lines:
    """The records of a file, oldest first. `remark` is what of it is not believed; empty if there is nothing."""

    records: tuple[dict[str, Any], ...] = ()
    remark: str = ""


NO_LINES = Lines()


def read_own(run: RunDir, file: Path) -> Lines:
    """Return the records that the owner of the run has written to a file in `watch/`."""
    try:
        with open_watch(run) as folder:
            return _read(folder, file, owner_of(run))
    except FileNotFoundError:
        return NO_LINES
    except OSError as error:
        return Lines(remark=_not_read(file, error))


def read_mine(run: RunDir, file: Path) -> Lines:
    """Return what watchers of this user, who is not the owner, have written; nothing for the owner."""
    return NO_LINES if is_owner(run) else read_of(run, file, os.geteuid())


def read_of(run: RunDir, file: Path, uid: int) -> Lines:
    """Return what watchers of a colleague have written."""
    place = run.watch_by(uid) / file.name
    try:
        with open_of(run, uid) as folder:
            return _read(folder, place, uid, MOST_OF_COLLEAGUE)
    except FileNotFoundError:
        return NO_LINES
    except OSError as error:
        return Lines(remark=_not_read(place, error))


def read_colleagues(run: RunDir, file: Path) -> Iterator[tuple[int, Lines]]:
    """Yield the number of each colleague, and what their watchers have written."""
    for uid in colleagues(run):
        yield uid, read_of(run, file, uid)


def remarks(run: RunDir) -> tuple[str, ...]:
    """Return what is not believed of the records of the run's owner, a sentence for each file."""
    found = [read_own(run, file) for file in (run.findings, run.acts, run.outbox)]
    return tuple(lines.remark for lines in found if lines.remark)


def remarks_on_colleagues(run: RunDir) -> tuple[str, ...]:
    """Return what is not believed of what colleagues have left."""
    return tuple(lines.remark for _, lines in read_colleagues(run, run.findings) if lines.remark)


def _read(folder: int, file: Path, owner: int, limit: int = 1 << 26) -> Lines:
    content, found = read_file_of(file.name, limit, folder=folder)
    require_own(found, owner, file)
    *whole, _torn = content.split(b"\n")  # the last line may be being written
    records = [_record(line) for line in whole if line.strip()]
    known = tuple(record for record in records if record is not None)
    wrong = len(records) - len(known)
    lines = "1 line is not a record" if wrong == 1 else f"{wrong} lines are not records"
    return Lines(known, f"{file}: {lines}, skipped" if wrong else "")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line, LONGEST_LINE)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _not_read(file: Path, error: OSError) -> str:
    return f"{file}: not read: {error.strerror or error}"


def append(run: RunDir, file: Path, record: dict[str, Any]) -> None:
    """Add a line to this user's file: the owner's in `watch/`. Raises OSError if it cannot be written."""
    with open_to_write(run) as folder:
        _append(folder, file, record)


def append_own(run: RunDir, file: Path, record: dict[str, Any]) -> None:
    """Add a line to a file in `watch/`. Raises OSError if it cannot be written, or if this is not the run's owner."""
    with open_watch(run, makes=True) as folder:
        _append(folder, file, record)


def _append(folder: int, file: Path, record: dict[str, Any]) -> None:
    text = json.dumps({"schema_version": SCHEMA_VERSION, **record}, default=str, ensure_ascii=False)
    with suppress(FileNotFoundError):
        require_own(os.stat(file.name, dir_fd=folder, follow_symlinks=False), os.geteuid(), file)
    append_line(file.name, text.encode("utf-8", "replace").decode(), folder=folder)
