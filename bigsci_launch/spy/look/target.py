"""Finds what to look at: the nodes, processes and known facts of the run or job that a person names."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigsci_launch.errors import CollectError, JobNotFound, RunDirError
from bigsci_launch.runs.attempts import JobRecord, find_job, identify, query_attempt, read_exit, read_job
from bigsci_launch.runs.find import find_run, run_argument, runs_root
from bigsci_launch.runs.generations.read import present_topology, read_generations
from bigsci_launch.runs.layout import AttemptDir, RunDir, find_runs, open_run
from bigsci_launch.scheduler import choice
from bigsci_launch.scheduler.here import this_node
from bigsci_launch.scheduler.hostlist import expand_hostlist
from bigsci_launch.scheduler.job import JobInfo, JobState


@dataclass(frozen=True, slots=True)
class LookOptions:
    """What a look reads besides the stacks, how long it lasts, and at which step of the job; None: the training's."""

    native: bool = False
    flight_recorder: str | None = None
    settle_s: float = 0.0
    step: str | None = None

    @property
    def request(self) -> dict[str, Any]:
        """Its part of the request to the node agent."""
        asked = {"native": self.native, "flight_recorder": self.flight_recorder, "settle_s": self.settle_s}
        return asked if self.step is None else {**asked, "step": self.step.rpartition(".")[2]}


@dataclass(frozen=True, slots=True)
class Target:
    """A job to look at, without a `job_id` on this machine; `request` is the request to the node agent.

    `job_id` is what its scheduler takes. `label` is the job's name in reports; `run` and `attempt` are None for a job
    that `bsl` did not submit.
    """

    label: str
    request: Mapping[str, Any]
    scheduler: choice.Scheduler = choice.HERE
    job_id: str = ""
    nodes: tuple[str, ...] = field(default_factory=lambda: (this_node(),))
    groups: Mapping[str, int] = field(default_factory=dict)
    """Of a heterogeneous job: the component of each node."""
    down: Mapping[str, str] = field(default_factory=dict)
    """Nodes that do not respond to their scheduler, and its word for that: the agent is not started on them."""
    run: RunDir | None = None
    attempt: AttemptDir | None = None
    topology: str | None = None
    asked: str = ""
    """How to name it on the command line of `bsl spy`."""
    is_over: bool = False
    """Whether the job has ended: its ranks have left rings, and nothing else of them can be looked at."""

    def with_options(self, look: LookOptions, axes: str | None = None) -> Target:
        """Return the target with the options of the look; `axes` is the topology, if the user named one."""
        named = (("step", look.step), ("topology", axes))
        options = [f"--{name} {value}" for name, value in named if value is not None]
        asked = " ".join(filter(None, (self.asked, *options)))
        return replace(self, request={**self.request, **look.request}, asked=asked)

    def evidence_folder(self, moment: float) -> Path:
        """Return the folder for evidence collected at `moment`: in the run directory, else in the user's state folder.
        Its name has the time in UTC, as logs and pages do.

        Raises:
            CollectError: the job is not a run of `bsl`, and the user has no home directory.
        """
        name = time.strftime("%Y%m%d-%H%M%SZ", time.gmtime(moment))
        if self.run is not None:
            return self.run.bundles / name
        return state_folder(os.environ) / "spy" / f"{name}-{re.sub(r'[^A-Za-z0-9_.+-]', '-', self.label)}"


def state_folder(environment: Mapping[str, str]) -> Path:
    """Return `$XDG_STATE_HOME/bsl`, else `~/.local/state/bsl`. As the XDG standard asks, ignore relative paths."""
    named, home = environment.get("XDG_STATE_HOME", ""), environment.get("HOME", "")
    if Path(named).is_absolute():
        return Path(named) / "bsl"
    if Path(home).is_absolute():
        return Path(home) / ".local" / "state" / "bsl"
    raise CollectError(
        "no place to store the evidence: neither XDG_STATE_HOME nor HOME is set", hint="set one of them to a folder"
    )


