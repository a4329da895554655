"""Where the ring of a rank lies, for rank_runner.py, and what becomes of it. Standard library, Python 3.8 or newer.

A ring is written thousands of times a second, so it belongs on storage of the node, not on the shared file system. When
the rank ends badly it is copied into the attempt, where `bsl` reads it; when it ends well it is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from ring_file import read_ring

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

ROOM_BYTES = 64 << 20
"""A folder with less room than this is left to the program."""
STALE_S = 3 * 86400.0
"""Rings that nobody could copy, such as after the loss of a node, are kept for this long."""
SITE = "ring_site"
STACKS = ".stacks"
"""What faulthandler has written is next to the ring, and is copied with it."""
FOLDER_MODE = 0o2750
"""What is made in the folder belongs to the group of the run too."""
COPY_MODE = 0o644
"""As that of every file of a run: the run directory says who may read it."""
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse", "wekafs", "panfs", "orangefs", "smb3", "cifs")


class Rings:
    """The folder of one rank. `folder` is None if the run wants none, or if there can be none: then `why` says why."""

    def __init__(self, setting: str, attempt: Path, name: str) -> None:
        self.folder: Path | None = None
        self.why: str | None = None
        self._is_kept = True
        self._copies, self.name = attempt / "rings", name
        self._wish = attempt / "trace.json"
        if setting == "none":
            self.why = "monitor.ring is none"
            return
        bases = bases_of(setting)
        errors = []
        for base in bases:
            try:
                above = base / f"bsl-rings-{os.getuid()}"
                above.mkdir(mode=0o711, exist_ok=True)
                if above.stat().st_uid != os.getuid() or above.is_symlink():
                    raise PermissionError(f"{above} belongs to somebody else")
                above.chmod(0o711)  # runs belong to several groups
                sweep(above)
                folder = above / f"{os.getpid()}-{time.time_ns()}-{name}"
                folder.mkdir()
                share(folder, group_of(attempt))
                self.folder = folder
                return
            except OSError as error:
                errors.append(str(error))
        self.why = "; ".join(errors) or "no storage of this node has room"

    def variables(self) -> dict[str, str]:
        """Return what the program's environment needs, so that it records its calls."""
        site = Path(__file__).resolve().parent / SITE
        if self.folder is None or not site.is_dir():
            return {}
        path = os.environ.get("PYTHONPATH")
        return {
            "BSL_RING_DIR": str(self.folder),
            "BSL_TRACE": str(self._wish),
            "PYTHONPATH": f"{site}{os.pathsep}{path}" if path else str(site),
        }

    def keep(self) -> str | None:
        """Copy the rings into the attempt, each under the number of its rank; return why that was not possible."""
        if self.folder is None:
            return None
        try:
            for name, ring in chosen(self.folder, self.name).items():
                self._copy(ring, name)
            self._is_kept = True
        except (OSError, ValueError) as error:
            self._is_kept = False
            return f"{self._copies}: {error}"
        return None

    def _copy(self, ring: Path, name: str) -> None:
        """Copy a ring, unless the attempt has a newer one of that rank: it may have been restarted on another node."""
        self._copies.mkdir(parents=True, exist_ok=True)
        copy = self._copies / f"{name}.ring"
        with contextlib.suppress(OSError, ValueError):
            if written(read_ring(copy.read_bytes())) > written(read_ring(ring.read_bytes())):
                return
        stacks = ring.with_suffix(STACKS)
        copy.with_suffix(STACKS).unlink(missing_ok=True)
        if stacks.exists() and stacks.stat().st_size:
            self._replace(stacks, copy.with_suffix(STACKS))
        self._replace(ring, copy)

    def _replace(self, source: Path, copy: Path) -> None:
        part = copy.with_name(f".{copy.name}.{os.getpid()}")
        try:
            shutil.copy2(str(source), str(part))  # with its time: that of stacks is their age
            part.chmod(COPY_MODE)
            part.replace(copy)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise

    def keep_traces(self, pid: int) -> str | None:
        """Copy the call traces into the attempt, however the rank has ended: somebody wanted them.

        That of a rank has its name, and those of further processes of task `pid` also their own numbers. Returns why
        one could not be copied.
        """
        if self.folder is None:
            return None
        try:
            names = {str(pid): self.name}
            names.update({ring.stem: name for name, ring in chosen(self.folder, self.name).items()})
            for trace in sorted(self.folder.glob("*.calls")):
                self._copies.mkdir(parents=True, exist_ok=True)
                name = names.get(trace.stem, f"{self.name}-{trace.stem}")
                self._replace(trace, self._copies / f"{name}.calls")
        except (OSError, ValueError) as error:
            self._is_kept = False
            return f"{self._copies}: {error}"
        return None

    def remove(self) -> None:
        """Remove the folder, unless its ring could not be copied."""
        if self.folder is not None and self._is_kept:
            shutil.rmtree(str(self.folder), ignore_errors=True)


