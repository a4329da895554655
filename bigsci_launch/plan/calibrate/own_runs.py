"""Calibrates on what `bsl train` has recorded itself: the attempts of a site under a folder of runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bigsci_launch.config.load import load_resolved
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import Site, is_path
from bigsci_launch.errors import BslError, DataError, RunDirError
from bigsci_launch.plan.calibrate.calibrate import calibrate
from bigsci_launch.plan.calibrate.physics import require_possible
from bigsci_launch.plan.calibrate.sources import read_sources
from bigsci_launch.plan.price.calibration import Calibration, calibration_of
from bigsci_launch.plan.price.hardware import GpuModel
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir, find_runs

FEWEST_STEPS = 10
"""Finished steps of an attempt from which its time of a step counts as measured."""


@dataclass(frozen=True, slots=True)
class OwnRuns:
    """What the runs under a folder give: a calibration, or the reason why it cannot be used."""

    calibration: Calibration | None
    problem: str = ""


def calibration_for(config: RunConfig, site: Site, path: Path | None) -> OwnRuns:
    """Return the calibration in the file at `path`, else that of the site, else one on the runs under `run.root`.

    Raises:
        DataError: the file is not a calibration, or it is for another GPU.
    """
    found, root = calibration_of(site, path), Path(config.run.root)
    if found is None or path or site.config.calibration or not root.is_dir():
        return OwnRuns(found)
    own = calibrate_on_runs(root, site.name, found.gpu) or OwnRuns(None)
    return replace(own, calibration=own.calibration or found)


def calibrate_on_runs(root: Path, site: str, gpu: GpuModel) -> OwnRuns | None:
    """Return the calibration on the runs under `root` that computed on the GPUs of `site`; None if there are none."""
    by_run = {run.path: names for run in find_runs(root) if (names := _measured_attempts(run, site))}
    if not by_run:
        return None
    try:
        found, _ = read_sources(sorted(by_run))
        names = set().union(*by_run.values())
        # The trials of micro-batch sizes are named after their attempt.
        rows = [measurement for measurement in found if measurement.name.partition(",")[0] in names]
        calibration = calibrate(rows, gpu, site=site, sources=[str(path) for path in sorted(by_run)])
        require_possible(calibration.constants, gpu)
    except DataError as error:
        return OwnRuns(None, f"runs under {root} are not used: {error}")
    count = f"{len(by_run)} runs" if len(by_run) > 1 else "1 run"
    return OwnRuns(replace(calibration, asked_site=site, origin=f"{count} under {root}"))


def _measured_attempts(run: RunDir, site: str) -> set[str]:
    """Return the names, as measurements have them, of the attempts that finished enough steps on GPUs of the site."""
    try:
        attempts = run.attempts()
    except RunDirError:
        return set()
    return {
        f"{run.name}/{attempt.name}"
        for attempt in attempts
        if _is_of_site(attempt, site) and _count_gpu_steps(attempt) >= FEWEST_STEPS
    }


def _is_of_site(attempt: AttemptDir, site: str) -> bool:
    try:
        named = load_resolved(attempt.config).slurm.site
    except BslError:
        return False
    return (Path(named).stem if is_path(named) else named) == site


def _count_gpu_steps(attempt: AttemptDir) -> int:
    """Return the steps of the first rank that recorded any, if it computed on a GPU: only then it knows its memory."""
    for path in sorted(attempt.events.glob("*.jsonl")):
        steps = [record for record in read_events(path) if record.get("kind") == "step" and record.get("seconds")]
        if steps:
            return sum("memory_allocated" in record for record in steps)
    return 0
