"""Where the ring of a rank lies, for rank_runner.py, and what becomes of it. Standard library, Python 3.8 or newer.

The folder is in one that others may write, such as /tmp. So it is opened once, without following a link, and everything
that is made, shared or deleted in it is named relative to that descriptor: what takes its place later is not touched.

A ring is written thousands of times a second, so it belongs on storage of the node, not on the shared file system. When
the rank ends badly it is copied into the attempt, where `bsl` reads it; when it ends well it is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from pathlib import Path

import safe_files
from ring_file import read_ring

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

ROOM_BYTES = 64 << 20
"""A folder with less room than this is left to the program."""
STALE_S = 3 * 86400.0
"""Rings that were not copied, such as after the loss of a node, are kept for this long."""
SITE = "ring_site"
STACKS = ".stacks"
"""What faulthandler has written is next to the ring, and is copied with it."""
FOLDER_MODE = 0o2750
"""What is made in the folder belongs to the group of the run too."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
COPY_MODE = 0o644
"""As that of every file of a run: the run directory decides who may read it."""
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse", "wekafs", "panfs", "orangefs", "smb3", "cifs")


class Rings:
    """The folder of one rank. `folder` is None if the run wants none, or if there can be none, for the reason `why`."""

    def __init__(self, setting: str, attempt: Path, name: str) -> None:
        self.folder: Path | None = None
        self.why: str | None = None
        self._is_kept = True
        self._above = self._opened = -1
        self._inside = Path()
        self._copies, self.name = attempt / "rings", name
        self._request = attempt / "requests" / "trace.json"
        if setting == "none":
            self.why = "monitor.ring is none"
            return
        bases = bases_of(setting)
        errors = []
        for base in bases:
            try:
                self._make_folder(base, group_of(attempt))
                return
            except OSError as error:
                errors.append(str(error))
        self.why = "; ".join(errors) or "no storage of this node has room"

    def _make_folder(self, base: Path, group: int) -> None:
        place, self._above = own_folder(base)
        sweep(self._above)
        name = f"{os.getpid()}-{time.time_ns()}-{self.name}"
        os.mkdir(name, 0o700, dir_fd=self._above)
        self._opened = os.open(name, FOLDER, dir_fd=self._above)
        share(self._opened, group)
        self.folder, self._inside = base / place / name, Path(f"/proc/self/fd/{self._opened}")

    def variables(self) -> dict[str, str]:
        """Return what the program's environment needs, so that it records its calls."""
        site = Path(__file__).resolve().parent / SITE
        if self.folder is None or not site.is_dir():
            return {}
        return {
            "BSL_RING_DIR": str(self.folder),
            "BSL_TRACE": str(self._request),
            "PYTHONPATH": first_on_path(site),
        }

    def keep(self) -> str | None:
        """Copy the rings into the attempt, each under the number of its rank; return why that was not possible."""
        if self.folder is None:
            return None
        try:
            for name, ring in chosen(self._inside, self.name).items():
                self._copy(ring, name)
            self._is_kept = True
        except (OSError, ValueError) as error:
            self._is_kept = False
            return f"{self._copies}: {error}"
        return None

    def _copy(self, ring: Path, name: str) -> None:
        """Copy a ring, unless the attempt has a newer one of that rank: it may have been restarted on another node."""
        self._copies.mkdir(mode=0o755, parents=True, exist_ok=True)
        copy = self._copies / f"{name}.ring"
        with contextlib.suppress(OSError, ValueError):
            if written(read_ring(safe_files.read_file(copy))) > written(read_ring(safe_files.read_file(ring))):
                return
        stacks = ring.with_suffix(STACKS)
        copy.with_suffix(STACKS).unlink(missing_ok=True)
        if stacks.exists() and stacks.stat().st_size:
            self._replace(stacks, copy.with_suffix(STACKS))
        self._replace(ring, copy)

    def _replace(self, source: Path, copy: Path) -> None:
        part = f".{copy.name}.{os.urandom(8).hex()}"
        with safe_files.open_folder(copy.parent, follow=True) as folder:
            try:
                copy_file(str(source), part, folder)
                os.rename(part, copy.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise

    def keep_traces(self, pid: int) -> str | None:
        """Copy the call traces into the attempt, however the rank has ended: they were requested.

        That of a rank has its name, and those of further processes of task `pid` also their own numbers. Returns why
        one could not be copied.
        """
        if self.folder is None:
            return None
        try:
            names = {str(pid): self.name}
            names.update({ring.stem: name for name, ring in chosen(self._inside, self.name).items()})
            for trace in sorted(self._inside.glob("*.calls")):
                self._copies.mkdir(mode=0o755, parents=True, exist_ok=True)
                name = names.get(trace.stem, f"{self.name}-{trace.stem}")
                self._replace(trace, self._copies / f"{name}.calls")
        except (OSError, ValueError) as error:
            self._is_kept = False
            return f"{self._copies}: {error}"
        return None

    def remove(self) -> None:
        """Remove the folder, unless its ring could not be copied."""
        if self.folder is not None and self._is_kept:
            with contextlib.suppress(OSError):
                remove_tree(self.folder.name, self._above)
            os.close(self._opened)
            os.close(self._above)
            self.folder = None


def first_on_path(site: Path) -> str:
    """Return the PYTHONPATH of a program, with `site` first, once."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(site), *(each for each in given if each not in ("", str(site)))])


def chosen(folder: Path, task: str) -> dict[str, Path]:
    """Return which rings to keep, by the name of their copy.

    A task may have started further processes that communicate, such as the workers of torchrun. They know their rank,
    once they take part; the launcher has that of the task. Of each rank the newest counts, and of worlds of different
    sizes the newest: workers are restarted. If none takes part, the ring that was written last is that of the task.
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
            yield path, read_ring(safe_files.read_file(path))


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


def share(folder: int, group: int) -> None:
    """Let a group read a folder and what will be in it; a user who is not in that group keeps the own one."""
    with contextlib.suppress(OSError):
        os.fchown(folder, -1, group)
    os.fchmod(folder, FOLDER_MODE)


def own_folder(base: Path) -> tuple[str, int]:
    """Return the name of this user's folder of rings below `base`, and the folder, open; it is made if need be.

    Another user may have taken the well-known name: then a random one serves, which cannot be guessed.

    Raises:
        OSError: there can be none.
    """
    with safe_files.open_folder(base, follow=True) as inside:
        for name in names_in(inside):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=inside)
            with contextlib.suppress(OSError):
                folder = os.open(name, FOLDER, dir_fd=inside)
                if os.fstat(folder).st_uid == os.getuid():
                    os.fchmod(folder, 0o711)  # runs belong to several groups
                    return name, folder
                os.close(folder)
    raise PermissionError(f"no folder in {base} belongs to this user alone")


