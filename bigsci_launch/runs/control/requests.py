"""What people ask of a run: one file each in `control/`. The whole group may write there.

`bsl control` writes JSON documents. A plain file whose name is the verb asks the same, with its content as the reason.
The requester is the owner of the file; its content does not name one.

Nothing in `control/` is believed for longer than it is open. Folder and file are opened without following links, the
file is judged by its descriptor, and what it asks is copied into the owner's own `watch/requests/`, as `KEY.TURN`. That
file gets its name by `link`, so only one watcher can make it. One that takes over makes the file of the next turn.

However many files there are, a look takes a bounded time, and the owner's requests come first: see `waiting`.
"""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import random
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bigsci_launch.procfs import user_name
from bigsci_launch.runs.control.request import MAX_BYTES, MOST_AT_ONCE, WITH_STEP, Request
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.ownership import owner_of
from bigsci_launch.runs.watching.places import SHARED_MODE, is_owner, names_in, open_watch, require_own
from bigsci_launch.runs.watching.typed import LARGEST_FLOAT, typed
from bigsci_launch.safe_files import make_folder, open_folder, parse_json, read_file_of, write_in

VERBS = ("save", "exit", "restart", "dump", "kill")
MAX_REASON = 500
MOST_OF_ONE = 10
"""Requests of anyone but the owner that wait or are being carried through."""
MOST_LOOKED_AT = 20_000
"""Files that are looked at in one look, which takes 0.1 s on a local disk. Of more than these, a lot decides which."""
_UNKNOWN_USER = -1
_NAMED = re.compile(r"(?P<verb>[a-z]+)-(?P<moment>[0-9]+)-(?P<number>[0-9]+)\.json")
_IGNORED = re.compile(r"\..*|.*~")
_TAKEN = re.compile(r"(?P<key>[A-Za-z0-9_]{1,20}-[0-9]{1,20}-[0-9]{1,20})\.(?P<turn>[0-9]{1,4})")
_ATTEMPT = re.compile(r"[0-9]{1,9}(\.r[0-9]{1,9})?")
_WITH_GROUP = stat.S_IRGRP | stat.S_IROTH
_LATEST_NS = int(LARGEST_FLOAT) * 10**9


@dataclass(frozen=True, slots=True)
class Taken:
    """A request that a watcher has taken up, in the given turn."""

    request: Request
    watcher: str
    turn: int = 1

    @property
    def name(self) -> str:
        return f"{self.request.key}.{self.turn}"


def make_control(run: RunDir) -> None:
    """Make the folder in which the run's group may ask, whatever the umask, or let only its owner remove what is there.

    Raises:
        OSError: it cannot be made.
    """
    make_folder(run.control, SHARED_MODE)
    with suppress(OSError), open_folder(run.control) as folder:
        found = os.fstat(folder)
        if found.st_uid == os.geteuid():
            os.fchown(folder, -1, run.path.stat().st_gid)
            os.fchmod(folder, stat.S_IMODE(found.st_mode) | stat.S_ISVTX)


def write_request(run: RunDir, verb: str, why: str, *, after_step: int | None, attempt: str) -> str:
    """Ask something of a run, and return the name of the file. Raises OSError if `control/` cannot be written."""
    name = f"{verb}-{time.time_ns()}-{os.getpid()}.json"
    document = {"schema_version": 1, "verb": verb, "why": why, "after_step": after_step, "attempt": attempt}
    if owner_of(run) == os.geteuid():
        make_control(run)
    with open_folder(run.control) as folder:
        write_in(folder, name, json.dumps(document, indent=2).encode("utf-8", "replace").decode() + "\n")
    return name


def waiting(run: RunDir) -> list[str]:
    """Return the names of files that ask something and were not taken up. A folder asks nothing.

    Those of the owner come first, oldest first; then the oldest of each other user, the second of each, and so on: of
    each at most MOST_OF_ONE, those included that are being carried through.
    """
    room = _room(taken_up(run))
    with suppress(OSError), open_folder(run.control) as folder:
        (_, own), *others = _by_user(run, folder).items()
        turns = zip_longest(*(names[: room(user)] for user, names in others))
        return [*own, *(name for turn in turns for name in turn if name is not None)][:MOST_AT_ONCE]
    return []


def _room(open_ones: Sequence[Taken]) -> Callable[[int], int]:
    """Return a function that says how many more requests of a user may wait, apart from the owner."""
    num_open = Counter(taken.request.who for taken in open_ones)
    return lambda user: max(0, MOST_OF_ONE - num_open[_who(user)])


def _who(user: int) -> str:
    return user_name(user) if user != _UNKNOWN_USER else "an unknown user"


