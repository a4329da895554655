"""What `bsl plan --survive` says: the plan, what to expect of failing nodes, a loss, and a trace replayed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bigsci_launch.config.rules.described import limits_of
from bigsci_launch.config.rules.table import find_refusal
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import Site
from bigsci_launch.errors import BslError, ConfigError, DataError
from bigsci_launch.plan.choose.answer import configured_setup, parse_nodes
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.shape.setup import require_framework, require_plain
from bigsci_launch.plan.survive.expected import ExpectedRun, expected_run
from bigsci_launch.plan.survive.loss import Loss, plan_loss
from bigsci_launch.plan.survive.replica import Replica
from bigsci_launch.plan.survive.survival import Survival, plan_survival
from bigsci_launch.plan.survive.trace import HINT, FailureTrace, Replay, Strategy, parse_trace, replay
from bigsci_launch.progress import Progress, no_progress
from bigsci_launch.scheduler.hostlist import expand_hostlist
from bigsci_launch.scheduler.slurm import partition_nodes
from bigsci_launch.typed_path import open_typed
from bigsci_launch.units import parse_slurm_duration

REBUILD_S = 30.0
"""Seconds from a node's death until all others have new communicators. Assumed: it is not measured on GPUs."""


DEFAULT_HORIZON_H = 24.0
"""Hours of a job whose time limit is not known."""


@dataclass(frozen=True, slots=True)
class ComparedStrategy:
    """A strategy with what it is expected to train, or has trained under a trace."""

    strategy: str
    expected: ExpectedRun | None
    replayed: Replay | None


@dataclass(frozen=True, slots=True)
class SurvivalAnswer:
    """What was asked and found. `horizon_h` is the time limit of the job, during which no node is replaced."""

    name: str
    site_name: str
    survival: Survival
    node_mtbf_h: float | None
    horizon_h: float
    undone_s: float
    strategies: tuple[ComparedStrategy, ...]
    trace: FailureTrace | None = None
    loss: Loss | None = None


def strategies_of(survival: Survival, undone_s: float) -> tuple[Strategy, Strategy]:
    """Return the plan and its rival: dropping whole replicas, which moves nothing.

    `undone_s` is the work that is done again where state is lost, which only a checkpoint then has.
    """
    by_templates = Strategy(
        "templates", survival.samples_per_second, lambda before, after: _pause(survival, before, after, undone_s)
    )
    whole = Strategy(
        "whole replicas",
        survival.whole_samples_per_second,
        lambda before, after: _whole_pause(survival, before, after, undone_s),
    )
    return by_templates, whole


def _pause(survival: Survival, before: int, after: int, undone_s: float) -> float:
    """Return the seconds of a change: new communicators, what must move, and the work that is done again."""
    largest, smallest = (min(number, survival.num_nodes) for number in (max(before, after), min(before, after)))
    moved = _transfer_seconds(survival, largest, largest - smallest)
    return REBUILD_S + moved + _again(survival, before, after, survival.samples_per_second(after), undone_s)


def _whole_pause(survival: Survival, before: int, after: int, undone_s: float) -> float:
    return REBUILD_S + _again(survival, before, after, survival.whole_samples_per_second(after), undone_s)


def _again(survival: Survival, before: int, after: int, rate: float, undone_s: float) -> float:
    """Return the seconds that are done again. More than f nodes lost at once count as lost state, wherever they are."""
    before, after = (min(number, survival.num_nodes) for number in (before, after))
    return undone_s if before - after > survival.failures else _half_a_step(survival, rate)


def _half_a_step(survival: Survival, rate: float) -> float:
    return survival.replica.setup.global_batch_size / rate / 2 if rate else 0.0


@lru_cache(maxsize=4096)
def _transfer_seconds(survival: Survival, num_nodes: int, num_lost: int) -> float:
    """Return the seconds of moving what the loss of the first nodes makes necessary; 0 if nothing can run after it."""
    if num_lost == 0 or num_nodes - num_lost not in survival.by_nodes or num_nodes not in survival.by_nodes:
        return 0.0
    nodes = [f"n{index:06d}" for index in range(num_nodes)]
    return plan_loss(survival, nodes, nodes[:num_lost]).transfer_seconds


def mean_undone_s(survival: Survival, save_interval: int | None, horizon_h: float) -> float:
    """Return the work since the last checkpoint: half an interval on average, or half the job if nothing is saved."""
    if save_interval is None:
        return horizon_h * 3600 / 2
    return save_interval * survival.by_nodes[survival.num_nodes].seconds / 2


