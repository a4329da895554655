"""Asks, on the login node, what ended attempts say about their nodes: no script did so if its own node was lost."""

from __future__ import annotations

import os

from bigsci_launch.errors import RunDirError, SlurmError
from bigsci_launch.nodes.examine import examine
from bigsci_launch.nodes.memory import LASTS_S
from bigsci_launch.runs.attempts import JobRecord, age_s, query_attempts, read_job
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.scheduler.slurm import query_nodes

OLDEST_S = max(lasts_s for lasts_s in LASTS_S.values() if lasts_s is not None)
"""What an older attempt has shown would have expired."""


def evaluate_run(run: RunDir) -> list[str]:
    """Add to the memory what ended attempts of a run have shown, if that was not done yet. Return what was found.

    Attempts of other people, those whose end is not known, and those that cannot be read are left alone.
    """
    try:
        attempts = run.attempts()
    except RunDirError:
        return []
    newest = {attempt.base_name: attempt.name for attempt in attempts}
    open_attempts = [(attempt, record) for attempt in attempts if (record := _open_record(attempt)) is not None]
    if not open_attempts:
        return []
    jobs = query_attempts([attempt for attempt, _ in open_attempts])
    lines: list[str] = []
    for attempt, record in open_attempts:
        job = jobs[attempt.name]
        # A later start of the same job shows that this one is over, whatever the job does now.
        if attempt.name != newest[attempt.base_name] or job.state.is_over or job.is_gone:
            lines += _evaluate(attempt, record, job)
    return lines


def _open_record(attempt: AttemptDir) -> JobRecord | None:
    """Return the job of an attempt that still has to be evaluated; None for any other."""
    try:
        if not os.access(attempt.path, os.W_OK) or age_s(attempt) > OLDEST_S or _is_final(attempt):
            return None
        record = read_job(attempt)
    except RunDirError:
        return None
    return record if record is not None and record.job_id is not None else None


def _is_final(attempt: AttemptDir) -> bool:
    if not attempt.bad_nodes.exists():
        return False
    document = read_json(attempt.bad_nodes)
    return isinstance(document, dict) and bool(document.get("is_final"))


def _evaluate(attempt: AttemptDir, record: JobRecord, job: JobInfo) -> list[str]:
    try:
        _, lines = examine(attempt, cluster=record.cluster, down=_nodes_given_up(job), is_over=True)
    except (OSError, ValueError, RunDirError) as error:
        return [f"attempt {attempt.name}: cannot record what it shows about its nodes: {error}"]
    return lines


def _nodes_given_up(job: JobInfo) -> list[str]:
    """Return the nodes of a job that Slurm ended because it lost a node, and that are down now."""
    if job.state is not JobState.NODE_FAIL or not job.hostlist:
        return []
    try:
        return [node.name for node in query_nodes(job.hostlist) if node.is_given_up]
    except SlurmError:
        return []
