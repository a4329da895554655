"""The options of sbatch and srun that a request has, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path

from bigsci_launch.config.exit_margin import ExitMargin
from bigsci_launch.config.schema.node import ResourceLimits
from bigsci_launch.config.schema.options import name_of
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.site import SiteConfig
from bigsci_launch.config.schema.slurm import SlurmSection
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.scheduler.job import format_comment


@dataclass(frozen=True, slots=True)
class Option:
    """An option of sbatch or srun: `--name=value`, or `--name` alone; `reason` is printed above it."""

    name: str
    value: str | None = None
    reason: str = ""


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
        nodes_option(slurm),
        tasks_option(slurm, ranks_per_node),
        Option("cpus-per-task", cpus_of_task(slurm, site)),
        Option("gres", site.gres),
        Option("partition", slurm.partition),
        Option("account", slurm.account),
        Option("qos", slurm.qos),
        Option("reservation", slurm.reservation),
        Option("constraint", slurm.constraint),
        Option("exclude", slurm.exclude),
        Option("nodelist", slurm.nodelist),
        Option("dependency", slurm.dependency),
        Option("time", slurm.time_limit),
        Option("signal", f"B:USR2@{margin.margin_s}" if margin else None, margin.how if margin else ""),
    )
    given = tuple(option for option in placed if option.value is not None)
    no_kill = (JOB_NO_KILL,) if config.survive is not None else ()
    return (*given, *no_kill, requeue_option(config), *further_options(config, site))


JOB_NO_KILL = Option("no-kill", None, "survive: without this, Slurm ends the job when any of its nodes fails")


def tasks_option(slurm: SlurmSection, ranks_per_node: int) -> Option:
    each = slurm.ranks_per_task
    reason = "one task per GPU: each task is a rank" if each == 1 else f"slurm.ranks_per_task: each starts {each} ranks"
    return Option("ntasks-per-node", str(ranks_per_node // each), reason)


def cpus_of_task(slurm: SlurmSection, site: SiteConfig) -> str | None:
    return str(site.cpus_per_rank * slurm.ranks_per_task) if site.cpus_per_rank else None


def nodes_option(slurm: SlurmSection) -> Option:
    if not slurm.spare_nodes:
        return Option("nodes", str(slurm.nodes))
    reason = f"{slurm.nodes} with ranks, and slurm.spare_nodes: {slurm.spare_nodes} that wait to replace a lost one"
    return Option("nodes", str(slurm.nodes + slurm.spare_nodes), reason)


def requeue_option(config: RunConfig) -> Option:
    slurm = config.slurm
    if slurm.requeue == "expedite":
        reason = "slurm.requeue is expedite: Slurm restarts the job at once after a node failure, before all other jobs"
        return Option("requeue", "expedite", reason)
    if slurm.requeue and config.survive is not None:
        reason = "slurm.requeue is true: the job is restarted when the node that runs this script fails; survive does"
        return Option("requeue", None, f"{reason} the rest")
    if slurm.requeue:
        return Option("requeue", None, "slurm.requeue is true: Slurm restarts the job after a node failure")
    if slurm.chain is not None and slurm.chain.by == "requeue":
        return Option("requeue", None, "slurm.chain.by is requeue: the job starts itself again")
    if config.survive is not None:
        reason = "slurm.requeue is false: a job that survive cannot continue ends, and you decide what follows"
        return Option("no-requeue", None, reason)
    return Option(
        "no-requeue",
        None,
        "slurm.requeue is false: a job that loses a node ends, and you decide whether to submit it again",
    )


def further_options(config: RunConfig, site: SiteConfig) -> tuple[Option, ...]:
    """Return the sbatch options of the site and of the run, which replaces those of the same name."""
    own = {name_of(text) for text in config.slurm.sbatch_options}
    texts = [text for text in site.sbatch_options if name_of(text) not in own] + config.slurm.sbatch_options
    options = tuple(parse_option(text) for text in texts)
    has_segment = any(name_of(text) == "--segment" for text in texts)
    return options if has_segment else (*segment_option(config, site), *options)


def segment_option(config: RunConfig, site: SiteConfig) -> tuple[Option, ...]:
    """Return the option that keeps the nodes of a tensor-parallel group in one NVLink domain, if it has several."""
    tp, ranks = config.parallelism.tensor_parallel_size, site.ranks_per_node
    if site.nvlink_domain_nodes == 1 or tp <= ranks:
        return ()
    reason = f"tp {tp} is {tp // ranks} nodes of {ranks} ranks: each group stays in one NVLink domain"
    return (Option("segment", str(tp // ranks), reason),)


def parse_option(text: str) -> Option:
    """Parse `--name=value` or `--name` from a site file or a run file."""
    name, equals, value = text.removeprefix("--").partition("=")
    return Option(name, value if equals else None)


# Each has its reason, so that it is known what it prevents before it is removed.
KILL_ON_BAD_EXIT = Option(
    "kill-on-bad-exit",
    "1",
    "a dead rank ends the step, since the others would wait for it in a collective until the time limit",
)
SURVIVE_OPTIONS = (
    Option("no-kill", None, "survive: without this, Slurm ends the step when any of its nodes fails"),
    Option("kill-on-bad-exit", "0", "survive: the controller decides what a dead runner means for the others"),
)
STEP_OPTIONS = (
    Option("distribution", "block", "ranks fill one node after another; coordinates and LOCAL_RANK depend on it"),
    Option("mpi", "none", "ranks find each other through MASTER_ADDR; MPI's start-up would only slow the step down"),
    Option("export", "ALL", "ranks get what this script exports, whatever the site's default is"),
    Option("label", None, "srun's own messages name the task that they are about"),
)


def step_options(config: RunConfig, site: SiteConfig, container: tuple[Option, ...]) -> tuple[Option, ...]:
    """Return the options of the srun that starts the ranks, in printed order."""
    return (
        *((KILL_ON_BAD_EXIT,) if config.survive is None else SURVIVE_OPTIONS),
        *STEP_OPTIONS,
        wait_option(config),
        *shape_options(config.slurm, site),
        *limit_options(config.slurm.ulimits),
        *container,
        *(parse_option(text) for text in site.srun_options),
    )


def check_options(nodes: int, site: SiteConfig, container: tuple[Option, ...]) -> tuple[Option, ...]:
    """Return the options of the step that tries the nodes: one process on each, with all of the job's GPUs."""
    cpus = site.cpus_per_rank * site.ranks_per_node if site.cpus_per_rank and site.ranks_per_node else None
    return (
        Option("nodes", str(nodes)),
        Option("ntasks", str(nodes)),
        Option("ntasks-per-node", "1", "one process per node, which tests all of its GPUs"),
        *((Option("cpus-per-task", str(cpus)),) if cpus else ()),
        Option("kill-on-bad-exit", "0", "a node that cannot be tested must not end the check of the others"),
        Option("wait", "0", "each node ends its check by itself after a minute"),
        Option("mpi", "none"),
        Option("input", "none", "the rest of this script is not its input"),
        Option("export", "ALL"),
        *container,
    )


