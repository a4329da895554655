"""What a scheduler knows about a job: its state and where it runs. Only values and text parsers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import NamedTuple
from urllib.parse import quote, unquote

from bigsci_launch.units import parse_slurm_duration

COMMENT_PREFIX = "bsl:"


class JobState(Enum):
    """Every job state and flag that Slurm 20.11 to 26.05 prints, and UNKNOWN if no source knows the state."""

    BOOT_FAIL = "BOOT_FAIL"
    CANCELLED = "CANCELLED"
    COMPLETED = "COMPLETED"
    COMPLETING = "COMPLETING"
    CONFIGURING = "CONFIGURING"
    DEADLINE = "DEADLINE"
    EXPEDITING = "EXPEDITING"
    FAILED = "FAILED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PENDING = "PENDING"
    POWER_UP_NODE = "POWER_UP_NODE"
    PREEMPTED = "PREEMPTED"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESIZING = "RESIZING"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    REVOKED = "REVOKED"
    RUNNING = "RUNNING"
    SIGNALING = "SIGNALING"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"
    SUSPENDED = "SUSPENDED"
    TIMEOUT = "TIMEOUT"
    UPDATE_DB = "UPDATE_DB"
    UNKNOWN = "UNKNOWN"

    @property
    def is_queued(self) -> bool:
        """Whether the job is still waiting for its nodes."""
        return self in _QUEUED

    @property
    def is_active(self) -> bool:
        """Whether the job is waiting, running or completing: its run must not be started a second time."""
        return self in _QUEUED or self in _ON_NODES

    @property
    def is_over(self) -> bool:
        """Whether the job has ended. UNKNOWN is neither active nor over."""
        return not self.is_active and self is not JobState.UNKNOWN


_QUEUED = frozenset(
    {
        JobState.PENDING,
        JobState.REQUEUED,
        JobState.REQUEUE_FED,
        JobState.REQUEUE_HOLD,
        JobState.RESV_DEL_HOLD,
        JobState.SPECIAL_EXIT,
    }
)
_ON_NODES = frozenset(
    {
        JobState.COMPLETING,
        JobState.CONFIGURING,
        JobState.EXPEDITING,
        JobState.POWER_UP_NODE,
        JobState.RESIZING,
        JobState.RUNNING,
        JobState.SIGNALING,
        JobState.STAGE_OUT,
        JobState.STOPPED,
        JobState.SUSPENDED,
        JobState.UPDATE_DB,
    }
)


def parse_state(text: str) -> JobState:
    """Parse Slurm's text for a state: `RUNNING`, `CANCELLED by 1000`, `OUT_OF_ME+`. Words of a later Slurm: UNKNOWN."""
    word = text.strip().split(" ")[0]
    if word.endswith("+"):
        found = [state for state in JobState if state.value.startswith(word[:-1]) and word != "+"]
        return found[0] if len(found) == 1 else JobState.UNKNOWN
    return JobState.__members__.get(word, JobState.UNKNOWN)


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What one source says about one job. Times are seconds since the epoch; None if the source does not say."""

    job_id: str
    state: JobState
    raw_state: str
    source: str
    """`squeue`, `sacct`, `exit.json`, `launcher`, `environment` (it is in the job), or `none`: it is not known."""
    name: str = ""
    user: str = ""
    partition: str = ""
    num_nodes: int | None = None
    hostlist: str = ""
    reason: str = ""
    """Slurm's reason (why the job waits, or `NodeDown`, `TimeLimit`, ...); for UNKNOWN, why the state is unknown."""
    started: float | None = None
    ends: float | None = None
    elapsed_s: int | None = None
    comment: str = ""
    submitted: float | None = None
    """When the job was queued, or queued again by a requeue."""
    cluster: str = ""
    """Name of the cluster that answered, if the answer has it: only where commands ask several clusters."""
    is_gone: bool = False
    """For UNKNOWN: the job is over. Slurm answered and no longer knows it, or its launcher is gone."""
    number: str = ""
    """The number that srun takes: that of a task of an array is not in its `job_id`, such as `6_1`."""
    components: Mapping[int, JobInfo] = field(default_factory=dict)
    """The components of a heterogeneous job; empty for any other job."""

    @property
    def expected_start(self) -> float | None:
        """Slurm's estimate of when a waiting job starts; None if Slurm has none, or the job does not wait."""
        return self.started if self.state.is_queued else None

    @property
    def run_directory(self) -> str | None:
        """The run directory named in the job's comment; None for a job that `bsl` did not submit."""
        return parse_comment(self.comment)


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node as sinfo reports it. `raw_state` is Slurm's word, such as `mixed` or `down*`."""

    name: str
    raw_state: str
    reason: str

    @property
    def is_responding(self) -> bool:
        """False once the node has stopped answering slurmctld (`*`), or is considered down.

        The jobs of a node that is `failing` or `draining` run on: an administrator lets nothing new start there.
        """
        return not (self.raw_state.endswith("*") or self.raw_state.startswith(("down", "unk")))

    @property
    def is_given_up(self) -> bool:
        """Whether Slurm itself considers the node down: it ends the jobs on it."""
        return self.raw_state.startswith("down")


