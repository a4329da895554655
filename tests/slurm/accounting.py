"""A real slurmdbd with MariaDB behind a mini cluster, so that sacct knows jobs that have left squeue."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.waiting import wait_until

from .conftest import SlurmCluster
from .test_status import processes

PROGRAMS = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db", "mariadb")
MIN_JOB_AGE_S = 5
"""How long squeue knows a job that has ended. slurmctld looks for such jobs once in a minute."""
DATABASE = "slurm_acct_db"


def missing_programs() -> list[str]:
    """The programs of an accounting database that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]


@contextmanager
def with_accounting(cluster: SlurmCluster, folder: Path) -> Iterator[None]:
    """Let a cluster of daemons on this host (not isolated) keep its jobs in a database below `folder`."""
    _end_controller(cluster)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    munge = re.search(r"^AuthInfo=socket=([^,\n]*)", cluster.slurm_conf.read_text(), re.MULTILINE)
    assert munge
    _write_slurm_conf(cluster.slurm_conf, munge[1], port)
    _write_dbd_conf(cluster.directory, munge[1], port)
    database = folder / "mariadb.sock"
    # slurmdbd has no option for the socket of MariaDB's library.
    environment = {**cluster.environment(), "MYSQL_UNIX_PORT": str(database)}
    with (
        _database(folder, database),
        _daemon(folder, "slurmdbd", ["slurmdbd", "-D"], environment),
    ):
        # slurmctld does not start with a cluster that the database does not know, and its jobs need an association.
        for words in (("cluster", "bsl"), ("account", "tests", "cluster=bsl"), ("user", "root", "account=tests")):
            wait_until(lambda words=words: _is_added(cluster, words), evidence=lambda: log_of(folder, "slurmdbd"))
        with _daemon(folder, "slurmctld", ["slurmctld", "-D"], environment):
            idle = ["sinfo", "-h", "-t", "idle", "-o", "%N"]
            wait_until(lambda: cluster.run(*idle).stdout.strip(), evidence=lambda: log_of(folder, "slurmctld"))
            yield


def log_of(folder: Path, name: str) -> str:
    """The last words of a daemon."""
    return (folder / f"{name}.log").read_text(errors="replace")[-2000:]


@contextmanager
def _database(folder: Path, socket_path: Path) -> Iterator[None]:
    data = folder / "data"
    data.mkdir()
    folder.chmod(0o755)
    for path in (folder, data):
        shutil.chown(path, "mysql")
    install = ["mariadb-install-db", "--user=mysql", f"--datadir={data}", "--skip-test-db"]
    subprocess.run([*install, "--auth-root-authentication-method=normal"], capture_output=True, check=True)
    options = ["--no-defaults", "--user=mysql", f"--datadir={data}", f"--socket={socket_path}", "--skip-networking"]
    words = f"create database {DATABASE}; create user slurm@localhost identified by 'x'; "
    client = ["mariadb", "-uroot", "-S", str(socket_path), "-e"]
    grant = f"grant all on {DATABASE}.* to slurm@localhost"
    with _daemon(folder, "mariadbd", ["mariadbd", *options], dict(os.environ)):
        made = [*client, words + grant]
        wait_until(
            lambda: subprocess.run(made, capture_output=True).returncode == 0,
            evidence=lambda: log_of(folder, "mariadbd"),
        )
        yield


def _write_dbd_conf(folder: Path, munge: str, port: int) -> None:
    path = folder / "slurmdbd.conf"
    path.touch(0o600)
    path.write_text(
        f"AuthType=auth/munge\nAuthInfo=socket={munge}\nDbdHost=localhost\nDbdAddr=127.0.0.1\nDbdPort={port}\n"
        f"SlurmUser=root\nPidFile={folder}/slurmdbd.pid\nStorageType=accounting_storage/mysql\n"
        f"StorageHost=localhost\nStorageUser=slurm\nStoragePass=x\nStorageLoc={DATABASE}\n"
    )


def _write_slurm_conf(path: Path, munge: str, port: int) -> None:
    settings = {
        "AccountingStorageType": f"accounting_storage/slurmdbd\nAccountingStoreFlags=job_comment\n"
        f"AccountingStorageHost=127.0.0.1\nAccountingStoragePort={port}\nAccountingStoragePass={munge}",
        "MinJobAge": str(MIN_JOB_AGE_S),
    }
    text = path.read_text()
    for key, value in settings.items():
        text = re.sub(rf"^{key}=.*", f"{key}={value}", text, flags=re.MULTILINE)
    path.write_text(text)


def _end_controller(cluster: SlurmCluster) -> None:
    (pid,) = processes(cluster, "slurmctld")
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    # It holds the number of the cluster, which the database gives from now on.
    for path in cluster.directory.rglob("clustername"):
        path.unlink()


def _is_added(cluster: SlurmCluster, words: tuple[str, ...]) -> bool:
    return cluster.run("sacctmgr", "-i", "add", *words).returncode == 0


@contextmanager
def _daemon(folder: Path, name: str, argv: list[str], environment: dict[str, str]) -> Iterator[None]:
    path = f"{environment['PATH']}:/usr/sbin"
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**environment, "PATH": path}
        )
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()
