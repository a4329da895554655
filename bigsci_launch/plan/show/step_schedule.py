"""In which order every stage of a pipeline computes the micro batches of a step, and when.

`1f1b`: a stage runs ahead by as many micro batches as there are stages after it, then alternates. `interleaved`: the
same with chunks of layers, in Megatron's order. `zero_bubble`: gradients of weights are computed apart from those of
inputs, and later stages put them off longer, so they fill the bubble (ZB-H1, arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bigsci_launch.config.schema.technique import Schedule

Kind = Literal["forward", "backward", "weights"]


@dataclass(frozen=True, slots=True)
class Work:
    """One pass of a micro batch through one chunk of layers of a stage; `weights` is the part of the backward pass that
    no other stage waits for."""

    kind: Kind
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Timed:
    """Work of a stage with its times. From `end` to `sent`, its result is on the way to another stage."""

    stage: int
    work: Work
    start: float
    end: float
    sent: float


def order_of(schedule: Schedule, stage: int, pp: int, num_micro_batches: int, chunks: int = 1) -> list[Work]:
    """Return the work of a stage in order."""
    if schedule == "zero_bubble":
        return list(_zero_bubble(stage, pp, num_micro_batches))
    forwards = [Work("forward", *place) for place in _places(pp, num_micro_batches, chunks)]
    backwards = [Work("backward", batch, chunks - 1 - chunk) for batch, chunk in _places(pp, num_micro_batches, chunks)]
    ahead = pp - stage - 1 if chunks == 1 else 2 * (pp - stage - 1) + (chunks - 1) * pp
    return list(_alternate(forwards, backwards, min(ahead, len(forwards))))


def _places(pp: int, num_micro_batches: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Yield micro batches and chunks in the order of forward passes: `pp` micro batches through one chunk after the
    other."""
    for first in range(0, num_micro_batches, pp):
        for chunk in range(chunks):
            for micro_batch in range(first, min(first + pp, num_micro_batches)):
                yield micro_batch, chunk


def _alternate(forwards: Sequence[Work], backwards: Sequence[Work], ahead: int) -> Iterator[Work]:
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


def _zero_bubble(stage: int, pp: int, num_micro_batches: int) -> Iterator[Work]:
    forwards = [Work("forward", index) for index in range(num_micro_batches)]
    backwards = [Work("backward", index) for index in range(num_micro_batches)]
    for work in _alternate(forwards, backwards, min(pp - stage - 1, num_micro_batches)):
        yield work
        if work.kind == "backward" and work.micro_batch >= stage:
            yield Work("weights", work.micro_batch - stage)
    for index in range(max(0, num_micro_batches - stage), num_micro_batches):
        yield Work("weights", index)


def time_orders(orders: Sequence[Sequence[Work]], seconds: Callable[[int, Kind], float], hop_s: float) -> list[Timed]:
    """Return all work with its times: as early as its stage is free and what it waits for has arrived.

    Args:
        orders: the work of every stage in order.
        seconds: how long one pass through a chunk takes, by stage and kind.
        hop_s: how long a stage sends a result to the next one.
    """
    pp, chunks = len(orders), 1 + max(work.chunk for order in orders for work in order)
    arrived: dict[tuple[int, Work], float] = {}
    free, done = [0.0] * pp, [0] * pp
    found: list[Timed] = []
    while len(found) < sum(map(len, orders)):
        before = len(found)
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                work = order[done[stage]]
                awaited = _awaited(stage, work, pp, chunks)
                if awaited is not None and awaited not in arrived:
                    break
                start = max(free[stage], arrived[awaited] if awaited else 0.0)
                end = start + seconds(stage, work.kind)
                sent = end + (hop_s if _is_sent(stage, work, pp, chunks) else 0.0)
                arrived[stage, work] = free[stage] = sent
                found.append(Timed(stage, work, start, end, sent))
                done[stage] += 1
        if len(found) == before:
            raise ValueError("the stages wait for each other")
    return found


def _awaited(stage: int, work: Work, pp: int, chunks: int) -> tuple[int, Work] | None:
    """Return the stage and the work whose result `work` needs; None for the input of the model."""
    batch, chunk = work.micro_batch, work.chunk
    if work.kind == "weights":
        return stage, Work("backward", batch, chunk)
    if work.kind == "forward":
        place = chunk * pp + stage - 1
        return None if place < 0 else (place % pp, Work("forward", batch, place // pp))
    place = chunk * pp + stage + 1
    if place == pp * chunks:
        return stage, Work("forward", batch, chunk)
    return place % pp, Work("backward", batch, place // pp)


def _is_sent(stage: int, work: Work, pp: int, chunks: int) -> bool:
    """Return whether the result goes to another stage: not out of the model, and not to weights."""
    place = work.chunk * pp + stage
    return pp > 1 and ((work.kind == "forward" and place < pp * chunks - 1) or (work.kind == "backward" and place > 0))