@dataclass(frozen=True, slots=True)
class MonitorStep:
    """A program to run once on each of `nodes`, next to the ranks of a job.

    `on_line` gets each line of output as it is printed, so that a silent node does not delay the others. The step is
    ended at the deadline `until()`, a `time.monotonic()` value that is asked for again after each line.
    """

    argv: Sequence[str]
    nodes: Sequence[str]
    until: Callable[[], float]
    on_line: Callable[[str], None]
    stdin: str = ""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Of a heterogeneous job: the component of each node."""


class StepEnd(NamedTuple):
    """The nodes where a step could not start, and what its starter said."""

    refused_nodes: tuple[str, ...]
    words: str


def format_comment(run_directory: str) -> str:
    """Return the job comment that links a job ID to its run. Blanks and separators are percent-encoded."""
    return COMMENT_PREFIX + quote(run_directory, safe="/:@!$&'()*+,;=~-._")


def parse_comment(comment: str) -> str | None:
    """Return the run directory in a job comment; None if `bsl` did not write the comment."""
    return unquote(comment[len(COMMENT_PREFIX) :]) if comment.startswith(COMMENT_PREFIX + "/") else None


def parse_time(text: str) -> float | None:
    """Parse Slurm's `2026-11-21T01:02:03` (local time) to seconds since the epoch; None for `Unknown`, `N/A`, ..."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def parse_elapsed(text: str) -> int | None:
    """Parse Slurm's elapsed time (`D-HH:MM:SS`, `HH:MM:SS` or `MM:SS`) to seconds; None for anything else."""
    try:
        return parse_slurm_duration(text)
    except ValueError:
        return None


SQUEUE_FORMAT = "%i %A|%T|%u|%P|%D|%N|%r|%S|%e|%M|%V|%j|%k"
SACCT_FIELDS = "JobID,State,User,Partition,NNodes,NodeList,Reason,Start,End,Elapsed,Submit,JobName,Comment"
_NUM_FIELDS = 13
LONGEST_NUMBER = 9


def parse_job_line(line: str, source: str) -> JobInfo | None:
    """Parse a line of squeue with `SQUEUE_FORMAT`, or of `sacct -P` with `SACCT_FIELDS`; None for any other line.

    The two free-text fields come last, so that a `|` in them cannot shift the others.
    """
    fields = line.split("|", _NUM_FIELDS - 1)
    if len(fields) != _NUM_FIELDS:
        return None
    job, state, user, partition, nodes, hostlist, reason, start, end, elapsed, submitted, name, comment = fields
    job_id, _, number = job.partition(" ")
    return JobInfo(
        job_id=job_id,
        state=parse_state(state),
        raw_state=state,
        source=source,
        name=name,
        user=user,
        partition=partition,
        num_nodes=int(nodes) if nodes.isdecimal() and len(nodes) <= LONGEST_NUMBER else None,
        hostlist="" if hostlist in ("None assigned", "(null)") else hostlist,
        reason="" if reason in ("None", "(null)") or _is_stale(state, source) else reason,
        started=parse_time(start),
        ends=parse_time(end),
        elapsed_s=parse_elapsed(elapsed),
        comment="" if comment == "(null)" else comment,
        submitted=parse_time(submitted),
        number=number or job_id,
    )


def _is_stale(state: str, source: str) -> bool:
    """Whether a reason is one for which the job once waited: sacct keeps that beyond its end."""
    return source == "sacct" and not parse_state(state).is_queued


def parse_node_line(line: str) -> NodeInfo | None:
    """Parse a line of `sinfo -N -o %N|%T|%E`; None for any other line."""
    fields = line.split("|", 2)
    if len(fields) != 3:
        return None
    return NodeInfo(name=fields[0], raw_state=fields[1], reason="" if fields[2] == "none" else fields[2])
