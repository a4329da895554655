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

PassKind = Literal["forward", "backward", "weights"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a micro batch through one chunk of layers of a stage; `weights` is the part of the backward pass that
    no other stage waits for."""

    kind: PassKind
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Timed:
    """Pass of a stage with its times. From `end` to `sent`, its result is on the way to another stage."""

    stage: int
    work: Pass
    start: float
    end: float
    sent: float


def order_of(schedule: Schedule, stage: int, pp: int, num_micro_batches: int, chunks: int = 1) -> list[Pass]:
    """Return the work of a stage in order."""
    if schedule == "zero_bubble":
        return list(_zero_bubble(stage, pp, num_micro_batches))
    forwards = [Pass("forward", *place) for place in _places(pp, num_micro_batches, chunks)]
    backwards = [Pass("backward", batch, chunks - 1 - chunk) for batch, chunk in _places(pp, num_micro_batches, chunks)]
    ahead = pp - stage - 1 if chunks == 1 else 2 * (pp - stage - 1) + (chunks - 1) * pp
    return list(_alternate(forwards, backwards, min(ahead, len(forwards))))


def _places(pp: int, num_micro_batches: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Yield micro batches and chunks in the order of forward passes: `pp` micro batches through one chunk after the
    other."""
    for first in range(0, num_micro_batches, pp):
        for chunk in range(chunks):
            for micro_batch in range(first, min(first + pp, num_micro_batches)):
                yield micro_batch, chunk


def _alternate(forwards: Sequence[Pass], backwards: Sequence[Pass], ahead: int) -> Iterator[Pass]:
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


def _zero_bubble(stage: int, pp: int, num_micro_batches: int) -> Iterator[Pass]:
    forwards = [Pass("forward", index) for index in range(num_micro_batches)]
    backwards = [Pass("backward", index) for index in range(num_micro_batches)]
    for work in _alternate(forwards, backwards, min(pp - stage - 1, num_micro_batches)):
        yield work
        if work.kind == "backward" and work.micro_batch >= stage:
            yield Pass("weights", work.micro_batch - stage)
    for index in range(max(0, num_micro_batches - stage), num_micro_batches):
        yield Pass("weights", index)


def time_orders(
    orders: Sequence[Sequence[Pass]], seconds: Callable[[int, PassKind], float], hop_s: float
) -> list[Timed]:
    """Return all work with its times: as early as its stage is free and what it waits for has arrived.

    Args:
        orders: the work of every stage in order.
        seconds: how long one pass through a chunk takes, by stage and kind.
        hop_s: how long a stage sends a result to the next one.
    """
    pp, chunks = len(orders), 1 + max(work.chunk for order in orders for work in order)
    arrived: dict[tuple[int, Pass], float] = {}
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


def _awaited(stage: int, work: Pass, pp: int, chunks: int) -> tuple[int, Pass] | None:
    """Return the stage and the work whose result `work` needs; None for the input of the model."""
    batch, chunk = work.micro_batch, work.chunk
    if work.kind == "weights":
        return stage, Pass("backward", batch, chunk)
    if work.kind == "forward":
        place = chunk * pp + stage - 1
        return None if place < 0 else (place % pp, Pass("forward", batch, place // pp))
    place = chunk * pp + stage + 1
    if place == pp * chunks:
        return stage, Pass("forward", batch, chunk)
    return place % pp, Pass("backward", batch, place // pp)


def _is_sent(stage: int, work: Pass, pp: int, chunks: int) -> bool:
    """Return whether the result goes to another stage: not out of the model, and not to weights."""
    place = work.chunk * pp + stage
    return pp > 1 and ((work.kind == "forward" and place < pp * chunks - 1) or (work.kind == "backward" and place > 0))
