"""Healthy runs, as events: one that only writes a log, and one whose ranks have heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bigsci_launch.file_names import rank_name
from watching.lines import SETS, arguments, bloom, evaluated, record
from watching.noise import Values
from watching.simulation import Event


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does. Seconds for the whole of an evaluation, a save and a start. 0 for an interval means never."""

    first: int
    last: int
    eval_interval: int = 1000
    eval_s: float = 720.0
    save_interval: int = 100
    save_s: float = 40.0
    start_s: float = 600.0
    num_sets: int = SETS
    says_saves: bool = True


Format = Callable[[int, Values, float], str]


def bloom_format(step: int, values: Values, when: float) -> str:
    return bloom(step, values)


def log_run(plan: Plan, steps: Iterator[Values], begun: float = 0.0, style: Format = bloom_format) -> list[Event]:
    """Return the lines of a run in the order of Megatron-DeepSpeed: step, evaluation, save.

    The time per iteration includes the evaluation and the save before it, as there.
    """
    events = [Event(begun + 1, arguments(plan.eval_interval, plan.save_interval))]
    events += [Event(begun + part * plan.start_s / 8, "> building train datasets ...\n") for part in range(1, 8)]
    now, pause = begun + plan.start_s, 0.0
    for step in range(plan.first, plan.last + 1):
        values = next(steps)
        now += values.seconds
        events.append(Event(now, style(step, Values(values.seconds + pause, values.loss, values.grad_norm), now)))
        pause = 0.0
        if plan.eval_interval and step % plan.eval_interval == 0:
            for each in range(1, plan.num_sets + 1):
                events.append(Event(now + each * plan.eval_s / plan.num_sets, evaluated(step)))
            pause, now = plan.eval_s, now + plan.eval_s
        if plan.save_interval and step % plan.save_interval == 0:
            if plan.says_saves:
                events.append(Event(now, f"[default0]:saving checkpoint at iteration {step:7d} to /scratch/main\n"))
            pause, now = pause + plan.save_s, now + plan.save_s
            if plan.says_saves:
                events.append(Event(now, f"[default0]:  successfully saved checkpoint at iteration {step:7d}\n"))
    return events


def end_of(events: list[Event]) -> float:
    return events[-1].time


@dataclass(slots=True)
class Ranks:
    """The ranks of `bsl train`, which write records. `notifier_of` also records steps."""

    num_ranks: int
    notifier_of: int = 0

    def every(self, when: float, kind: str, step: int, **fields: object) -> list[Event]:
        return [self.one(rank, when + 1e-4 * rank, kind, step, **fields) for rank in range(self.num_ranks)]

    def one(self, rank: int, when: float, kind: str, step: int, **fields: object) -> Event:
        return Event(when, record(kind, when, step, **fields), f"events/{rank_name(rank)}.jsonl")


def heartbeat_run(
    plan: Plan, steps: Iterator[Values], ranks: Ranks, begun: float = 0.0, size: int = 256
) -> list[Event]:
    """Return the records of a run in the order of `bsl train`: step, save, evaluation."""
    events = ranks.every(begun + 1, "start", 0) + ranks.every(begun + 2, "heartbeat", 0, phase="load")
    events += ranks.every(begun + 5, "heartbeat", 0, phase="init")
    now = begun + plan.start_s
    for step in range(plan.first, plan.last + 1):
        events += ranks.every(now, "heartbeat", step, phase="step")
        values = next(steps)
        now += values.seconds
        told = {"loss": values.loss, "grad_norm": values.grad_norm, "global_batch_size": size}
        events.append(ranks.one(ranks.notifier_of, now, "step", step, seconds=values.seconds, **told))
        if plan.save_interval and step % plan.save_interval == 0:
            events += ranks.every(now, "heartbeat", step, phase="save")
            now += plan.save_s
            events += ranks.every(now, "save", step, seconds=plan.save_s)
        if plan.eval_interval and step % plan.eval_interval == 0:
            events += ranks.every(now, "heartbeat", step, phase="eval")
            now += plan.eval_s
            events += ranks.every(now, "evaluation", step, seconds=plan.eval_s, loss=2.3)
    return events