def names_in(base: int) -> Iterator[str]:
    """Yield names of this user's folder of rings: the usual one, those made when it was taken, and a new one."""
    usual = f"bsl-rings-{os.getuid()}"
    yield usual
    with contextlib.suppress(OSError):  # a folder that may not be listed
        yield from sorted(each for each in os.listdir(base) if each.startswith(f"{usual}-"))
    yield f"{usual}-{os.urandom(8).hex()}"


def copy_file(source: str, name: str, folder: int) -> None:
    """Copy a file to a new one in an open folder, with its time: that of stacks is their age."""
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with safe_files.open_stream(source) as original, os.fdopen(handle, "wb") as copy:
        shutil.copyfileobj(original, copy)
        copy.flush()
        found = os.fstat(original.fileno())
        os.utime(copy.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
        os.fchmod(copy.fileno(), COPY_MODE)


def remove_tree(name: str, inside: int) -> None:
    """Remove a folder and all that is in it; links are removed, and what they name stays."""
    with safe_files.open_folder(name, folder=inside) as folder:
        for each in os.listdir(folder):
            if stat.S_ISDIR(os.stat(each, dir_fd=folder, follow_symlinks=False).st_mode):
                remove_tree(each, folder)
            else:
                os.unlink(each, dir_fd=folder)
    os.rmdir(name, dir_fd=inside)


def bases_of(setting: str) -> list[Path]:
    """Return the folders to try: the one that the run names, or those of this node that have room, memory last."""
    if setting != "auto":
        return [Path(setting)]
    named = [os.environ.get(name) for name in ("SLURM_TMPDIR", "TMPDIR")]
    found = [Path(each) for each in (*named, "/tmp", "/dev/shm") if each]
    return [base for base in dict.fromkeys(found) if is_usable(base)]


def is_usable(base: Path) -> bool:
    """Whether a folder is on storage of this node, as far as the kernel shows, and has room."""
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


def sweep(above: int) -> None:
    """Remove folders of runners that have ended and left them here long ago."""
    for name in os.listdir(above):
        with contextlib.suppress(OSError):
            if is_old(name, os.stat(name, dir_fd=above, follow_symlinks=False)):
                remove_tree(name, above)


def is_old(name: str, found: os.stat_result) -> bool:
    """Whether an entry is PID-NS-rank-NNNN or PID-NS-slot-NNNN of a runner that has ended long ago, and a folder."""
    pid, _, rest = name.partition("-")
    moment, _, rest = rest.partition("-")
    kind, _, rank = rest.partition("-")
    is_ours = all(part.isdigit() for part in (pid, moment, rank)) and kind in ("rank", "slot")
    is_folder = is_ours and stat.S_ISDIR(found.st_mode) and found.st_mtime < time.time() - STALE_S
    return is_folder and not os.path.exists(f"/proc/{pid}")
