"""Real Slurm clusters for tests; a test is skipped, with the reason, if something they need is missing.

SLURM_CONF points at `isolated_cluster` from a module's first fixture to its last, if one of its tests uses it.
`shared_cluster` is for what nodes of one host add. A test that breaks its cluster makes one with `make_cluster`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class SlurmCluster:
    """A running mini cluster; partition `debug`, nodes `n0`, `n1`, ... with `gres gpu:<gpus_per_node>`."""

    directory: Path
    nodes: tuple[str, ...]
    gpus_per_node: int

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "slurm.conf"

    def environment(self) -> dict[str, str]:
        """The caller's environment, pointing at this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.slurm_conf), "BSL_CLUSTER_DIR": str(self.directory)}

    def run(self, *argv: str, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
        """Run a program against this cluster; the caller checks its status."""
        return subprocess.run(
            argv, env=self.environment(), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def bsl(self, *argv: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run `bsl ARGV` against this cluster."""
        return self.run(sys.executable, "-m", "bigsci_launch", *argv, timeout_s=timeout_s)


MakeCluster = Callable[..., SlurmCluster]


def _start(nodes: int, gpus_per_node: int, isolated: bool, may_mount: bool = True) -> SlurmCluster:
    directory = Path(tempfile.mkdtemp(prefix="bsl-", dir="/tmp"))  # short, because Unix sockets are created in it
    width = len(str(nodes - 1))
    cluster = SlurmCluster(directory, tuple(f"n{i:0{width}d}" for i in range(nodes)), gpus_per_node)
    options = ["--nodes", str(nodes), "--gpus-per-node", str(gpus_per_node), *(["--isolated"] if isolated else [])]
    powerless = [] if may_mount else ["setpriv", "--bounding-set=-sys_admin"]
    done = cluster.run(*powerless, sys.executable, "-m", "bigsci_launch", "cluster", "up", *options, timeout_s=300)
    if done.returncode != 0:
        cluster.bsl("cluster", "down")
        pytest.fail(f"bsl cluster up: {done.stderr}")
    return cluster


def _stop(cluster: SlurmCluster) -> None:
    done = cluster.bsl("cluster", "down")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def isolated_cluster(slurm_packages: None) -> Iterator[SlurmCluster]:
    """4 nodes `n0` to `n3` with 2 "GPUs" each, each node with its own PIDs, host name and address."""
    cluster = _start(4, 2, isolated=True)
    yield cluster
    _stop(cluster)


@pytest.fixture(scope="session")
def shared_cluster(slurm_packages: None) -> Iterator[SlurmCluster]:
    """3 nodes `n0` to `n2` with 2 "GPUs" each that share this host. SLURM_CONF does not point at it."""
    cluster = _start(3, 2, isolated=False)
    yield cluster
    _stop(cluster)


@pytest.fixture
def make_cluster(slurm_packages: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCluster]:
    """`make_cluster(nodes=2, gpus_per_node=2, isolated=True)` makes a cluster for one test, which may break it.

    Without `may_mount`, its nodes are not known by their names, as in the cluster of a user who is not root. SLURM_CONF
    points at the newest one until the test ends.
    """
    made: list[SlurmCluster] = []

    def make(nodes: int = 2, gpus_per_node: int = 2, isolated: bool = True, may_mount: bool = True) -> SlurmCluster:
        cluster = _start(nodes, gpus_per_node, isolated, may_mount)
        made.append(cluster)
        monkeypatch.setenv("SLURM_CONF", str(cluster.slurm_conf))
        return cluster

    yield make
    for cluster in made:
        _stop(cluster)


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """An empty directory whose path is short enough for a cluster in it."""
    with tempfile.TemporaryDirectory(prefix="bsl-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module", autouse=True)
def slurm_conf(request: pytest.FixtureRequest) -> Iterator[None]:
    """Point SLURM_CONF at the isolated cluster, if the module's tests use it, for its module fixtures too."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    with pytest.MonkeyPatch.context() as patch:
        if any("isolated_cluster" in getattr(item, "fixturenames", ()) for item in items):
            patch.setenv("SLURM_CONF", str(request.getfixturevalue("isolated_cluster").slurm_conf))
        yield
