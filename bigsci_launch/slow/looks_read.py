"""Reads the documents of a look that lasted: for what shares of the time each rank waited, and worked at what."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bigsci_launch.slow.looks_frames import Activity, activity_of
from bigsci_launch.slow.straggler import StepPhase
from bigsci_launch.spy.evidence.bundle import Bundle

RUNNING_PER_LOOK = 0.5
"""How often the second recorder of diagnostics/node_looks.py looks, for each look of the first one."""
MOSTLY = 0.9
MAIN = "MainThread"


@dataclass(frozen=True, slots=True)
class LookedRank:
    """What looks at one rank have shown. All shares are of the time of the look.

    `waits` is the share that it waited for others, by segment of the look; None where it was not seen. `late` is the
    share that its main thread was ready to run without a core, `ran` that it ran; None if the kernel does not count.
    `stage` is a number that ranks with the same work share, if that is known: the index on the pipeline axis, unless
    pipelines have different depths (`is_uneven`).
    """

    rank: int
    node: str
    waits: tuple[float | None, ...]
    work: Mapping[tuple[StepPhase, str | None], float]
    num_looks: int
    late: float | None = None
    ran: float | None = None
    stage: int | None = None
    is_uneven: bool = False
    passes_messages: bool = False

    @property
    def num_segments(self) -> int:
        return sum(share is not None for share in self.waits)

    @property
    def waited(self) -> float:
        known = [share for share in self.waits if share is not None]
        return sum(known) / len(known)

    @property
    def stays_put(self) -> bool:
        """Whether every look found it in one wait, or in one place of its own."""
        return self.waited == 1.0 or (self.waited == 0.0 and len(self.work) == 1)

    def in_phase(self, phase: StepPhase) -> float:
        return sum(share for (each, _), share in self.work.items() if each is phase)


def read_looks(bundle: Bundle) -> tuple[tuple[LookedRank, ...], tuple[str, ...], float]:
    """Return the ranks, why others are missing, and how many seconds the longest look of a node lasted."""
    evidence = bundle.evidence()
    seen = {(each.node, each.pid): each for each in evidence.ranks if each.pid is not None}
    found, missing = [], [f"{node}: {why}" for node, why in sorted(evidence.nodes_silent)]
    for document in bundle.nodes:
        missing += [f"{document['node']}: {problem}" for problem in document.get("problems", ())]
        activities = _activities(document)
        for record in document["ranks"]:
            known = seen.get((str(document["node"]), record["pid"]))
            if known is None:
                continue  # a process of another step
            looked = _read_rank(record, activities)
            topology = evidence.topology if evidence.coordinate(known.rank) else None
            stage, is_uneven = (topology.kind_of(known.rank), not topology.is_grid) if topology else (None, False)
            if looked is None:
                missing.append(f"rank {known.rank} ({known.node}): {record.get('why') or 'it could not be looked at'}")
            else:
                found.append(looked(rank=known.rank, node=known.node, stage=stage, is_uneven=is_uneven))
    if any(not evidence.is_numbered(each.rank) for each in found):
        missing.append("which process is which rank is not known: they are counted in the order of their start")
    seconds = max((float(document.get("looked_s") or 0.0) for document in bundle.nodes), default=0.0)
    return tuple(sorted(found, key=lambda each: each.rank)), tuple(missing), seconds


def _activities(document: Mapping[str, Any]) -> list[Activity]:
    lines = document.get("lines") or {}
    return [activity_of(stack, lines.get(stack.rpartition(";")[2], "")) for stack in document.get("stacks", ())]


def _read_rank(record: Mapping[str, Any], activities: Sequence[Activity]) -> partial[LookedRank] | None:
    """Return the rank without its number and place; None if no segment has a look."""
    thread = _deciding_thread(record["segments"], activities)
    rows = [[row for row in segment if row[0] == thread] for segment in record["segments"]]
    if not any(row[2] for segment in rows for row in segment):
        return None
    awake = _awake(rows, activities, _engine_share(record))
    work, total = Counter[tuple[StepPhase, str | None]](), sum(row[2] for segment in rows for row in segment)
    for _, index, count, _ in (row for segment in rows for row in segment):
        doing = activities[index]
        work[doing.phase, doing.site] += count * (1 - _waiting(doing, awake)) / total
    late, ran = _on_cores(record["counters"])
    pointed = any(activities[row[1]].is_pointed for segment in rows for row in segment)
    return partial(
        LookedRank,
        waits=tuple(_waits_of(segment, activities, awake) for segment in rows),
        work=dict(work),
        num_looks=total,
        late=late,
        ran=ran,
        passes_messages=pointed,
    )


def _deciding_thread(segments: Iterable[Sequence[Any]], activities: Sequence[Activity]) -> str:
    """Return the main thread, or if that only waits for other threads, the one that does so least often."""
    looks, idle = Counter[str](), Counter[str]()
    for thread, index, count, _ in (row for segment in segments for row in segment):
        looks[thread] += count
        idle[thread] += count * activities[index].is_idle
    main = next((thread for thread in looks if thread.endswith(MAIN)), next(iter(looks), ""))
    if not looks[main] or idle[main] < MOSTLY * looks[main]:
        return main
    return max(looks, key=lambda thread: looks[thread] - idle[thread])


def _awake(rows: Iterable[Sequence[Any]], activities: Sequence[Activity], engine: float) -> dict[Activity, float]:
    """Return how much of each activity that may be a wait is none, because the thread ran in it.

    `engine` is the share of time that torch's own threads worked at backward passes while this thread slept.
    """
    looks: dict[Activity, float] = defaultdict(float)
    running: dict[Activity, float] = defaultdict(float)
    total = 0
    for _, index, count, active in (row for segment in rows for row in segment):
        looks[activities[index]] += count
        running[activities[index]] += active / RUNNING_PER_LOOK
        total += count
    backward = sum(count for doing, count in looks.items() if doing.may_wait and doing.phase is StepPhase.BACKWARD)
    more = engine * total / backward if backward else 0.0
    return {
        doing: min(1.0, running[doing] / count + (more if doing.phase is StepPhase.BACKWARD else 0.0))
        for doing, count in looks.items()
        if doing.may_wait and count
    }


def _waits_of(
    segment: Sequence[Sequence[Any]], activities: Sequence[Activity], awake: Mapping[Activity, float]
) -> float | None:
    looks = sum(row[2] for row in segment)
    return sum(row[2] * _waiting(activities[row[1]], awake) for row in segment) / looks if looks else None


def _waiting(doing: Activity, awake: Mapping[Activity, float]) -> float:
    return 1.0 if doing.waits else 1.0 - awake.get(doing, 0.0) if doing.may_wait else 0.0


def _engine_share(record: Mapping[str, Any]) -> float:
    before, after = record["counters"][0], record["counters"][-1]
    if "autograd_ns" not in before or "autograd_ns" not in after or after["mono"] <= before["mono"]:
        return 0.0
    return max(0.0, float(after["autograd_ns"] - before["autograd_ns"]) / 1e9 / float(after["mono"] - before["mono"]))


def _on_cores(counters: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Return the shares of time that the main thread was ready without a core, and on one."""
    before, after = counters[0], counters[-1]
    seconds = after["mono"] - before["mono"]
    if "schedule" not in before or "schedule" not in after or seconds <= 0:
        return None, None
    late, ran = (float(after["schedule"][key] - before["schedule"][key]) for key in ("delay_ns", "run_ns"))
    return late / 1e9 / seconds, ran / 1e9 / seconds
