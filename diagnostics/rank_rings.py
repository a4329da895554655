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

ROOM_BYTES = 64 << 20
"""A folder with less room than this is left to the program."""
STALE_S = 3 * 86400.0
"""Rings that nobody could copy, such as after the loss of a node, are kept for this long."""
SITE = "ring_site"
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse", "wekafs", "panfs", "orangefs", "smb3", "cifs")


class Rings:
    """The folder of one rank. `folder` is None if the run wants none, or if there can be none: then `why` says why."""

    def __init__(self, setting: str, attempt: Path, name: str) -> None:
        self.folder: Path | None = None
        self.why: str | None = None
        self._is_kept = True
        self._copy = attempt / "rings" / f"{name}.ring"
        self._wish = attempt / "trace.json"
        if setting == "none":
            self.why = "monitor.ring is none"
            return
        bases = bases_of(setting)
        errors = []
        for base in bases:
            try:
                above = base / f"bsl-rings-{os.getuid()}"
                above.mkdir(mode=0o700, exist_ok=True)
                if above.stat().st_uid != os.getuid() or above.is_symlink():
                    raise PermissionError(f"{above} belongs to somebody else")
                sweep(above)
                folder = above / f"{os.getpid()}-{time.time_ns()}-{name}"
                folder.mkdir(mode=0o755)
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
        """Copy the ring into the attempt; return why it could not be copied.

        A rank may have started further processes that communicate: the ring that was written last is taken.
        """
        if self.folder is None:
            return None
        part = self._copy.with_name(f".{self._copy.name}.{os.getpid()}")
        try:
            found = sorted(self.folder.glob("*.ring"), key=written)
            if found:
                self._copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(found[-1]), str(part))
                part.replace(self._copy)
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                part.unlink()
            self._is_kept = False
            return f"{self._copy}: {error}"
        return None

    def keep_traces(self, pid: int) -> str | None:
        """Copy the call traces into the attempt, however the rank has ended: somebody wanted them.

        That of the rank itself, process `pid`, is named after the rank alone, and those of its children also after
        their numbers. Returns why one could not be copied.
        """
        why = None
        for trace in sorted(self.folder.glob("*.calls")) if self.folder is not None else []:
            child = "" if trace.stem == str(pid) else f"-{trace.stem}"
            copy = self._copy.with_name(f"{self._copy.stem}{child}.calls")
            why = self._copy_file(trace, copy) or why
        return why

    def _copy_file(self, file: Path, copy: Path) -> str | None:
        part = copy.with_name(f".{copy.name}.{os.getpid()}")
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file), str(part))
            part.replace(copy)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            self._is_kept = False
            return f"{copy}: {error}"
        return None

    def remove(self) -> None:
        """Remove the folder, unless its ring could not be copied."""
        if self.folder is not None and self._is_kept:
            shutil.rmtree(str(self.folder), ignore_errors=True)


def written(ring: Path) -> float:
    """Return when the newest call in a ring began: writing through a map does not change the time of a file."""
    with ring.open("rb") as stream:
        calls = read_ring(stream.read())["lanes"]
    return max((lane["calls"][-1][0] for lane in calls if lane["calls"]), default=0.0)


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