def remove_surplus(run: RunDir, open_ones: Sequence[Taken]) -> dict[str, int]:
    """Remove unread what asks more than MOST_OF_ONE of one user, `open_ones` included; the owner may ask any number.

    Return how many were removed, by login name. Only the owner removes something.
    """
    removed: dict[str, int] = {}
    if not is_owner(run):
        return removed
    room = _room(open_ones)
    with suppress(OSError), open_folder(run.control) as folder:
        _, *others = _by_user(run, folder).items()
        for user, names in others:
            if surplus := names[room(user) :]:
                removed[_who(user)] = sum(_remove(folder, name) for name in surplus)
    return removed


def _by_user(run: RunDir, folder: int) -> dict[int, list[str]]:
    """Return the names of files that ask something, oldest first, by user. The owner is the first, with files or not.

    Files with a second name count as an unknown user's: their owner may not be who put them there.
    """
    with os.scandir(folder) as entries:
        names = [
            each.name for each in entries if not (_IGNORED.fullmatch(each.name) or each.is_dir(follow_symlinks=False))
        ]
    found: dict[int, list[tuple[float, str]]] = {owner_of(run): []}
    for name in random.sample(names, min(len(names), MOST_LOOKED_AT)):
        with suppress(FileNotFoundError):
            each = _lstat(folder, name)
            user = each.st_uid if each.st_nlink == 1 else _UNKNOWN_USER
            found.setdefault(user, []).append((_sane(each.st_mtime), name))
    return {user: [name for _, name in sorted(files)] for user, files in found.items()}


def _remove(folder: int, name: str) -> bool:
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)
        return True
    return False


def is_complete(run: RunDir, name: str) -> bool:
    """Whether a file can be taken up at once. An empty one may have been made by a shell that is about to write."""
    with suppress(OSError), open_folder(run.control) as folder:
        return _lstat(folder, name).st_size > 0
    return False


def take_up(run: RunDir, name: str, watcher: str) -> Taken | None:
    """Take a request up for `watcher`. None if another one has, or if it is gone.

    Raises:
        OSError: it cannot be kept: it stays where it is then.
    """
    with open_watch(run, run.requests.name, makes=True) as kept, open_folder(run.control) as folder:
        try:
            found = _lstat(folder, name)
        except FileNotFoundError:
            return None
        key = f"{_verb(name)}-{min(max(found.st_mtime_ns, 0), _LATEST_NS)}-{found.st_ino}"
        taken = Taken(replace(_read(run, folder, name), key=key), watcher)
        is_ours = _keep(kept, taken)
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
    return taken if is_ours else None


def take_over(run: RunDir, taken: Taken, watcher: str) -> Taken | None:
    """Take over a request of another watcher, which is gone. None if a third one was quicker."""
    ours = replace(taken, watcher=watcher, turn=taken.turn + 1)
    with open_watch(run, run.requests.name, makes=True) as kept:
        return ours if _keep(kept, ours) else None


def _keep(kept: int, taken: Taken) -> bool:
    """Write down who has taken a request up. False if that turn is another watcher's."""
    part = f".{taken.name}.{secrets.token_hex(8)}"
    write_in(kept, part, json.dumps({"watcher": taken.watcher, "request": asdict(taken.request)}) + "\n")
    try:
        os.link(part, taken.name, src_dir_fd=kept, dst_dir_fd=kept, follow_symlinks=False)
    except FileExistsError:
        return False
    finally:
        os.unlink(part, dir_fd=kept)
    return True


def taken_up(run: RunDir) -> list[Taken]:
    """Return the requests that were taken up and are not settled, each in its last turn, oldest first."""
    try:
        with open_watch(run, run.requests.name) as kept:
            found = [_taken(kept, name, owner_of(run)) for name in _last_turns(names_in(kept))]
    except OSError:
        return []
    return sorted(filter(None, found), key=lambda taken: (taken.request.asked, taken.request.key))


def _last_turns(names: Iterable[str]) -> list[str]:
    turns: dict[str, int] = {}
    for match in filter(None, map(_TAKEN.fullmatch, names)):
        turns[match["key"]] = max(turns.get(match["key"], 0), int(match["turn"]))
    return [f"{key}.{turn}" for key, turn in turns.items()]


