"""Leaves remembered bad nodes out of a job, and says so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from bigsci_launch.config.schema.slurm import SlurmSection
from bigsci_launch.errors import SlurmError
from bigsci_launch.launch.job.options import Option
from bigsci_launch.launch.job.request import JobRequest
from bigsci_launch.nodes.evaluate import evaluate_run
from bigsci_launch.nodes.memory import BadNode, left_out, read_nodes
from bigsci_launch.nodes.show import entry_line
from bigsci_launch.runs.layout import node_memory
from bigsci_launch.scheduler.hostlist import expand_hostlist
from bigsci_launch.scheduler.slurm import cluster_name, partition_nodes

_AFTER = frozenset({"nodelist", "time", "signal", "requeue", "no-requeue"})
"""Options that are printed below `exclude`."""


def leave_out_bad_nodes(
    request: JobRequest, slurm: SlurmSection, *, is_dry_run: bool = False
) -> tuple[JobRequest, list[str]]:
    """Return the request without the nodes that are remembered as bad, and what the user should read.

    Unless it is a dry run, the run's ended attempts are examined first. A node of slurm.nodelist stays, with a warning.

    Raises:
        RunDirError: the memory cannot be read.
    """
    if request.scheduler != "slurm":
        return request, []
    said = [] if is_dry_run else evaluate_run(request.run)
    entries = read_nodes(node_memory(request.run.path.parent))
    if not entries:
        return request, said
    bad = left_out(entries, cluster=cluster_name(), now=time.time())
    partition = _nodes_of(slurm.partition)
    demanded = _expand(slurm.nodelist)
    kept = [entry for entry in bad if entry.node in demanded]
    excluded = [entry for entry in bad if entry.node not in demanded and (partition is None or entry.node in partition)]
    said += [f"left out: {entry_line(entry)}" for entry in excluded]
    said += [f"warning: slurm.nodelist requires a node remembered as bad: {entry_line(entry)}" for entry in kept]
    said += _too_few(request, slurm, partition, excluded)
    return (without_nodes(request, slurm.exclude, excluded) if excluded else request), said


def without_nodes(request: JobRequest, exclude: str | None, bad: Sequence[BadNode]) -> JobRequest:
    """Return the request with `bad` added to its option `exclude`, each node with its reason."""
    names = list(dict.fromkeys(entry.node for entry in bad if entry.node not in _expand(exclude)))
    if not names:
        return request
    value = ",".join([*([exclude] if exclude else []), *names])
    reason = "\n".join(f"remembered as bad: {entry_line(entry)}" for entry in bad if entry.node in names)
    option = Option("exclude", value, reason)
    options = [each for each in request.options if each.name != "exclude"]
    at = next((index for index, each in enumerate(options) if each.name in _AFTER), len(options))
    return replace(request, options=(*options[:at], option, *options[at:]), left_out=tuple(bad))


def _too_few(
    request: JobRequest, slurm: SlurmSection, partition: list[str] | None, excluded: Sequence[BadNode]
) -> list[str]:
    if partition is None or not partition:
        return []
    bad = {entry.node for entry in excluded}
    left = len(set(partition) - bad - set(_expand(slurm.exclude)))
    if left >= request.nodes:
        return []
    where = f"partition {slurm.partition}" if slurm.partition else "the default partition"
    return [
        f"warning: {where} has {left} usable node{'s' * (left != 1)} left, but the run needs {request.nodes}: the job "
        f"cannot start; `bsl nodes forgive {','.join(sorted(bad))}` readmits the bad ones"
    ]


def _nodes_of(partition: str | None) -> list[str] | None:
    try:
        return partition_nodes(partition) or None
    except SlurmError:
        return None


def _expand(hostlist: str | None) -> list[str]:
    try:
        return expand_hostlist(hostlist or "")
    except ValueError:
        return []  # Slurm itself says what is wrong with it
