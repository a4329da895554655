"""The place where failures are made: mini clusters, runs on them, and what a user sees of those runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigsci_launch.scheduler.hostlist import expand_hostlist
from injected.case import Check, Look

PROGRAMS = Path(__file__).parent / "programs"
OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE")
MODEL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "sequence_length": 16, "vocab_size": 512}
WAIT_S = 90.0
POLL_S = 0.4
LOGS_BYTES = 1 << 21
CONF_OF = {
    "isolated": "",
    # Long enough to look at a node that does not answer, before Slurm gives it up.
    "shared": "SlurmdTimeout=120\n",
    # As on most sites, a node that was reset is not used again before somebody has looked at it.
    "rebooting": "ReturnToService=1\nSlurmdTimeout=60\n",
    "preempting": "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
    "PartitionName=urgent Nodes=ALL PriorityTier=9 MaxTime=60 State=UP\n"
    "PartitionName=patient Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=25 MaxTime=60 State=UP\n"
    "PartitionName=hasty Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 MaxTime=60 State=UP\n",
}
SITE = {
    "description": "the mini cluster, without limits that bsl knows",
    "scheduler": "slurm",
    "ranks_per_node": 2,
    "gres": "gpu:2",
    "environment": {"OMP_NUM_THREADS": {"value": "1", "reason": "all nodes share the cores of one machine"}},
}


class NotMade(Exception):
    """A failure could not be injected, so nothing can be said of it."""


class Refused(Exception):
    """`bsl submit` refuses the run: it does not know what the run asks for."""


@dataclass
class MiniCluster:
    """A running mini cluster. `started` are daemons that were started again, which `bsl cluster down` does not know."""

    directory: Path
    num_nodes: int
    is_isolated: bool
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @classmethod
    def up(cls, kind: str, num_nodes: int) -> MiniCluster:
        """Start a cluster, with the settings of its kind.

        Raises:
            NotMade: it does not start.
        """
        cluster = cls(Path(tempfile.mkdtemp(prefix="bsl-", dir="/tmp")), num_nodes, kind == "isolated")
        cluster.start()
        if more := CONF_OF.get(kind, ""):
            known = {line.partition("=")[0] for line in more.splitlines() if not line.startswith("Partition")}
            lines = [line for line in cluster.conf.read_text().splitlines() if line.partition("=")[0] not in known]
            cluster.conf.write_text("\n".join([*lines, more]))
            cluster.kill_controller()
            cluster.start_controller()
        return cluster

    @property
    def conf(self) -> Path:
        return self.directory / "slurm.conf"

    def start(self) -> None:
        isolated = ["--isolated"] if self.is_isolated else []
        done = self.bsl("cluster", "up", "--nodes", str(self.num_nodes), *isolated)
        if done.returncode != 0:
            raise NotMade(f"bsl cluster up: {done.stderr}")

    def down(self) -> None:
        for daemon in self.started:
            daemon.kill()
            daemon.wait()
        self.started.clear()
        self.bsl("cluster", "down")

    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf), "BSL_CLUSTER_DIR": str(self.directory)}

    def run(self, *argv: str, timeout_s: float = 90.0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program against this cluster; the caller checks its status."""
        return subprocess.run(
            argv, env=self.environment(), cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def bsl(self, *argv: str, cwd: Path | None = None, timeout_s: float = 150.0) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "bigsci_launch", *argv, cwd=cwd, timeout_s=timeout_s)

    def ask(self, *argv: str) -> str:
        """Run one of Slurm's programs, which must succeed."""
        done = self.run(*argv)
        if done.returncode != 0:
            raise NotMade(f"{' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def daemon(self, name: str) -> int:
        """The PID of the newest daemon of that name, such as `slurmctld`, or a node of a shared cluster."""
        if name == "slurmctld" and self.started:
            return self.started[-1].pid
        lines = (self.directory / "processes.jsonl").read_text().splitlines()
        return int([record["pid"] for line in lines if (record := json.loads(line))["name"] == name][-1])

    def unplug(self, node: str) -> None:
        """Take the cable out of an isolated node."""
        children = Path(f"/proc/{self.daemon(node)}/task/{self.daemon(node)}/children").read_text().split()
        enter = ["nsenter", f"--net=/proc/{children[0]}/ns/net"]
        subprocess.run([*enter, "ip", "link", "set", "eth0", "down"], check=True)

    def kill_controller(self) -> None:
        pid = self.daemon("slurmctld")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if self.started:
            self.started[-1].wait()

    def start_controller(self) -> None:
        """Start slurmctld again. Only a cluster that shares the host's network can do that from outside."""
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        with (self.directory / "slurmctld-again").open("ab") as output:
            daemon = subprocess.Popen(
                ["slurmctld", "-D"],
                env={"PATH": path, "SLURM_CONF": str(self.conf)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(daemon)
        wait_until(lambda: self.run("scontrol", "ping").stdout.find(" is UP") > 0, "slurmctld answers again")


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait until something is so.

    Raises:
        NotMade: it is not within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise NotMade(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(POLL_S)


@dataclass
class Run:
    """A submitted run, and what `bsl` says about it."""

    cluster: MiniCluster
    folder: Path
    directory: Path
    job_id: str
    num_ranks: int

    def bsl(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return self.cluster.bsl(*argv, cwd=self.folder)

    def attempt(self, name: str = "0001") -> Path:
        return self.directory / "attempts" / name

    def log(self, rank: int, attempt: str = "0001") -> str:
        path = self.attempt(attempt) / "logs" / f"rank-{rank:04d}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_line(self, text: str, ranks: Sequence[int] = (), attempt: str = "0001") -> None:
        wanted = ranks or range(self.num_ranks)
        wait_until(lambda: all(text in self.log(rank, attempt) for rank in wanted), f"all ranks print {text}")

    def facts(self) -> dict[str, str]:
        """What Slurm itself knows of the job."""
        said = self.cluster.ask("scontrol", "show", "job", "-o", self.job_id)
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def wait_over(self, timeout_s: float = WAIT_S) -> str:
        wait_until(lambda: self.facts()["JobState"] in OVER, f"job {self.job_id} ends", timeout_s)
        return self.facts()["JobState"]

    def wait_state(self, *states: str, timeout_s: float = WAIT_S) -> None:
        wait_until(lambda: self.facts()["JobState"] in states, f"job {self.job_id} is {states}", timeout_s)

    def nodes(self) -> tuple[str, ...]:
        hostlist = self.facts().get("NodeList", "")
        return tuple(expand_hostlist(hostlist)) if hostlist not in ("", "(null)") else ()

    def slurm_code(self) -> int | None:
        code, _, number = self.facts().get("ExitCode", "").partition(":")
        return (int(code) or (128 + int(number) if number != "0" else 0)) if code else None

    def pid(self, rank: int) -> int:
        """The PID of a rank's program on this machine: its environment names the rank and the job."""
        wanted = {f"RANK={rank}".encode(), f"SLURM_JOB_ID={self.job_id}".encode()}
        return self.find_process(wanted, lambda words: b"rank_runner.py" not in b" ".join(words))

    def find_process(self, variables: set[bytes], accepts: Callable[[list[bytes]], bool]) -> int:
        wanted = {*variables, f"BSL_RUN_DIR={self.directory}".encode()}
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                is_of_job = path.name.isdigit() and wanted <= set((path / "environ").read_bytes().split(b"\0"))
                if is_of_job and accepts((path / "cmdline").read_bytes().split(b"\0")):
                    return int(path.name)
        raise NotMade(f"no process of job {self.job_id} with {variables}")

    def find_launcher(self, name: bytes) -> int:
        """The PID of the job's `srun`, or of its script, `slurm_script`. Other clusters have jobs with the same id."""
        job = f"SLURM_JOB_ID={self.job_id}".encode()
        spool = str(self.cluster.directory).encode()
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                environment = (path / "environ").read_bytes() if path.name.isdigit() else b""
                words = (path / "cmdline").read_bytes().split(b"\0") if job in environment.split(b"\0") else []
                if spool in environment and any(word.endswith(name) for word in words[:2]):
                    return int(path.name)
        raise NotMade(f"no {name.decode()} of job {self.job_id} is found")

    def look(self, moment: str = "", *checks: Check, nodes: Sequence[str] = ()) -> Look:
        """Ask `bsl status` twice, for a program and for a person, and follow an advice to read logs."""
        asked = self.bsl("status", str(self.directory), "--json")
        text = self.bsl("status", str(self.directory))
        if asked.returncode != 0 or text.returncode != 0:
            failed = Check("cause", "wrong", f"bsl status fails: {asked.stderr or text.stderr}")
            return Look(moment, checks=(*checks, failed))
        facts = self.slurm_facts_if_it_answers()
        return Look(
            moment,
            json.loads(asked.stdout),
            text.stdout,
            facts[0],
            tuple(nodes) or facts[1],
            logs=self.read_advised(text.stdout),
            checks=checks,
        )

    def slurm_facts_if_it_answers(self) -> tuple[int | None, tuple[str, ...]]:
        try:
            return self.slurm_code(), self.nodes()
        except (NotMade, subprocess.TimeoutExpired):
            return None, ()

    def read_advised(self, text: str) -> str | None:
        """Run the `bsl logs` that the last line advises; return what it prints first."""
        found = re.search(r"^next: bsl (logs [^(\n]*)", text, re.MULTILINE)
        return self.read_logs(*shlex.split(found[1]))[0] if found else None

    def read_logs(self, *argv: str, timeout_s: float = 60.0) -> tuple[str, float]:
        """Return what `bsl ARGV` prints, up to 2 MB, and the seconds until its first line."""
        began = time.monotonic()
        command = [sys.executable, "-m", "bigsci_launch", *argv]
        with subprocess.Popen(
            command, cwd=self.folder, env=self.cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            stop = time.monotonic() + timeout_s
            os.set_blocking(process.stdout.fileno(), False)
            seen, first_s = b"", timeout_s
            while time.monotonic() < stop and len(seen) < LOGS_BYTES:
                block = process.stdout.read(1 << 16)
                if block == b"":
                    break
                if block and not seen:
                    first_s = time.monotonic() - began
                seen += block or b""
                time.sleep(0.0 if block else 0.05)
            process.kill()
        return seen.decode(errors="replace"), first_s


@dataclass(frozen=True)
class Field:
    """Where one injection happens: its cluster and its own folder. `disks` are small file systems that nodes see."""

    cluster: MiniCluster
    folder: Path
    disks: Path

    def submit(
        self,
        *words: str,
        nodes: int = 2,
        sets: Sequence[str] = (),
        program: str | Sequence[str] = "rank.py",
        root: Path | None = None,
        site: dict[str, Any] | None = None,
        name: str = "run",
    ) -> Run:
        """Submit a run whose ranks execute a program of this folder.

        Raises:
            Refused: `bsl submit` refuses it.
        """
        done, directory = self.try_submit(
            *words, nodes=nodes, sets=sets, program=program, root=root, site=site, name=name
        )
        if done.returncode != 0:
            raise Refused(done.stderr.strip())
        return Run(self.cluster, self.folder, directory, done.stdout.strip(), nodes * 2)

    def try_submit(
        self,
        *words: str,
        nodes: int = 2,
        sets: Sequence[str] = (),
        program: str | Sequence[str] = "rank.py",
        root: Path | None = None,
        site: dict[str, Any] | None = None,
        name: str = "run",
    ) -> tuple[subprocess.CompletedProcess[str], Path]:
        """Run `bsl submit`; return how it ended, and where the run is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "site.yaml").write_text(json.dumps({**SITE, **(site or {})}))
        command = [sys.executable, str(PROGRAMS / program), *words] if isinstance(program, str) else list(program)
        root = root or self.folder / "runs"
        config = {
            "run": {"name": name, "root": str(root), **({"command": command} if command else {})},
            "slurm": {"site": str(self.folder / "site.yaml"), "nodes": nodes, "time_limit": "00:10:00", "wait_s": 5},
            "parallelism": {"tensor_parallel_size": 2},
            "model": MODEL,
            "training": {"steps": 40, "micro_batch_size": 1, "global_batch_size": nodes},
            "monitor": {"step_time_s": 1, "save_time_s": 1},
            "data": {"prefix": str(self.disks.parent / "corpus" / "text") if not command else "none"},
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(config))
        options = [word for each in sets for word in ("--set", each)]
        done = self.cluster.bsl("submit", str(path), *options, cwd=self.folder)
        return done, root / name
