"""What `bsl` asks of Slurm: submit, query and cancel jobs, and run a step inside a running job.

Only text output in explicit formats is parsed. squeue is asked first, for all jobs at once; then sacct, if it is
installed and keeps records. A job that neither knows has no answer.
"""

from __future__ import annotations

import os
import pwd
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from bigsci_launch.errors import JobNotFound, SlurmRefused, SlurmUnavailable
from bigsci_launch.scheduler.command import (
    DEFAULT_TIMEOUT_S,
    has_command,
    refused,
    run_slurm,
    slurm_text,
    stream_slurm,
)
from bigsci_launch.scheduler.hostlist import expand_hostlist
from bigsci_launch.scheduler.job import (
    SACCT_FIELDS,
    SQUEUE_FORMAT,
    JobInfo,
    MonitorStep,
    NodeInfo,
    StepEnd,
    parse_comment,
    parse_job_line,
    parse_node_line,
)
from bigsci_launch.scheduler.job_ids import asked_as, is_job_id, leaders_missing, named_jobs, only_job

SUBMIT_TIMEOUT_S = 150.0
"""sbatch itself repeats its request for 120 s while the cluster has as many jobs as it may (MaxJobCount)."""
NAMES_TIMEOUT_S = 15.0
"""Names are optional: they are worth the wait for a slurmctld that is slow, and not for one that is down."""
SLURM_EVERY_S = 30.0
"""Seconds between two questions of whoever asks again and again."""
ONLY_OWN_JOBS = "this cluster shows you only your own jobs (PrivateData)"
_SETTING = re.compile(r"^(ClusterName|PrivateData)\s*=\s*(\S+)", re.MULTILINE)
_CLUSTER_HEADING = "CLUSTER: "
_CANCELLED_BY = re.compile(r"^CANCELLED by (\d+)", re.MULTILINE)
_RECORD = re.compile(r"^(?=JobId=\d)", re.MULTILINE)
# What users choose freely (name, comment, command line) comes before these three. Up to 25.05 a line ends with a blank.
_OUTPUT = re.compile(r".* StdErr=(.*?) StdIn=.*? StdOut=(.*?)(?: [A-Z]\w+=.*)?\s*\Z", re.DOTALL)
_ADDRESS = re.compile(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", re.MULTILINE)
_GPUS = re.compile(r"(?:^|[,/:])gpu(?::[A-Za-z][\w.-]*)?(?::(\d+))?(?=$|[,(])")
_SHELL = re.compile(r"[|<>]")
_NO_SUCH_JOB = re.compile(r"Invalid job id", re.IGNORECASE)


def submit_argv(script: Path) -> list[str]:
    """Return the command that submits `script`, whose header has all options."""
    return ["sbatch", "--parsable", str(script)]


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """What sbatch answered: the job, and its cluster's name; None if no command says it. `said` is everything else that
    it printed, line by line: sites put warnings there, also for jobs that they accept."""

    job_id: str
    cluster: str | None
    said: tuple[str, ...] = ()


def submit_script(
    argv: Sequence[str], *, cwd: Path | None = None, options: Mapping[str, str] | None = None
) -> SubmittedJob:
    """Run `sbatch --parsable ...` and return the job. Where sbatch does not add `;cluster`, ask for the name.

    `options` are variables from which sbatch takes options, such as SBATCH_ACCOUNT.

    Raises:
        SlurmUnavailable, SlurmRefused: as `run_slurm`.
    """
    completed = run_slurm(argv, timeout_s=SUBMIT_TIMEOUT_S, cwd=cwd, extra_environment=options)
    *before, last_line = completed.stdout.strip().splitlines() or [""]
    job_id, _, cluster = (part.strip() for part in last_line.partition(";"))
    if not job_id.isdigit():
        raise SlurmRefused(
            f"sbatch: no job ID in its output {completed.stdout.strip()!r}", argv=argv, stderr=completed.stderr
        )
    said = (line.rstrip() for line in [*before, *completed.stderr.splitlines()])
    return SubmittedJob(job_id, cluster or cluster_name(), tuple(line for line in said if line))


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What Slurm's configuration says; None if it cannot be had. `hides_jobs`: other people's, from this user."""

    name: str | None = None
    hides_jobs: bool | None = None


def cluster_facts() -> ClusterFacts:
    """Return what is known of the cluster that Slurm's commands reach.

    SLURM_CLUSTER_NAME is not asked: inside a job it names the cluster of that job, whatever SLURM_CONF says.
    """
    if not has_command("scontrol"):
        return ClusterFacts()
    try:
        completed = run_slurm(["scontrol", "show", "config"], check=False, timeout_s=NAMES_TIMEOUT_S)
    except SlurmUnavailable:
        return ClusterFacts()
    found = dict(_SETTING.findall(completed.stdout))
    private = found.get("PrivateData")
    hides = None if private is None else os.geteuid() != 0 and "jobs" in private.split(",")
    return ClusterFacts(found.get("ClusterName"), hides)


def cluster_name() -> str | None:
    """Return the name of the cluster that Slurm's commands reach; None if it cannot be had."""
    return cluster_facts().name


def query_jobs(wanted: Mapping[str, str | None]) -> dict[str, JobInfo]:
    """Return what squeue, and then sacct, know about jobs, of which the cluster may be known; others are left out.

    Raises:
        SlurmUnavailable: squeue gave no answer.
    """
    found = _query_named([job_id for job_id in wanted if is_job_id(job_id)])
    of_cluster = {
        job_id: [job for job in named if not job.cluster or wanted[job_id] in (None, job.cluster)]
        for job_id, named in found.items()
    }
    return {job_id: named[0] for job_id, named in of_cluster.items() if len(named) == 1}


def query_job(job_id: str) -> JobInfo:
    """Return what squeue, or else sacct, knows about one job, in any spelling that they print.

    Raises:
        SlurmUnavailable: squeue gave no answer.
        JobNotFound: neither knows the job.
        AmbiguousJob: it is an array, and several of its tasks run, or none.
    """
    return only_job(job_id, jobs_called(job_id))


def jobs_called(job_id: str) -> list[JobInfo]:
    """Return the jobs that an ID means: several if it is that of an array.

    Raises:
        SlurmUnavailable, JobNotFound: as `query_job`.
    """
    found = _query_named([job_id])
    if job_id not in found:
        accounting = "sacct has no record of it" if has_command("sacct") else "sacct is not installed here"
        raise JobNotFound(
            f"job {job_id}: squeue does not know it, and {accounting}",
            hint=ONLY_OWN_JOBS
            if cluster_facts().hides_jobs
            else "a job leaves squeue some minutes after it ends; `bsl list` shows the runs that can be found",
        )
    return found[job_id]


def query_output(job_id: str) -> Path | None:
    """Return the file that the job's batch script prints to; None if Slurm does not say it, or says a pattern.

    Raises:
        SlurmUnavailable: as `run_slurm`.
    """
    return next((output for _, output in _ask_outputs(job_id) if output), None)


def query_outputs(job_id: str) -> list[Path]:
    """Return the files of its output and of its errors, which are often the same.

    Raises:
        SlurmUnavailable: as `run_slurm`.
    """
    return list(dict.fromkeys(path for paths in _ask_outputs(job_id) for path in paths if path))


def _ask_outputs(job_id: str) -> list[tuple[Path | None, ...]]:
    return parse_outputs(run_slurm(["scontrol", "show", "job", "-o", job_id], check=False).stdout)


def parse_outputs(text: str) -> list[tuple[Path | None, ...]]:
    """Return the files of errors and of output in each record of `scontrol show job -o`; None for one not expanded."""
    found = (_OUTPUT.match(record) for record in _RECORD.split(text))
    return [
        tuple(Path(path) if path.startswith("/") and "%" not in path else None for path in each.groups())
        for each in found
        if each
    ]


@dataclass(frozen=True, slots=True)
class QueuedScript:
    """A job that waits or runs: the script that was passed to sbatch, and the run that its comment names."""

    job_id: str
    script: Path
    run_directory: str | None


def queued_scripts(*users: int) -> list[QueuedScript]:
    """Return the jobs of these users, by number, that wait or run.

    Raises:
        SlurmUnavailable: squeue gave no answer.
        SlurmRefused: squeue failed otherwise.
    """
    whose = ",".join(str(user) for user in dict.fromkeys(users))
    completed = run_slurm(["squeue", "--noheader", f"--user={whose}", "--format=%i|%k|%o"])
    rows = (line.split("|", 2) for line in completed.stdout.splitlines())
    return [QueuedScript(row[0], Path(row[2].strip()), parse_comment(row[1])) for row in rows if len(row) == 3]


@dataclass(frozen=True, slots=True)
class UserJob:
    """A job of a user. `gpus` is how many it has on all nodes; None if squeue does not say that."""

    job: JobInfo
    gpus: int | None


def jobs_of_user(user: int) -> list[UserJob]:
    """Return the jobs of a user that squeue knows, whoever submitted them: also those that ended minutes ago.

    Raises:
        SlurmUnavailable: squeue gave no answer.
        SlurmRefused: squeue failed otherwise.
    """
    asked = ["squeue", "--noheader", "--states=all", f"--user={user}", f"--format=%b|{SQUEUE_FORMAT}"]
    found = []
    for line in run_slurm(asked).stdout.splitlines():
        gres, _, rest = line.partition("|")
        if (job := parse_job_line(rest, "squeue")) is not None and is_job_id(job.job_id):
            counts = [int(number or 1) for number in _GPUS.findall(gres)]
            found.append(UserJob(job, sum(counts) * job.num_nodes if counts and job.num_nodes else None))
    return found


def query_canceller(job_id: str) -> str | None:
    """Return who cancelled a job, by name or number. None if it is not known: only sacct says it."""
    if not has_command("sacct"):
        return None
    try:
        completed = run_slurm(["sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State"], check=False)
    except SlurmUnavailable:
        return None
    found = _CANCELLED_BY.search(completed.stdout)
    if found is None:
        return None
    try:
        return pwd.getpwuid(int(found[1])).pw_name
    except (KeyError, OverflowError):
        return f"uid {found[1]}"


def query_nodes(
    hostlist: str, *, slurm_conf: Path | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[NodeInfo]:
    """Return the state of each node of `hostlist` once. `slurm_conf`, if given, selects the cluster."""
    environment = {"SLURM_CONF": str(slurm_conf)} if slurm_conf else {}
    argv = ["sinfo", "-h", "-N", "-n", hostlist, "-o", "%N|%T|%E"]
    completed = run_slurm(argv, extra_environment=environment, timeout_s=timeout_s)
    nodes = (parse_node_line(line) for line in completed.stdout.splitlines())
    return list({node.name: node for node in nodes if node is not None}.values())


def query_addresses(nodes: Sequence[str]) -> dict[str, str]:
    """Return the address of each node by which Slurm itself reaches it.

    Raises:
        SlurmUnavailable, SlurmRefused: as `run_slurm`.
    """
    completed = run_slurm(["scontrol", "--oneliner", "show", "node", ",".join(nodes)])
    return dict(_ADDRESS.findall(completed.stdout))


def partition_nodes(partition: str | None) -> list[str]:
    """Return the nodes of a partition, or of the default one, as Slurm lists them: each machine once.

    A partition that Slurm does not know has none.

    Raises:
        SlurmUnavailable, SlurmRefused: as `run_slurm`.
    """
    where = ["-p", partition] if partition else []
    completed = run_slurm(["sinfo", "-h", "-N", "-o", "%P %N", *where], timeout_s=NAMES_TIMEOUT_S)
    rows = (line.split() for line in completed.stdout.splitlines())
    named = [row for row in rows if len(row) == 2 and row[0] != _CLUSTER_HEADING.strip()]
    return list(dict.fromkeys(node for part, node in named if partition or part.endswith("*")))


def cancel_job(job_id: str) -> None:
    """Ask Slurm to end the job, or all tasks of an array: TERM to the processes now, KILL after the site's KillWait.

    Raises:
        SlurmUnavailable, SlurmRefused: as `run_slurm`. scancel says nothing of a job that there is not.
    """
    completed = run_slurm(["scancel", job_id], check=False)
    if completed.returncode != 0:
        raise SlurmRefused(
            f"scancel: Slurm refused to cancel job {job_id}: {completed.stderr.strip()}",
            hint="only the owner of a job and operators may cancel it",
            argv=completed.argv,
            returncode=completed.returncode,
            stderr=completed.stderr,
        )


def signal_script(job_id: str, name: str) -> None:
    """Send a signal to the job's batch script alone, as `sbatch --signal=B:` does before the time limit.

    Raises:
        SlurmUnavailable, SlurmRefused: as `run_slurm`.
    """
    run_slurm(["scancel", "--batch", f"--signal={name}", job_id])


def signal_step(step: str, name: str) -> None:
    """Send a signal to every process of a step, such as `1234.0`. Its job stays.

    Raises:
        SlurmUnavailable, SlurmRefused: as `run_slurm`; JobNotFound: there is no such step, or no longer.
    """
    _scancel_step(step, f"--signal={name}")


def kill_step(step: str) -> None:
    """End a step: KILL to every process of it, at once. Its job stays.

    Raises:
        SlurmUnavailable, SlurmRefused: as `run_slurm`; JobNotFound: there is no such step, or no longer.
    """
    _scancel_step(step)


def _scancel_step(step: str, *options: str) -> None:
    completed = run_slurm(["scancel", *options, step], check=False)
    if _NO_SUCH_JOB.search(completed.stderr):
        raise JobNotFound(f"scancel: there is no step {step}", argv=completed.argv, stderr=completed.stderr)
    if completed.returncode != 0:
        raise refused(completed)


def step_argv(
    job_id: str,
    argv: Sequence[str],
    *,
    nodes: Sequence[str],
    groups: Mapping[str, int] | None = None,
    options: Sequence[str] = ("--input=none",),
) -> list[str]:
    """Return the srun command that runs `argv` once on each of `nodes`, alongside the job's own step.

    `job_id` is a number. In a heterogeneous job, `groups` says to which component each node belongs.
    `--overlap` and `--gres=gpu:0` are both needed: without them the step waits until the training ends.
    """
    parts: dict[int | None, list[str]] = {}
    for node in nodes:
        parts.setdefault((groups or {}).get(node), []).append(node)
    words: list[str] = []
    for group, members in parts.items():
        words += [
            *([":"] if words else [f"--jobid={job_id}"]),
            *([] if group is None else [f"--het-group={group}"]),
            "--overlap",
            "--gres=gpu:0",
            f"--nodes={len(members)}",
            f"--ntasks={len(members)}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(members)}",
            "--kill-on-bad-exit=0",
            "--cpu-bind=none",
            "--mpi=none",
            *options,
            *argv,
        ]
    return ["srun", *words]


class Slurm:
    """Slurm, as `bsl spy` asks it: see `scheduler.choice`."""

    name, starter = "Slurm", "srun"
    show_job, list_steps = "scontrol show job {job_id}", "squeue --steps --jobs={job_id}"

    def find_job(self, job_id: str) -> JobInfo:
        return query_job(job_id)

    def nodes_of(self, job: JobInfo) -> list[NodeInfo]:
        known = {node.name: node for node in query_nodes(job.hostlist)}
        return [known.get(name, NodeInfo(name, "", "")) for name in dict.fromkeys(expand_hostlist(job.hostlist))]

    def run_on_nodes(self, job_id: str, step: MonitorStep) -> StepEnd:
        with tempfile.NamedTemporaryFile("w", prefix="bsl-step-") as source:
            # What srun reads from its own stdin reaches one component of a heterogeneous job, a file reaches all.
            source.write(step.stdin if step.groups else "")
            source.flush()
            # --wait=0: a site's WaitTime must not end slower nodes when the first is done.
            options = (f"--input={source.name if step.groups else 'all'}", "--wait=0", "--no-kill", "--quiet")
            command = step_argv(job_id, step.argv, nodes=step.nodes, groups=step.groups, options=options)
            words = stream_slurm(command, stdin=step.stdin, until=step.until, on_line=step.on_line)
        refused_nodes = re.findall(r"[Tt]ask launch for \S+ failed on node (\S+?):", words)
        return StepEnd(tuple(dict.fromkeys(refused_nodes)), slurm_text(words))

    def command_on_node(self, command: str, job_id: str, *, node: str | None = None, group: int | None = None) -> str:
        component = "" if group is None else f" --het-group={group}"
        where = "" if node is None else f" -N1 -n1 -w {node}"
        words = f"sh -c {quote(command)}" if _SHELL.search(command) else command
        return f"srun --overlap --jobid={job_id}{component} --gres=gpu:0{where} {words}"


def _query_named(wanted: Sequence[str]) -> dict[str, list[JobInfo]]:
    """Return the jobs that each of the IDs means, asking squeue, and sacct for those that it does not know."""
    found = _named(wanted, _ask_squeue([asked_as(job_id) for job_id in wanted]) if wanted else [])
    if missing := [job_id for job_id in wanted if job_id not in found]:
        found |= _named(missing, _ask_sacct(missing))
    return found


def _named(wanted: Sequence[str], jobs: Sequence[JobInfo]) -> dict[str, list[JobInfo]]:
    return {job_id: named for job_id in wanted if (named := named_jobs(job_id, jobs))}


def _ask_squeue(numbers: Sequence[str]) -> list[JobInfo]:
    completed = run_slurm(
        # All states: a job stays in squeue for MinJobAge after it ends.
        ["squeue", "-h", "-t", "all", f"--jobs={','.join(dict.fromkeys(numbers))}", "-o", SQUEUE_FORMAT],
        check=False,
    )
    if completed.returncode != 0 and not _NO_SUCH_JOB.search(completed.stderr):
        raise SlurmUnavailable(
            f"squeue: {completed.stderr.strip()}", argv=completed.argv, returncode=completed.returncode
        )
    jobs = _parse_jobs(completed.stdout, "squeue")
    return jobs + _of_leaders(jobs, numbers, _ask_squeue)


def _of_leaders(
    jobs: Sequence[JobInfo], asked: Sequence[str], ask: Callable[[Sequence[str]], list[JobInfo]]
) -> list[JobInfo]:
    """Return the components that the first answer leaves out of heterogeneous jobs."""
    leaders = [leader for leader in leaders_missing(jobs) if leader not in asked]
    return ask(leaders) if leaders else []


def _ask_sacct(job_ids: Sequence[str]) -> list[JobInfo]:
    """Return sacct's answer, or nothing if it is missing, switched off or silent: it is only the second source."""
    if not has_command("sacct"):
        return []
    try:
        completed = run_slurm(
            ["sacct", "-n", "-X", "-P", f"--jobs={','.join(job_ids)}", "-o", SACCT_FIELDS], check=False
        )
    except SlurmUnavailable:
        return []
    jobs = _parse_jobs(completed.stdout, "sacct") if completed.returncode == 0 else []
    return jobs + _of_leaders(jobs, job_ids, _ask_sacct)


def _parse_jobs(text: str, source: str) -> list[JobInfo]:
    """Parse an answer. One from several clusters (SLURM_CLUSTERS) names each above its jobs."""
    jobs: dict[tuple[str, str], JobInfo] = {}
    cluster = ""
    for line in text.splitlines():
        if line.startswith(_CLUSTER_HEADING):
            cluster = line.removeprefix(_CLUSTER_HEADING).strip()
        elif (job := parse_job_line(line, source)) is not None and is_job_id(job.job_id):
            jobs[cluster, job.job_id] = replace(job, cluster=cluster)
    return list(jobs.values())
