"""The ledger of a run: what watchers noticed, and what was done about it, by whom and why. The whole group reads it.

Each is a file of JSON lines to which watchers of the run's owner append. What a watcher of another user has noticed is
in a folder of its own, only to be read: no process of the owner acts on it, tells it, or leaves out anything.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from bigsci_launch.procfs import user_name
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.places import open_watch
from bigsci_launch.runs.watching.records import append, append_own, read_colleagues, read_mine, read_own
from bigsci_launch.runs.watching.typed import typed

MOST_OF_COLLEAGUE = 5
"""Findings of a colleague's watchers that are shown."""
_KEY = re.compile(r"[A-Za-z0-9][\w.:@+=, -]{0,199}")


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One thing that is wrong with a run.

    `kind` is a word for programs, such as `hang`, `stall`, `dead`, `slower`, `loss_spike`, `restart_spike`. `key` says
    when two findings are the same one. `since` is the onset as far as known, `noticed` when it was found, both in
    seconds since the epoch. `details` are further sentences. `bundle` is the path of the evidence; `signature` is equal
    for hangs whose ranks are in the same places. `cleared` is when it was over; None if it is not. `accuses`: it says
    which ranks caused it.
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
    lost_ranks: float | None = None
    accuses: bool = False

    def lost_hours(self, now: float | None) -> float | None:
        """Return how many hours of a rank's time are lost until `now`; None if that is not known. `now` is None if the
        run may have ended before."""
        until = self.cleared if self.cleared is not None else now
        if self.lost_ranks is None or self.since is None or until is None or until < self.since:
            return None
        return self.lost_ranks * (until - self.since) / 3600


BY_WATCHERS = ("end_ranks", "leave_out", "pin", "fence", "begin_again")
"""Acts that a watcher does by itself; all others were asked for."""
ActState = Literal["begun", "done", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Act:
    """Something that was done to a run, or asked for.

    `what` is `save`, `exit`, `restart`, `dump`, `kill` (asked for), `cancel` (by an agent of the owner),
    or `end_ranks`, `leave_out`, `pin`, `fence`, `begin_again` (by a watcher that may act), or `requests` (more than one
    user may ask). `who` is a login name, or the name of a watcher. `why` is their reason, `words` the result. `key` is
    the same for all lines about one act. `stage` is how far an act has got that takes a while, for the watcher that
    carries it through.
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
    append(run, run.findings, {"event": "raised", **asdict(finding)})


def clear_finding(run: RunDir, key: str, words: str) -> None:
    """Note that the finding `key` is over, and why. Raises OSError if it cannot be written."""
    append(run, run.findings, {"event": "cleared", "key": key, "cleared": time.time(), "words": words})


def read_findings(run: RunDir) -> list[RunFinding]:
    """Return all findings that this process goes by, oldest first: those of the owner's watchers, and its own user's.

    One that was raised again after it was cleared is open again.
    """
    mine = _findings(read_mine(run, run.findings).records)
    return list({**mine, **_findings(read_own(run, run.findings).records)}.values())


def read_all_findings(run: RunDir) -> list[RunFinding]:
    """Return all findings for people to read: also what only watchers of colleagues have noticed, with their names."""
    own = _findings(read_own(run, run.findings).records)
    found = list(own.values())
    for uid, lines in read_colleagues(run, run.findings):
        theirs = [each for each in _findings(lines.records).values() if each.key not in own]
        found += [_of_colleague(each, uid) for each in theirs[-MOST_OF_COLLEAGUE:]]
    return found


def _of_colleague(finding: RunFinding, uid: int) -> RunFinding:
    said = f"noticed by a watcher of {user_name(uid)}: shown only, not acted on"
    return replace(finding, key=f"{finding.key} by {uid}", details=(*finding.details[:MOST_OF_COLLEAGUE], said))


def _findings(lines: Iterable[Mapping[str, Any]]) -> dict[str, RunFinding]:
    found: dict[str, RunFinding] = {}
    for line in lines:
        with suppress(ValueError):
            if line.get("event") == "raised" and is_key((finding := typed(RunFinding, line)).key):
                found[finding.key] = finding
            elif line.get("event") == "cleared" and (over := typed(_Cleared, line)).key in found:
                found[over.key] = replace(found[over.key], cleared=over.cleared)
    return found


@dataclass(frozen=True, slots=True)
class _Cleared:
    key: str
    cleared: float


def is_key(key: str) -> bool:
    """Whether this may be the key of a record: it has no slash, and is short."""
    return _KEY.fullmatch(key) is not None


def record_act(run: RunDir, act: Act) -> None:
    """Append what was done. Raises OSError if it cannot be written, or is not this user's to do: then it must not be
    done."""
    append_own(run, run.acts, asdict(replace(act, time=act.time or time.time())))


def read_acts(run: RunDir) -> list[Act]:
    """Return every line about acts, oldest first; an act has one for each of its states. Only the owner's count."""
    return list(_acts(run))


def _acts(run: RunDir) -> Iterator[Act]:
    for line in read_own(run, run.acts).records:
        with suppress(ValueError):
            if is_key((act := typed(Act, line)).key):
                yield act


def claim(run: RunDir, key: str, who: str) -> bool:
    """Take the act `key` for this watcher. False if any watcher has taken it before, also one that died since.

    Raises OSError if that cannot be known, or if the run is not this user's: then no act is allowed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open_watch(run, "claims", makes=True) as folder:
        try:
            handle = os.open(run.claim_file(key).name, flags, 0o644, dir_fd=folder)
        except FileExistsError:
            return False
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(f"{who}\n")
    return True


def claimed_at(run: RunDir, key: str) -> float:
    """Return when the act `key` was claimed, by the clock of the file system. Raises OSError if it was not."""
    with open_watch(run, "claims") as folder:
        return os.stat(run.claim_file(key).name, dir_fd=folder, follow_symlinks=False).st_mtime
