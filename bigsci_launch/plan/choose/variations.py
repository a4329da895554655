"""What other techniques than the configured one would gain: one key of the run file after the other is changed, as long
as the best plan that fits gets faster. The search itself varies sizes and cuts alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from bigsci_launch.config.schema.technique import Schedule
from bigsci_launch.plan.choose.search import Plan
from bigsci_launch.plan.shape.setup import Setup

WORTHWHILE = 0.02
"""Share of the time that another technique must save to be named."""

MOST_CHUNKS, MOST_CHANGES = 8, 3

_RECOMPUTATIONS: tuple[tuple[str, Literal["none", "selective", "full"]], ...] = (
    ("false", "none"),
    ("selective", "selective"),
    ("true", "full"),
)

FindBest = Callable[[Setup], Plan | None]
"""The best plan that fits, with the technique of a setup."""


@dataclass(frozen=True, slots=True)
class Variation:
    """Keys of the run file with other values, as `--set` takes them, and the best plan with them."""

    keys: tuple[str, ...]
    plan: Plan


def best_variation(setup: Setup, best: Plan | None, find_best: FindBest) -> Variation | None:
    """Return the keys that make the best plan fastest, or None if none is faster than `best` by a worthwhile share."""
    found: Variation | None = None
    for _ in range(MOST_CHANGES):
        known = () if found is None else found.keys
        options = ((key, plan) for key, other in _neighbours(setup) if (plan := find_best(other)))
        key, plan = min(options, key=lambda option: option[1].likely_days, default=("", None))
        if plan is None or (best and plan.likely_days > best.likely_days * (1 - WORTHWHILE)):
            return found
        found = Variation((*(word for word in known if _name(word) != _name(key)), *key.split()), plan)
        setup, best = replace(plan.setup, partition_method=setup.partition_method), plan
    return found


def _name(word: str) -> str:
    return word.partition("=")[0]


def _neighbours(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield setups that differ in one respect which the program knows, with the keys that say so."""
    technique, cp = setup.technique, setup.topology["cp"]
    for value, recomputation in _RECOMPUTATIONS:
        if recomputation != technique.recomputation:
            changed = replace(technique, recomputation=recomputation, recomputed_layers=None)
            yield f"training.activation_checkpointing={value}", replace(setup, technique=changed)
    if setup.framework not in ("megatron", "torchtitan"):
        return
    for size in (2 * cp, cp // 2):
        if size:
            yield f"parallelism.context_parallel_size={size}", replace(setup, topology=setup.topology.resized(cp=size))
    yield from _schedules(setup)


def _schedules(setup: Setup) -> Iterator[tuple[str, Setup]]:
    technique = setup.technique
    if not technique.sequence_parallel:
        changed = replace(technique, sequence_parallel=True)
        yield "parallelism.sequence_parallel=true", replace(setup, technique=changed)
    for chunks in (2 * technique.chunks_per_rank, technique.chunks_per_rank // 2):
        if 1 <= chunks <= MOST_CHUNKS and technique.schedule != "zero_bubble":
            schedule: Schedule = "interleaved" if chunks > 1 else "1f1b"
            changed = replace(technique, schedule=schedule, chunks_per_rank=chunks)
            keys = f"parallelism.schedule={schedule} parallelism.chunks_per_rank={chunks}"
            yield keys, replace(setup, technique=changed)
