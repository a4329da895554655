"""Jobs that run in no time: their ranks work and wait as programs do, and leave rings."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bigsci_launch.slow.answer import judged_rings
from bigsci_launch.slow.straggler import SlowAnswer
from bigsci_launch.spy.evidence.calls.flight_recorder import Recorder
from bigsci_launch.spy.evidence.calls.ring import Ring, RingCall
from bigsci_launch.topology import Topology
from bigsci_launch.trace.last import RankCalls

TRANSFER_S = 0.001
Seconds = Callable[[int, int, str], float]
"""Seconds of a rank, in a step, in a part of it."""


@dataclass(frozen=True, slots=True)
class Act:
    """What a rank does next: own work, of a recorded call or, without a name, between two; or its end of a collective
    or a message."""

    name: str
    seconds: float = 0.0
    group: tuple[int, ...] = ()
    peer: int | None = None
    tag: int = 0


Program = Callable[[int, int, Seconds], Iterator[Act]]
"""Of a rank and a step."""


def data_parallel(size: int, *, saves: Callable[[int, int], bool] = lambda rank, step: False) -> Program:
    """Return a program like DDP's. Whether a rank saves in a step, `saves` says."""

    def acts(rank: int, step: int, seconds: Seconds) -> Iterator[Act]:
        yield Act("next batch", seconds(rank, step, "data"))
        yield Act("forward", seconds(rank, step, "forward"))
        yield Act("backward", seconds(rank, step, "backward"))
        yield Act("gradient reduction", group=tuple(range(size)))
        yield Act("optimizer step", seconds(rank, step, "optimizer"))
        if (pause := seconds(rank, step, "garbage")) > 0:
            yield Act("garbage collection", pause)
        if saves(rank, step):
            yield Act("torch.save", seconds(rank, step, "save"))

    return acts


def pipelined(topology: Topology, micro_batches: int = 4) -> Program:
    """Return a program of 1F1B, whose tensor-parallel ranks meet in each pass."""

    def acts(rank: int, step: int, seconds: Seconds) -> Iterator[Act]:
        at = topology.coordinate(rank)
        num = {axis: topology[axis] for axis in ("tp", "pp", "dp")}
        tensor = tuple(each for each in range(topology.world_size) if _same(topology, each, rank, ("pp", "dp")))
        data = tuple(each for each in range(topology.world_size) if _same(topology, each, rank, ("tp", "pp")))
        after, before = rank + num["tp"] * num["dp"], rank - num["tp"] * num["dp"]
        warm = min(num["pp"] - 1 - at.pp_rank, micro_batches)

        def forward() -> Iterator[Act]:
            if at.pp_rank in (0, num["pp"] - 1):
                yield Act("next batch", seconds(rank, step, "data"))
            if at.pp_rank:
                yield Act("recv", peer=before)
            yield Act("", seconds(rank, step, "forward") / micro_batches)
            yield Act("all_reduce", group=tensor)
            if at.pp_rank < num["pp"] - 1:
                yield Act("send", peer=after)

        def backward() -> Iterator[Act]:
            if at.pp_rank < num["pp"] - 1:
                yield Act("recv", peer=after)
            yield Act("backward", seconds(rank, step, "backward") / micro_batches)
            yield Act("all_reduce", group=tensor)
            if at.pp_rank:
                yield Act("send", peer=before)

        for _ in range(warm):
            yield from forward()
        for _ in range(micro_batches - warm):
            yield from forward()
            yield from backward()
        for _ in range(warm):
            yield from backward()
        yield Act("all_reduce", group=data)
        yield Act("optimizer step", seconds(rank, step, "optimizer"))
        yield Act("all_reduce", group=tuple(range(topology.world_size)))

    return acts


def _same(topology: Topology, one: int, other: int, axes: Sequence[str]) -> bool:
    return all(topology.coordinate(one)[axis] == topology.coordinate(other)[axis] for axis in axes)


def noisy(seconds: Seconds, seed: int = 0, noise: float = 0.05) -> Seconds:
    """Return the seconds with noise."""
    draw = random.Random(seed)
    return lambda rank, step, part: seconds(rank, step, part) * max(0.1, draw.gauss(1.0, noise))


