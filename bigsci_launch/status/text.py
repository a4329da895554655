"""The output of `bsl status` and `bsl list`: plain lines and JSON documents from the values of `status`. Pure."""

from __future__ import annotations

import time

from bigsci_launch.runs.ending.job_output import last_own_line
from bigsci_launch.runs.ending.source import source_facts, unknown_end
from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.generations.read import layout_text
from bigsci_launch.runs.generations.recovery_text import LONG_RECOVERY_S
from bigsci_launch.runs.generations.strangers import stranger_facts
from bigsci_launch.runs.signs import FRESH_S, LastOutput, RankSign, StepRecord, UnreachableNode
from bigsci_launch.scheduler.hostlist import expand_hostlist
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.scheduler.waiting import advice_for, meaning_of
from bigsci_launch.status.ending import ending_advice, ending_facts
from bigsci_launch.status.generations import generation_facts
from bigsci_launch.status.next import next_advice, next_lines
from bigsci_launch.status.read import RunStatus, total_steps
from bigsci_launch.status.sections import restart_facts, size_facts, watching_facts
from bigsci_launch.topology.naming import count_ranks
from bigsci_launch.units import ago, format_age, format_slurm_duration

SCHEMA_VERSION = 1
SILENT_AFTER_S = 120.0
"""If the newest sign of life is older than this, and than three steps, `bsl status` suggests `bsl spy`."""


def status_lines(status: RunStatus) -> list[str]:
    """Return the status as lines `name   value`, followed by what to do next."""
    submitted = status.record.submitted if status.record else None
    waiting = _waiting(status.job, submitted, status.asked)
    progress = [*_progress(status), *size_facts(status.found_size), *restart_facts(status.restart)]
    facts = [*_identity(status), *waiting, *progress, *_ranks(status), *_pipelines(status), *_generations(status)]
    facts += [*stranger_facts(status.strangers, status.asked), *_ending(status)]
    facts += next_lines(status)
    facts += watching_facts(status.watching, status.asked, may_run=_may_run(status))
    width = max(len(name) for name, _ in facts)
    return [f"{name:<{width}}  {value}" for name, value in facts] + _advice(status)


def job_lines(job: JobInfo, asked: float) -> list[str]:
    """Return only what Slurm knew at `asked` (seconds since the epoch), for a job that `bsl` did not submit."""
    facts = [("job", f"{job.job_id} ({job.name or 'unnamed'}), not submitted by bsl"), *_job_facts(job)]
    facts += _waiting(job, job.submitted, asked)
    width = max(len(name) for name, _ in facts)
    advice = advice_for(job, None)
    return [f"{name:<{width}}  {value}" for name, value in facts] + ([f"next: {advice}"] if advice else [])


def _identity(status: RunStatus) -> list[tuple[str, str]]:
    label = status.record.label if status.record else "no job"
    axes = f", {count_ranks(status.topology.world_size)} ({status.topology})" if status.topology else ""
    return [
        ("run", f"{status.run.name}  {status.run.path}"),
        ("attempt", f"{status.attempt.name} of {status.num_attempts}, {label}{axes}"),
        *_job_facts(status.job),
    ]


def _job_facts(job: JobInfo) -> list[tuple[str, str]]:
    said = f" ({job.reason})" if job.reason else ""
    source = "" if job.source == "none" else f", according to {job.source}"
    facts = [("state", f"{job.state.value}{said}{source}")]
    if job.hostlist:
        facts.append(("nodes", f"{job.num_nodes or len(expand_hostlist(job.hostlist))}: {job.hostlist}"))
    if job.elapsed_s is not None and job.state.is_active and not job.state.is_queued:
        facts.append(("runs for", format_slurm_duration(job.elapsed_s)))
    return facts


def _waiting(job: JobInfo, submitted: float | None, asked: float) -> list[tuple[str, str]]:
    """Why a job waits, since when, and when Slurm expects to start it."""
    facts = [("waits because", meaning)] if (meaning := meaning_of(job)) else []
    if not job.state.is_queued:
        return facts
    since = job.submitted or submitted
    if since is not None:
        facts.append(("waits for", f"{format_age(max(0.0, asked - since))}, since {_clock(since)}"))
    expected = job.expected_start
    if expected is None:
        start = "Slurm has no estimate"
    elif expected <= asked:
        start = "Slurm expects it at any moment"
    else:
        start = f"{_clock(expected)}, in {format_age(expected - asked)}; Slurm's estimate"
    return [*facts, ("start", start)]


