"""What people ask of a run: one file each in `control/`. The whole group may write there.

`bsl control` writes JSON documents. A plain file whose name is the verb asks the same, with its content as the reason.
Who asks is the owner of the file; nothing in it says so. A watcher takes a file up by renaming it into `control/done/`,
which only one can do: its new name is the key of the request, an `@`, and the watcher's name.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.runs.layout import RunDir, write_json

VERBS = ("save", "exit", "restart", "dump", "kill")
WITH_STEP = ("save", "exit", "restart")
"""Verbs that may wait for a step."""
MAX_BYTES = 64 * 1024
MAX_REASON = 500
_REQUEST = re.compile(r"(?P<verb>[a-z]+)-(?P<moment>[0-9]+)-(?P<number>[0-9]+)\.json")
_IGNORED = re.compile(r"\..*|.*~|done")


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody asks. `who` is a login name. `attempt` is the attempt that the person saw; None in a plain file.

    `asked` is when it was written, in seconds since the epoch, by the clock of the file system. `wrong` says why it
    must be refused; None if nothing in the file speaks against it.
    """

    key: str
    verb: str
    who: str
    why: str
    after_step: int | None
    attempt: str | None
    asked: float
    wrong: str | None = None


def write_request(run: RunDir, verb: str, why: str, *, after_step: int | None, attempt: str) -> Path:
    """Ask something of a run. Raises OSError if `control/` cannot be written."""
    file = run.control / f"{verb}-{time.time_ns()}-{os.getpid()}.json"
    document = {"schema_version": 1, "verb": verb, "why": why, "after_step": after_step, "attempt": attempt}
    write_json(file, document)
    return file


def waiting(run: RunDir) -> list[Path]:
    """Return the files that ask something and were not taken up, oldest first."""
    try:
        found = [path for path in run.control.iterdir() if not _IGNORED.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(found, key=_age_order)


def is_complete(path: Path) -> bool:
    """Whether a file can be taken up at once. An empty one may have been made by a shell that is about to write."""
    try:
        return path.lstat().st_size > 0
    except OSError:
        return False


def take_up(run: RunDir, path: Path, watcher: str) -> Path | None:
    """Take a request up for `watcher`. None if another one has, or if it cannot be moved."""
    try:
        found = path.lstat()
        verb = re.sub(r"[^A-Za-z0-9]", "_", path.name)[:20] if path.name not in VERBS else path.name
        verb = match["verb"] if (match := _REQUEST.fullmatch(path.name)) else verb
        taken = run.control_done / f"{verb}-{found.st_mtime_ns}-{found.st_ino}@{watcher}"
        path.rename(taken)
    except OSError:
        return None
    return taken


def take_over(taken: Path, watcher: str) -> Path | None:
    """Take over a request of another watcher, which is gone. None if somebody else was quicker."""
    ours = taken.with_name(f"{key_of(taken)}@{watcher}")
    try:
        taken.rename(ours)
    except OSError:
        return None
    return ours


def taken_up(run: RunDir) -> list[Path]:
    """Return the requests that were taken up, oldest first."""
    try:
        return sorted((path for path in run.control_done.iterdir() if "@" in path.name), key=_age_order)
    except OSError:
        return []


def key_of(taken: Path) -> str:
    return taken.name.rpartition("@")[0]


def moment_of(key: str) -> float | None:
    """Return when a request was written that was taken up, in seconds since the epoch, by the file system's clock."""
    parts = key.split("-")
    return int(parts[1]) / 1e9 if len(parts) == 3 and parts[1].isdigit() else None


def watcher_of(taken: Path) -> str:
    return taken.name.rpartition("@")[2]


def verb_of(path: Path) -> str:
    """Return what a file asks, by its name."""
    return path.name if path.name in VERBS else path.name.partition("-")[0]


def read_request(run: RunDir, path: Path) -> Request:
    """Return what a file asks, whether it waits or was taken up. It may be anything that somebody has put there."""
    key, verb = key_of(path) if "@" in path.name else path.name, verb_of(path)
    try:
        found, content = _read(path)
    except (OSError, _Unusable) as error:
        owner = _lstat_owner(path)
        return Request(key, verb, owner, "", None, None, _moment(path), str(getattr(error, "strerror", None) or error))
    who, asked = user_name(found.st_uid), found.st_mtime
    if not content.lstrip().startswith(b"{"):
        text = content.decode("utf-8", "replace")
        return Request(key, verb, who, _line(text), None, None, asked, _why_wrong(run, verb, found, None))
    document = _document(content)
    if document is None:
        return Request(key, verb, who, "", None, None, asked, "it is not a JSON document")
    step = document.get("after_step")
    return Request(
        key=key,
        verb=verb,
        who=who,
        why=_line(str(document.get("why") or "")),
        after_step=step if isinstance(step, int) else None,
        attempt=document["attempt"] if isinstance(document.get("attempt"), str) else None,
        asked=asked,
        wrong=_why_wrong(run, verb, found, step),
    )


class _Unusable(Exception):
    """A file that must not be read."""


def _read(path: Path) -> tuple[os.stat_result, bytes]:
    if stat.S_ISLNK((known := path.lstat()).st_mode):
        raise _Unusable("it is a link")
    if stat.S_ISREG(known.st_mode) and known.st_size == 0 and known.st_nlink == 1:
        return known, b""  # there is nothing to read, whoever may
    # A FIFO must not stop the watcher, nor a link have it read what its writer may not.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise _Unusable("it is not a plain file")
        if found.st_nlink > 1:
            raise _Unusable("it has another name elsewhere, so that its owner may not be who put it there")
        if found.st_size > MAX_BYTES:
            raise _Unusable(f"it is larger than {MAX_BYTES >> 10} KiB")
        return found, os.read(handle, MAX_BYTES)
    finally:
        os.close(handle)


def _document(content: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _why_wrong(run: RunDir, verb: str, found: os.stat_result, step: Any) -> str | None:
    if verb not in VERBS:
        return f"{verb!r} is no verb: {', '.join(VERBS)}"
    if step is not None and (verb not in WITH_STEP or not isinstance(step, int) or isinstance(step, bool) or step < 1):
        return f"{verb} after step {_line(str(step))} is not possible"
    return _why_stranger(run, found.st_uid)


def _why_stranger(run: RunDir, uid: int) -> str | None:
    """Return why a user may ask nothing of the run; None for its owner, members of its group, and root."""
    place = run.path.stat()
    if uid in (0, place.st_uid):
        return None
    try:
        user = pwd.getpwuid(uid)
        if place.st_gid in os.getgrouplist(user.pw_name, user.pw_gid):
            return None
    except KeyError:
        return f"uid {uid} is not known on this machine"
    try:
        group = grp.getgrgid(place.st_gid).gr_name
    except KeyError:
        group = str(place.st_gid)
    return f"{user.pw_name} is not in the run's group {group}"


def user_name(uid: int) -> str:
    """Return the login name of a user, or `uid 1234`."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return f"uid {uid}"


def _line(text: str) -> str:
    """Return the reason on one line, without what a terminal would obey."""
    words = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in words)[:MAX_REASON]


def _moment(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _lstat_owner(path: Path) -> str:
    try:
        return user_name(path.lstat().st_uid)
    except OSError:
        return "nobody known"


def _age_order(path: Path) -> tuple[float, str]:
    return _moment(path), path.name


def read_waiting(run: RunDir) -> Iterator[Request]:
    """Yield the requests that nobody has taken up, oldest first."""
    for path in waiting(run):
        yield read_request(run, path)
