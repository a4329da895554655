"""Reads `recover/generations.jsonl`, which the controller appends to. A torn last line is not there yet.

A record of another version may have events, kinds and fields that are not known here: they are kept as what they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.generations.records import (
    Ended,
    Generation,
    Generations,
    Member,
    NodeLeftOut,
    PassedPhase,
    RankFailure,
)
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json
from bigsci_launch.safe_files import parse_json
from bigsci_launch.topology import Topology, UnevenTopology

GenerationRecord = Mapping[str, Any]
EVENTS = ("began", "phase", "failed", "ended", "left_out", "finished", "gave_up")


class GenerationLine(NamedTuple):
    """One record: its event, or the phase that all ranks have passed; when, at which step, and with how many ranks."""

    what: str
    time: float | None
    step: int | None
    world_size: int | None


def read_generations(attempt: AttemptDir) -> Generations | None:
    """Return the generations of an attempt; None without `survive`, and until the first one has begun."""
    found, layouts = parse_generations(read_events(attempt.generations)), read_layouts(attempt)
    if found is None or not layouts:
        return found
    topologies = {record.get("generation"): uneven_topology(record) for record in layouts}
    return replace(found, all=tuple(replace(each, topology=topologies.get(each.number)) for each in found.all))


def parse_line(line: str) -> GenerationLine | None:
    """Return the record in one line, for readers that follow the file as it grows; None for any other line."""
    try:
        record = parse_json(line, allow_nan=True)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        return None
    what = str(record.get("phase")) if record["event"] == "phase" else record["event"]
    return GenerationLine(
        what, number_in(record.get("time")), whole_in(record.get("step")), whole_in(record.get("world_size"))
    )


def read_topology(run: RunDir) -> Topology | None:
    """Return the topology in `run.json`; None if it has none."""
    document = read_json(run.record)
    try:
        return Topology(**document["topology"])
    except (KeyError, TypeError, ValueError):
        return None


def present_topology(run: RunDir, attempt: AttemptDir | None, generations: Generations | None) -> Topology | None:
    """Return the topology of the newest generation: it may have fewer replicas than the run was submitted with.

    None if its ranks have not formed their pipelines yet, which may have different depths.
    """
    records = read_layouts(attempt) if attempt is not None else []
    if not records:
        return (generations.newest.topology if generations else None) or read_topology(run)
    return generations.newest.topology if generations else uneven_topology(records[-1])


def read_layouts(attempt: AttemptDir) -> list[Mapping[str, Any]]:
    """Return the pipelines of each generation of an uneven run, the oldest first; nothing for any other run."""
    return list(read_events(attempt.layouts))


def present_layout(attempt: AttemptDir, generations: Generations | None) -> Mapping[str, Any] | None:
    """Return the record of the pipelines that train now; None for a run whose ranks have formed none."""
    records = read_layouts(attempt)
    is_present = records and (generations is None or records[-1].get("generation") == generations.newest.number)
    return records[-1] if is_present else None


def layout_text(record: Mapping[str, Any]) -> str:
    """Return how many pipelines there are, how they were formed, and how many lost ranks they tolerate."""
    topology = uneven_topology(record)
    if topology is None:
        return "unknown"
    failures, wanted = (whole_in(record.get(key)) or 0 for key in ("failures", "wanted_failures"))
    kept = "" if failures >= wanted else f"; f = {wanted} cannot be kept with so few ranks"
    count = f"{topology.dp} pipeline{'s' if topology.dp > 1 else ''} ({record.get('means')})"
    return f"{count}, f = {failures}: so many ranks may be lost at the same time{kept}"


def uneven_topology(record: Mapping[str, Any]) -> UnevenTopology | None:
    """Return the topology that a record of `read_layouts` names; None for one that is not understood."""
    try:
        return UnevenTopology.parse_pipelines(str(record["topology"]))
    except (KeyError, ValueError):
        return None


def parse_generations(records: Iterable[GenerationRecord]) -> Generations | None:
    """Return what the records say, oldest first; None if no generation is among them."""
    found = parse_records(records)
    return found if found.all else None


def parse_records(records: Iterable[GenerationRecord]) -> Generations:
    """Return what the records say, oldest first. The controller may have given up before a generation began."""
    by_number: dict[int, list[GenerationRecord]] = {}
    last: dict[str, GenerationRecord] = {}
    unknown: Counter[str] = Counter()
    for record in records:
        event, number = str(record.get("event")), whole_in(record.get("generation"))
        if event not in EVENTS:
            unknown[event] += 1
        elif event in ("finished", "gave_up"):
            last[event] = record
        elif number is not None:
            by_number.setdefault(number, []).append(record)
    gave_up = last.get("gave_up")
    return Generations(
        tuple(_generation(number, by_number[number]) for number in sorted(by_number)),
        exit_code=whole_in((gave_up or last.get("finished") or {}).get("exit_code")),
        gave_up=(_text(gave_up.get("why")) or "reason unknown") if gave_up else None,
        unknown=tuple(f"{event} ({count})" for event, count in sorted(unknown.items())),
    )


def _generation(number: int, records: list[GenerationRecord]) -> Generation:
    def of(event: str) -> list[GenerationRecord]:
        return [record for record in records if record.get("event") == event]

    began = next(iter(of("began")), {})
    ended = next(iter(of("ended")), None)
    spares = began.get("spares")
    return Generation(
        number=number,
        began=number_in(began.get("time")),
        world_size=whole_in(began.get("world_size")),
        topology=_topology(began.get("topology")),
        members=tuple(_members(began.get("members"))),
        num_spares=len(spares) if isinstance(spares, list) else 0,
        phases={str(each.get("phase")): _phase(each) for each in of("phase")},
        failures=tuple(_failure(each) for each in of("failed")),
        ended=_ended(ended) if ended is not None else None,
        left_out=tuple(_left_out(each) for each in of("left_out")),
    )


def _members(found: Any) -> Iterable[Member]:
    for each in found if isinstance(found, list) else ():
        rank = whole_in(each.get("rank")) if isinstance(each, dict) else None
        if rank is not None:
            yield Member(rank, whole_in(each.get("slot")), _text(each.get("node")))


def _topology(found: Any) -> Topology | None:
    try:
        return Topology(**found)
    except (TypeError, ValueError):
        return None


def _phase(record: GenerationRecord) -> PassedPhase:
    return PassedPhase(
        number_in(record.get("seconds")),
        whole_in(record.get("step")),
        _text(record.get("source")),
        _text(record.get("why")),
    )


def _failure(record: GenerationRecord) -> RankFailure:
    noticed = number_in(record.get("noticed"))
    return RankFailure(
        kind=_text(record.get("kind")) or "unknown",
        rank=whole_in(record.get("rank")),
        node=_text(record.get("node")),
        code=whole_in(record.get("code")),
        signal=_text(record.get("signal")),
        step=whole_in(record.get("step")),
        words=_text(record.get("words")),
        died=number_in(record.get("died")),
        noticed=noticed if noticed is not None else number_in(record.get("time")),
    )


def _ended(record: GenerationRecord) -> Ended:
    killed = record.get("killed")
    ranks = (whole_in(each) for each in killed) if isinstance(killed, list) else ()
    return Ended(
        number_in(record.get("time")),
        whole_in(record.get("step")),
        number_in(record.get("seconds")),
        tuple(rank for rank in ranks if rank is not None),
    )


def _left_out(record: GenerationRecord) -> NodeLeftOut:
    return NodeLeftOut(
        _text(record.get("node")) or "?", _text(record.get("reason")) or "", number_in(record.get("until"))
    )


def number_in(value: Any) -> float | None:
    """Return a number of a record; None for anything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def whole_in(value: Any) -> int | None:
    """Return a whole number of a record; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return " ".join(value.split()) or None if isinstance(value, str) else None
