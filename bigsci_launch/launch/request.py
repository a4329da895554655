"""A request: everything that defines a job, as plain values. Making one writes nothing and calls nothing.

A dry run prints the same request that a submission writes and runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bigsci_launch.config.load import LoadedRun
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.site import Container, SiteConfig
from bigsci_launch.errors import ConfigError, Problem
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.scheduler.job import format_comment
from bigsci_launch.topology import Topology
from bigsci_launch.units import parse_slurm_duration

SLACK_S = 60
"""Part of the exit margin: Slurm counts time limits in half-minute steps, and ranks need some seconds to exit."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of sbatch or srun: `--name=value`, or `--name` alone; `reason` is printed above it."""

    name: str
    value: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the ranks' environment, and the reason for it."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class CallerOption:
    """An option that the caller's environment gives to sbatch. `why` says why it applies or does not."""

    variable: str
    value: str
    option: str
    applies: bool
    why: str


@dataclass(frozen=True, slots=True)
class ExitMargin:
    """How many seconds before the time limit ranks are told to save and stop, and how that was computed."""

    margin_s: int
    how: str


@dataclass(frozen=True, slots=True)
class JobRequest:
    """One attempt of a run, ready to be rendered and started."""

    scheduler: Literal["slurm", "local"]
    name: str
    site: str
    run: RunDir
    attempt: AttemptDir
    working_directory: Path
    nodes: int
    ranks_per_node: int
    topology: Topology
    options: tuple[Option, ...]
    step_options: tuple[Option, ...]
    wait_s: int
    """Seconds for which ranks may still run after the first has ended with 0; 0 means no limit."""
    step_prefix: tuple[str, ...]
    """Words between srun's options and the runner: `apptainer exec ...`, or nothing."""
    activation: tuple[str, ...]
    variables: tuple[Variable, ...]
    host_python: str
    """The Python of `bsl` itself, which runs the helpers of the job script."""
    rank_python: str
    """The Python of the ranks: that of `bsl`, or the one from the site's activation lines or container."""
    program: tuple[str, ...]
    total_steps: int | None
    """Optimizer steps of the whole run; None for a program other than `bsl train`."""
    exit_margin: ExitMargin | None
    caller_options: tuple[CallerOption, ...] = ()
    """What becomes of the `SBATCH_*` variables of the caller."""


BUILT_IN_VARIABLES = (
    Variable("PYTHONUNBUFFERED", "1", "output reaches the log at once, even if the rank then hangs or is killed"),
    Variable(
        "PYTHONFAULTHANDLER", "1", "a rank that is killed by SIGSEGV, SIGFPE, SIGABRT or SIGBUS prints its stack first"
    ),
)


def make_request(
    loaded: LoadedRun, *, run: RunDir, attempt: str, working_directory: Path, python: str, local: bool
) -> JobRequest:
    """Return the request for attempt `attempt` of the run.

    With `local`, a run for a Slurm site becomes processes on this machine. The site's activation lines and container
    are then left out, because they exist only on that cluster.

    Raises:
        ConfigError: Slurm cannot use a path of the run.
    """
    config, site = loaded.config, loaded.site.config
    is_local = local or loaded.site.is_local
    is_foreign = is_local and not loaded.site.is_local
    require_plain_paths(run.path, working_directory, None if is_local else site.container)
    activation = () if is_foreign else tuple(site.activation)
    container = None if is_foreign else site.container
    rank_python = "python3" if activation or container else python
    margin = None if is_local else exit_margin(config)
    folder = run.attempt(attempt)
    topology = loaded.layout.topology
    nodes, ranks_per_node = (
        (1, topology.world_size) if is_local else (loaded.layout.nodes, loaded.layout.ranks_per_node)
    )
    return JobRequest(
        scheduler="local" if is_local else "slurm",
        name=config.run.name,
        site=loaded.site.name,
        run=run,
        attempt=folder,
        working_directory=working_directory,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        topology=topology,
        options=()
        if is_local
        else sbatch_options(config, site, ranks_per_node, run, folder, working_directory, margin),
        step_options=()
        if is_local
        else (
            *STEP_OPTIONS,
            wait_option(config.slurm.wait_s),
            *shape_options(site),
            *pyxis_options(container, run),
        ),
        wait_s=config.slurm.wait_s,
        step_prefix=apptainer_prefix(container, run, has_gpu=site.gpu is not None),
        activation=activation,
        variables=(*BUILT_IN_VARIABLES, *network_variables(site), *run_variables(config)),
        host_python=python,
        rank_python=rank_python,
        program=tuple(config.run.command or (rank_python, "-m", "bigsci_launch.train")),
        total_steps=config.training.steps if config.run.starts_trainer else None,
        exit_margin=margin,
    )


def sbatch_options(
    config: RunConfig,
    site: SiteConfig,
    ranks_per_node: int,
    run: RunDir,
    attempt: AttemptDir,
    working_directory: Path,
    margin: ExitMargin | None,
) -> tuple[Option, ...]:
    """Return the header of the job script in printed order, without options that have no value."""
    slurm = config.slurm
    placed = (
        Option("job-name", config.run.name),
        Option("comment", format_comment(str(run.path)), "lets bsl status --jobid find the run directory"),
        Option("chdir", str(working_directory)),
        Option("output", str(attempt.job_output).replace("%", "%%")),
        Option("open-mode", "append", "a requeued job continues in the same file"),
        Option("nodes", str(slurm.nodes)),
        Option("ntasks-per-node", str(ranks_per_node), "one task per GPU: each task is a rank"),
        Option("cpus-per-task", str(site.cpus_per_rank) if site.cpus_per_rank else None),
        Option("gres", site.gres),
        Option("partition", slurm.partition),
        Option("account", slurm.account),
        Option("qos", slurm.qos),
        Option("reservation", slurm.reservation),
        Option("constraint", slurm.constraint),
        Option("exclude", slurm.exclude),
        Option("nodelist", slurm.nodelist),
        Option("time", slurm.time_limit),
        Option("signal", f"B:USR2@{margin.margin_s}" if margin else None, margin.how if margin else ""),
    )
    given = tuple(option for option in placed if option.value is not None)
    return (*given, requeue_option(slurm.requeue), *(parse_option(text) for text in site.sbatch_options))


