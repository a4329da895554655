"""Why a job waits, in plain words. Slurm's reasons are data here; one that is not in the table is shown as it is.

Sources: the section "JOB REASON CODES" of squeue(1), and the texts that slurmctld writes in their place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bigsci_launch.scheduler.job import JobInfo, JobState


@dataclass(frozen=True, slots=True)
class WaitReason:
    """One of Slurm's reasons: a pattern for its text, what it means, and what to do next; empty if only to wait.

    In `advice`, `{job}` is the job's id, `{partition}` its partition and `{again}` says to cancel and submit again.
    """

    pattern: str
    meaning: str
    advice: str = ""


AGAIN = "bsl cancel {run}; then submit it again"
CANCEL = "scancel {job}; then submit it again"
_LIMITS = "sacctmgr show assoc user=$USER   (shows your limits)"
_QOS = "sacctmgr show qos   (shows the limits of each QOS)"
_NODES = "sinfo -R -p {partition}   (shows which nodes are down or drained, and why)"

REASONS = (
    WaitReason("Priority", "jobs with a higher priority come first"),
    WaitReason("Resources", "it is next, and waits until enough nodes are free"),
    WaitReason("None", "Slurm has not looked at it yet"),
    WaitReason("Cleaning", "Slurm is still cleaning up after its last start"),
    WaitReason(
        "BeginTime", "it may not start before its begin time; after a requeue, Slurm sets that some minutes ahead"
    ),
    WaitReason("Dependency", "it waits for another job", "scontrol show job {job}   (Dependency names that job)"),
    WaitReason(
        "DependencyNeverSatisfied", "it waits for a job that did not end as asked: it will never start", "{again}"
    ),
    WaitReason("JobArrayTaskLimit", "as many tasks of its array run as may run at once (--array=...%N)"),
    WaitReason("DeadLine", "its deadline comes before it could end: it will not start", "{again}"),
    WaitReason("JobHeldUser", "its owner holds it back", "scontrol release {job}"),
    WaitReason("JobHeldAdmin", "an administrator holds it back", "ask the cluster's support why"),
    WaitReason("launch failed requeued held", "Slurm could not start it, and holds it back", "scontrol release {job}"),
    WaitReason("job requeued in held state|RequeueHold", "it was requeued, and is held back", "scontrol release {job}"),
    WaitReason("RequeueExit", "it ended with an exit code after which this cluster starts jobs again"),
    WaitReason("JobHoldMaxRequeue", "it was requeued too often, and is held back", "scontrol release {job}"),
    WaitReason(
        "PartitionNodeLimit",
        "it requests more or fewer nodes than partition {partition} allows: it will not start",
        "{again} with another slurm.nodes or slurm.partition",
    ),
    WaitReason(
        "PartitionTimeLimit",
        "its time limit is longer than partition {partition} allows: it will not start",
        "{again} with another slurm.time_limit or slurm.partition",
    ),
    WaitReason("PartitionDown", "partition {partition} starts no jobs at present", "sinfo -p {partition}"),
    WaitReason("PartitionInactive", "partition {partition} takes and starts no jobs", "sinfo -p {partition}"),
    WaitReason("PartitionConfig", "it requests something that partition {partition} does not allow", "{again}"),
    WaitReason(
        "AccountNotAllowed", "its account may not use partition {partition}", "{again} with another slurm.account"
    ),
    WaitReason("InvalidAccount", "its account is not valid", "{again} with another slurm.account"),
    WaitReason("InvalidQOS", "its QOS is not valid", "{again} with another slurm.qos"),
    WaitReason(
        "BadConstraints", "no node has what it requests: it will not start", "{again} with another slurm.constraint"
    ),
    WaitReason(
        "ReqNodeNotAvail, *Reserved for maintenance.*",
        "the nodes are reserved for maintenance before it could end",
        "scontrol show reservation   (a shorter slurm.time_limit may end before it)",
    ),
    WaitReason("ReqNodeNotAvail.*", "a node that it requests is down, drained or reserved", _NODES),
    WaitReason(
        "Nodes required for job are DOWN.*",
        "too few nodes are usable: others are down, drained or reserved for jobs with a higher priority",
        _NODES,
    ),
    WaitReason("NodeDown", "a node that it needs is down", _NODES),
    WaitReason("Reservation", "it waits for its reservation to begin", "scontrol show reservation"),
    WaitReason(
        "ReservationDeleted", "its reservation is gone: it will not start", "{again} with another slurm.reservation"
    ),
    WaitReason("Licenses", "it waits for a licence that other jobs hold", "scontrol show licenses"),
    WaitReason("QOS.*PerUser.*|QOS.*PU.*", "you have reached a limit of its QOS for each user", _QOS),
    WaitReason("QOS.*PerAccount.*|QOS.*PA.*", "its account has reached a limit of the QOS for each account", _QOS),
    WaitReason("QOS.*PerJob.*|QOSMaxWall.*|QOSMin.*", "it requests more or less than its QOS allows for a job", _QOS),
    WaitReason("QOS.*", "a limit of its QOS is reached, or its QOS may not be used here", _QOS),
    WaitReason(
        "MaxGRES.*|Assoc.*PerJob.*|AssocMaxWall.*", "it requests more than its account allows for a job", _LIMITS
    ),
    WaitReason("Assoc.*", "a limit of its account or user is reached", _LIMITS),
    WaitReason("MaxMemPerLimit", "it requests more memory than a node or the partition allows", "{again}"),
    WaitReason("MaxPoweredUpNodes", "as many nodes are powered up as may be at once"),
    WaitReason("MpiPortsBusy|NvidiaImexChannels", "it waits for ports or channels that other jobs hold"),
    WaitReason("BurstBuffer.*", "its burst buffer is not ready", "scontrol show burst"),
    WaitReason("Prolog", "the cluster's prolog prepares its nodes"),
    WaitReason("ReservationInvalid", "its reservation may not be used", "{again} with another slurm.reservation"),
    WaitReason("FrontEndDown|SchedDefer|InactiveLimit", "the cluster starts no jobs at present"),
)
STATES = {
    JobState.CONFIGURING: WaitReason("", "its nodes are being prepared: the cluster's prolog runs, or they boot"),
    JobState.POWER_UP_NODE: WaitReason("", "its nodes are being powered up"),
    JobState.EXPEDITING: WaitReason("", "Slurm starts it again, before other jobs"),
    JobState.REQUEUE_HOLD: WaitReason("", "it was requeued, and is held back", "scontrol release {job}"),
    JobState.SPECIAL_EXIT: WaitReason(
        "",
        "it ended with an exit code after which this cluster holds jobs back, or was held back so by hand",
        "scontrol release {job}   (once it is known why it ended)",
    ),
    JobState.RESV_DEL_HOLD: WaitReason("", "its reservation is gone, and it is held back", "{again}"),
    JobState.STAGE_OUT: WaitReason("", "its burst buffer is being written out"),
    JobState.STOPPED: WaitReason("", "its processes were stopped by a signal", "scancel --signal=CONT {job}"),
    JobState.SUSPENDED: WaitReason("", "it was suspended: its processes stand still", "scontrol resume {job}"),
}
"""States that say more than the reason next to them, which may be an old one."""


def find_reason(text: str) -> WaitReason | None:
    """Return what Slurm's reason means; None for one that is not in the table."""
    word = text.strip().strip("()") or "None"
    return next((reason for reason in REASONS if re.fullmatch(reason.pattern, word, re.IGNORECASE)), None)


def _why(job: JobInfo) -> WaitReason | None:
    return STATES.get(job.state) or (find_reason(job.reason) if job.state.is_queued else None)


def meaning_of(job: JobInfo) -> str | None:
    """Return in plain words why the job waits; None if it does not wait, or if its reason is not known here."""
    reason = _why(job)
    return reason.meaning.format(partition=_partition(job)) if reason else None


def advice_for(job: JobInfo, run: str | None) -> str | None:
    """Return the next command for a waiting job; None if there is only to wait. `run` is how to name its run."""
    reason = _why(job)
    if reason is None or not reason.advice:
        return None
    again = AGAIN.format(run=run) if run else CANCEL.format(job=job.job_id)
    return reason.advice.format(job=job.job_id, partition=_partition(job), again=again)


def _partition(job: JobInfo) -> str:
    """A job may ask for several partitions; the first stands for them in a sentence and in a command."""
    return job.partition.partition(",")[0] or "?"
