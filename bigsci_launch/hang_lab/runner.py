"""Runs a reproduction on this machine: starts its ranks, waits for its state, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bigsci_launch.errors import LabError
from bigsci_launch.hang_lab.catalogue import Reproduction
from bigsci_launch.hang_lab.needs import missing_need
from bigsci_launch.hang_lab.nursery import Nursery
from bigsci_launch.hang_lab.processes import kill_sessions, wait_until_gone
from bigsci_launch.hang_lab.programs import RANK_VARIABLES, lab_program, rank_runner
from bigsci_launch.hang_lab.stage import SetStage, Surroundings, set_stage
from bigsci_launch.hang_lab.stand import Job, wait_for_stand
from bigsci_launch.procfs import start_ticks
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.scheduler.local import Launcher, reserved_port
from bigsci_launch.spy.taxonomy import HangClass
from bigsci_launch.topology import Topology

STAND_TIMEOUT_S = 90.0
ATTEMPT = "0001"


@dataclass(frozen=True, slots=True)
class Standing:
    """A running reproduction. The ranks are descendants of process `launcher_pid`, which is None on Slurm."""

    reproduction: Reproduction
    run: RunDir
    job: Job
    topology: Topology
    launcher_pid: int | None

    @property
    def pids(self) -> dict[int, int]:
        return self.job.pids()


@dataclass(frozen=True, slots=True)
class Trial:
    """What to reproduce. `environment` has variables to add to the usual environment of the ranks.

    `arguments` are extra options for the rank program; `timeout_s` limits the time to reach the reproduction's state.
    `keeps_rings`: whether the ranks record their last calls, as those that `bsl submit` starts.
    """

    reproduction: Reproduction
    num_ranks: int
    culprit: int
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    timeout_s: float = STAND_TIMEOUT_S
    keeps_rings: bool = False

    def program(self, topology: Topology) -> list[str]:
        recipe, file = self.reproduction.recipe, lab_program(self.reproduction.program)
        options = ["--topology", str(topology), "--culprit", str(self.culprit), *self.arguments]
        return [sys.executable, str(file), recipe, *options]


@contextmanager
def reproduce(trial: Trial, *, nursery: Nursery | None = None) -> Iterator[Standing]:
    """Yield the reproduction once it has reached its state. Nothing of it is left after the block, however that ends.

    Raises:
        LabError: this machine cannot run it, or it does not reach its state.
    """
    with begin(trial, nursery=nursery) as standing:
        wait_for_stand(standing.job, trial.reproduction.stand, trial.timeout_s)
        yield standing


@contextmanager
def begin(trial: Trial, *, nursery: Nursery | None = None) -> Iterator[Standing]:
    """Yield the reproduction as soon as it has started. Nothing of it is left after the block, however that ends.

    Raises:
        LabError: this machine cannot run it.
    """
    topology = require_possible(trial)
    reproduction = trial.reproduction
    with made_folder(reproduction.name) as folder, set_stage(reproduction.stage) as stage:
        run = prepare_run(folder, reproduction, topology)
        with started(trial, topology, run, stage, nursery) as launcher_pid:
            job = Job(run.attempt(ATTEMPT), run.path / "lab", trial.num_ranks, trial.culprit)
            yield Standing(reproduction, run, job, topology, launcher_pid)


def require_possible(trial: Trial) -> Topology:
    """Return the topology of the ranks.

    Raises:
        LabError: the reproduction cannot run here, or not with this number of ranks or this culprit.
    """
    topology = trial.reproduction.topology(trial.num_ranks)
    if reason := missing_need(trial.reproduction):
        raise LabError(f"{trial.reproduction.name} ({trial.reproduction.title}) {reason}")
    if not 0 <= trial.culprit < trial.num_ranks:
        raise LabError(f"there is no rank {trial.culprit}: ranks are 0 to {trial.num_ranks - 1}")
    if trial.culprit == 0 and trial.reproduction.culprits == "not rank 0":
        end = f"without which the others end too ({HangClass.RANK_KILLED})"
        raise LabError(f"{trial.reproduction.name}: rank 0 serves the store, {end}")
    return topology


@contextmanager
def made_folder(name: str) -> Iterator[Path]:
    """Yield a temporary folder for the run. Its name is short, because the path of a socket is limited to 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="bsl-lab-"))
    try:
        yield folder / name.lower()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepare_run(folder: Path, reproduction: Reproduction, topology: Topology) -> RunDir:
    """Make a run directory with one attempt, with only the files that a diagnosis reads."""
    run = RunDir(folder.resolve())
    record = {
        "schema_version": 1,
        "name": run.name,
        "run_id": f"lab-{os.getpid()}-{time.time_ns():x}",
        "made": time.time(),
        "site": "hang-lab",
        "topology": topology.as_dict(),
    }
    attempt = run.attempt(ATTEMPT)
    attempt.make()
    (run.path / "lab").mkdir()
    write_json(run.record, record)
    launcher = Launcher(os.getpid(), start_ticks(os.getpid()) or 0, socket.gethostname())
    write_job(attempt, JobRecord("local", time.time(), launcher=launcher))
    return run


@contextmanager
def started(
    trial: Trial, topology: Topology, run: RunDir, stage: SetStage | None, nursery: Nursery | None
) -> Iterator[int]:
    """Start all ranks, each runner in its own session, and yield the launcher's process id."""
    runners: list[subprocess.Popen[bytes]] = []
    sessions: set[int] = set()
    surroundings = stage.surroundings if stage else Surroundings()
    try:
        with reserved_port() as port:
            for rank in range(trial.num_ranks):
                environment = {
                    **RANK_VARIABLES,
                    "MASTER_PORT": str(port),
                    **surroundings.environment(rank, trial.num_ranks),
                    **trial.environment,
                }
                arguments = runner_arguments(trial, topology, run, rank)
                output = run.attempt(ATTEMPT).job_output
                if nursery:
                    sessions.add(nursery.start(arguments, environment, output))
                else:
                    runners.append(start_runner(arguments, environment, output))
                    sessions.add(runners[-1].pid)
            yield nursery.pid if nursery else os.getpid()
    finally:
        with undisturbed():
            end_all(sessions, runners, stage)


def runner_arguments(trial: Trial, topology: Topology, run: RunDir, rank: int) -> list[str]:
    where = ["--attempt-dir", str(run.attempt(ATTEMPT).path), "--topology", str(topology)]
    # The folder is removed with the run, so that rings of killed runners are not left on the node.
    rings = ["--ring", str(run.path.parent)] if trial.keeps_rings else []
    return [
        *where,
        *rings,
        "--ranks-per-node",
        str(trial.num_ranks),
        "--rank",
        str(rank),
        "--",
        *trial.program(topology),
    ]


def start_runner(arguments: list[str], environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(rank_runner()), *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_all(sessions: set[int], runners: list[subprocess.Popen[bytes]], stage: SetStage | None) -> None:
    """Kill every process of `sessions`. Processes that wait for the stage die only once it is undone.

    Raises:
        LabError: processes are left.
    """
    kill_sessions(sessions)
    if stage:
        stage.undo()
        kill_sessions(sessions)
    left = wait_until_gone(sessions)
    for runner in runners:
        if runner.pid not in left:
            runner.wait()
    if left:
        raise LabError(f"processes {left} do not end", hint="`cat /proc/PID/wchan` shows where they wait in the kernel")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Block SIGINT and SIGTERM during clean-up, so that an impatient Ctrl-C leaves nothing behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