def requeue_option(requeue: bool) -> Option:
    if requeue:
        return Option("requeue", None, "slurm.requeue is true: Slurm restarts the job after a node failure")
    return Option(
        "no-requeue",
        None,
        "slurm.requeue is false: a job that loses a node ends, and you decide whether to submit it again",
    )


def parse_option(text: str) -> Option:
    """Parse `--name=value` or `--name` from a site file."""
    name, equals, value = text.removeprefix("--").partition("=")
    return Option(name, value if equals else None)


# Each has its reason, so that whoever removes one knows what it prevents.
STEP_OPTIONS = (
    Option(
        "kill-on-bad-exit",
        "1",
        "a dead rank ends the step, since the others would wait for it in a collective until the time limit",
    ),
    Option("distribution", "block", "ranks fill one node after another; coordinates and LOCAL_RANK depend on it"),
    Option("mpi", "none", "ranks find each other through MASTER_ADDR; MPI's start-up would only slow the step down"),
    Option("export", "ALL", "ranks get what this script exports, whatever the site's default is"),
    Option("label", None, "srun's own messages name the task that they are about"),
)


def wait_option(wait_s: int) -> Option:
    if wait_s == 0:
        return Option("wait", "0", "slurm.wait_s is 0: ranks may run as long as they like after the first has ended")
    reason = f"slurm.wait_s: ranks that still run {wait_s} s after the first one has ended with 0 are hung: end them"
    return Option("wait", str(wait_s), reason)


def shape_options(site: SiteConfig) -> tuple[Option, ...]:
    if site.cpus_per_rank is None:
        return ()
    return (
        Option("cpus-per-task", str(site.cpus_per_rank), "since Slurm 22.05, srun no longer inherits this from sbatch"),
    )


def pyxis_options(container: Container | None, run: RunDir) -> tuple[Option, ...]:
    if container is None or container.kind != "pyxis":
        return ()
    mounts = ",".join([f"{run.path}:{run.path}", *container.mounts])
    return (
        Option("container-image", container.image),
        Option("container-mounts", mounts, "the run directory contains the config, the runner and all records"),
    )


def apptainer_prefix(container: Container | None, run: RunDir, *, has_gpu: bool) -> tuple[str, ...]:
    if container is None or container.kind != "apptainer":
        return ()
    binds = (f"--bind={mount}" for mount in (f"{run.path}:{run.path}", *container.mounts))
    return ("apptainer", "exec", *(("--nv",) if has_gpu else ()), *binds, container.image)


def network_variables(site: SiteConfig) -> tuple[Variable, ...]:
    if site.network_interface is None:
        return ()
    reason = "site.network_interface: the default interface does not connect the nodes"
    return tuple(Variable(f"{library}_SOCKET_IFNAME", site.network_interface, reason) for library in ("GLOO", "NCCL"))


def run_variables(config: RunConfig) -> tuple[Variable, ...]:
    """Return the variables of the run, which include the site's."""
    return tuple(Variable(name, variable.value, variable.reason) for name, variable in config.env.items())


def exit_margin(config: RunConfig) -> ExitMargin | None:
    """Return how long before the time limit to warn ranks; None if there is no limit.

    The signal may come just after a step and a save have begun. These must end, then the step in which all ranks agree
    to stop, and the last save. A computed margin is never more than half of the limit.
    """
    if config.slurm.time_limit is None:
        return None
    monitor = config.monitor
    if monitor.exit_margin_s is not None:
        return ExitMargin(monitor.exit_margin_s, f"{monitor.exit_margin_s} s before the limit: monitor.exit_margin_s")
    margin_s = math.ceil(2 * (monitor.step_time_s + monitor.save_time_s)) + SLACK_S
    how = f"{margin_s} s = 2 x (step {monitor.step_time_s:g} s + save {monitor.save_time_s:g} s) + slack {SLACK_S} s"
    half_s = parse_slurm_duration(config.slurm.time_limit) // 2
    if margin_s > half_s:
        return ExitMargin(max(half_s, 1), f"{half_s} s: half of the time limit, which is less than {how}")
    return ExitMargin(margin_s, how)


def require_plain_paths(run_directory: Path, working_directory: Path, container: Container | None) -> None:
    """Raise ConfigError for paths that Slurm, or the mounts of a container, cannot use."""
    for key, path in (("run.root", run_directory), ("working directory", working_directory)):
        if bad := next((letter for letter in str(path) if not letter.isprintable() or letter == "\\"), None):
            raise _unusable(key, f"{str(path)!r} contains {bad!r}: Slurm cannot write to such a path")
    if container is not None and any(letter in str(run_directory) for letter in ",:"):
        raise _unusable("run.root", f"{str(run_directory)!r} contains a comma or a colon: containers cannot mount it")


def _unusable(key: str, text: str) -> ConfigError:
    return ConfigError(f"{key}: {text}", problems=[Problem("", key, text)], hint="set run.root to another folder")
