"""Records what the commands of the installed Slurm print about jobs and nodes in each state that bsl reads.

    OUT=tests/unit/scheduler/recorded
    bash slurm/minicluster/with-slurm.sh 24.11 .venv/bin/python benchmarks/slurm_outputs.py $OUT

It starts a mini cluster (root) and writes OUT/slurm-VERSION.json: for each case what was asked for, the argv, and what
was printed. The tests of `scheduler` read these files with the code that reads a real Slurm.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bigsci_launch.scheduler.job import SACCT_FIELDS, SQUEUE_FORMAT

NODES = 6
COMMENT = "bsl:/runs/a%20demo"
SLEEP = "srun sleep 300"
STATES = {  # node: how scontrol is asked to change it while a job of one node runs there
    "n1": ["state=drain", "reason=k8s: cordon"],
    "n2": ["state=fail", "reason=ecc"],
}
"""n0 stays as it is, n3 is idle and drained, n4 idle, n5 has no slurmd."""


@dataclass
class Printed:
    """One call: what was asked for, and what came back."""

    case: str
    argv: list[str]
    stdout: str
    stderr: str
    returncode: int
    truth: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """Runs commands on one cluster and keeps what they print, with the folder's name made neutral."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self._environment = folder, environment
        self.printed: list[Printed] = []

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, env=self._environment, cwd=self.folder, capture_output=True, text=True, timeout=120)

    def record(self, case: str, argv: Sequence[str], **truth: Any) -> None:
        done = self.run(*argv)
        texts = [text.replace(str(self.folder), "/home/me") for text in (done.stdout, done.stderr)]
        self.printed.append(Printed(case, list(argv), texts[0], texts[1], done.returncode, truth))

    def submit(self, body: str, *options: str) -> str:
        (self.folder / "job.sh").write_text(f"#!/bin/bash\n{body}\n")
        done = self.run("sbatch", "--parsable", "--comment", COMMENT, *options, "job.sh")
        if done.returncode:
            raise SystemExit(f"sbatch {' '.join(options)}: {done.stderr}")
        return done.stdout.strip()

    def job(self, case: str, job: str, **truth: Any) -> None:
        """Record all that is asked about a job."""
        self.record(case, ["squeue", "-h", "-t", "all", f"--jobs={job}", "-o", SQUEUE_FORMAT], job=job, **truth)
        self.record(f"{case}: control", ["scontrol", "show", "job", "-o", job], job=job, **truth)

    def wait(self, job: str, *states: str, limit_s: float = 90.0) -> None:
        self.until(
            lambda: self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout.split()[0] in states,
            job,
            limit_s,
        )

    def until(self, condition: Callable[[], bool], what: str, limit_s: float = 90.0) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                raise SystemExit(
                    f"{what}: not seen in {limit_s:.0f} s:\n{self.run('squeue').stdout}{self.run('sinfo').stdout}"
                )
            time.sleep(0.3)


