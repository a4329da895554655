"""Every path of a cluster's directory, and the lock that lets one `bsl cluster` at a time work in it.

DIR/
  processes.jsonl     who was started; made first, so that it also says "this directory is a cluster's"
  cluster.json        what the cluster is: nodes, addresses, ports
  slurm.conf gres.conf cgroup.conf
  hosts               what isolated nodes see as /etc/hosts
  munge.key munge.sock munge.seed munge.pid
  gpu/n0/gpu0         empty files that stand for devices
  log/ state/ spool/  Slurm's and munge's own files
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.errors import ClusterError

# sockaddr_un holds 108 bytes; slurmd's own sockets in spool/NODE/ are the longest: NODE_JOBID.STEPID.
MAX_PATH_LENGTH = 60


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
    def munge_key(self) -> Path:
        return self.path / "munge.key"

    @property
    def munge_socket(self) -> Path:
        return self.path / "munge.sock"

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

    def output(self, process: str) -> Path:
        """Where a daemon's stdout and stderr go."""
        return self.logs / f"{process}.out"

    @property
    def is_cluster(self) -> bool:
        """Whether `up` ever began here."""
        return self.processes.exists()

    def claim(self) -> None:
        """Make the directory a cluster's.

        Raises:
            ClusterError: a cluster is here already, or the directory holds something else.
        """
        if self.is_cluster:
            raise ClusterError(
                f"a cluster is in {self.path} already",
                hint="`bsl cluster down` removes it, and BSL_CLUSTER_DIR names a place for another",
            )
        if any(self.path.iterdir()):
            raise ClusterError(f"{self.path} is not empty", hint="set BSL_CLUSTER_DIR to a directory of its own")
        self.processes.touch(mode=0o600)

    def remove(self) -> None:
        """Delete the directory; a cluster's only.

        Raises:
            ClusterError: it holds files, and none says that `up` made them.
        """
        if self.is_cluster:
            shutil.rmtree(self.path)
            return
        try:
            self.path.rmdir()
        except OSError as error:
            raise ClusterError(f"{self.path} is not a cluster's directory: it is left as it is") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other `up`, `down` and `kill-node` away from the directory, which is made if missing."""
        handle = self._open()
        try:
            self._lock(handle)
            yield
        finally:
            os.close(handle)

    def _open(self) -> int:
        try:
            self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
            return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ClusterError(
                f"{self.path}: {error.strerror}", hint="set BSL_CLUSTER_DIR to a directory that you may write"
            ) from error

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A `down` that was quicker has removed the directory that we hold open.
            is_current = self.path.exists() and os.path.samestat(os.fstat(handle), self.path.stat())
        except BlockingIOError:
            is_current = False
        if not is_current:
            raise ClusterError(f"another `bsl cluster` is at work in {self.path}", hint="try again when it has ended")


def default_directory(environment: dict[str, str]) -> ClusterDir:
    """`$BSL_CLUSTER_DIR`, else `~/.cache/bsl/cluster`.

    Raises:
        ClusterError: the path is too long for the sockets that are made in it.
    """
    named = environment.get("BSL_CLUSTER_DIR")
    home = environment.get("HOME") or tempfile.gettempdir()
    path = Path(named).absolute() if named else Path(home) / ".cache" / "bsl" / "cluster"
    if len(str(path)) > MAX_PATH_LENGTH:
        raise ClusterError(
            f"{path} is too long for Unix sockets ({len(str(path))} characters, at most {MAX_PATH_LENGTH})",
            hint="set BSL_CLUSTER_DIR to a short path, such as /tmp/bsl-cluster",
        )
    return ClusterDir(path)
