"""A request: everything that defines a job, as plain values. Making one writes nothing and calls nothing.

A dry run prints the same request that a submission writes and runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bigsci_launch.checkpoints.changes import NOTHING_ACCEPTED, Acceptance
from bigsci_launch.config.exit_margin import ExitMargin, exit_margin
from bigsci_launch.config.load import LoadedRun
from bigsci_launch.config.schema.node import StageIn
from bigsci_launch.config.schema.program import TRAINER_MODULE
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.site import SiteConfig
from bigsci_launch.config.schema.slurm import SlurmSection
from bigsci_launch.errors import ConfigError, Problem
from bigsci_launch.launch.job.containers import RankContainer, apptainer_prefix, container_of, pyxis_options
from bigsci_launch.launch.job.options import Option, check_options, sbatch_options, step_options
from bigsci_launch.nodes.memory import BadNode
from bigsci_launch.runs.chain.records import ChainRecord
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.topology import Topology

ULIMIT_LETTERS = {"core": "c", "memlock": "l", "nofile": "n", "nproc": "u", "stack": "s"}


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the ranks' environment, and the reason for it if one is given."""

    name: str
    value: str | None
    """None: that of the environment of `bsl submit`, which the job has; nothing of it is stored."""
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class CallerOption:
    """An option that the caller's environment gives to sbatch. `why` says why it applies or does not."""

    variable: str
    value: str
    option: str
    applies: bool
    why: str


