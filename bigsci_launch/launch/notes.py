"""What the user should know before a run starts: stored secrets, missing files, and whether it was rehearsed."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import bigsci_launch
from bigsci_launch.config.load import OVERRIDE, LoadedRun
from bigsci_launch.config.masking import is_secret
from bigsci_launch.config.schema.monitor import TRACKER_GROUP, TRACKER_PACKAGES
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.section import DESCRIBING
from bigsci_launch.errors import INSTALL_OTLP
from bigsci_launch.launch.freeze import open_place_notes
from bigsci_launch.launch.inputs import missing_data, prepare_hint
from bigsci_launch.launch.job.request import JobRequest
from bigsci_launch.launch.provenance import describe_repository, uncommitted_changes
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.rehearsals import CodeRevision, config_identity, describe_past, digest, read_rehearsals
from bigsci_launch.scheduler.command import has_command
from bigsci_launch.topology.naming import count_ranks

OTLP_MODULE = "opentelemetry.exporter.otlp.proto.http"
MOST_NODES = 2
"""A run on so few nodes is as small as its rehearsal."""


def dry_run_notes(request: JobRequest) -> list[str]:
    """Return what differs between a dry run and a submission on this machine."""
    if request.scheduler == "local" or has_command("sbatch"):
        return []
    return ["sbatch not found: without --dry-run, this would fail"]


def notes(loaded: LoadedRun, *, is_local: bool) -> list[str]:
    """Return what the user should know before the run is started, line by line."""
    found = [
        f"warning: env.{name}: its value will be stored in the run directory, where your group may read it; "
        f"write `{name}: {{from: environment, reason: ...}}`, and set {name} where you call `bsl submit`"
        for name, variable in loaded.config.env.items()
        if variable.value and is_secret(name, variable.value)
    ]
    found += _shared_place(loaded.config)
    found += _missing_webhook(loaded.config)
    found += [*_missing_packages(loaded.config), *_unwritable_folder(loaded.config)]
    found += [*_missing_data(loaded.config), *(() if is_local else _missing_files(loaded.config))]
    found += [] if is_local else rehearsal_note(loaded, Path.cwd())
    if not is_local or loaded.site.is_local:
        return found
    ranks = loaded.layout.topology.world_size
    left_out = [name for name in ("activation", "container") if getattr(loaded.site.config, name)]
    without = f", without the {' and '.join(left_out)} of site {loaded.site.name}" if left_out else ""
    return [*found, f"starting {count_ranks(ranks)} on this machine{without}"]


def _shared_place(config: RunConfig) -> list[str]:
    run = RunDir((Path.cwd() / config.run.root / config.run.name).resolve())
    return [] if run.record.exists() else open_place_notes(run)


def _missing_webhook(config: RunConfig) -> Iterator[str]:
    """Yield a warning if the variable that holds the URL of a webhook is not set. It may be set later, for `bsl watch`
    on another machine."""
    notify = config.monitor.notify
    if notify is not None and (name := notify.webhook_variable) and not os.environ.get(name):
        yield f"warning: monitor.notify.webhook_variable: {name} is not set here, so the job will not know the URL"


def _missing_packages(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each package that `bsl metrics --follow` would not find. The job starts it with this
    Python."""
    for name in config.monitor.trackers:
        if not (_is_installed(name) if name in TRACKER_PACKAGES else entry_points(group=TRACKER_GROUP, name=name)):
            yield f"warning: monitor.trackers: {name} is not installed for {sys.executable}: it will not get this run"
    metrics = config.monitor.metrics
    if metrics is not None and metrics.otlp is not None and not _is_installed(OTLP_MODULE):
        yield (
            f"warning: monitor.metrics.otlp: opentelemetry is not installed for {sys.executable}, so nothing will be "
            f"sent; {INSTALL_OTLP}"
        )


def _is_installed(module: str) -> bool:
    with suppress(ModuleNotFoundError):  # a package above it is missing
        return find_spec(module) is not None
    return False


def _unwritable_folder(config: RunConfig) -> Iterator[str]:
    """Yield a warning if the file of metrics could not be written here. The first node of a job may differ."""
    metrics = config.monitor.metrics
    if metrics is None or metrics.file is None:
        return
    path = Path(metrics.file)
    folder = path.parent if path.suffix == ".prom" else path
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        what = "write in this folder" if there == folder else f"make this folder: {there} is not yours"
        yield f"warning: monitor.metrics.file: {folder}: on this machine you cannot {what}"


def _missing_data(config: RunConfig) -> Iterator[str]:
    """Yield a warning if the dataset is missing. Only the compute nodes must see the files."""
    if missing := missing_data(config):
        yield f"warning: data.prefix: {missing}: no such file on this machine; {prepare_hint(config)}"


def _missing_files(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each file to stage that is missing here. The job's first node copies it, not this machine."""
    for item in config.slurm.stage_in:
        if not Path(item.file).exists():
            yield f"warning: slurm.stage_in: {item.file}: no such file on this machine"


def read_revision(working_directory: Path) -> CodeRevision:
    """Return the revision of `bsl` and of the working directory. Takes some tenths of a second, in git."""
    folders = {"bigsci_launch": Path(bigsci_launch.__file__).parent, "working_directory": working_directory}
    found = {role: describe_repository(folder) for role, folder in folders.items()}
    roots = list(dict.fromkeys(entry["root"] for entry in found.values() if entry["root"]))
    diff = "".join(uncommitted_changes(Path(root)) for root in roots)
    changed = {
        f"{entry['root']} {line}" for entry in found.values() if entry["root"] for line in entry["changed_files"] or ()
    }
    return CodeRevision(
        {role: entry.get("revision") for role, entry in found.items()},
        bool(diff) if roots else None,
        digest(diff) if diff else None,
        sum("?? " in line for line in changed),
    )


def rehearsal_note(loaded: LoadedRun, working_directory: Path) -> list[str]:
    """Return one line on whether the run was rehearsed; none for a run that is not larger than a rehearsal, or that
    cannot be made smaller, because it is not described."""
    is_small = loaded.site.is_local or loaded.layout.nodes <= MOST_NODES
    if is_small or not loaded.config.describes(*DESCRIBING):
        return []
    root = (working_directory / loaded.config.run.root).resolve()
    past = read_rehearsals(root, loaded.config.run.name)
    same = " with the same --set" if OVERRIDE in loaded.origins.values() else ""
    command = f"`bsl rehearse {shlex.quote(str(loaded.path))}`{same}"
    return [describe_past(past, read_revision(working_directory), config_identity(loaded), command=command)]