def _taken(kept: int, name: str, owner: int) -> Taken | None:
    try:
        content, found = read_file_of(name, 4 * MAX_BYTES, folder=kept)
        require_own(found, owner, Path(name))
        document = parse_json(content)
        taken = Taken(typed(Request, document["request"]), str(document["watcher"]), int(name.rpartition(".")[2]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return taken if taken.name == name else None


def forget(run: RunDir, taken: Taken) -> None:
    """Remove a request that is settled, as the ledger says. Raises OSError if it cannot be removed."""
    with open_watch(run, run.requests.name, makes=True) as kept:
        for turn in range(1, taken.turn + 1):
            with suppress(FileNotFoundError):
                os.unlink(replace(taken, turn=turn).name, dir_fd=kept)


def moment_of(key: str) -> float | None:
    """Return when a request was written that was taken up, in seconds since the epoch, by the file system's clock."""
    return int(key.split("-")[1]) / 1e9 if _TAKEN.fullmatch(f"{key}.1") else None


def _verb(name: str) -> str:
    match = _NAMED.fullmatch(name)
    verb = match["verb"] if match else name
    plain = re.sub(r"[^A-Za-z0-9]", "_", verb)[:19]
    # Keys of the ledger begin with a letter or a digit.
    return verb if verb in VERBS else plain if plain[:1].isalnum() else f"x{plain}"


def read_waiting(run: RunDir) -> list[Request]:
    """Return the requests that were not taken up yet, oldest first. The folder may hold any other file."""
    names = waiting(run)
    with suppress(OSError), open_folder(run.control) as folder:
        return [_read(run, folder, name) for name in names]
    return []


def _read(run: RunDir, folder: int, name: str) -> Request:
    verb = _verb(name)
    try:
        found, content = _content(folder, name)
    except (OSError, _Unusable) as error:
        moment, wrong = _moment(folder, name), str(getattr(error, "strerror", None) or error)
        return Request(name, verb, _lstat_owner(folder, name), "", None, None, moment, wrong)
    plain = Request(name, verb, user_name(found.st_uid), "", None, None, _sane(found.st_mtime))
    document = _document(content)
    if document is None:
        return replace(plain, wrong="it is not a JSON document")
    if (refused := _why_wrong(run, verb, found, document)) is not None:
        return replace(plain, wrong=refused)
    # A file that only its owner may read may have been moved here by another user: its content is not shown.
    why = _line(str(document.get("why") or "")) if found.st_mode & _WITH_GROUP else ""
    return replace(plain, why=why, after_step=document.get("after_step"), attempt=document.get("attempt"))


class _Unusable(Exception):
    """A file that must not be read."""


def _content(folder: int, name: str) -> tuple[os.stat_result, bytes]:
    known = _lstat(folder, name)
    if stat.S_ISLNK(known.st_mode):
        raise _Unusable("it is a link")
    if stat.S_ISREG(known.st_mode) and known.st_size == 0 and known.st_nlink == 1:
        return known, b""  # there is nothing to read
    if not stat.S_ISREG(known.st_mode):
        raise _Unusable("it is not a plain file")
    try:
        content, found = read_file_of(name, MAX_BYTES, folder=folder)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise _Unusable(f"it is larger than {MAX_BYTES >> 10} KiB") from error
        raise
    if found.st_nlink > 1:
        raise _Unusable("it has a second hard link, so its owner may not have put it there")
    return found, content


def _document(content: bytes) -> dict[str, Any] | None:
    """Return what a request says; None if it is damaged. In a plain file, that is the reason."""
    if not content.lstrip().startswith(b"{"):
        return {"why": content.decode("utf-8", "replace")}
    try:
        document = parse_json(content)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _why_wrong(run: RunDir, verb: str, found: os.stat_result, document: Mapping[str, Any]) -> str | None:
    step, attempt = document.get("after_step"), document.get("attempt")
    if verb not in VERBS:
        return f"{verb!r} is not one of {', '.join(VERBS)}"
    if step is not None and (verb not in WITH_STEP or not _is_step(step)):
        return f"{verb} after step {_line(str(step))} is not possible"
    if attempt is not None and not (isinstance(attempt, str) and _ATTEMPT.fullmatch(attempt)):
        return f"{_line(str(attempt)[:40])!r} is not an attempt"
    return _why_stranger(run, found.st_uid)


def _is_step(step: Any) -> bool:
    return isinstance(step, int) and not isinstance(step, bool) and 1 <= step < 1 << 62


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


def _line(text: str) -> str:
    """Return the reason on one line, without what a terminal would obey."""
    words = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in words)[:MAX_REASON]


def _lstat(folder: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _moment(folder: int, name: str) -> float:
    try:
        return _sane(_lstat(folder, name).st_mtime)
    except OSError:
        return 0.0


def _sane(moment: float) -> float:
    return min(max(moment, 0.0), LARGEST_FLOAT)


def _lstat_owner(folder: int, name: str) -> str:
    try:
        return user_name(_lstat(folder, name).st_uid)
    except OSError:
        return "an unknown user"
