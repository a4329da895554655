"""Checks the arithmetic of a whole run before it is submitted. Each finding has its keys and its price.

Rules that need no model are in `config.check`. The rules here need the partitioner, a predicted step, or the whole
ramp-up. If nothing was measured, `monitor.step_time_s` is used as the time of a step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Any

from bigsci_launch.config.check import check_run
from bigsci_launch.config.exit_margin import exit_margin
from bigsci_launch.config.finding import DP, PP, TP, Finding, Severity, finding_document, finding_line, worst_first
from bigsci_launch.config.rules.described import limits_of
from bigsci_launch.config.rules.layout import Limits
from bigsci_launch.config.rules.table import EMPTY_STAGE, find_refusal
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import Site
from bigsci_launch.plan.choose.answer import configured_setup
from bigsci_launch.plan.choose.preflight import preflight, remedy
from bigsci_launch.plan.choose.search import Plan, make_plan
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.price import TERM_NAMES
from bigsci_launch.plan.shape.advice import advise
from bigsci_launch.plan.shape.parameters import checkpoint_bytes, count_parameters
from bigsci_launch.plan.shape.ramp import Phase, filling_batch_size, phases_of
from bigsci_launch.plan.shape.setup import Setup, unpriced
from bigsci_launch.units import format_count

DECLARED_TOLERANCE = 0.03
"""Relative error of a declared size above which it gets a warning; three times as much is an error."""

INTERVAL_TOLERANCE = 2.0
"""Factor above or below the best save interval that gets a warning, because either costs a quarter more."""

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kKmMbBtT]?)\s*")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True)
class Case:
    """A run with everything that the rules look at. `plan` is None if the site has no GPU."""

    config: RunConfig
    site: Site
    setup: Setup
    limits: Limits
    phases: tuple[Phase, ...]
    calibration: Calibration | None
    plan: Plan | None
    starts: date

    @property
    def step_s(self) -> float:
        """Seconds of a full step: predicted if runs were measured, else as the run file expects."""
        if self.plan and self.calibration and self.calibration.is_measured:
            return self.plan.price.seconds
        return self.config.monitor.step_time_s

    @property
    def run_days(self) -> float:
        """Days of the whole run, including the ramp-up if it can be predicted."""
        if self.plan and self.calibration and self.calibration.is_measured:
            return self.plan.days
        return self.config.training.steps * self.config.monitor.step_time_s / 86400

    @property
    def hours_between_failures(self) -> float | None:
        """Mean hours between failures of any node of the job."""
        mtbf = self.site.config.node_mtbf_h
        return mtbf / self.setup.num_nodes if mtbf else None


def check_plan(
    config: RunConfig, site: Site, setup: Setup, calibration: Calibration | None, *, starts: date | None = None
) -> list[Finding]:
    """Return the findings for a run in which `check_run` finds no error, errors first.

    Args:
        config: the run.
        site: where it is to run.
        setup: the run's `configured_setup`.
        calibration: the basis of prices; without one, nothing is priced.
        starts: the first day of the run; default: today.
    """
    if why := unpriced(config):
        keys = ("run.framework", "run.command") if config.parallelism.engine == "deepspeed" else ("parallelism.engine",)
        return [Finding("framework", "note", keys, why, "nothing is priced for this run")]
    limits, phases = limits_of(config, site), phases_of(config.training)
    refusal = find_refusal(setup, limits)
    refused = _preflight_findings(config)
    if refusal and refusal.rule == EMPTY_STAGE and not config.run.starts_trainer:
        return [replace(refusal, severity="warning", price="if the program cuts layers as Megatron-DeepSpeed does")]
    # The preflight reports an empty stage too, with its contents, the consequence and a remedy.
    if refusal and not (refusal.rule == EMPTY_STAGE and refused):
        return [refusal, *refused]
    if refused:
        return refused
    plan = make_plan(setup, phases, calibration) if calibration else None
    case = Case(config, site, setup, limits, phases, calibration, plan, starts or date.today())
    return worst_first([finding for rule in RULES for finding in rule(case)])


def _preflight_findings(config: RunConfig) -> list[Finding]:
    """Return what would hang or crash in `bsl train`; the layers of other programs are not known."""
    if not config.run.starts_trainer or config.guards.preflight == "warn":
        return []
    return [
        replace(finding, rule=f"preflight: {finding.rule}", text=f"{finding.rule}: {finding.text}; {remedy(config)}")
        for finding in preflight(config)
    ]


def check_everything(
    config: RunConfig, site: Site, calibration: Calibration | None, *, starts: date | None = None
) -> list[Finding]:
    """Return the findings of `check_run`, which have no price, and, unless one is an error, those of `check_plan`."""
    plain = check_run(config, site)
    if any(finding.is_error for finding in plain):
        return plain
    setup = configured_setup(config, site, calibration)
    return worst_first([*plain, *check_plan(config, site, setup, calibration, starts=starts)])


def check_below_fill(case: Case) -> Iterator[Finding]:
    """Small batches of the ramp do not fill the pipeline. BLOOM started at 8 TFLOP/s with a batch of 16."""
    topology = case.setup.topology
    filling = filling_batch_size(case.setup.micro_batch_size, topology.dp, topology.pp)
    thin = [phase for phase in case.phases if phase.global_batch_size < filling]
    if not thin or topology.pp == 1:
        return
    text = (
        f"batches below {filling} = pp {topology.pp} x micro batch {case.setup.micro_batch_size} x dp {topology.dp} "
        f"do not fill the pipeline: {sum(phase.num_steps for phase in thin)} steps"
    )
    days, lost = _days_below(case, thin)
    price = (
        f"{days:.2f} days are spent there, {lost:.2f} of them lost ({lost * 24 * topology.world_size:,.0f} GPU-hours)"
    )
    key = "training.rampup.start" if case.config.training.rampup else "training.global_batch_size"
    severity: Severity = "warning" if lost > 0.01 * case.run_days else "note"
    yield Finding("pipeline fill", severity, (key, PP), text, price)


def _days_below(case: Case, thin: Sequence[Phase]) -> tuple[float, float]:
    """Return the days spent in `thin` phases, and how many of them full steps would save on the same samples."""
    full = case.setup.global_batch_size
    seconds = [(phase, _phase_step_s(case, phase)) for phase in thin]
    spent = sum(phase.num_steps * step for phase, step in seconds)
    ideal = sum(phase.num_samples for phase in thin) / full * case.step_s
    return spent / 86400, (spent - ideal) / 86400


def _phase_step_s(case: Case, phase: Phase) -> float:
    """Return the seconds of a step at the batch size of `phase`; without a prediction, by the pipeline's fill alone."""
    micro, topology = case.setup.micro_batch_size * case.setup.topology.dp, case.setup.topology
    missing = (case.setup.global_batch_size - phase.global_batch_size) / micro
    if case.plan and case.calibration and case.calibration.is_measured:
        return case.plan.price.seconds - missing * case.plan.price.micro_batch_seconds
    slots = case.setup.num_micro_batches + topology.pp - 1
    return case.step_s * (slots - missing) / slots


