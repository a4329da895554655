"""The metrics of a run as text that OpenMetrics' and Prometheus' parsers read. Pure.

All are gauges: the same text is then valid in both formats, and a collector of text files takes it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from bigsci_launch.export.facts import RunFacts, one_phase
from bigsci_launch.runs.signs import find_slowest
from bigsci_launch.runs.watching.heartbeat import Health

HANGS = ("hang", "stall")
_KIND = re.compile(r"[a-z][a-z_]{0,39}")

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a run: its name without `bsl_`, what it means, and its values by their labels."""

    name: str
    help: str
    samples: tuple[tuple[Labels, float], ...]
    unit: str = ""


@dataclass(slots=True)
class _Metrics:
    """Collects metrics; one without a known value is left out."""

    labels: Labels
    all: list[Metric] = field(default_factory=list)

    def add(self, name: str, value: float | None, help: str, unit: str = "") -> None:
        if value is not None:
            self.many(name, [({}, value)], help, unit)

    def many(self, name: str, samples: Iterable[tuple[Labels, float]], help: str, unit: str = "") -> None:
        found = tuple(({**self.labels, **labels}, value) for labels, value in samples)
        if found:
            self.all.append(Metric(f"{name}_{unit}" if unit else name, help, found, unit))


def metrics_of(facts: RunFacts) -> list[Metric]:
    """Return what is known of a run. What is not known has no metric: it is never 0."""
    found = _Metrics({"run": facts.view.name})
    _add_run(found, facts)
    _add_progress(found, facts)
    _add_ranks(found, facts)
    _add_watching(found, facts)
    return found.all


def _add_run(found: _Metrics, facts: RunFacts) -> None:
    view = facts.view
    topology = {} if view.topology is None else {"topology": str(view.topology)}
    about = {"attempt": view.attempt, "job": view.label, **topology}
    found.many("run_about", [(about, 1)], "The newest attempt of the run, its job and its topology; always 1.")
    found.many("job_state", [({"state": view.job.state.value}, 1)], "The state of its job; always 1.")
    found.add("attempts", facts.num_attempts, "Attempts of the run, with this one.")
    found.add("restarts", facts.num_attempts - 1, "Attempts before this one.")
    generation = view.generations.all[-1].number if view.generations and view.generations.all else None
    found.add("generation", generation, "The generation of an attempt with survive, from 0.")
    found.add("asked_timestamp", view.asked, "When the records were read.", "seconds")


def _add_progress(found: _Metrics, facts: RunFacts) -> None:
    view, last = facts.view, facts.view.step
    found.add("last_step", view.total_steps, "The step at which the run ends.")
    if last is not None:
        found.add("step", last.step, "The newest step.")
        when = None if last.clock_differs else last.time
        found.add("step_timestamp", when, "When the newest step was reported.", "seconds")
        found.add("step_duration", last.seconds, "Seconds of the newest step.", "seconds")
        found.add("loss", last.loss, "The loss of the newest step.")
        found.add("tflops_per_rank", last.tflops, "TFLOP/s of one rank in the newest step, with recomputation.")
        if facts.tokens_per_step and last.seconds:
            rate = facts.tokens_per_step / last.seconds
            found.add("tokens_per_second", rate, "Tokens a second of the whole run in the newest step.")
    found.add("grad_norm", facts.grad_norm, "The gradient norm of the newest step.")
    found.add("mfu_ratio", facts.utilization, "Model FLOP/s in the newest step, as a share of the device's peak.")
    phases = [({"phase": phase}, seconds) for phase, seconds in facts.phases.items()]
    found.many("phase_duration", phases, "Seconds a step in each phase, of the rank that reports steps.", "seconds")
    saved = facts.checkpoint.time if facts.checkpoint else None
    found.add("checkpoint_timestamp", saved, "When the newest complete checkpoint was finished.", "seconds")


def _add_ranks(found: _Metrics, facts: RunFacts) -> None:
    view = facts.view
    found.add("world_size", view.topology.world_size if view.topology else None, "Ranks of the run.")
    found.add("ranks_started", len(view.signs) or None, "Ranks that have left a record of their start.")
    running = [sign for sign in view.signs if not sign.has_ended]
    phases = Counter(one_phase(sign.phase) for sign in running if sign.phase is not None)
    found.many("ranks", [({"phase": str(phase)}, number) for phase, number in sorted(phases.items(), key=str)],
               "Ranks that have not ended, by the phase of their newest heartbeat.")  # fmt: skip
    slow = find_slowest(running)
    if slow is not None and not slow.clock_differs:
        where = {"rank": str(slow.rank), "node": slow.node, "phase": one_phase(slow.phase) or "none"}
        found.many("oldest_heartbeat_timestamp", [(where, slow.time)],
                   "The newest heartbeat of the rank whose newest heartbeat is the oldest.", "seconds")  # fmt: skip


def _add_watching(found: _Metrics, facts: RunFacts) -> None:
    """Add what watchers report. Without a living watcher, only findings that are open are known: none is not 0."""
    view = facts.view
    living = [each for each in view.heartbeats if not each.ended and each.is_dead(view.asked) is False]
    living = [each for each in living if each.attempt == view.attempt]
    findings = [each for each in view.findings if each.attempt in (view.attempt, None)]
    kinds = Counter(each.kind if _KIND.fullmatch(each.kind) else "other" for each in findings)
    found.many("findings", [({"kind": kind}, number) for kind, number in sorted(kinds.items())],
               "Open findings of watchers, by kind.")  # fmt: skip
    sees = any(each.health is not Health.BLIND for each in living)
    found.add("findings_open", sum(kinds.values()) if kinds or sees else None, "Open findings of watchers.")
    for name, words, wanted in (
        ("hang", "1: a hang or a stall is found; 0: a watcher runs, sees, and finds none.", HANGS),
        ("straggler", "1: steps have become slower for good, or ranks make little progress; 0: as with hang.",
         ("slower", "slow")),
    ):  # fmt: skip
        has = any(each.kind in wanted for each in findings)
        found.add(name, None if view.job.state.is_over else 1 if has else 0 if sees else None, words)
    if living:
        found.many("watcher_health", [({"health": living[0].health.value}, 1)], "The newest watcher's report.")
        found.add("watcher_timestamp", living[0].time, "When it last looked.", "seconds")


def openmetrics_text(metrics: Iterable[Metric]) -> str:
    """Return the metrics as text, with its end mark."""
    return "".join(f"{line}\n" for metric in metrics for line in _lines(metric)) + "# EOF\n"


def _lines(metric: Metric) -> Iterator[str]:
    yield f"# HELP bsl_{metric.name} {_escape(metric.help)}"
    yield f"# TYPE bsl_{metric.name} gauge"
    if metric.unit:
        yield f"# UNIT bsl_{metric.name} {metric.unit}"
    for labels, value in metric.samples:
        shown = ",".join(f'{name}="{_escape(text)}"' for name, text in labels.items())
        yield f"bsl_{metric.name}{{{shown}}} {_number(value)}"


def _escape(text: str) -> str:
    plain = text.encode("utf-8", "replace").decode()
    return plain.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value)) if value != int(value) else str(int(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