@dataclass(frozen=True, slots=True)
class UserLimit:
    """A resource limit that the job script sets: the letter of bash's `ulimit`, the value, and its key."""

    letter: str
    value: str
    key: str


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
    ranks_per_task: int
    """1, or how many ranks a launcher starts, which each task runs."""
    topology: Topology
    options: tuple[Option, ...]
    step_options: tuple[Option, ...]
    check_options: tuple[Option, ...]
    """Options of the step that tries the nodes before the ranks start; empty if the run wants no check."""
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
    command: tuple[str, ...]
    """`run.command`; empty for `bsl train`."""
    stop_signal: str
    """What asks the program to save and stop, without `SIG`."""
    master_addr_suffix: str
    ulimits: tuple[UserLimit, ...]
    stage_in: tuple[StageIn, ...]
    total_steps: int | None
    """Optimizer steps of the whole run; None for a program other than `bsl train`."""
    exit_margin: ExitMargin | None
    log_limit_mib: int
    """Largest size of the log of a rank, MiB; 0 means no limit."""
    ring: str
    """Where ranks keep their last calls: a folder on each node, `auto` or `none`."""
    watch: Literal["off", "observe", "act"]
    """Whether a watcher is started next to the ranks, and what it may do."""
    exports: bool
    """Whether a process is started next to them that keeps metrics or trackers up to date."""
    survive: Literal["restart", "in_place"] | None
    """How the job continues when a rank is lost; None: it ends."""
    standby: bool
    """Whether a second process waits in every slot, with `in_place`."""
    spare_nodes: int
    """Nodes of the job on which no rank starts, but a runner for each that may be needed."""
    chain: ChainRecord | None
    """How the run starts itself again; None for a local attempt."""
    caller_options: tuple[CallerOption, ...] = ()
    """What becomes of the `SBATCH_*` variables of the caller."""
    left_out: tuple[BadNode, ...] = ()
    """Bad nodes that the job excludes, apart from those of slurm.exclude."""
    accepted: Acceptance = NOTHING_ACCEPTED
    """What has changed since the checkpoint was saved and is accepted with `--force`."""

    @property
    def program(self) -> tuple[str, ...]:
        """What every rank executes."""
        return self.command or (self.rank_python, str(self.attempt.tools / "run_module.py"), TRAINER_MODULE)


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
        ConfigError: Slurm cannot use a path of the run, or an option.
    """
    config, site = loaded.config, loaded.site.config
    is_local = local or loaded.site.is_local
    is_foreign = is_local and not loaded.site.is_local
    activation = () if is_foreign else tuple(site.activation)
    container = None if is_foreign else container_of(loaded, run, working_directory)
    require_plain_paths(run.path, working_directory, container)
    variables = (*BUILT_IN_VARIABLES, *network_variables(site), *run_variables(config))
    rank_python = "python3" if activation or container else python
    margin = None if is_local else exit_margin(config)
    folder = run.attempt(attempt)
    topology = loaded.layout.topology
    total_steps = config.training.steps if config.run.starts_trainer else None
    nodes, ranks_per_node = (
        (1, topology.world_size) if is_local else (loaded.layout.nodes, loaded.layout.ranks_per_node)
    )
    options = () if is_local else sbatch_options(config, site, ranks_per_node, run, folder, working_directory, margin)
    require_plain_options(options)
    return JobRequest(
        scheduler="local" if is_local else "slurm",
        name=config.run.name,
        site=loaded.site.name,
        run=run,
        attempt=folder,
        working_directory=working_directory,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        ranks_per_task=config.slurm.ranks_per_task,
        topology=topology,
        options=options,
        step_options=() if is_local else step_options(config, site, pyxis_options(container, exported(variables))),
        check_options=()
        if is_local or not config.slurm.node_check
        else check_options(nodes + config.slurm.spare_nodes, site, pyxis_options(container, exported(variables))),
        wait_s=config.slurm.wait_s,
        step_prefix=apptainer_prefix(container),
        activation=activation,
        variables=variables,
        host_python=python,
        rank_python=rank_python,
        command=tuple(config.run.command or ()),
        stop_signal=config.run.stop_signal,
        master_addr_suffix=site.master_addr_suffix or "",
        ulimits=() if is_local else user_limits(config),
        stage_in=() if is_local else tuple(config.slurm.stage_in),
        total_steps=total_steps,
        exit_margin=margin,
        chain=None if is_local else chain_of(config.slurm, total_steps, attempt),
        log_limit_mib=config.run.log_limit_mib,
        ring=config.monitor.ring,
        watch=watch_of(config),
        exports=config.monitor.metrics is not None or bool(config.monitor.trackers),
        survive=survive_of(config),
        standby=config.survive is not None and config.survive.standby and survive_of(config) == "in_place",
        spare_nodes=0 if is_local else config.slurm.spare_nodes,
    )


def chain_of(slurm: SlurmSection, total_steps: int | None, attempt: str) -> ChainRecord | None:
    """Return the chain that begins with `attempt`; None if the run does not start itself again."""
    chain, is_expedited = slurm.chain, slurm.requeue == "expedite"
    if chain is None:
        if not slurm.requeue:
            return None
        # The bound is that of a chain, because a job may be preempted for ever.
        return ChainRecord(
            "requeue", 50, None, total_steps, only_preempted=True, first=attempt, is_expedited=is_expedited
        )
    return ChainRecord(
        chain.by,
        chain.max_starts,
        chain.max_hours,
        total_steps,
        only_preempted=False,
        first=attempt,
        links=chain.links,
        is_expedited=is_expedited,
    )


def survive_of(config: RunConfig) -> Literal["restart", "in_place"] | None:
    """Return what `survive` means for the program of this run: ranks of `bsl train` and of `Survivor` can stay."""
    if config.survive is None:
        return None
    return "in_place" if config.run.starts_trainer or config.survive.in_place else "restart"


def watch_of(config: RunConfig) -> Literal["off", "observe", "act"]:
    """Return what `monitor.watch` means for the program of this run."""
    if config.monitor.watch == "auto" and config.survive is not None:
        return "act"  # a run that is to survive should recover from hangs too
    if config.monitor.watch == "auto":
        return "observe" if config.run.starts_trainer else "off"
    return config.monitor.watch


def exported(variables: tuple[Variable, ...]) -> tuple[str, ...]:
    """Return the names of all variables that the job script exports."""
    return ("MASTER_ADDR", "MASTER_PORT", *dict.fromkeys(variable.name for variable in variables))


def user_limits(config: RunConfig) -> tuple[UserLimit, ...]:
    given = config.slurm.ulimits.given
    return tuple(UserLimit(ULIMIT_LETTERS[name], value, f"ulimits.{name}") for name, value in given.items())


def network_variables(site: SiteConfig) -> tuple[Variable, ...]:
    if site.network_interface is None:
        return ()
    reason = "site.network_interface: the default interface does not connect the nodes"
    return tuple(Variable(f"{library}_SOCKET_IFNAME", site.network_interface, reason) for library in ("GLOO", "NCCL"))


def run_variables(config: RunConfig) -> tuple[Variable, ...]:
    """Return the variables of the run, which include the site's."""
    return tuple(Variable(name, variable.value, variable.reason) for name, variable in config.env.items())


def require_plain_paths(run_directory: Path, working_directory: Path, container: RankContainer | None) -> None:
    """Raise ConfigError for paths that Slurm, or the mounts of a container, cannot use."""
    for key, path in (("run.root", run_directory), ("working directory", working_directory)):
        if bad := next((letter for letter in str(path) if not letter.isprintable() or letter == "\\"), None):
            raise _unusable(key, f"{str(path)!r} contains {bad!r}: Slurm cannot write to such a path")
        if container is not None and any(letter in str(path) for letter in ",:"):
            raise _unusable(key, f"{str(path)!r} contains a comma or a colon: containers cannot mount it")


def require_plain_options(options: Sequence[Option]) -> None:
    """Raise ConfigError for an option that has no place in a `#SBATCH` line, where nothing quotes such letters."""
    problems = [
        Problem("", f"sbatch option --{option.name}", f"{option.value!r} contains {bad!r}, which sbatch cannot read")
        for option in options
        if (bad := next((letter for letter in option.value or "" if not letter.isprintable()), None))
    ]
    if problems:
        hint = "remove it where the run file, the site or --set gives the option"
        raise ConfigError(f"{problems[0].key}: {problems[0].text}", problems=problems, hint=hint)


def _unusable(key: str, text: str) -> ConfigError:
    return ConfigError(f"{key}: {text}", problems=[Problem("", key, text)], hint="set run.root to another folder")