def check_declared_size(case: Case) -> Iterator[Finding]:
    """The declared size is the size of the model. A left-over MLP width once made tr8 train 58B as 104B."""
    declared_text = case.config.model.declared_parameters
    if declared_text is None:
        return
    real = count_parameters(case.setup.shape, case.setup.topology.tp)
    declared = parse_size(declared_text)
    key = "model.declared_parameters"
    if declared is None:
        text = f"{declared_text!r} is not a size such as 176B"
        yield Finding("declared size", "error", (key,), text, "there is nothing to compare with")
        return
    off = real / declared - 1
    if abs(off) <= DECLARED_TOLERANCE:
        return
    other = "model.ffn_hidden_size" if case.config.model.ffn_hidden_size else "model.num_layers"
    severity: Severity = "error" if abs(off) > 3 * DECLARED_TOLERANCE else "warning"
    text = (
        f"{declared_text} is declared, but the sizes give {format_count(real)} ({real} parameters, {100 * off:+.0f} %)"
    )
    price = f"the whole budget of {case.run_days:.0f} days would go into a different model"
    yield Finding("declared size", severity, (key, other), text, price)


def parse_size(text: str) -> float | None:
    """Return the parameters in `176B`, `1.3b` or `350 M`; None for another text."""
    match = _SIZE.fullmatch(text)
    return float(match[1]) * _UNITS[match[2].lower()] if match else None


def check_save_interval(case: Case) -> Iterator[Finding]:
    """The save interval is close to Young's and Daly's, which minimises saves plus the work that failures undo."""
    between, interval = case.hours_between_failures, case.config.checkpoint.save_interval
    if between is None:
        return
    save_s, failure_s = case.config.monitor.save_time_s, between * 3600
    best_s = math.sqrt(2 * save_s * failure_s)
    best = max(1, round(best_s / case.step_s))
    keys = ("checkpoint.save_interval", "site.node_mtbf_h")
    if interval is None:
        text = f"no save before the end, but a node fails every {between:.0f} h; the best interval is {best} steps"
        price = f"each failure undoes everything since the start of the job, up to {case.run_days:.1f} days"
        yield Finding("save interval", "warning", keys, text, price)
        return
    interval_s = interval * case.step_s
    off = interval_s / best_s
    is_far = off > INTERVAL_TOLERANCE or off < 1 / INTERVAL_TOLERANCE
    cost, least = (_share_lost(seconds, save_s, failure_s) for seconds in (interval_s, best_s))
    text = (
        f"{interval} steps are {interval_s / 3600:.1f} h, {off:.1f} x the best interval of {best} steps (Young, Daly)"
    )
    price = f"saves and undone work take {100 * cost:.2f} % of the time; {100 * least:.2f} % at best"
    yield Finding("save interval", "warning" if is_far else "note", keys, text, price)