def wait_option(config: RunConfig) -> Option:
    wait_s = config.slurm.wait_s
    if config.survive is not None:
        return Option("wait", "0", "survive: the controller applies slurm.wait_s and ends the runners")
    if wait_s == 0:
        return Option("wait", "0", "slurm.wait_s is 0: ranks may run without limit after the first has ended")
    reason = f"slurm.wait_s: ranks that still run {wait_s} s after the first one has ended with 0 are hung: end them"
    return Option("wait", str(wait_s), reason)


def shape_options(slurm: SlurmSection, site: SiteConfig) -> tuple[Option, ...]:
    who = "rank" if slurm.ranks_per_task == 1 else "task"
    placed = (
        Option(
            "cpus-per-task",
            cpus_of_task(slurm, site),
            "since Slurm 22.05, srun no longer inherits this from sbatch",
        ),
        Option(
            "cpu-bind",
            bound_cpus(site.cpu_bind, slurm.ranks_per_task),
            f"site.cpu_bind: the CPUs of each {who} of a node",
        ),
    )
    return tuple(option for option in placed if option.value is not None)


def bound_cpus(bind: str | None, ranks_per_task: int) -> str | None:
    """Return where tasks are bound: a list with a mask for each rank becomes one with the masks of each task."""
    head, colon, masks = (bind or "").partition("mask_cpu:")
    if ranks_per_task == 1 or not colon:
        return bind
    numbers = [int(mask, 16) for mask in masks.split(",")]
    tasks = (numbers[at : at + ranks_per_task] for at in range(0, len(numbers), ranks_per_task))
    return head + colon + ",".join(f"{reduce(or_, task):x}" for task in tasks)


def limit_options(ulimits: ResourceLimits) -> tuple[Option, ...]:
    names = ",".join(name.upper() for name in ulimits.given)
    if not names:
        return ()
    return (Option("propagate", names, "ulimits: ranks get the limits that this script has set"),)
