"""Rules about `slurm.ranks_per_task`: tasks that start several ranks each, by a launcher such as torchrun."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bigsci_launch.config.checks.command import RANKS_PER_TASK
from bigsci_launch.config.finding import Finding
from bigsci_launch.config.schema.options import name_of
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import Site

# What each launcher finds in its environment: torchrun in those with PET_, other ones in the line of a shell.
LAUNCHER_VARIABLES = re.compile(r"(PET_)?(NNODES|NPROC_PER_NODE|NODE_RANK|MASTER_ADDR|MASTER_PORT)|BSL_WORKER_RUNNER")
_MASKS = re.compile(r"(?:[a-z]+,)*mask_cpu:(?:0x)?[0-9a-f]{1,512}(?:,(?:0x)?[0-9a-f]{1,512})*", re.IGNORECASE)


def check_ranks_per_task(config: RunConfig, site: Site) -> Iterator[Finding]:
    """Only a launcher in `run.command` starts several ranks, all tasks are alike, and each has what its ranks need."""
    each = config.slurm.ranks_per_task
    if each == 1:
        return
    if config.run.starts_trainer:
        text = "`bsl train` is started once for each rank; leave it out, or set run.command to a launcher"
        yield _error("run.command", text)
        return
    if config.survive is not None:
        text = "survive replaces single ranks, and with ranks_per_task a launcher starts them: leave out one of the two"
        yield _error("survive", text)
    try:
        ranks = site.layout(config).ranks_per_node
    except ValueError:
        return
    if ranks % each:
        yield _error("slurm.site", f"{each} does not divide the {ranks} ranks of a node")
    for name in config.env:
        if LAUNCHER_VARIABLES.fullmatch(name):
            yield Finding(
                "ranks_per_task",
                "error",
                (f"env.{name}", RANKS_PER_TASK),
                "`bsl` sets it for each launcher; leave it out",
            )
    if not site.is_local:
        yield from _check_shares(config, site)


def _check_shares(config: RunConfig, site: Site) -> Iterator[Finding]:
    """A task has the CPUs and GPUs of all its ranks."""
    each, bind = config.slurm.ranks_per_task, site.config.cpu_bind or ""
    if ":" in bind and not _MASKS.fullmatch(bind):
        text = f"cpu_bind {bind} is for tasks of one rank; a copy of the site file without it, or with mask_cpu, fits"
        yield _error("site.cpu_bind", text)
    for key, options in (
        ("slurm.sbatch_options", config.slurm.sbatch_options),
        ("site.sbatch_options", site.config.sbatch_options),
        ("site.srun_options", site.config.srun_options),
    ):
        for option in options:
            count = re.split(r"[=:]", option)[-1]
            if name_of(option) == "--gpus-per-task" and count.isdigit() and int(count) < each:
                yield _error(key, f"{option} is less than a GPU for each of the {each} ranks of a task")


def _error(key: str, text: str) -> Finding:
    return Finding("ranks_per_task", "error", (RANKS_PER_TASK, key), text)
