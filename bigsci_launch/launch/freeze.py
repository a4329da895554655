"""The frozen part of an attempt: its config, its script, and the programs that the script runs.

Queued jobs and requeues run them days later, as the user who submitted them. So no other user may write to them or to
the folders that they are in, whatever the umask is; the job script checks that before it runs them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bigsci_launch import own_place, safe_files
from bigsci_launch.checkpoints.changes import NOTHING_ACCEPTED, write_accepted
from bigsci_launch.config.load import LoadedRun, dump_resolved
from bigsci_launch.content import packaged
from bigsci_launch.errors import RunDirError
from bigsci_launch.launch.job.frozen import NAME, job_program
from bigsci_launch.launch.job.request import JobRequest
from bigsci_launch.launch.job.script import render_script
from bigsci_launch.launch.provenance import collect_provenance
from bigsci_launch.plan.survive.uneven import first_layout
from bigsci_launch.procfs import user_name
from bigsci_launch.runs.chain.records import write_chain
from bigsci_launch.runs.control.request import put_request, trace_request
from bigsci_launch.runs.layout import AttemptDir, RunDir, write_json
from bigsci_launch.safe_files import append_line
from bigsci_launch.step_lines import check_forms

FOR_GROUP = 0o640
"""Mode of files that hold values of a run file, or what may be an unrecognised secret."""
SENT = "node_"
"""What begins so is sent to the nodes when ranks are sampled, and is not part of an attempt."""


def freeze(request: JobRequest, loaded: LoadedRun, command: Sequence[str]) -> None:
    """Write everything that the attempt needs into its directory, so that later edits do not change a queued job."""
    attempt = request.attempt
    check_forms()
    make_own_folder(attempt.path)
    for folder in attempt.folders:
        make_own_folder(folder)
    attempt.job_output.touch(mode=0o644)  # Slurm appends to it; it would make it as the umask says
    if request.chain is not None:
        if request.chain.after is not None:
            safe_files.write_file(attempt.queued_mark, f"behind {request.chain.after}\n")
        write_chain(attempt, request.chain)
    private = within_umask(FOR_GROUP)
    if (step_line := loaded.config.monitor.step_line) is not None:
        safe_files.write_file(attempt.step_line, step_line, within_umask(0o644))
    safe_files.write_file(attempt.config, dump_resolved(loaded.config), private)
    write_json(attempt.origins, loaded.origins, within_umask(0o644))
    if loaded.config.parallelism.engine == "uneven":
        record = first_layout(loaded.config, request.topology.world_size).record()
        append_line(attempt.layouts, json.dumps({"time": time.time(), "generation": 0, **record}))
    if (trace := loaded.config.monitor.trace) is not None:
        put_request(attempt, trace_request(trace.include, trace.from_step, trace.from_call))
    if request.accepted != NOTHING_ACCEPTED:
        write_accepted(attempt, request.accepted)
    provenance = collect_provenance(command, request.working_directory, secret_variables(loaded))
    write_json(attempt.provenance, provenance.document, private)
    if provenance.diff:
        safe_files.write_file(attempt.dirty_diff, provenance.diff, private)
    safe_files.write_file(attempt.script, render_script(request), within_umask(0o750))
    write_tools(attempt)


def secret_variables(loaded: LoadedRun) -> frozenset[str]:
    """Return the variables whose values are recorded nowhere, whatever they are called."""
    notify = loaded.config.monitor.notify
    webhook = notify.webhook_variable if notify is not None else None
    taken = [name for name, variable in loaded.config.env.items() if variable.value is None]
    return frozenset([*taken, *([webhook] if webhook else [])])


def write_tools(attempt: AttemptDir) -> None:
    """Write the programs of the attempt next to its script, onto the file system that all nodes share: the one of the
    script itself, and those that run under the ranks' Python.

    Python finds no bytecode next to them and writes none, because what runs is what was written: its place is taken by
    a folder in which not even we may write.
    """
    tools: dict[Path, str | bytes] = {attempt.tools / NAME: job_program()}
    for path in rank_programs():
        tools[attempt.tools / path.relative_to(packaged("diagnostics"))] = path.read_text(encoding="utf-8")
    for path, content in tools.items():
        make_own_folder(path.parent)
        safe_files.make_folder(path.parent / "__pycache__", 0o555)
        safe_files.write_file(path, content, within_umask(0o644))


def rank_programs() -> list[Path]:
    """Return the stand-alone programs that run next to the ranks, and what they need."""
    folders = (packaged("diagnostics"), packaged("diagnostics", "ring_site"))
    found = (path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in (".py", ".c"))
    return [path for path in found if not path.name.startswith(SENT)]


def within_umask(mode: int) -> int:
    """Return `mode` without what the umask of this process denies, for files that get exactly a mode."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mode & ~mask


def make_own_folder(path: Path) -> None:
    """Make a folder that no other user may write to, and those above it, whatever the umask.

    One that is there and is ours is closed to others too. A stricter umask and an inherited group are kept.

    Raises:
        OSError: it cannot be made, or is no folder.
        RunDirError: it belongs to another user.
    """
    own_place.make_folders(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o755)
    with safe_files.open_folder(path) as folder:
        found = os.fstat(folder)
        if found.st_uid not in (os.geteuid(), 0):
            raise RunDirError(
                f"{path} belongs to {user_name(found.st_uid)}, who could replace what your job runs",
                hint="choose another run.name or run.root",
            )
        if found.st_uid == os.geteuid() and found.st_mode & safe_files.OTHERS_WRITE:
            os.fchmod(folder, found.st_mode & 0o7777 & ~safe_files.OTHERS_WRITE)


def require_own_place(run: RunDir) -> None:
    """Require that no other user can replace this run with theirs, where the user can prevent that.

    Raises:
        RunDirError: others may rename folders in the folder of all runs, or in one above it that is ours.
    """
    folders = own_place.mendable(run.path, own_place.open_above(run.path))
    if not folders:
        return
    folder = folders[0]
    is_ours = folder.stat().st_uid == os.geteuid()
    remedy = f"`chmod +t {folder}` lets each user rename only what is theirs" if is_ours else _other_root(folder)
    raise RunDirError(
        f"{folder}: others may rename folders in it and replace this run with theirs, which would then run as you",
        hint=remedy,
    )


def _other_root(folder: Path) -> str:
    owner = user_name(folder.stat().st_uid)
    return f"set run.root to a folder of your own in it, or ask {owner} for `chmod +t {folder}`"


def open_place_notes(run: RunDir) -> list[str]:
    """Return a warning for each folder of other users, above the folder of all runs, in which others may rename."""
    try:
        folders = own_place.open_above(run.path)
        mendable = own_place.mendable(run.path, folders)
    except OSError:
        return []
    return [
        f"warning: others may rename folders in {folder}, including the one that leads to this run, and replace it "
        f"with theirs: ask {user_name(folder.stat().st_uid)} for `chmod +t {folder}`"
        for folder in folders
        if folder not in mendable
    ]
