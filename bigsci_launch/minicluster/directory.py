"""Every path in a cluster's directory, and the lock that lets one `bsl cluster` at a time work in it.

Whoever can reach the directory of an ordinary user's cluster could run jobs as that user, because a slurmd that is not
root runs every task as itself. So it is private. In a cluster of root, tasks run as the user who submits them.

DIR/
  processes.jsonl     processes that were started; created first, it also marks the directory as a cluster's
  cluster.json        what the cluster is: nodes, addresses, ports
  slurm.conf gres.conf cgroup.conf
  hosts               what nodes see as /etc/hosts
  munge/              munged's key, socket, seed and PID
  gpu/n0/gpu0         empty files that act as devices
  log/ state/ spool/  Slurm's and munge's own files
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.errors import ClusterError
from bigsci_launch.safe_files import others_may_write

# sockaddr_un holds 108 bytes; slurmd's own sockets in spool/NODE/ are the longest: NODE_JOBID.STEPID.
MAX_PATH_LENGTH = 60
FOLDER_HINT = "set BSL_CLUSTER_DIR to a new folder in your home directory or in /tmp"
PLAIN_PATH = re.compile(r"/[A-Za-z0-9/._+-]*")


@dataclass(frozen=True, slots=True)
class ClusterDir:
    """The directory of one cluster; `path` is absolute."""

    path: Path

    @property
    def processes(self) -> Path:
        return self.path / "processes.jsonl"

    @property
    def record(self) -> Path:
        return self.path / "cluster.json"

    @property
    def slurm_conf(self) -> Path:
        return self.path / "slurm.conf"

    @property
    def hosts(self) -> Path:
        return self.path / "hosts"

    @property
    def munge(self) -> Path:
        """As private as the directory: who cannot reach the socket in it gets no credential, and Slurm refuses him."""
        return self.path / "munge"

    @property
    def munge_key(self) -> Path:
        return self.munge / "munge.key"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "munge.sock"

    @property
    def munge_pid(self) -> Path:
        return self.munge / "munge.pid"

    @property
    def munge_seed(self) -> Path:
        return self.munge / "munge.seed"

    @property
    def munge_log(self) -> Path:
        return self.logs / "munged.log"

    @property
    def logs(self) -> Path:
        return self.path / "log"

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def spool(self) -> Path:
        return self.path / "spool"

    @property
    def devices(self) -> Path:
        return self.path / "gpu"

    def node_spool(self, node: str) -> Path:
        return self.spool / node

    def node_devices(self, node: str) -> Path:
        return self.devices / node

    def device(self, node: str, number: int) -> Path:
        return self.node_devices(node) / f"gpu{number}"

    def configuration(self, name: str) -> Path:
        """One of slurm.conf, gres.conf, cgroup.conf."""
        return self.path / name

    def output(self, process: str) -> Path:
        """Where a daemon's stdout and stderr go."""
        return self.logs / f"{process}.out"

    @property
    def is_cluster(self) -> bool:
        """Whether `up` has ever started here."""
        return self.processes.exists()

    def require_safe_place(self) -> None:
        """Check that no other user could replace the directory by one of their own, with another slurm.conf.

        Raises:
            ClusterError: names the folder above that others own or may write.
        """
        trusted = {0, os.geteuid(), Path("/").stat().st_uid}  # in a user namespace, / may belong to nobody
        for above in filter(Path.exists, self.path.resolve().parents):
            found = above.stat()
            if found.st_uid not in trusted or others_may_write(found):
                raise ClusterError(
                    f"{self.path} is below {above}, where others may exchange it ({_describe(found)})", hint=FOLDER_HINT
                )

    def claim(self) -> None:
        """Mark the directory as a cluster's.

        Raises:
            ClusterError: there is already a cluster here, the directory contains something else, or others can get in.
        """
        _require_private(self.path)
        if self.is_cluster:
            raise ClusterError(
                f"there is already a cluster in {self.path}",
                hint="`bsl cluster down` removes it; to start another one, set BSL_CLUSTER_DIR",
            )
        if any(self.path.iterdir()):
            raise ClusterError(f"{self.path} is not empty", hint="set BSL_CLUSTER_DIR to an empty directory")
        self.processes.touch(mode=0o600)

    def remove(self) -> None:
        """Delete the directory of a cluster whose processes have ended."""
        # The marker is removed last, so that an interrupted removal can be repeated.
        for path in self.path.iterdir():
            if path != self.processes:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self.processes.unlink()
        self.path.rmdir()

    def remove_if_empty(self) -> None:
        """Delete what is left of an `up` that ended before it marked the directory.

        Raises:
            ClusterError: the directory contains files, but no sign that `up` created them.
        """
        try:
            self.path.rmdir()
        except OSError as error:
            raise ClusterError(f"{self.path} is not a cluster's directory: nothing was removed") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other `up`, `down` and `kill-node` out of the directory, which is created if missing.

        Raises:
            ClusterError: another command works in it, or it is not ours: what it records are processes to be killed.
        """
        handle = self._open()
        try:
            self._lock(handle)
            yield
        finally:
            os.close(handle)

    def _open(self) -> int:
        try:
            for above in reversed(self.path.parents):
                if not above.exists():
                    above.mkdir(mode=0o755, exist_ok=True)
            self.path.mkdir(mode=folder_mode(), exist_ok=True)
            handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ClusterError(
                f"{self.path}: {error.strerror}", hint="set BSL_CLUSTER_DIR to a directory that you can write to"
            ) from error
        found = os.fstat(handle)
        if found.st_uid != os.geteuid() or others_may_write(found):
            os.close(handle)
            raise ClusterError(f"{self.path} is not yours alone ({_describe(found)})", hint=FOLDER_HINT)
        return handle

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A faster `down` may have removed the directory that we hold open.
            is_current = self.path.exists() and os.path.samestat(os.fstat(handle), self.path.stat())
        except BlockingIOError:
            is_current = False
        if not is_current:
            raise ClusterError(f"another `bsl cluster` is running in {self.path}", hint="try again when it has ended")


def is_root() -> bool:
    """Whether the daemons of a cluster will run as root."""
    return os.geteuid() == 0


def folder_mode() -> int:
    """Return the mode of the directory, and of munged's folder in it."""
    return 0o755 if is_root() else 0o700


