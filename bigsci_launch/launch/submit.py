"""Submission: the one place where a request becomes files and a job. What fails leaves nothing half done."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any
from uuid import uuid4

from bigsci_launch.config.load import LoadedRun, dump_resolved
from bigsci_launch.config.schema import ModelSection, RunConfig
from bigsci_launch.content import packaged
from bigsci_launch.errors import RunDirError
from bigsci_launch.launch.provenance import collect_provenance, is_secret_name
from bigsci_launch.launch.request import JobRequest
from bigsci_launch.launch.script import render_script
from bigsci_launch.runs.attempts import JobRecord, age_s, query_attempt, read_exit, read_job, write_job
from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json, write_atomically, write_json
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.scheduler.local import start_launcher
from bigsci_launch.scheduler.slurm import cancel_job, submit_argv, submit_script
from bigsci_launch.topology import AXIS_NAMES, Topology

SCHEMA_VERSION = 1
TOOLS = ("rank_runner.py", "exit_reason.py")
SUBMISSION_GRACE_S = 120.0
"""An attempt without a job that is younger than this may be in the middle of its submission."""

MAX_UNKNOWN = 10


@dataclass(frozen=True, slots=True)
class Submission:
    """An attempt that was started: its request, its job, and for a local one its launcher process."""

    request: JobRequest
    record: JobRecord
    process: Popen[bytes] | None = None


def submit(loaded: LoadedRun, request: JobRequest, command: Sequence[str]) -> Submission:
    """Make the attempt's directory, freeze everything in it, and start the request.

    Raises:
        RunDirError: the run is under way, is another model's, or cannot be written; SlurmUnavailable, SlurmRefused:
            as sbatch says. Nothing is left of the attempt then.
    """
    try:
        return _submit(loaded, request, command)
    except OSError as error:
        raise _cannot_write(request, error) from error


def _submit(loaded: LoadedRun, request: JobRequest, command: Sequence[str]) -> Submission:
    require_same_run(request.run, loaded.config, request.topology)
    require_no_active_attempt(request.run)
    with new_attempt(request, loaded.config):
        freeze(request, loaded, command)
        submission = start(request)
        try:
            write_job(request.attempt, submission.record)
        except BaseException:
            take_back(submission)
            raise
    return submission


def start(request: JobRequest) -> Submission:
    """Hand the attempt's script to its scheduler."""
    if request.scheduler == "slurm":
        job_id = submit_script(submit_argv(request.attempt.script), cwd=request.working_directory)
        return Submission(request, JobRecord("slurm", time.time(), job_id=job_id, total_steps=request.total_steps))
    launcher, process = start_launcher(request.attempt.script, request.attempt.job_output, request.working_directory)
    record = JobRecord("local", time.time(), launcher=launcher, total_steps=request.total_steps)
    return Submission(request, record, process)


def take_back(submission: Submission) -> None:
    """End a job that could not be noted down: nobody would find it again."""
    if submission.record.job_id is not None:
        cancel_job(submission.record.job_id)
    if submission.process is not None:
        submission.process.terminate()
        submission.process.wait()


def freeze(request: JobRequest, loaded: LoadedRun, command: Sequence[str]) -> None:
    """Write everything that the attempt is made from into its directory: later edits do not change a queued job."""
    attempt = request.attempt
    attempt.make()
    write_atomically(attempt.config, dump_resolved(loaded.config))
    write_json(attempt.origins, loaded.origins)
    provenance = collect_provenance(command, request.working_directory)
    write_json(attempt.provenance, provenance.document)
    if provenance.diff:
        write_atomically(attempt.dirty_diff, provenance.diff)
    write_atomically(attempt.script, render_script(request))
    attempt.script.chmod(0o755)
    copy_tools(attempt)


def copy_tools(attempt: AttemptDir) -> None:
    """Copy the stand-alone helpers of the script beside it: they are then on the file system that all nodes share."""
    attempt.tools.mkdir(exist_ok=True)
    for name in TOOLS:
        (attempt.tools / name).write_bytes(packaged("diagnostics", name).read_bytes())


@contextmanager
def new_attempt(request: JobRequest, config: RunConfig) -> Iterator[None]:
    """Make the run (if it is new) and the attempt's directory; on any failure take away what was made."""
    is_new_run = not request.run.record.exists()
    is_ours = False
    try:
        if is_new_run:
            write_json(request.run.record, run_record(request, config))
        request.attempt.path.mkdir(parents=True)
        is_ours = True
        yield
    except BaseException:
        if is_ours:
            shutil.rmtree(request.attempt.path, ignore_errors=True)
        if is_new_run:
            forget_run(request.run)
        raise


def _cannot_write(request: JobRequest, error: OSError) -> RunDirError:
    if isinstance(error, FileExistsError):
        return RunDirError(
            f"run {request.name}: attempt {request.attempt.name} is being submitted by somebody else",
            hint=f"`bsl status {run_argument(request.run)}` shows it",
        )
    where = error.filename or request.run.path
    return RunDirError(f"{where}: {error.strerror or error}", hint="make room, or set run.root to another folder")


def forget_run(run: RunDir) -> None:
    """Take away a run directory in which nothing ever happened; what somebody else put there stays."""
    with suppress(OSError):
        run.record.unlink(missing_ok=True)
        run.attempts_folder.rmdir()
        run.path.rmdir()


