"""What `bsl submit` prints: lines and JSON documents of requests and submissions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from bigsci_launch.checkpoints.resume import find_next_start
from bigsci_launch.config.finding import Finding, finding_line
from bigsci_launch.config.masking import shown_value
from bigsci_launch.launch.job.rank_map import rank_map, rank_map_lines
from bigsci_launch.launch.job.request import JobRequest
from bigsci_launch.launch.job.script import option_text, render_script
from bigsci_launch.launch.prepare import Prepared
from bigsci_launch.launch.start_job import Submission
from bigsci_launch.nodes.show import entry_document
from bigsci_launch.plan.price.stages import layout_lines
from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.scheduler.slurm import submit_argv
from bigsci_launch.status.ending import ending_advice, ending_facts

SCHEMA_VERSION = 1


def dry_run_text(prepared: Prepared) -> str:
    """Return the whole script, the rank map, and the contents of each pipeline stage."""
    request, axes = prepared.request, prepared.request.topology
    title = f"# rank map: {axes.world_size} ranks, {axes}; {axes.numbering}"
    held = [f"# {line}" for line in layout_lines(prepared.stages)]
    return "\n".join([render_script(_shown(request)), title, *rank_map_lines(axes, request.ranks_per_node), *held])


def dry_run_document(prepared: Prepared) -> dict[str, Any]:
    request = prepared.request
    return {
        "schema_version": SCHEMA_VERSION,
        "dry_run": True,
        **_request_document(request),
        "options": [option_text(option) for option in request.options],
        "step_options": [option_text(option) for option in request.step_options],
        "environment": [asdict(variable) for variable in _shown(request).variables],
        "program": list(request.program),
        "exit_margin": asdict(request.exit_margin) if request.exit_margin else None,
        "rank_map": [asdict(entry) for entry in rank_map(request.topology, request.ranks_per_node)],
        "stages": [asdict(stage) for stage in prepared.stages],
        "script": render_script(_shown(request)),
    }


def _shown(request: JobRequest) -> JobRequest:
    """Return the request without values that are perhaps secrets: what is printed is soon pasted somewhere."""
    shown = (replace(each, value=shown_value(each.name, each.value)) for each in request.variables)
    return replace(request, variables=tuple(shown))


def remark_lines(findings: Sequence[Finding]) -> list[str]:
    """Return the errors and warnings of a run that is submitted; its notes are left out."""
    forced = [f"forced despite {finding_line(finding)}" for finding in findings if finding.is_error]
    return [*forced, *(finding_line(finding) for finding in findings if finding.severity == "warning")]


def caller_lines(request: JobRequest) -> list[str]:
    """Return what becomes of the options in the caller's environment, one line for each."""
    return [
        f"{option.variable}={option.value} in your environment {'applies' if option.applies else 'has no effect'}: "
        f"{option.why}"
        for option in request.caller_options
    ]


def submission_document(submission: Submission, ended: dict[str, Any] | None) -> dict[str, Any]:
    """Return the JSON document of a submission; `ended` is that of exit.json if the end was waited for."""
    record = submission.record
    return {
        "schema_version": SCHEMA_VERSION,
        "dry_run": False,
        **_request_document(submission.request),
        "job_id": record.job_id,
        "pid": record.launcher.pid if record.launcher else None,
        "said": list(record.said),
        "successor_job_id": submission.successors[0].job_id if submission.successors else None,
        "exit": ended,
    }


def _request_document(request: JobRequest) -> dict[str, Any]:
    is_slurm = request.scheduler == "slurm"
    return {
        "scheduler": request.scheduler,
        "site": request.site,
        "run": {"name": request.name, "directory": str(request.run.path)},
        "attempt": {"name": request.attempt.name, "directory": str(request.attempt.path)},
        "command": submit_argv(request.attempt.script) if is_slurm else ["/bin/bash", str(request.attempt.script)],
        "nodes": request.nodes,
        "left_out": [entry_document(entry) for entry in request.left_out],
        "ranks_per_node": request.ranks_per_node,
        "world_size": request.topology.world_size,
        "topology": request.topology.as_dict(),
        "caller_options": [asdict(option) for option in request.caller_options],
    }


def state_line(job: JobInfo) -> str:
    return f"job {job.job_id}: {job.state.value}" + (f" ({job.reason})" if job.reason else "")


def end_lines(run: RunDir, job: JobInfo, ended: dict[str, Any] | None) -> list[str]:
    """Return why a job that was waited for did not end well, as `bsl status` says it; nothing if it did."""
    if job.state is JobState.COMPLETED:
        return []
    shown = run_argument(run)
    if ended is None:
        return [f"next: bsl status {shown}"]
    attempt = run.latest_attempt()
    advice = ending_advice(ended, shown, find_next_start(run, attempt) if attempt else "unknown")
    return [f"{name}: {text}" for name, text in ending_facts(ended)] + ([f"next: {advice}"] if advice else [])


def submission_id(submission: Submission) -> str:
    """Return what a pipe gets: the job id, or the pid of a local attempt's launcher."""
    launcher = submission.record.launcher
    return str(launcher.pid) if launcher else str(submission.record.job_id)


def successor_lines(submission: Submission) -> list[str]:
    """Return what happened to the attempts that were to be queued behind a new one."""
    chain, queued = submission.request.chain, submission.successors
    lines = [f"waits behind attempt {chain.after}"] if chain is not None and chain.after is not None else []
    if len(queued) == 1:
        lines.append(f"{queued[0].label} is queued behind it (slurm.chain)")
    elif queued:
        lines.append(f"jobs {', '.join(str(job.job_id) for job in queued)} are queued behind it (slurm.chain)")
    if submission.refused:
        again = "each start tries again, as does `bsl submit`" if queued else "`bsl submit` queues it"
        lines.append(f"warning: the next attempt could not be queued behind it: {submission.refused}; {again}")
    return lines


def submission_lines(submission: Submission) -> list[str]:
    """Return the text for the terminal: the job, the run directory, and what to type next."""
    run = run_argument(submission.request.run)
    spy = f"bsl spy {run}"
    return [
        f"{submission.record.label}: attempt {submission.request.attempt.name} of run {submission.request.name}",
        f"run directory {submission.request.run.path}",
        "next:",
        f"  bsl status {run}",
        f"  bsl logs {run} -f",
        f"  {spy:<24}  when it hangs",
        f"  bsl cancel {run}",
    ]
