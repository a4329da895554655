"""Slurm's own daemons stand still, die, or are new ones that give the same job ids again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from injected.case import Check, Injection, Look, Truth
from injected.field import Field, MiniCluster, NotMade, Run, wait_until

HEALTHY = (r"bsl cancel", r"scancel", r"(?m)^lost node", r"\bended\b", r"died", r"bsl spy")


def slurmd_silent(field: Field) -> Iterator[Look]:
    run = field.submit(f"until={field.folder}/enough")
    run.wait_for_line("iteration 2")
    node = run.nodes()[1]
    pid = field.cluster.daemon(node)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: "*" in run.cluster.ask("sinfo", "-h", "-n", node, "-o", "%T"), "Slurm notices it", 120)
        seen = run.look("while slurmd is silent")
        if run.facts()["JobState"] != "RUNNING":
            raise NotMade("Slurm gave the node up before anybody could look")
        yield seen
    finally:
        os.kill(pid, signal.SIGCONT)
    (field.folder / "enough").touch()
    run.wait_over(120)
    yield run.look("at the end")


def controller_killed(field: Field) -> Iterator[Look]:
    run = field.submit(f"until={field.folder}/enough")
    run.wait_for_line("iteration 2")
    waits = [sys.executable, "-m", "bigsci_launch", "logs", str(run.directory), "--follow"]
    follower = subprocess.Popen(
        waits, cwd=run.folder, env=run.cluster.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(12)  # slurmctld has saved what it knows of the job by then
    field.cluster.kill_controller()
    yield run.look("while slurmctld is dead")
    time.sleep(5)
    field.cluster.start_controller()
    (field.folder / "enough").touch()
    run.wait_over()
    survived = follower.wait(60) == 0
    yield run.look("at the end", Check("cause", "right" if survived else "wrong", "bsl logs --follow did not survive"))


def controller_silent(field: Field) -> Iterator[Look]:
    run = field.submit(f"until={field.folder}/enough")
    run.wait_for_line("iteration 2")
    pid = field.cluster.daemon("slurmctld")
    os.kill(pid, signal.SIGSTOP)
    try:
        asked = run.bsl("status", str(run.directory))
    finally:
        os.kill(pid, signal.SIGCONT)
    seen = asked.stdout
    claims = [word for word in ("ended", "died", "bsl cancel", "lost node") if word in seen]
    told = "last output" in seen or "slowest" in seen
    yield Look(
        "while slurmctld is silent",
        checks=(
            Check("cause", "wrong" if claims else "right", f"says {claims} of a running job"),
            Check("cause", "right" if "UNKNOWN" in seen and told else "unknown", f"said: {seen}"),
        ),
    )
    run.cluster.ask("scancel", run.job_id)
    run.wait_over()


def job_id_again(field: Field) -> Iterator[Look]:
    """The cluster is made again; another run's job gets the id of a run that is over."""
    own = MiniCluster.up("shared-plain", 1)
    try:
        first = Field(own, field.folder / "a", field.disks).submit("steps=1", nodes=1, name="first")
        first.wait_over()
        own.down()
        own.start()
        second = Field(own, field.folder / "b", field.disks).submit(nodes=1, name="second")
        second.wait_for_line("iteration 2")
        yield first.look("the first run")
        yield cancel_other(first, second)
    finally:
        own.down()


def cancel_other(first: Run, second: Run) -> Look:
    same = first.job_id == second.job_id
    done = first.bsl("cancel", str(first.directory))
    time.sleep(1)
    alive = second.facts()["JobState"] == "RUNNING"
    return Look(
        "bsl cancel of the first run",
        checks=(
            Check("next step", "right" if alive else "wrong", "it ended the job of another run"),
            Check("cause", "right" if same and done.returncode == 2 else "wrong", f"said: {done.stderr.strip()}"),
        ),
    )


RUNS = Truth(states=("RUNNING",), never=HEALTHY)
FINISHED = Truth(0, ("COMPLETED",), ("finished",), never=("bsl cancel", "lost node"))
CASES = (
    Injection(
        "slurmd-silent",
        "a slurmd does not answer for a while; the job is unharmed",
        slurmd_silent,
        (RUNS, FINISHED),
        "called a lost node, and advised to cancel",
        "shared",
    ),
    Injection(
        "slurmctld-killed",
        "slurmctld is dead while `bsl status` asks, and starts again",
        controller_killed,
        (Truth(states=("UNKNOWN",), words=("last output|slowest",), never=HEALTHY), FINISHED),
        "right at the end",
        "shared",
    ),
    Injection(
        "slurmctld-silent",
        "slurmctld does not answer",
        controller_silent,
        (Truth(),),
        "a running job was called ended",
        "shared",
    ),
    Injection(
        "job-id-again",
        "a new cluster gives the id of an old job again",
        job_id_again,
        (Truth(0, ("COMPLETED",), ("finished",)), Truth()),
        "the job of another run was ended",
        "shared",
        is_own=True,
    ),
)