def run_record(request: JobRequest, config: RunConfig) -> dict[str, Any]:
    """The document of `run.json`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": request.name,
        "run_id": uuid4().hex,
        "made": time.time(),
        "site": request.site,
        **identity(config, request.topology),
    }


def identity(config: RunConfig, topology: Topology) -> dict[str, Any]:
    """What every attempt of a run shares: a checkpoint fits no other model and no other layout."""
    return {
        "topology": topology.as_dict(),
        "model": config.model.model_dump(mode="json", exclude={"declared_parameters"}),
        "parallelism": {"partition_method": config.parallelism.partition_method},
    }


def require_same_run(run: RunDir, config: RunConfig, topology: Topology) -> None:
    """Raise RunDirError where the run directory belongs to another model or layout, or is no run's."""
    if not run.record.exists():
        # A checkpoint that was converted for a run comes before the run.
        if run.path.exists() and (not run.path.is_dir() or any(path != run.checkpoints for path in run.path.iterdir())):
            raise RunDirError(
                f"{run.path} exists and is not a run directory", hint="choose another run.name or run.root"
            )
        return
    record = read_json(run.record)
    here = {**identity(config, topology), "topology": {axis: topology[axis] for axis in AXIS_NAMES}}
    changed = [
        f"{section}.{key}: {_shown(record, section, key)} -> {value}"
        for section, values in here.items()
        for key, value in values.items()
        if _shown(record, section, key) != value
    ]
    if changed:
        raise RunDirError(
            f"run {config.run.name} was begun with another model or layout: {'; '.join(changed)}",
            hint="its checkpoints do not fit; choose another run.name, or set the keys back",
        )


def _shown(record: Any, section: str, key: str) -> Any:
    """What the run was begun with; a key that was not known then had what is the default now, an axis size 1."""
    defaults = {"model": ModelSection.model_fields[key].default} if section == "model" else {"topology": 1}
    return record.get(section, {}).get(key, defaults.get(section)) if isinstance(record, dict) else None


def require_no_active_attempt(run: RunDir) -> None:
    """Raise RunDirError while an attempt of the run is queued, runs, or is being submitted."""
    attempt = run.latest_attempt()
    if attempt is None:
        return
    record = read_job(attempt)
    if record is None:
        if attempt.path.exists() and age_s(attempt) < SUBMISSION_GRACE_S:
            raise RunDirError(
                f"run {run.name}: attempt {attempt.name} is being submitted just now, or its submission was killed",
                hint=f"try again in {SUBMISSION_GRACE_S:g} s",
            )
        return
    job = query_attempt(attempt)
    if job.state.is_active:
        name = run_argument(run)
        raise RunDirError(
            f"run {run.name}: attempt {attempt.name} ({record.label}) is {job.state.value}; a run has one at a time",
            hint=f"wait for it (`bsl status {name}`), end it (`bsl cancel {name}`), or choose another run.name",
        )


def notes(loaded: LoadedRun, *, is_local: bool, was_asked: bool) -> list[str]:
    """What the user should know before the run is started."""
    found = [
        f"warning: env.{name}: its value is written into the run directory, where others may read it; "
        f"set {name} in the environment of `bsl submit` instead"
        for name, variable in loaded.config.env.items()
        if is_secret_name(name) and variable.value
    ]
    found += _missing_data(loaded.config)
    if not is_local or loaded.site.is_local:
        return found
    why = "" if was_asked else "there is no sbatch here: "
    ranks = loaded.layout.topology.world_size
    left_out = [name for name in ("activation", "container") if getattr(loaded.site.config, name)]
    without = f", without the {' and '.join(left_out)} of site {loaded.site.name}" if left_out else ""
    return [*found, f"{why}starting {ranks} ranks on this machine{without}"]


def _missing_data(config: RunConfig) -> Iterator[str]:
    """A warning and no error: a login node need not see what the compute nodes do."""
    names = () if config.run.command is not None else (f"{config.data.prefix}.bin", f"{config.data.prefix}.idx")
    for name in names:
        if not Path(name).exists():
            yield (
                f"warning: data.prefix: {name}: no such file seen from here; "
                f"`bsl data prepare DIR --output {config.data.prefix}` makes a dataset"
            )
            return


def exit_of(submission: Submission) -> dict[str, Any] | None:
    """Why the newest attempt of the submission's job ended (a requeue is an attempt of its own)."""
    attempt = submission.request.run.latest_attempt()
    return read_exit(attempt) if attempt else None


def exit_code_of(submission: Submission, job: JobInfo) -> int:
    """The exit code of the training; 1 where the job ended badly and nobody noted a code, 4 where nobody knows."""
    code = (exit_of(submission) or {}).get("exit_code")
    if job.state is JobState.UNKNOWN and code is None:
        return 4
    is_good = job.state is JobState.COMPLETED
    return 0 if is_good else int(code or 1)


def wait_for_end(run: RunDir, tell: Callable[[JobInfo], None]) -> JobInfo:
    """Wait until the job of the run's newest attempt has ended, asking after 2, 4, 8, 16 and then every 30 s.

    `tell` is called with each new state. Answers of UNKNOWN (slurmctld is being restarted) are borne for some minutes.
    """
    pause_s, last, num_unknown = 1.0, None, 0
    while True:
        attempt = run.latest_attempt()
        assert attempt is not None, "the attempt has just been made"
        job = query_attempt(attempt)
        if job.state is not last:
            tell(job)
            last = job.state
        num_unknown = num_unknown + 1 if job.state is JobState.UNKNOWN else 0
        if job.state.is_over or num_unknown >= MAX_UNKNOWN:
            return job
        pause_s = min(pause_s * 2, 30.0)
        time.sleep(pause_s)
