"""Prepares a submission: every decision that is made before anything is written or started, as one value.

The run is checked once, and the calibration of its site is read once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bigsci_launch.config.finding import Finding
from bigsci_launch.config.load import COMPUTED, LoadedRun, load_run
from bigsci_launch.config.site import Site
from bigsci_launch.errors import ConfigError, Problem, SlurmUnavailable
from bigsci_launch.launch.job.caller import apply_caller_options
from bigsci_launch.launch.job.request import JobRequest, make_request
from bigsci_launch.plan.choose.answer import configured_setup
from bigsci_launch.plan.choose.check import check_plan
from bigsci_launch.plan.price.calibration import Calibration, calibration_of
from bigsci_launch.plan.price.stages import StageLayout, lay_out_stages
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.scheduler.command import has_command

MIN_LOCAL_RANKS, RANKS_PER_CORE = 64, 16


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is ready to be submitted. `findings` are those of `check_plan`; `loaded` has the run file's own
    warnings. `calibration` is None on a site without GPUs, `setup` for a run that does not describe its model."""

    loaded: LoadedRun
    calibration: Calibration | None
    setup: Setup | None
    findings: tuple[Finding, ...]
    request: JobRequest

    @property
    def stages(self) -> tuple[StageLayout, ...]:
        """What `bsl train` will place on each stage; empty for another program, whose layers are not known."""
        if self.setup is None or not self.loaded.config.run.starts_trainer:
            return ()
        return lay_out_stages(self.setup, self.calibration)


def prepare(
    path: Path,
    overrides: Sequence[str] = (),
    arguments: Sequence[str] = (),
    *,
    working_directory: Path,
    python: str,
    local: bool = False,
    dry_run: bool = False,
) -> Prepared:
    """Return the run in the file at `path` with `overrides` applied, and `arguments` for its program.

    Without `local`, the run goes to Slurm, unless its site is local. A `dry_run` needs no sbatch.

    Raises:
        ConfigError: the run file is wrong, Slurm cannot use a path of the run, or this machine is too small for it.
        SlurmUnavailable: there is no sbatch here.
        DataError: the calibration of the site cannot be read.
    """
    written = load_run(path, overrides, arguments)
    calibration, unpriced = _calibration(written.site)
    setup, loaded, findings = None, written, unpriced
    if written.config.describes("model", "training"):
        setup = configured_setup(written.config, written.site, calibration)
        loaded = _with_stages(written, setup)
        findings = [*check_plan(loaded.config, loaded.site, setup, calibration), *unpriced]
    is_local = local or loaded.site.is_local
    if is_local:
        require_few_ranks(loaded)
    elif not dry_run:
        require_sbatch(loaded)
    if not dry_run:
        require_variables(loaded)
    request = plan_submission(loaded, working_directory=working_directory, python=python, local=is_local)
    return Prepared(loaded, calibration, setup, tuple(findings), request)


def _calibration(site: Site) -> tuple[Calibration | None, list[Finding]]:
    """Return the calibration of `site`. An unknown GPU is no reason not to submit: nothing is priced then."""
    try:
        return calibration_of(site), []
    except ConfigError as error:
        return None, [Finding("gpu", "warning", ("site.gpu.name",), str(error), "nothing is priced for this run")]


def require_few_ranks(loaded: LoadedRun) -> None:
    """Raise ConfigError if the run has more ranks than can be meant for this machine."""
    ranks = loaded.layout.topology.world_size
    limit = max(MIN_LOCAL_RANKS, RANKS_PER_CORE * len(os.sched_getaffinity(0)))
    if ranks > limit:
        raise ConfigError(
            f"the run has {ranks} ranks, but `bsl` starts at most {limit} on this machine "
            f"({RANKS_PER_CORE} per core, or {MIN_LOCAL_RANKS})",
            hint="make parallelism smaller for a local trial; ranks of a Slurm site start on its nodes without --local",
        )


def require_sbatch(loaded: LoadedRun) -> None:
    """Raise SlurmUnavailable without sbatch: ranks that are meant for a cluster must not start where the user is."""
    if not has_command("sbatch"):
        raise SlurmUnavailable(
            f"site {loaded.site.name} uses Slurm, but sbatch is not on PATH",
            hint="use a login node of the cluster, or load the module with Slurm's commands; "
            "--local starts the ranks on this machine instead",
        )


def _with_stages(loaded: LoadedRun, setup: Setup) -> LoadedRun:
    """Replace a partition method that goes by price with the layers of each stage.

    Otherwise a queued job would change with the calibration.
    """
    parallelism = loaded.config.parallelism
    if parallelism.partition_method == setup.partition_method:
        return loaded
    settled = parallelism.model_copy(update={"partition_method": setup.partition_method})
    config = loaded.config.model_copy(update={"parallelism": settled})
    return replace(loaded, config=config, origins={**loaded.origins, "parallelism.partition_method": COMPUTED})


def require_variables(loaded: LoadedRun) -> None:
    """Raise ConfigError if a variable of `env` is to be that of this environment, and is not set here."""
    missing = [name for name, each in loaded.config.env.items() if each.value is None and name not in os.environ]
    where = [(loaded.origins.get(f"env.{name}.from", ""), name) for name in missing]
    problems = [Problem(place, f"env.{name}.from", f"{name} is not set in this environment") for place, name in where]
    if problems:
        hint = f"`export {missing[0]}=...` here, or set env.{missing[0]}.value"
        raise ConfigError(f"{loaded.path}: {len(problems)} variables are missing here", problems=problems, hint=hint)


def plan_submission(loaded: LoadedRun, *, working_directory: Path, python: str, local: bool) -> JobRequest:
    """Return the request that `submit` would start now. Reads the run directory and the caller's `SBATCH_*` variables,
    writes nothing, does not call Slurm."""
    run = RunDir((working_directory / loaded.config.run.root / loaded.config.run.name).resolve())
    request = make_request(
        loaded,
        run=run,
        attempt=run.next_attempt_name(),
        working_directory=working_directory,
        python=python,
        local=local,
    )
    return apply_caller_options(request, os.environ, loaded)


def require_sound(prepared: Prepared) -> None:
    """Check that the arithmetic of the run holds.

    Raises:
        ConfigError: it does not; lists every error.
    """
    loaded = prepared.loaded
    errors = [finding for finding in prepared.findings if finding.is_error]
    problems = [finding.at(loaded.origins.get(finding.keys[0], "")) for finding in errors]
    if problems:
        hint = "`bsl plan check` shows the arithmetic; --force submits anyway"
        raise ConfigError(f"{loaded.path}: {len(problems)} findings of bsl plan check", problems=problems, hint=hint)