def _share_lost(interval_s: float, save_s: float, failure_s: float) -> float:
    return save_s / interval_s + interval_s / 2 / failure_s


def check_save_before_eval(case: Case) -> Iterator[Finding]:
    """No evaluation comes just before a save. Megatron evaluates first, so if an evaluation hangs on a save step, the
    whole interval is lost. `bsl train` saves first."""
    evaluation, interval = case.config.monitor.eval_interval, case.config.checkpoint.save_interval
    if case.config.run.starts_trainer or not evaluation or not interval or evaluation % interval:
        return
    text = f"every evaluation ({evaluation} steps) is on a save step ({interval}), and the save comes after it"
    price = f"a hang in it undoes {interval * case.step_s / 3600:.1f} h; save a few steps earlier instead"
    yield Finding("save before eval", "warning", ("monitor.eval_interval", "checkpoint.save_interval"), text, price)


def check_exit_margin(case: Case) -> Iterator[Finding]:
    """An evaluation, a step and a save fit between the signal and the time limit."""
    monitor = case.config.monitor
    found = exit_margin(case.config)
    if found is None or case.site.is_local or not monitor.eval_time_s:
        return
    margin = found.margin_s
    needed = monitor.eval_time_s + max(case.step_s, monitor.step_time_s) + monitor.save_time_s
    if margin >= needed:
        return
    interval = case.config.checkpoint.save_interval
    text = f"{margin:.0f} s before the limit, but evaluation + step + save take {needed:.0f} s"
    lost = f"{interval * case.step_s / 3600:.1f} h" if interval else "everything since the start of the job"
    price = f"a job that ends in an evaluation loses {lost}"
    yield Finding("exit margin", "warning", ("monitor.exit_margin_s", "monitor.eval_time_s"), text, price)


