"""Submission: the steps from a run file to a job. A submission that fails leaves nothing behind."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace

from bigsci_launch.config.load import LoadedRun
from bigsci_launch.config.report import warning_lines
from bigsci_launch.errors import RunDirError, SlurmError
from bigsci_launch.launch.decide import Turn, accept_changes, behind, decide_start
from bigsci_launch.launch.inputs import require_inputs
from bigsci_launch.launch.job.request import JobRequest, make_request
from bigsci_launch.launch.leave_out import leave_out_bad_nodes
from bigsci_launch.launch.notes import dry_run_notes, notes
from bigsci_launch.launch.prepare import Prepared, require_sound
from bigsci_launch.launch.report import caller_lines, remark_lines, successor_lines
from bigsci_launch.launch.start_job import Submission, start_attempt
from bigsci_launch.progress import Report, Shown, not_shown
from bigsci_launch.runs.attempts import JobRecord
from bigsci_launch.runs.find import run_argument


def review(prepared: Prepared, tell: Report, *, force: bool, dry_run: bool) -> Prepared:
    """Report what is remarkable about a run before it starts. Return it without the nodes that are known to be bad.

    Raises:
        ConfigError: the arithmetic of the run does not hold, or its dataset is missing, and there is no `force`.
        BslError: the ranks would not find torch.
        RunDirError: the memory of bad nodes cannot be read.
    """
    for line in warning_lines(prepared.loaded):
        tell(f"warning: {line}")
    if not force:
        require_sound(prepared)
    if not dry_run:
        require_inputs(prepared.loaded, prepared.request, force=force)
    for line in remark_lines(prepared.findings):
        tell(line)
    request, lines = leave_out_bad_nodes(prepared.request, prepared.loaded.config.slurm, is_dry_run=dry_run)
    for line in (*lines, *caller_lines(request), *(dry_run_notes(request) if dry_run else ())):
        tell(line)
    return replace(prepared, request=request)


def submit_reviewed(
    prepared: Prepared, command: Sequence[str], tell: Report, verifying: Shown, *, force: bool
) -> Submission:
    """Submit the run as `submit` does, and report what the user should know before and after."""
    for line in notes(prepared.loaded, is_local=prepared.request.scheduler == "local"):
        tell(line)
    submission = submit(prepared.loaded, prepared.request, command, tell, verifying, force=force)
    for line in (*submission.record.said, *successor_lines(submission)):
        tell(line)
    return submission


def submit(
    loaded: LoadedRun,
    request: JobRequest,
    command: Sequence[str],
    tell: Report = lambda line: None,
    verifying: Shown = not_shown,
    *,
    force: bool = False,
) -> Submission:
    """Decide how the next attempt starts, start it, and queue those that wait behind it.

    Raises:
        CheckpointError, RunDirError: as `decide_start` and `accept_changes`; the run cannot be written.
        SlurmUnavailable, SlurmRefused: sbatch failed. Nothing is left of the attempt.
        SubmissionUnknown: sbatch got no answer. The attempt stays, because it may have a job.
    """
    try:
        start = decide_start(loaded.config, request, verifying, force=force)
        request = accept_changes(start, loaded.config, request, tell, force=force)
        turn, chain = start.turn, request.chain
        submission = start_attempt(loaded, request if turn is None else behind(request, turn), command)
    except OSError as error:
        raise _cannot_write(request, error) from error
    return submission if chain is None or chain.by != "queue" else queue_links(loaded, submission, turn, command)


def queue_links(loaded: LoadedRun, submission: Submission, turn: Turn | None, command: Sequence[str]) -> Submission:
    """Submit attempts behind the one of `submission` until as many wait as the chain wants. Those that Slurm accepted
    are kept if it refuses one. `turn` is what the first one waits for."""
    first, chain, successors = submission.request, submission.request.chain, list[JobRecord]()
    assert chain is not None
    turn = after(turn, submission)
    while turn.num_waiting < chain.links and turn.num_starts < chain.max_starts:
        following = make_request(
            loaded,
            run=first.run,
            attempt=first.run.next_attempt_name(),
            working_directory=first.working_directory,
            python=first.host_python,
            local=False,
        )
        following = replace(following, accepted=first.accepted)
        try:
            queued = start_attempt(loaded, behind(following, turn), command)
        except (OSError, SlurmError) as error:
            return replace(submission, successors=tuple(successors), refused=str(error))
        successors.append(queued.record)
        turn = after(turn, queued)
    return replace(submission, successors=tuple(successors))


def after(turn: Turn | None, submission: Submission) -> Turn:
    """Return the place behind an attempt that was just submitted, and behind all that it waits for."""
    attempt, job_id = submission.request.attempt, str(submission.record.job_id)
    if turn is None:
        return Turn(attempt, (job_id,), num_starts=1, num_waiting=0)
    return Turn(attempt, (*turn.jobs, job_id), turn.num_starts + 1, turn.num_waiting + 1)


def _cannot_write(request: JobRequest, error: OSError) -> RunDirError:
    if isinstance(error, FileExistsError) and error.filename == str(request.attempt.path):
        return RunDirError(
            f"run {request.name}: attempt {request.attempt.name} is being submitted by another process",
            hint=f"`bsl status {run_argument(request.run)}` shows it",
        )
    where = error.filename or request.run.path
    room = "make room, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    # A run that has begun would begin again in another root.
    remedy = "make it writable" if request.run.record.exists() else "set run.root to another folder"
    return RunDirError(f"{where}: {error.strerror or error}", hint=f"{room}{remedy}")
