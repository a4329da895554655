"""Who starts a run: one process makes the directory of an attempt, and the same one makes `run.json` if there is none.

So of several first submissions at once, one is accepted, and `run.json` is its own. What is taken back is only what
this process has made.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from bigsci_launch import safe_files
from bigsci_launch.config.schema.run import ModelSection, RunConfig
from bigsci_launch.errors import RunDirError, SubmissionUnknown
from bigsci_launch.launch.freeze import make_own_folder, within_umask
from bigsci_launch.launch.job.request import JobRequest
from bigsci_launch.procfs import user_name
from bigsci_launch.runs.control.requests import make_control
from bigsci_launch.runs.layout import RunDir, read_json
from bigsci_launch.topology import AXIS_NAMES, Topology

SCHEMA_VERSION = 1
MOST_TRIES = 100
"""How often the folders of a run are made again that another submission, which failed, was removing."""


@contextmanager
def new_attempt(request: JobRequest, config: RunConfig) -> Iterator[None]:
    """Create the attempt's directory, and the run if it is new. On any failure, remove what this process created.

    It stays if there may be a job, which is found later by the path of its script.

    Raises:
        FileExistsError: another process has made the directory of this attempt.
    """
    run = request.run
    missing = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
    has_taken, run_id = False, None
    try:
        _take_attempt(request)
        has_taken = True
        run_id = _record_run(run, run_record(request, config))
        if run_id is None:
            require_same_run(run, config, request.topology)
        make_control(run)
        yield
    except SubmissionUnknown:
        raise
    except BaseException:
        if run_id is not None and _withdraw_record(request, run_id):
            _remove_if_empty(run.control)
        if has_taken:  # no other run of this name could be made until now
            shutil.rmtree(request.attempt.path, ignore_errors=True)
        _remove_if_empty(run.attempts_folder, run.path, *missing)
        raise


def _take_attempt(request: JobRequest) -> None:
    """Make the attempt's directory, or raise FileExistsError: only one process can."""
    for tries in range(MOST_TRIES):
        try:
            make_own_folder(request.run.path)
            make_own_folder(request.run.attempts_folder)
            request.attempt.path.mkdir(mode=0o755)
        except FileNotFoundError:
            if tries == MOST_TRIES - 1:
                raise
        else:
            return


def _record_run(run: RunDir, document: dict[str, Any]) -> str | None:
    """Make `run.json` whole, and return its run ID; None if it is there already."""
    with safe_files.open_folder(run.path) as folder:
        part = f".{run.record.name}.{secrets.token_hex(8)}"
        try:
            safe_files.write_in(folder, part, json.dumps(document, indent=2) + "\n", within_umask(0o644))
            os.link(part, run.record.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            return None
        finally:
            with suppress(OSError):
                os.unlink(part, dir_fd=folder)
    return str(document["run_id"])


def _withdraw_record(request: JobRequest, run_id: str) -> bool:
    """Remove the `run.json` with this run ID, unless another attempt was made: that one's run is this one then.

    It is moved aside first. An attempt that is made after that finds none, and records the run itself.
    """
    run = request.run
    aside = run.path / f".{run.record.name}.{secrets.token_hex(8)}"
    with suppress(OSError, ValueError):
        if safe_files.read_json(run.record).get("run_id") != run_id:
            return False
        run.record.rename(aside)
        has_others = any(path != request.attempt.path for path in run.attempts_folder.iterdir())
        if has_others:
            with suppress(FileExistsError):
                os.link(aside, run.record)
        aside.unlink()
        return not has_others
    return False


def _remove_if_empty(*folders: Path) -> None:
    """Remove folders, the innermost first. What others put there stays. On a full disk, some may not exist."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def run_record(request: JobRequest, config: RunConfig) -> dict[str, Any]:
    """Return the document of `run.json`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": request.name,
        "run_id": uuid4().hex,
        "made": time.time(),
        "site": request.site,
        **identity(config, request.topology),
    }


def identity(config: RunConfig, topology: Topology) -> dict[str, Any]:
    """Return what all attempts of a run share. A checkpoint fits no other model or layout."""
    if not config.run.starts_trainer:
        return {"topology": topology.as_dict()}  # what else its checkpoints fit, only the program knows
    return {
        "topology": topology.as_dict(),
        "model": config.model.model_dump(mode="json", exclude={"declared_parameters"}),
        "parallelism": {"partition_method": config.parallelism.partition_method},
    }


def require_same_run(run: RunDir, config: RunConfig, topology: Topology) -> None:
    """Raise RunDirError if the run directory belongs to another run, model or layout, or is not a run directory."""
    _require_own_link(run, config)
    if not run.record.exists():
        if not run.path.exists() or _may_become_run(run):
            return
        if not run.record.exists():  # it was not made since we looked
            raise RunDirError(
                f"{run.path} exists and is not a run directory", hint="choose another run.name or run.root"
            )
    record = read_json(run.record)
    if isinstance(record, dict) and record.get("name", config.run.name) != config.run.name:
        raise RunDirError(
            f"{run.record} belongs to run {str(record['name'])!r:.110}, not to {config.run.name}",
            hint="choose another run.name; if you have renamed its folder, correct `name` in that file",
        )
    here = {**identity(config, topology), "topology": {axis: topology[axis] for axis in AXIS_NAMES}}
    if isinstance(record, dict) and "model" not in record:
        here = {"topology": here["topology"]}  # it was started with another program
    changed = [
        f"{section}.{key}: {_shown(record, section, key)} -> {value}"
        for section, values in here.items()
        for key, value in values.items()
        if _shown(record, section, key) != value
    ]
    if changed:
        raise RunDirError(
            f"run {config.run.name} was started with another model or layout: {'; '.join(changed)}",
            hint="its checkpoints do not fit; choose another run.name, or restore those keys",
        )


def _require_own_link(run: RunDir, config: RunConfig) -> None:
    """Require that no other user leads a run elsewhere: in a sticky folder, any user may make a link of its name."""
    link = Path(config.run.root) / config.run.name
    if link.is_symlink() and link.lstat().st_uid not in (0, os.geteuid()):
        raise RunDirError(
            f"{link} is a symbolic link to {run.path}, owned by {user_name(link.lstat().st_uid)}",
            hint="choose another run.name or run.root",
        )


def _may_become_run(run: RunDir) -> bool:
    """Whether a directory without `run.json` holds only what exists before it: a checkpoint that was converted for this
    run, and what a first submission makes, which may be doing so right now."""
    if not run.path.is_dir():
        return False
    with suppress(FileNotFoundError):  # a submission that failed has just removed it
        return _holds_no_attempt(run)
    return True


def _holds_no_attempt(run: RunDir) -> bool:
    parts = {run.checkpoints.name, run.attempts_folder.name, run.control.name, run.record.name}
    # While `run.json` is written, it has other names with dots before and behind its own.
    names = {path.name for path in run.path.iterdir() if not path.name.lstrip(".").startswith(f"{run.record.name}.")}
    return names <= parts and not any(attempt.job.exists() for attempt in run.attempts())


def _shown(record: Any, section: str, key: str) -> Any:
    """Return the value the run was started with. A key or axis that was added since had its default, or size 1."""
    defaults = {"model": ModelSection.model_fields[key].default} if section == "model" else {"topology": 1}
    return record.get(section, {}).get(key, defaults.get(section)) if isinstance(record, dict) else None
