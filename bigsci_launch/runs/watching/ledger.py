"""The ledger of a run: what watchers noticed, and what was done about it, by whom and why. The whole group reads it.

Each is a file of JSON lines to which any watcher appends. A torn or foreign line is skipped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import RunDir

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One thing that is wrong with a run.

    `kind` is a word for programs, such as `hang`, `stall`, `dead`, `slower`, `loss_spike`, `restart_spike`. `key` says
    when two findings are the same one. `since` is the onset as far as known, `noticed` when it was found, both in
    seconds since the epoch. `details` are further sentences. `bundle` is the path of the evidence; `signature` is equal
    for hangs whose ranks are in the same places. `cleared` is when it was over; None if it is not.
    """

    kind: str
    key: str
    sentence: str
    noticed: float
    attempt: str | None = None
    step: int | None = None
    since: float | None = None
    details: tuple[str, ...] = ()
    bundle: str | None = None
    signature: str = ""
    cleared: float | None = None


ActState = Literal["begun", "done", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Act:
    """Something that was done to a run, or asked for.

    `what` is `save`, `exit`, `restart`, `dump`, `kill` (asked by a person), or `end_ranks`, `leave_out`, `pin`,
    `fence`, `begin_again` (by a watcher that may act). `who` is a login name, or the name of a watcher. `why` is their
    reason, `words` what came of it. `key` is the same for all lines about one act. `stage` is how far an act has got
    that takes a while, for the watcher that carries it through.
    """

    key: str
    what: str
    who: str
    why: str
    state: ActState
    words: str = ""
    attempt: str | None = None
    step: int | None = None
    time: float = 0.0
    stage: str = ""


def raise_finding(run: RunDir, finding: RunFinding) -> None:
    """Append a finding. Raises OSError if it cannot be written."""
    append(run.findings, {"event": "raised", **asdict(finding)})


def clear_finding(run: RunDir, key: str, words: str) -> None:
    """Note that the finding `key` is over, and why. Raises OSError if it cannot be written."""
    append(run.findings, {"event": "cleared", "key": key, "cleared": time.time(), "words": words})


def read_findings(run: RunDir) -> list[RunFinding]:
    """Return all findings, oldest first; one that was raised again after it was cleared is open again."""
    found: dict[str, RunFinding] = {}
    for line in read_events(run.findings):
        key = line.get("key")
        if line.get("event") == "cleared" and key in found:
            found[key] = replace(found[key], cleared=line.get("cleared"))
        elif line.get("event") == "raised" and (finding := _finding(line)) is not None:
            found[finding.key] = finding
    return list(found.values())


def _finding(line: dict[str, Any]) -> RunFinding | None:
    known = {name: line[name] for name in RunFinding.__slots__ if name in line}
    try:
        return RunFinding(**{**known, "details": tuple(known.get("details") or ())})
    except TypeError:
        return None


def record_act(run: RunDir, act: Act) -> None:
    """Append what was done. Raises OSError if it cannot be written: then it must not be done."""
    append(run.acts, asdict(replace(act, time=act.time or time.time())))


def read_acts(run: RunDir) -> list[Act]:
    """Return every line about acts, oldest first; an act has one for each of its states."""
    return list(_acts(run))


def _acts(run: RunDir) -> Iterator[Act]:
    for line in read_events(run.acts):
        with suppress(TypeError):
            yield Act(**{name: line[name] for name in Act.__slots__ if name in line})


def claim(run: RunDir, key: str, who: str) -> bool:
    """Take the act `key` for this watcher. False if any watcher has taken it before, also one that died since.

    Raises OSError if that cannot be known: then nobody may act.
    """
    file = run.claim_file(key)
    make_shared_folder(file.parent)
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(f"{who}\n")
    return True


def make_shared_folder(folder: Path) -> None:
    """Make a folder in which all members of the run's group may create files."""
    for each in reversed([folder, *folder.parents]):
        if not each.exists():
            each.mkdir(exist_ok=True)
            with suppress(OSError):
                each.chmod(each.parent.stat().st_mode | 0o2070)


def append(file: Path, record: dict[str, Any]) -> None:
    """Add a line to a file that the whole group writes. Raises OSError if it cannot be written."""
    make_shared_folder(file.parent)
    text = json.dumps({"schema_version": SCHEMA_VERSION, **record}, default=str) + "\n"
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o664)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)
    with suppress(OSError):  # the umask took the group's permission; only the owner may give it back
        file.chmod(0o664)
