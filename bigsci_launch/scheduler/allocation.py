"""Nodes for a short time: one step on nodes of its own, and nodes that are held while several steps run on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from bigsci_launch.errors import SlurmRefused
from bigsci_launch.scheduler.command import run_slurm, slurm_text, stream_slurm
from bigsci_launch.scheduler.hostlist import expand_hostlist
from bigsci_launch.scheduler.slurm import cancel_job, query_job

_FOR_EVER_S = 20 * 86400.0
"""A queue may be long. Whoever waits can interrupt."""
_POLL_S = 1.0


def run_on_each(
    argv: Sequence[str],
    *,
    name: str,
    options: Mapping[str, str | None],
    limit_s: float,
    on_line: Callable[[str], None],
    environment: Mapping[str, str],
) -> str:
    """Run `argv` once on each of some whole nodes, and return Slurm's own words; `on_line` gets each output line.

    `environment` has further variables.

    It waits until Slurm gives the nodes. From the first line on, the step may last for `limit_s` seconds.

    Raises:
        SlurmUnavailable: srun is missing.
        SlurmRefused: no line was printed: Slurm gave no node.
    """
    placed = [f"--{option}={value}" for option, value in options.items() if value is not None]
    fixed = ("--ntasks-per-node=1", "--exclusive", f"--job-name={name}", "--mpi=none", "--export=ALL")
    tolerant = ("--kill-on-bad-exit=0", "--wait=0", "--no-kill")
    command = ["srun", *placed, *fixed, *tolerant, *argv]
    deadline = [time.monotonic() + _FOR_EVER_S]
    count = [0]

    def take(line: str) -> None:
        if not count[0]:
            deadline[0] = time.monotonic() + limit_s
        count[0] += 1
        on_line(line)

    said = stream_slurm(command, stdin="", until=lambda: deadline[0], on_line=take, extra_environment=environment)
    words = slurm_text(said)
    if not count[0]:
        raise SlurmRefused(f"srun: {name} did not start: {words or 'no message from Slurm'}", argv=command)
    return words


def hold_nodes(*, name: str, options: Mapping[str, str | None], minutes: int) -> str:
    """Submit a job that only holds whole nodes, and return its id.

    Raises:
        SlurmUnavailable, SlurmRefused: as `run_slurm`.
    """
    placed = [f"--{option}={value}" for option, value in options.items() if value is not None]
    argv = [
        "sbatch",
        "--parsable",
        "--exclusive",
        "--ntasks-per-node=1",
        "--no-requeue",
        f"--job-name={name}",
        f"--time={minutes}",
        "--output=/dev/null",
        *placed,
        f"--wrap=sleep {minutes * 60}",
    ]
    words = run_slurm(argv, timeout_s=120).stdout.strip().splitlines()
    return words[-1].partition(";")[0] if words else ""


def wait_for_nodes(job_id: str) -> list[str]:
    """Wait until the job runs, and return its nodes.

    Raises:
        SlurmRefused: it ended before; SlurmUnavailable, JobNotFound: as `query_job`.
    """
    while True:
        job = query_job(job_id)
        if job.state.is_over:
            raise SlurmRefused(f"job {job_id}, whose nodes are needed, is {job.state.value}: {job.reason}")
        if job.hostlist and not job.state.is_queued:
            return expand_hostlist(job.hostlist)
        time.sleep(_POLL_S)


def release_nodes(job_id: str) -> None:
    """End the job that holds nodes."""
    cancel_job(job_id)


def time_on_group(job_id: str, argv: Sequence[str], nodes: Sequence[str], *, limit_s: float) -> float | None:
    """Run `argv` once on each of `nodes`, which the job holds; return the seconds until all have ended, None if it
    failed.

    Raises:
        SlurmUnavailable: it did not end within `limit_s`, or Slurm did not answer.
    """
    command = [
        "srun",
        f"--jobid={job_id}",
        "--overlap",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        "--input=none",
        *argv,
    ]
    began = time.monotonic()
    completed = run_slurm(command, check=False, timeout_s=limit_s)
    return time.monotonic() - began if completed.returncode == 0 else None