def file_mode() -> int:
    """Return the mode of the configuration: other users may read it in a cluster of root, where they may run jobs."""
    return 0o644 if is_root() else 0o600


def _require_private(path: Path) -> None:
    """Refuse an ordinary user's directory that others can reach.

    Raises:
        ClusterError: names the mode.
    """
    found = path.stat()
    if not is_root() and stat.S_IMODE(found.st_mode) & 0o077:
        raise ClusterError(
            f"{path} is open to others ({_describe(found)}): they could run jobs as you",
            hint=f"`chmod 700 {path}`, or set BSL_CLUSTER_DIR to a folder that does not exist yet",
        )


def _describe(found: os.stat_result) -> str:
    return f"uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"


def default_directory(environment: Mapping[str, str]) -> ClusterDir:
    """Return `$BSL_CLUSTER_DIR`, else `~/.bsl-cluster`.

    Raises:
        ClusterError: the path has characters that slurm.conf does not allow, or is too long for the sockets in it.
    """
    named = environment.get("BSL_CLUSTER_DIR") or str(Path(environment.get("HOME", "/tmp")) / ".bsl-cluster")
    path = str(Path(named).absolute())
    hint = "set BSL_CLUSTER_DIR to a short and plain path, such as /tmp/bsl-cluster"
    if not PLAIN_PATH.fullmatch(path):
        raise ClusterError(f"{path!r}: a path in slurm.conf may only have letters, digits and /._+-", hint=hint)
    if len(path) > MAX_PATH_LENGTH:
        raise ClusterError(
            f"{path}: {len(path)} characters are too many for Unix sockets (at most {MAX_PATH_LENGTH})", hint=hint
        )
    return ClusterDir(Path(path))