@contextmanager
def cluster(folder: Path, nodes: int = NODES) -> Iterator[dict[str, str]]:
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "BSL_CLUSTER_DIR": str(folder),
    }
    bsl = [sys.executable, "-m", "bigsci_launch", "cluster"]
    try:
        subprocess.run([*bsl, "up", "--isolated", "--nodes", str(nodes)], env=environment, check=True)
        yield {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([*bsl, "down"], env=environment, check=True)


def record_jobs(recorder: Recorder) -> None:
    """Jobs in the states that Slurm shows, whole jobs, arrays and heterogeneous ones."""
    plain = recorder.submit(SLEEP, "-N2", "-J", "a demo", "-o", "/tmp/log-%j.txt", "-w", "n[0-1]")
    recorder.wait(plain, "RUNNING")
    recorder.job("running", plain, state="RUNNING", nodes=["n0", "n1"], name="a demo", output=f"/tmp/log-{plain}.txt")
    asked = recorder.submit(SLEEP, "-N1", "--gres=gpu:1", "-e", "err.txt", "-w", "n2")
    recorder.wait(asked, "RUNNING")
    recorder.job("with gres", asked, state="RUNNING", nodes=["n2"], output=f"/home/me/slurm-{asked}.out")
    held = recorder.submit(SLEEP, "-N1", "--hold")
    recorder.job("held", held, state="PENDING", reason="JobHeldUser", nodes=[])
    after = recorder.submit(SLEEP, "-N1", f"--dependency=afterok:{plain}")
    recorder.job("dependent", after, state="PENDING", reason="Dependency", nodes=[])
    later = recorder.submit(SLEEP, "-N1", "--begin=now+1hour")
    recorder.job("later", later, state="PENDING", reason="BeginTime", nodes=[])
    array = recorder.submit(SLEEP, "-N1", "--array=0-3%1", "-w", "n3")
    recorder.wait(f"{array}_0", "RUNNING")
    recorder.job("array", array, state="RUNNING", tasks=["0", "[1-3%1]"], reason_of_others="JobArrayTaskLimit")
    recorder.run("scancel", array)
    mixed = recorder.submit(SLEEP, "-N1", ":", "-N1")
    recorder.wait(f"{mixed}+0", "RUNNING")
    recorder.job("heterogeneous", mixed, state="RUNNING", components=2)
    recorder.run("scancel", mixed, held, after, later)
    record_nodes(recorder)
    recorder.run("scancel", plain, asked)
    recorder.wait(plain, "CANCELLED")
    recorder.job("cancelled", plain, state="CANCELLED", nodes=["n0", "n1"])


def record_nodes(recorder: Recorder) -> None:
    """Nodes that work, that an administrator has marked, and that are lost."""
    for node, change in STATES.items():
        recorder.run("scontrol", "update", f"nodename={node}", *change)
    recorder.run("scontrol", "update", "nodename=n3", "state=drain", "reason=Action:Replace")
    recorder.run(sys.executable, "-m", "bigsci_launch", "cluster", "kill-node", "n5")
    recorder.until(lambda: "n5 down" in recorder.run("sinfo", "-h", "-N", "-o", "%N %T").stdout, "n5 is lost")
    recorder.until(lambda: "n3 drained" in recorder.run("sinfo", "-h", "-N", "-o", "%N %T").stdout, "n3 is drained")
    truth = {"n0": "works", "n1": "works", "n2": "works", "n3": "works", "n4": "works", "n5": "given up"}
    recorder.record("nodes", ["sinfo", "-h", "-N", "-n", "n[0-5]", "-o", "%N|%T|%E"], **truth)
    recorder.record("addresses", ["scontrol", "--oneliner", "show", "node", "n0,n1"], nodes=["n0", "n1"])
    recorder.record("partition", ["sinfo", "-h", "-N", "-o", "%P %N"], nodes=[f"n{number}" for number in range(NODES)])
    recorder.run("scontrol", "update", "nodename=n[1-3]", "state=resume")


def record_ends(recorder: Recorder) -> None:
    """Jobs that end by themselves or otherwise, and what srun and slurmstepd print about it."""
    ends = {
        "exit": ("srun -n2 bash -c 'exit $((SLURM_PROCID * 3))'", [], "FAILED", "crashed"),
        "killed": ("srun -n2 bash -c '[ $SLURM_PROCID = 0 ] && sleep 2 || kill -9 $$'", [], "FAILED", "crashed"),
        "left early": (
            "srun -n2 --kill-on-bad-exit=0 --wait=2 bash -c '[ $SLURM_PROCID = 0 ] || sleep 300'",
            [],
            "FAILED",
            "",
        ),
        "not found": ("srun no-such-program", [], "FAILED", "launch_failed"),
        "finished": ("srun true", [], "COMPLETED", ""),
        "time limit": (SLEEP, ["--time=00:01:00"], "TIMEOUT", "time_limit"),
    }
    jobs = {}
    for case, (body, options, _, _) in ends.items():
        jobs[case] = recorder.submit(body, "-N2", "-o", f"{case.replace(' ', '-')}.txt", *options)
    recorder.submit(f"{SLEEP} &\nsleep 3; scancel $SLURM_JOB_ID.0; wait", "-N1", "-o", "step-cancelled.txt")
    for case, (_, _, state, kind) in ends.items():
        recorder.wait(jobs[case], state, limit_s=180)
        recorder.job(case, jobs[case], state=state)
        recorder.record(f"{case}: output", ["cat", f"{case.replace(' ', '-')}.txt"], kind=kind)
    recorder.until(lambda: (recorder.folder / "step-cancelled.txt").read_text() != "", "a cancelled step")
    time.sleep(2)
    recorder.record("step cancelled: output", ["cat", "step-cancelled.txt"], kind="cancelled")
    lost = recorder.submit("srun --no-kill sleep 300", "-N2", "--no-kill", "-o", "lost.txt", "-w", "n[0-1]")
    recorder.wait(lost, "RUNNING")
    time.sleep(2)
    recorder.run(sys.executable, "-m", "bigsci_launch", "cluster", "kill-node", "n1")
    recorder.until(lambda: "n1 down" in recorder.run("sinfo", "-h", "-N", "-o", "%N %T").stdout, "n1 is lost")
    time.sleep(8)
    recorder.record("node lost, kept: output", ["cat", "lost.txt"], node="n1")
    recorder.run("scancel", lost)
    gone = recorder.submit(SLEEP, "-N2", "--no-requeue", "-o", "gone.txt", "-w", "n[2-3]")
    recorder.wait(gone, "RUNNING")
    time.sleep(2)
    recorder.run(sys.executable, "-m", "bigsci_launch", "cluster", "kill-node", "n3")
    recorder.wait(gone, "NODE_FAIL")
    time.sleep(3)
    recorder.job("node fail", gone, state="NODE_FAIL")
    recorder.record("node fail: output", ["cat", "gone.txt"], kind="node_failure", node="n3")


def record_refusals(recorder: Recorder) -> None:
    """What is refused, and questions about what is not there."""
    (recorder.folder / "job.sh").write_text("#!/bin/bash\ntrue\n")
    refused = {
        "no such partition": ["-p", "nowhere"],
        "too many nodes": ["-N99"],
        "too much time": ["--time=9-00:00:00"],
        "no such account option": ["--no-such-option"],
        "bad constraint": ["-C", "nosuch"],
    }
    for case, options in refused.items():
        recorder.record(f"refused: {case}", ["sbatch", "--parsable", *options, "job.sh"])
    recorder.record("unknown job", ["squeue", "-h", "-t", "all", "--jobs=99999", "-o", SQUEUE_FORMAT])
    recorder.record("unknown job: control", ["scontrol", "show", "job", "-o", "99999"])
    recorder.record("unknown job: cancel", ["scancel", "99999"])
    recorder.record("unknown step: cancel", ["scancel", "--signal=KILL", "99999.0"])
    recorder.record("no accounting", ["sacct", "-n", "-X", "-P", "--jobs=1", "-o", SACCT_FIELDS])
    recorder.record("no reservations", ["scontrol", "show", "reservation", "-o"])
    recorder.run("scontrol", "create", "reservation", "reservationname=service", "starttime=now+2hours", "duration=60",
                 "users=root", "nodes=n0", "flags=maint")  # fmt: skip
    recorder.record("reservations", ["scontrol", "show", "reservation", "-o"], nodes=["n0"], name="service")


def main() -> None:
    out = Path(sys.argv[1])
    with (
        tempfile.TemporaryDirectory(prefix="bsl-", dir="/tmp") as folder,
        tempfile.TemporaryDirectory(dir="/tmp") as work,
        cluster(Path(folder)) as environment,
    ):
        recorder = Recorder(Path(work), environment)
        version = recorder.run("sinfo", "-V").stdout.split()[-1]
        record_jobs(recorder)
        record_ends(recorder)
        record_refusals(recorder)
    document = {"version": version, "printed": [asdict(each) for each in recorder.printed]}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"slurm-{version}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(recorder.printed)} calls of Slurm {version}")


if __name__ == "__main__":
    main()