def _clock(moment: float) -> str:
    """A moment as people of this machine write it."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def _progress(status: RunStatus) -> list[tuple[str, str]]:
    facts = []
    if (last := status.last_step) is not None:
        total = total_steps(status.record, last)
        parts = [
            f"{last.seconds:.3g} s per step{_planned(last)}" if last.seconds is not None else "",
            f"{last.tflops:.3g} TFLOP/s per rank" if last.tflops is not None else "",
            f"loss {last.loss:.6g}" if last.loss is not None else "",
            ago(last.time, status.asked, differs=last.clock_differs) if not status.job.state.is_over else "",
        ]
        step = f"{last.step}/{total}" if total else f"{last.step}"
        facts.append(("step", ", ".join([step, *(part for part in parts if part)])))
    if (saved := status.checkpoint) is not None:
        facts.append(("checkpoint", f"{saved.path.name}, {ago(saved.time, status.asked)}"))
    if (refused := status.refused_saves) is not None:
        facts.append(("not saved", f"{refused.sentence}, {ago(refused.time, status.asked)}: {refused.path}"))
    return facts


def _planned(last: StepRecord) -> str:
    return f" (planned: {last.planned_s:.3g} s)" if last.planned_s is not None else ""


def _pipelines(status: RunStatus) -> list[tuple[str, str]]:
    return [("pipelines", layout_text(status.pipelines))] if status.pipelines is not None else []


def _may_run(status: RunStatus) -> bool:
    """Whether the ranks run, as far as is known: a job whose state is unknown may."""
    return not status.job.state.is_over and not status.job.state.is_queued and not status.job.is_gone


def _ranks(status: RunStatus) -> list[tuple[str, str]]:
    facts = []
    if _may_run(status) and status.topology:
        facts.append(("ranks", f"{status.num_started} of {status.topology.world_size} started"))
        if status.slowest is not None:
            facts.append(("slowest", slowest_text(status.slowest, status.asked)))
        elif status.last_output is not None:
            facts.append(("last output", output_text(status.last_output, status.asked)))
    return [
        *facts,
        *(("lost node" if each.fate == "lost" else "node", node_text(each)) for each in status.unreachable_nodes),
    ]


def _generations(status: RunStatus) -> list[tuple[str, str]]:
    return generation_facts(status.generations, status.recorded_steps, status.asked, may_run=_may_run(status))


def output_text(last: LastOutput, asked: float) -> str:
    """Return who printed last, and how long ago: for programs that write no heartbeats."""
    who = "the batch script"
    if (sign := last.sign) is not None:
        who = f"rank {sign.rank} ({sign.coordinate}) on {sign.node}"
    return f"{who}, {ago(last.time, asked)}"


def node_text(unreachable: UnreachableNode) -> str:
    """Return what is known about a node that does not answer Slurm."""
    node = unreachable.node
    said = f"{node.name} does not respond ({node.raw_state}) {node.reason}".rstrip()
    age = None if unreachable.sign_age_s is None else format_age(unreachable.sign_age_s)
    if unreachable.fate == "alive":
        return f"{said}: only its slurmd, since a rank on it was alive {age} ago"
    signs = "no sign of life from its ranks" if age is None else f"newest sign of life from its ranks {age} ago"
    if unreachable.fate == "lost":
        return f"{said}; {signs}" + ("; Slurm has marked it down" if node.is_given_up else "")
    may_be_usual = ", but they may print nothing" if (unreachable.sign_age_s or 0.0) > FRESH_S else ""
    return f"{said}; {signs}{may_be_usual}: unknown whether it is lost"


def slowest_text(slow: RankSign, asked: float) -> str:
    """Return who the slowest rank is, and for how long it has been silent."""
    age = ago(slow.time, asked, differs=slow.clock_differs)
    who = f"rank {slow.rank} ({slow.coordinate}) on {slow.node}"
    if slow.phase is None:
        return f"{who}: no heartbeat since it started {age}"
    at = f" at step {slow.step}" if slow.step is not None else ""
    printed = ""
    if slow.printed is not None and asked - slow.time > SILENT_AFTER_S:
        printed = f"; its newest output {ago(slow.printed, asked)}"
    return f"{who}: newest heartbeat {age}, in {slow.phase}{at}{printed}"


def _ending(status: RunStatus) -> list[tuple[str, str]]:
    if status.job.state.is_active or (status.exit is None and not _is_known_to_have_ended(status)):
        return []
    if status.exit is None and status.num_started == 0 and status.last_output is None:
        return [("ended", "no evidence that it started: its script printed nothing, and no rank left a record")]
    if status.exit is None:
        return [("ended", unknown_end(last_own_line(status.attempt)))]
    (name, reason), *more = ending_facts(status.exit)
    facts = [(name, reason + _steps_not_made(status)), *more]
    return facts + source_facts(status.exit, status.job, status.cancelled_by)


def _steps_not_made(status: RunStatus) -> str:
    """Return that a program which ended well has not printed its last step; empty if it has, or if that is unknown.

    What prints every tenth step need not print the last one.
    """
    last, ended = status.last_step, status.exit or {}
    if last is None or last.stride is None or last.total_steps is None or ended.get("reason") != "finished":
        return ""
    return (
        ""
        if last.step + last.stride > last.total_steps
        else f": not its last step, the last that it printed is {last.step} of {last.total_steps}"
    )


def _is_known_to_have_ended(status: RunStatus) -> bool:
    """A job that Slurm no longer knows has ended. One about which it gave no answer may still run."""
    return status.job.state.is_over or status.job.is_gone


def _advice(status: RunStatus) -> list[str]:
    run = run_argument(status.run)
    if status.unreachable_nodes:
        return [f"next: {_node_advice(status, run)}"]
    if advice := advice_for(status.job, run):
        return [f"next: {advice}"]
    if (
        status.exit is not None
        and not status.job.state.is_active
        and (advice := ending_advice(status.exit, run, status.next_start))
    ):
        return [f"next: {advice}"]
    if status.generations is not None and status.generations.is_recovering and _may_run(status):
        return [f"next: {_recovery_advice(status, run)}"]
    silence = silence_s(status)
    if status.job.state is JobState.RUNNING and silence is not None and silence > silent_after_s(status):
        who = "no rank should be silent" if status.slowest else "nothing was printed"
        return [f"next: bsl spy {run}   ({who} for that long)"]
    return [f"next: {again}"] if (again := next_advice(status)) else []


def _recovery_advice(status: RunStatus, run: str) -> str:
    """What to do while a run recovers: nothing, unless it takes long."""
    since = status.generations.recovering_since if status.generations else None
    if since is None or status.asked - since <= LONG_RECOVERY_S:
        return f"wait, then check again: bsl status {run}   (it recovers by itself)"
    return f"bsl spy {run}   (a recovery should not take that long)"


def _node_advice(status: RunStatus, run: str) -> str:
    """What to do about nodes that do not answer Slurm. Only a lost node is left out of the next attempt."""
    lost = [each.node.name for each in status.unreachable_nodes if each.fate == "lost"]
    if not lost:
        return f"wait, then check again: bsl status {run}   (Slurm ends the job by itself if it marks the node down)"
    if status.record is not None and status.record.requeue:
        return f"wait: Slurm requeues the job by itself when it marks the node down   (bsl status {run})"
    return f"bsl cancel {run}; then submit it again with --set slurm.exclude={','.join(lost)}"


def silence_s(status: RunStatus) -> float | None:
    """Return for how long the slowest rank has been silent; for a program without heartbeats, all of them. In seconds.

    None if nothing is known about the ranks, or if none has started.
    """
    if status.slowest is not None:
        return status.asked - status.slowest.newest
    if status.last_output is None or status.num_started == 0:
        return None
    return status.asked - status.last_output.time


def silent_after_s(status: RunStatus) -> float:
    """Return how many seconds of silence are too long: two minutes, or the time of three steps if that is longer."""
    last = status.last_step
    usual = max(last.every_s or 0.0, last.seconds or 0.0) if last is not None else 0.0
    return max(SILENT_AFTER_S, 3 * usual)
