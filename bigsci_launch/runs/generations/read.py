"""Reads `recover/generations.jsonl`, which the controller appends to. A torn last line is not there yet.

A record of another version may have events, kinds and fields that are not known here: they are kept as what they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

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
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.topology import Topology

Record = Mapping[str, Any]
EVENTS = ("began", "phase", "failed", "ended", "left_out", "finished", "gave_up")


def read_generations(attempt: AttemptDir) -> Generations | None:
    """Return the generations of an attempt; None without `survive`, and until the first one has begun."""
    return parse_generations(read_events(attempt.generations))


def parse_generations(records: Iterable[Record]) -> Generations | None:
    """Return what the records say, oldest first; None if no generation is among them."""
    by_number: dict[int, list[Record]] = {}
    last: dict[str, Record] = {}
    unknown: Counter[str] = Counter()
    for record in records:
        event, number = str(record.get("event")), _whole(record.get("generation"))
        if event not in EVENTS:
            unknown[event] += 1
        elif event in ("finished", "gave_up"):
            last[event] = record
        elif number is not None:
            by_number.setdefault(number, []).append(record)
    if not by_number:
        return None
    gave_up = last.get("gave_up")
    return Generations(
        tuple(_generation(number, by_number[number]) for number in sorted(by_number)),
        exit_code=_whole((gave_up or last.get("finished") or {}).get("exit_code")),
        gave_up=(_text(gave_up.get("why")) or "not known why") if gave_up else None,
        unknown=tuple(f"{event} ({count})" for event, count in sorted(unknown.items())),
    )


def _generation(number: int, records: list[Record]) -> Generation:
    def of(event: str) -> list[Record]:
        return [record for record in records if record.get("event") == event]

    began = next(iter(of("began")), {})
    ended = next(iter(of("ended")), None)
    spares = began.get("spares")
    return Generation(
        number=number,
        began=_number(began.get("time")),
        world_size=_whole(began.get("world_size")),
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
        rank = _whole(each.get("rank")) if isinstance(each, dict) else None
        if rank is not None:
            yield Member(rank, _whole(each.get("seat")), _text(each.get("node")))


def _topology(found: Any) -> Topology | None:
    try:
        return Topology(**found)
    except (TypeError, ValueError):
        return None


def _phase(record: Record) -> PassedPhase:
    return PassedPhase(
        _number(record.get("seconds")),
        _whole(record.get("step")),
        _text(record.get("source")),
        _text(record.get("why")),
    )


def _failure(record: Record) -> RankFailure:
    noticed = _number(record.get("noticed"))
    return RankFailure(
        kind=_text(record.get("kind")) or "unknown",
        rank=_whole(record.get("rank")),
        node=_text(record.get("node")),
        code=_whole(record.get("code")),
        signal=_text(record.get("signal")),
        step=_whole(record.get("step")),
        words=_text(record.get("words")),
        died=_number(record.get("died")),
        noticed=noticed if noticed is not None else _number(record.get("time")),
    )


def _ended(record: Record) -> Ended:
    killed = record.get("killed")
    ranks = (_whole(each) for each in killed) if isinstance(killed, list) else ()
    return Ended(
        _number(record.get("time")),
        _whole(record.get("step")),
        _number(record.get("seconds")),
        tuple(rank for rank in ranks if rank is not None),
    )


def _left_out(record: Record) -> NodeLeftOut:
    return NodeLeftOut(
        _text(record.get("node")) or "?", _text(record.get("reason")) or "", _number(record.get("until"))
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return " ".join(value.split()) or None if isinstance(value, str) else None
