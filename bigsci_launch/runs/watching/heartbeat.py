"""The heartbeat of a watcher: who watches a run, when it last looked, and what it found."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from bigsci_launch.procfs import start_ticks, user_name
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.ownership import owner_of
from bigsci_launch.runs.watching.places import colleagues, names_in, open_of, open_to_write, open_watch, require_own
from bigsci_launch.runs.watching.typed import typed
from bigsci_launch.safe_files import parse_json, read_file_of, write_in

AGENT = "agent"
"""What the names of watchers begin with that job scripts start: `agent-0001` watches attempt 0001."""
MISSED = 6
"""A watcher that has left out this many looks is dead, or does not get to run."""
LEAST_SILENCE_S = 120.0
LARGEST, MOST_FILES, MOST_OF_COLLEAGUE = 1 << 20, 1000, 5
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,199}\.json")


class Health(Enum):
    """The report of a watcher on a run. A watcher that cannot see is never healthy: `blind` is for what is unknown."""

    HEALTHY = "healthy"
    FINDING = "finding"
    BLIND = "blind"


@dataclass(frozen=True, slots=True)
class WatcherHeartbeat:
    """`every_s` is the time between two looks; `time` is seconds since the epoch by the clock of `host`. `blind` says
    what it could not see. `may_act`: whether it was allowed to act. `ended`: it has left by itself."""

    name: str
    host: str
    pid: int
    start_ticks: int | None
    time: float
    every_s: float
    health: Health
    sentence: str
    attempt: str | None
    may_act: bool
    blind: tuple[str, ...] = ()
    ended: bool = False

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def is_dead(self, now: float) -> bool | None:
        """Whether the watcher is gone without having said so; None if it is on another host and only just late."""
        if self.ended:
            return False
        if self.is_here:
            return start_ticks(self.pid) != self.start_ticks
        age = now - self.time
        return age > max(LEAST_SILENCE_S, MISSED * self.every_s) or (None if age > 2 * self.every_s + 30 else False)


def agent_of(attempt: str) -> str:
    """Return the name of the watcher that the script of an attempt starts."""
    return f"{AGENT}-{attempt}"


def own_heartbeat(name: str, **fields: Any) -> WatcherHeartbeat:
    """Return a heartbeat of this process, now."""
    pid = os.getpid()
    return WatcherHeartbeat(
        name=name, host=socket.gethostname(), pid=pid, start_ticks=start_ticks(pid), time=time.time(), **fields
    )


def write_heartbeat(run: RunDir, heartbeat: WatcherHeartbeat) -> None:
    """Replace the watcher's heartbeat. Raises OSError if it cannot be written."""
    file = run.watcher_file(heartbeat.name)
    document = {"schema_version": 1, **asdict(heartbeat), "health": heartbeat.health.value}
    text = json.dumps(document, indent=2, ensure_ascii=False).encode("utf-8", "replace").decode()
    with open_to_write(run) as folder:
        write_in(folder, file.name, f"{text}\n")


def remove_heartbeat(run: RunDir, name: str) -> None:
    """Remove the sign of a watcher that leaves. Raises OSError if it cannot be removed."""
    with open_to_write(run) as folder, suppress(FileNotFoundError):
        os.unlink(run.watcher_file(name).name, dir_fd=folder)


def read_heartbeats(run: RunDir) -> list[WatcherHeartbeat]:
    """Return the newest sign of every watcher of the run's owner, the newest first."""
    with suppress(OSError), open_watch(run) as folder:
        return _newest_first(_read_all(folder, owner_of(run)))
    return []


def read_all_heartbeats(run: RunDir) -> list[WatcherHeartbeat]:
    """Return the newest sign of every watcher, for people to read: colleagues' have the names of these."""
    found = read_heartbeats(run)
    for uid in colleagues(run):
        with suppress(OSError), open_of(run, uid) as folder:
            theirs = _newest_first(_read_all(folder, uid))[:MOST_OF_COLLEAGUE]
            found += [
                replace(heartbeat, name=f"{heartbeat.name} of {user_name(uid)}", may_act=False) for heartbeat in theirs
            ]
    return _newest_first(found)


def _read_all(folder: int, owner: int) -> list[WatcherHeartbeat]:
    names = [name for name in names_in(folder) if _NAME.fullmatch(name)]
    return [heartbeat for name in names[:MOST_FILES] if (heartbeat := _heartbeat(folder, name, owner)) is not None]


def _newest_first(heartbeats: list[WatcherHeartbeat]) -> list[WatcherHeartbeat]:
    return sorted(heartbeats, key=lambda heartbeat: heartbeat.time, reverse=True)


def _heartbeat(folder: int, name: str, owner: int) -> WatcherHeartbeat | None:
    try:
        content, found = read_file_of(name, LARGEST, folder=folder)
        require_own(found, owner, Path(name))
        heartbeat = typed(WatcherHeartbeat, parse_json(content))
    except (OSError, ValueError):
        return None
    return heartbeat if f"{heartbeat.name}.json" == name else None