def chosen(folder: Path, task: str) -> dict[str, Path]:
    """Return which rings to keep, by the name of their copy.

    A task may have started further processes that communicate, such as the workers of torchrun. They know their rank,
    once they take part; the launcher has that of the task. Of each rank the newest counts, and of worlds of different
    sizes the newest: workers are restarted. If nobody takes part, the ring that was written last is that of the task.
    """
    found = sorted(readable(folder), key=lambda each: written(each[1]))
    workers = [(path, ring) for path, ring in found if ring["rank"] is not None and takes_part(ring)]
    if not workers:
        return {task: found[-1][0]} if found else {}
    size = workers[-1][1]["world_size"]
    return {f"rank-{ring['rank']:04d}": path for path, ring in workers if ring["world_size"] == size}


def readable(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in folder.glob("*.ring"):
        with contextlib.suppress(ValueError):
            yield path, read_ring(path.read_bytes())


def takes_part(ring: dict[str, Any]) -> bool:
    """Whether the process communicates with other ranks, as opposed to one that only has a store."""
    calls = (call for lane in ring["lanes"] for call in lane["calls"])
    return any(call[2] == "init_process_group" or call[8] or call[6] is not None for call in calls)


def written(ring: dict[str, Any]) -> float:
    """Return when the newest call in a ring began: writing through a map does not change the time of a file."""
    return max((lane["calls"][-1][0] for lane in ring["lanes"] if lane["calls"]), default=0.0)


def group_of(attempt: Path) -> int:
    """Return the group of the run directory, whose members may read the run; -1 if it cannot be known."""
    with contextlib.suppress(OSError):
        return attempt.parent.parent.stat().st_gid
    return -1


def share(folder: Path, group: int) -> None:
    """Let a group read a folder and what will be in it; a user who is not in that group keeps the own one."""
    with contextlib.suppress(OSError):
        os.chown(str(folder), -1, group)
    folder.chmod(FOLDER_MODE)


def bases_of(setting: str) -> list[Path]:
    """Return the folders to try: the one that the run names, or those of this node that have room, memory last."""
    if setting != "auto":
        return [Path(setting)]
    named = [os.environ.get(name) for name in ("SLURM_TMPDIR", "TMPDIR")]
    found = [Path(each) for each in (*named, "/tmp", "/dev/shm") if each]
    return [base for base in dict.fromkeys(found) if is_usable(base)]


def is_usable(base: Path) -> bool:
    """Whether a folder is on storage of this node, as far as the kernel says, and has room."""
    try:
        room = os.statvfs(str(base))
        return room.f_bavail * room.f_frsize >= ROOM_BYTES and not is_shared(base)
    except OSError:
        return False


def is_shared(base: Path) -> bool:
    """Whether the file system of a folder is one that nodes share."""
    place, best, kind = os.path.realpath(str(base)), "", ""
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as stream:
        for line in stream:
            _, mount, name = line.split()[:3]
            is_above = place == mount or place.startswith(mount.rstrip("/") + "/")
            if is_above and len(mount) >= len(best):
                best, kind = mount, name
    return kind.startswith(SHARED)


def sweep(above: Path) -> None:
    """Remove folders of runners that have ended and left them here long ago."""
    for folder in old_folders(above):
        shutil.rmtree(str(folder), ignore_errors=True)


def old_folders(above: Path) -> Iterator[Path]:
    for folder in above.iterdir():
        pid = folder.name.partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and folder.stat().st_mtime < time.time() - STALE_S:
            yield folder