@dataclass(slots=True)
class _Rank:
    number: int
    acts: deque[tuple[int, Act]]
    now: float = 0.0
    calls: list[RingCall] = field(default_factory=list)
    phases: list[RingCall] = field(default_factory=list)
    counts: dict[tuple[int, ...], int] = field(default_factory=dict)


def run(
    program: Program,
    size: int,
    seconds: Seconds,
    *,
    steps: int = 24,
    topology: Topology | None = None,
    delay: Callable[[int, int], float] = lambda one, other: 0.0,
    clocks: Callable[[int], float] = lambda rank: 0.0,
    cores: Callable[[int, int], tuple[float, float]] | None = None,
) -> list[RankCalls]:
    """Run a job, and return the rings of its ranks. `delay` is how much longer messages between two ranks take. `cores`
    is for how long a quota held a rank up in a step, and for how long it was ready without a core."""
    ranks = [
        _Rank(rank, deque((step, act) for step in range(steps) for act in program(rank, step, seconds)))
        for rank in range(size)
    ]
    came: dict[tuple[object, ...], dict[int, float]] = {}
    while any(rank.acts for rank in ranks):
        moved = [rank for rank in ranks if rank.acts and _advance(rank, came, delay)]
        assert moved, "all ranks wait"
    for rank in ranks if cores is not None else ():
        rank.phases = [_counted(call, cores(rank.number, call.step or 0)) for call in rank.phases]
    return [_ring(rank, topology, clocks(rank.number)) for rank in ranks]


def answer_of_rings(ranks: Sequence[RankCalls], nodes: Mapping[int, str]) -> SlowAnswer:
    return judged_rings(ranks, nodes)[0]


def _advance(rank: _Rank, came: dict[tuple[object, ...], dict[int, float]], delay: Callable[[int, int], float]) -> bool:
    step, act = rank.acts[0]
    if not act.group and act.peer is None:
        _work(rank, step, act)
        return True
    ends, key = act.group, act.group
    if act.peer is not None:
        key = (rank.number, act.peer) if act.name == "send" else (act.peer, rank.number)
        ends = key
    number = rank.counts.get(key, 0) + 1
    here = came.setdefault((key, number), {})
    entered = here.setdefault(rank.number, rank.now)
    if act.name != "send" and len(here) < len(ends):
        return False
    late = delay(*key) if act.name == "recv" and act.peer is not None else 0.0
    rank.now = (entered if act.name == "send" else max(here.values())) + TRANSFER_S + late + act.seconds
    rank.counts[key] = number
    rank.acts.popleft()
    group = f"{min(act.group)}-{len(act.group)}: {','.join(map(str, act.group))}" if act.group else None
    counted = number if act.group else 0
    call = RingCall(
        entered, rank.now, act.name, group, "train.py:7 main", "float32 [8]", act.peer, 0, counted, step, False, 1
    )
    (rank.phases if act.name == "gradient reduction" else rank.calls).append(call)
    return True


def _counted(call: RingCall, seconds: tuple[float, float]) -> RingCall:
    held, ready = (round(each * 1e6) for each in seconds)
    return replace(call, peer=held, tag=ready) if call.operation == "optimizer step" else call


def _work(rank: _Rank, step: int, act: Act) -> None:
    begin, rank.now = rank.now, rank.now + act.seconds
    rank.acts.popleft()
    if act.name:
        call = RingCall(begin, rank.now, act.name, None, None, None, None, None, 0, step, False, 1)
        (rank.calls if act.name in ("next batch", "torch.save") else rank.phases).append(call)


def _ring(rank: _Rank, topology: Topology | None, ahead: float) -> RankCalls:
    def shifted(calls: Sequence[RingCall]) -> tuple[RingCall, ...]:
        return tuple(
            RingCall(
                call.entered + ahead, (call.left or 0.0) + ahead, call.operation, call.group, call.place, call.tensors,
                call.peer, call.tag, call.number, call.step, call.is_async, call.thread,
            )
            for call in calls
        )  # fmt: skip

    ring = Ring(
        step=0,
        phase="",
        heartbeat=0.0,
        read=rank.now,
        lost_names=0,
        lost_threads=0,
        calls=shifted(rank.calls),
        open_calls=(),
        recorder=Recorder(0, (), (), {}, (), {}),
        topology=topology,
        are_blocking=True,
        phases=shifted(rank.phases),
    )
    return RankCalls(f"rank {rank.number}", rank.number, ring, None)