def find_target(argument: str | None, job_id: str | None) -> Target:
    """Return the latest attempt of a run (by name or path), or a Slurm job of any user.

    Raises:
        RunDirError, JobNotFound, SlurmUnavailable: there is no such run or job.
        CollectError: it does not run, and no record shows that it has ended.
    """
    if job_id is not None:
        job = choice.OF_JOBS.find_job(job_id)
        job_run, job_attempt = _run_of(job)
        if job_run and job_attempt and _has_right_job(job_attempt, job):
            return target_of_ended_run(job_run, job_attempt)
        return target_of_job(job, job_run, job_attempt)
    run = find_run(argument, None)
    attempt = run.latest_attempt()
    record = find_job(attempt) if attempt else None
    if attempt is None or record is None:
        raise CollectError(f"{run.path}: this run was never started", hint="`bsl submit CONFIG` starts it")
    if record.job_id is not None:
        try:
            return _target_of_run_on_slurm(run, attempt, record)
        except (CollectError, JobNotFound):
            if not _has_ended(attempt, query_attempt(attempt)):
                raise
            return target_of_ended_run(run, attempt)
    if query_attempt(attempt).state.is_over:
        return target_of_ended_run(run, attempt)
    return target_of_local_run(run, attempt)


def _target_of_run_on_slurm(run: RunDir, attempt: AttemptDir, record: JobRecord) -> Target:
    job = choice.OF_JOBS.find_job(record.job_id or "")
    if (who := identify(attempt, record, job)).is_ours is False:
        raise CollectError(f"run {run.name} is not running: {who.why}", hint=f"see `bsl status {run_argument(run)}`")
    return target_of_job(job, run, attempt)


def target_of_ended_run(run: RunDir, attempt: AttemptDir) -> Target:
    """Return the target for a run whose job has ended: its records, and the rings that its ranks have left."""
    topology = _topology_text(run, attempt)
    asked = run_argument(run)
    return Target(run.name, {}, nodes=(), run=run, attempt=attempt, topology=topology, asked=asked, is_over=True)


def _has_right_job(attempt: AttemptDir, job: JobInfo) -> bool:
    """Whether the attempt is that of the job, which has ended."""
    record = read_job(attempt)
    return record is not None and record.job_id == job.number and _has_ended(attempt, job)


def _has_ended(attempt: AttemptDir, job: JobInfo) -> bool:
    """Whether the job is over. While Slurm cleans up its nodes, its attempt records that."""
    return job.state.is_over or (job.state is JobState.COMPLETING and read_exit(attempt) is not None)


def _run_of(job: JobInfo) -> tuple[RunDir | None, AttemptDir | None]:
    """Return the run of a job and its attempt, or None for both if the run directory is deleted or not readable."""
    try:
        run = open_run(Path(job.run_directory)) if job.run_directory else None
        return run, _attempt_of(run, job.job_id) if run else None
    except RunDirError:
        return None, None


def _attempt_of(run: RunDir, job_id: str) -> AttemptDir | None:
    """Return the latest attempt with this job id; a requeued job keeps its id."""
    attempts = reversed(run.attempts())
    found = next((each for each in attempts if (record := read_job(each)) and record.job_id == job_id), None)
    return found or run.latest_attempt()