def compare_strategies(
    survival: Survival, node_mtbf_h: float | None, horizon_h: float, trace: FailureTrace | None, undone_s: float
) -> tuple[ComparedStrategy, ...]:
    """Return what each strategy is expected to train, if the site says how often nodes fail, and under the trace."""
    return tuple(
        ComparedStrategy(
            strategy.name,
            expected_run(strategy, survival.num_nodes, node_mtbf_h, horizon_h)
            if node_mtbf_h and strategy.samples_per_second(survival.num_nodes) > 0
            else None,
            replay(trace, strategy)
            if trace and strategy.samples_per_second(min(trace.most_nodes, survival.num_nodes)) > 0
            else None,
        )
        for strategy in strategies_of(survival, undone_s)
    )


def answer_survival(
    config: RunConfig,
    site: Site,
    calibration: Calibration | None,
    *,
    nodes: str | None,
    survive: str | None,
    lose: str | None,
    trace: Path | None,
    report_progress: Progress = no_progress,
) -> SurvivalAnswer:
    """Return everything that is asked about losses; `survive` is `f=N`, `lose` a list of nodes as Slurm writes it.

    Raises:
        ConfigError: an option has the wrong form, the layout is refused, or the nodes do not hold f + 1 replicas.
        DataError: the trace cannot be read.
    """
    if calibration is None:
        raise ConfigError(f"site {site.name} has no GPU: memory is not predicted, so nothing is planned for losses")
    failures = parse_failures(survive)
    lost = _hosts(lose) if lose is not None else []
    numbers = parse_nodes(nodes, config.slurm.nodes)
    num_nodes = numbers[-1]
    read = read_trace(trace, num_nodes) if trace else None
    replica = _replica(config, site, calibration, failures)
    survival = plan_survival(replica, num_nodes, report_progress=report_progress)
    limit = config.slurm.time_limit
    horizon_h = parse_slurm_duration(limit) / 3600 if limit else DEFAULT_HORIZON_H
    mtbf = site.config.node_mtbf_h
    loss = None
    if lost:
        loss = plan_loss(survival, name_nodes(config, site, num_nodes, lost), lost)
    undone_s = mean_undone_s(survival, config.checkpoint.save_interval, horizon_h)
    compared = compare_strategies(survival, mtbf, horizon_h, read, undone_s)
    return SurvivalAnswer(config.run.name, site.name, survival, mtbf, horizon_h, undone_s, compared, read, loss)


def parse_failures(text: str | None) -> int:
    """Return N of `f=N`; 1 without a text.

    Raises:
        ConfigError: the text has another form.
    """
    match = re.fullmatch(r"(?:f=)?(\d{1,4})", text.strip()) if text is not None else None
    if text is not None and match is None:
        raise ConfigError(f"--survive {text}: not f=N", hint="--survive f=1")
    return int(match[1]) if match else 1


def _replica(config: RunConfig, site: Site, calibration: Calibration, failures: int) -> Replica:
    require_framework(config)
    require_plain(config)
    try:
        setup = configured_setup(config, site, calibration)
    except ValueError as problem:
        raise ConfigError(f"the configured layout does not fit the site: {problem}") from problem
    if refusal := find_refusal(setup, limits_of(config, site)):
        raise ConfigError(f"the configured layout is refused: {refusal.text}", hint="bsl plan FILE shows legal ones")
    return Replica(setup, calibration, failures, site.config.node_memory_gib)


def _hosts(text: str) -> list[str]:
    try:
        found = expand_hostlist(text)
    except ValueError as problem:
        raise ConfigError(f"--lose {text}: {problem}", hint=_HOSTS) from problem
    if not found:
        raise ConfigError("--lose: no node is named", hint=_HOSTS)
    return found


_HOSTS = "node3,node7 or node[3-7]"


def name_nodes(config: RunConfig, site: Site, num_nodes: int, lost: Sequence[str]) -> list[str]:
    """Return the nodes of the run: of the partition's, in Slurm's order, the lost ones and as many others as needed.

    Where no Slurm answers, or it has too few nodes, they are called node1, node2 and so on.
    """
    known: list[str] = []
    if not site.is_local:
        try:
            known = partition_nodes(config.slurm.partition or site.config.default_partition)
        except BslError:
            known = []
    if len(known) < num_nodes:
        return [f"node{index}" for index in range(1, num_nodes + 1)]
    room = num_nodes - len({*known} & {*lost})
    chosen = {*lost, *[node for node in known if node not in lost][: max(0, room)]}
    return [node for node in known if node in chosen]


def read_trace(path: Path, num_nodes: int) -> FailureTrace:
    """Return the trace in a file.

    Raises:
        DataError: it cannot be read, or is no trace.
    """
    try:
        with open_typed(path) as stream:
            text = stream.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: {problem}") from problem
    found = parse_trace(text, str(path), num_nodes)
    if found.spans[-1].end <= 0:
        raise DataError(f"{path}: all events are at second 0, so there is nothing to replay", hint=HINT)
    return found