def check_disk(case: Case) -> Iterator[Finding]:
    """Checkpoints take disk space: 19 TB a day for BLOOM, pruned by hand."""
    interval = case.config.checkpoint.save_interval
    if interval is None:
        return
    size = checkpoint_bytes(case.setup.shape, case.setup.topology.tp)
    per_day = size * 86400 / (interval * case.step_s)
    whole = size * (case.config.training.steps // interval)
    text = f"a checkpoint of {size / 1e12:.3f} TB every {interval} steps"
    price = f"{per_day / 1e12:.2f} TB a day; {whole / 1e12:,.1f} TB in total if nothing is deleted"
    severity: Severity = "warning" if per_day > 1e12 else "note"
    yield Finding("disk", severity, ("checkpoint.save_interval", "model.num_layers"), text, price)


def check_reserve(case: Case) -> Iterator[Finding]:
    """A spare node can replace one that fails. Without it, the run waits for a repair."""
    partition = case.site.config.partitions.get(case.config.slurm.partition or "")
    between = case.hours_between_failures
    if partition is None or partition.nodes is None or between is None:
        return
    spare, per_week = partition.nodes - case.setup.num_nodes, 168 / between
    if spare >= 1:
        return
    text = f"all {partition.nodes} nodes of the partition are used, and none is left to replace a failed one"
    price = f"{per_week:.1f} nodes fail per week; each failure stops the run until the node is repaired"
    yield Finding("reserve", "warning", ("slurm.nodes", "site.reserve_nodes"), text, price)


def check_lost_node(case: Case) -> Iterator[Finding]:
    """Report the effect of losing one node: the replicas left, and the largest dp that the batch sizes allow."""
    setup = case.setup
    if setup.num_nodes < 2 or case.site.is_local:
        return
    ranks = (setup.num_nodes - 1) * setup.ranks_per_node
    replica = setup.topology.tp * setup.topology.pp
    keys = ("slurm.nodes", DP)
    left = next((dp for dp in range(ranks // replica, 0, -1) if _fits(case, dp)), None)
    if left is None:
        text = f"with one node fewer, no replica of {replica} ranks is left"
        yield Finding("lost node", "note", keys, text, "the run stops until the node is replaced")
        return
    reduced = replace(setup, topology=setup.topology.resized(dp=left))
    text = (
        f"with one node fewer, {ranks // replica} replicas of {replica} ranks are left; the batch sizes allow "
        f"dp {left} on {reduced.num_nodes} nodes"
    )
    yield Finding("lost node", "note", keys, text, _price_of_reduced(case, reduced))


def _fits(case: Case, dp: int) -> bool:
    return find_refusal(replace(case.setup, topology=case.setup.topology.resized(dp=dp)), case.limits) is None


def _price_of_reduced(case: Case, reduced: Setup) -> str:
    """Return how much slower and fuller a run on fewer replicas is; ZeRO-1 then shards over fewer ranks."""
    if case.plan is None or case.calibration is None:
        return f"about {case.setup.topology.dp / reduced.topology.dp:.2f} x the time per step"
    other = make_plan(reduced, case.phases, case.calibration).price
    price = f"{other.seconds / case.plan.price.seconds:.2f} x the time per step, {other.need_gib:.0f} GiB per GPU"
    return f"{price}: out of memory" if other.is_out_of_memory else price


def check_allocation(case: Case) -> Iterator[Finding]:
    """The run ends before the allocation does."""
    if case.site.config.allocation_ends is None:
        return
    end = date.fromisoformat(case.site.config.allocation_ends)
    finish = case.starts + timedelta(days=math.ceil(case.run_days))
    late = (finish - end).days
    keys = ("training.steps", "site.allocation_ends")
    text = (
        f"started on {case.starts}, {case.run_days:.0f} days of computing end on {finish}; the allocation ends on {end}"
    )
    if late > 0:
        yield Finding("allocation", "error", keys, text, f"{late} days too late, even without any failure")
    elif -late < 0.1 * case.run_days:
        yield Finding("allocation", "warning", keys, text, f"{-late} days are left for failures and restarts")


def check_memory(case: Case) -> Iterator[Finding]:
    """The fullest stage fits into the GPU's memory with some room."""
    if case.plan is None or case.calibration is None:
        return
    price, memory = case.plan.price, case.calibration.gpu.memory_gib
    keys = ("training.micro_batch_size", "site.gpu.memory_gib")
    text = f"the fullest rank needs {price.need_gib:.0f} GiB of {memory:g}: {price.fit}"
    if price.is_out_of_memory and case.calibration.knows_need_of(case.setup):
        yield Finding("memory", "error", keys, text, "out of memory in the first step")
    elif not price.is_safe:
        yield Finding(
            "memory", "warning", keys, text, "out of memory in the first step, unless the estimate is too high"
        )
    elif price.fit == "tight":
        cost = f"{memory - price.need_gib:.0f} GiB are left for fragmentation and spikes; a smaller dp needs more"
        yield Finding("memory", "warning", keys, text, cost)


def check_step_time(case: Case) -> Iterator[Finding]:
    """The step time from which margins are computed agrees with the predicted one."""
    if case.plan is None or case.calibration is None or not case.calibration.is_measured:
        return
    expected, price = case.config.monitor.step_time_s, case.plan.price
    if abs(expected / price.seconds - 1) <= max(price.band, 0.1):
        return
    text = f"{expected:g} s expected, {price.seconds:.0f} s predicted (±{100 * price.band:.0f} %)"
    cost = "the exit margin is computed from the expected time"
    yield Finding("step time", "warning", ("monitor.step_time_s", "training.global_batch_size"), text, cost)


def check_advice(case: Case) -> Iterator[Finding]:
    """The shapes suit the GPU's kernels."""
    if case.plan is None:
        return
    for text in advise(case.setup):
        share = _share_of_misaligned(case.plan)
        price = f"{100 * share:.0f} % of a step" if share > 0.01 else "small; measure it"
        yield Finding("shape", "warning", ("model.num_attention_heads", TP), text, price)


def _share_of_misaligned(plan: Plan) -> float:
    return plan.price.terms[TERM_NAMES.index("misaligned heads")] / plan.price.seconds


RULES: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    check_memory,
    check_declared_size,
    check_allocation,
    check_below_fill,
    check_save_interval,
    check_save_before_eval,
    check_exit_margin,
    check_disk,
    check_reserve,
    check_lost_node,
    check_step_time,
    check_advice,
)


def check_lines(name: str, findings: Sequence[Finding]) -> list[str]:
    """Return the findings as lines of text; without findings, one line that says so."""
    return [finding_line(finding) for finding in findings] or [f"{name}: the arithmetic holds"]


def check_document(name: str, findings: Sequence[Finding]) -> dict[str, Any]:
    return {"schema_version": 1, "run": name, "findings": [_document(finding) for finding in findings]}


def _document(finding: Finding) -> dict[str, str]:
    return {**finding_document(finding), "price": finding.price}