def target_of_job(job: JobInfo, run: RunDir | None, attempt: AttemptDir | None) -> Target:
    """Return the target for a job of a scheduler, with its nodes in the order in which that lists them."""
    scheduler = choice.OF_JOBS
    if job.state is not JobState.RUNNING or not job.hostlist:
        more = f"bsl status --jobid {job.job_id}" if run else scheduler.show_job.format(job_id=job.job_id)
        more = f"bsl why {job.job_id}" if job.state.is_over else more
        raise CollectError(
            f"job {job.job_id} is not running: {job.raw_state or job.state.value}",
            hint=f"stacks can only be read while a job is running; see `{more}`",
        )
    generations = read_generations(attempt) if attempt is not None else None
    # A spare node, and one that was lost and whose ranks have been replaced, are no evidence of a hang now.
    used = [node for node in scheduler.nodes_of(job) if generations is None or generations.needs(node.name)]
    down = {node.name: node.raw_state for node in used if not node.is_responding}
    request: dict[str, Any] = {"scheduler": scheduler.name, "job_id": job.number}
    if job.components:
        request["components"] = [part.number for part in job.components.values()]
    if attempt is not None:
        request |= _records_request(attempt)
    return Target(
        label=job.job_id,
        request=request,
        scheduler=scheduler,
        job_id=job.number,
        nodes=tuple(node.name for node in used if node.is_responding),
        groups=_groups_of(job),
        down={node: f"it does not respond to {scheduler.name} ({state})" for node, state in down.items()},
        run=run,
        attempt=attempt,
        topology=_topology_text(run, attempt),
        asked=run_argument(run) if run is not None else f"--jobid {job.job_id}",
    )


def _groups_of(job: JobInfo) -> dict[str, int]:
    """Return the component of each node, the first where a node has several: one look finds the ranks of all."""
    found: dict[str, int] = {}
    for index, part in job.components.items():
        for node in expand_hostlist(part.hostlist):
            found.setdefault(node, index)
    return found


def _records_request(attempt: AttemptDir) -> dict[str, Any]:
    """Return where the records of an attempt are, and how many of its ranks there are now, if that may have changed."""
    generations = read_generations(attempt)
    size = generations.newest.world_size if generations else None
    where = {"pid_files": str(attempt.pids), "recorder_folder": str(attempt.recorder)}
    return {**where, **({"num_ranks": size} if size is not None else {})}


def target_of_local_run(run: RunDir, attempt: AttemptDir) -> Target:
    record = read_job(attempt)
    if record is not None and record.launcher is not None and not record.launcher.is_here:
        raise CollectError(
            f"{run.name} runs on {record.launcher.host}", hint=f"on that machine: bsl spy {run_argument(run)}"
        )
    return Target(
        label=run.name,
        request=_records_request(attempt),
        run=run,
        attempt=attempt,
        topology=_topology_text(run, attempt),
        asked=run_argument(run),
    )


def target_of_process(pid: int) -> Target:
    """Return the target for the ranks among the descendants of a launcher on this machine.

    Raises:
        CollectError: there is no such process.
    """
    choice.HERE.find_job(str(pid))
    return Target(label=f"local:{pid}", request={"launcher_pid": pid}, asked=f"--pid {pid}")


def find_local_target() -> Target:
    """Return the target for the only run that is in progress under the local launcher on this machine.

    Raises:
        CollectError: there is none, or more than one.
    """
    running = [run for run in find_runs(runs_root()) if _is_running_here(run)]
    if len(running) == 1:
        attempt = running[0].latest_attempt()
        assert attempt is not None
        return target_of_local_run(running[0], attempt)
    if running:
        names = ", ".join(run.name for run in running)
        raise CollectError(f"{len(running)} local runs are in progress: {names}", hint="name one: bsl spy NAME")
    raise CollectError(
        f"no local run is in progress in {runs_root()}",
        hint="for another launcher (torchrun, mpirun, a script), give its pid: bsl spy --local --pid PID",
    )


def _is_running_here(run: RunDir) -> bool:
    try:
        attempt = run.latest_attempt()
        record = read_job(attempt) if attempt else None
        is_local = record is not None and record.launcher is not None and record.launcher.is_here
        return attempt is not None and is_local and query_attempt(attempt).state is JobState.RUNNING
    except (RunDirError, JobNotFound):
        return False


def _topology_text(run: RunDir | None, attempt: AttemptDir | None) -> str | None:
    try:
        topology = present_topology(run, attempt, read_generations(attempt) if attempt else None) if run else None
    except RunDirError:
        return None
    return str(topology) if topology else None
