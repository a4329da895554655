"""An uneven run under `survive`, on one rank in one generation: its pipelines are made of the ranks that are left.

As many owners compute each part of the state as must hold it, so nothing is copied while training runs. After a loss,
the ranks agree on the step that counts (`past`), on the pipelines (`layout`), and send each other what they lack.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigsci_launch.config.checks.uneven import require_supported
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.plan.survive.uneven import UnevenLayout, first_layout, next_layout
from bigsci_launch.recover.holding import Holding, Shard, StateVersion, Transfer, plan_transfers
from bigsci_launch.train.device.digest import digest64
from bigsci_launch.train.rank.events import RankReport
from bigsci_launch.train.rank.stop import wait_for_writers
from bigsci_launch.train.state.checkpoint import ChosenCheckpoint, choose_from
from bigsci_launch.train.steps.companion import Built, RankSetup, Start, StepDone, TrainingProgress
from bigsci_launch.train.survive.buddies import HostGroup
from bigsci_launch.train.survive.channel import Begin, Channel
from bigsci_launch.train.survive.life import load_in
from bigsci_launch.train.survive.restore import find_apart, require_equal
from bigsci_launch.train.survive.waits import Waits
from bigsci_launch.train.survive.words import LifeWords
from bigsci_launch.train.uneven.engine import UnevenEngine
from bigsci_launch.train.uneven.optimizer import ROLES, MasterAdamW, UnitState
from bigsci_launch.train.uneven.origin import UnevenOrigin
from bigsci_launch.train.uneven.past import CommonPast, Past, common_past, lane_name, of_lane, of_roles, wanted_by


@dataclass(slots=True)
class KeptStage:
    """The stage that this process had in generation `line`. Training continues with its optimizer."""

    line: int
    rank: int
    layout: UnevenLayout
    optimizer: MasterAdamW
    began: TrainingProgress
    num_samples: int
    told: int
    whole: Mapping[str, int]

    def past(self) -> Past:
        taken = self.optimizer.taken
        return Past(
            self.line,
            self.rank,
            self.layout,
            taken,
            self.optimizer.summed,
            self.optimizer.num_steps,
            self.optimizer.num_skipped,
            self.began.consumed_samples + (taken.step - self.began.step) * self.num_samples,
            self.began.step,
            self.told,
            tuple(of_lane(self.optimizer.masters, self.lane)),
            self.whole,
        )

    @property
    def lane(self) -> int:
        return self.rank % self.layout.tp

    def digests(self) -> dict[Shard, list[int]]:
        """Return those of all that this rank holds."""
        masters, states = list(self.optimizer.masters), self.optimizer.state_of
        tensors = [states(shard).tensors for shard in masters]
        return {
            shard: [digest64(tensor) for tensor in each]
            for shard, each in zip(of_lane(masters, self.lane), tensors, strict=True)
        }


class KeptStages:
    """What outlives the generations of a process. `began` is the step after which the attempt has begun."""

    def __init__(self) -> None:
        self.kept: KeptStage | None = None
        self.began: int | None = None
        self.reached = 0

    @property
    def done(self) -> int:
        """The last step that this process has taken."""
        return self.kept.optimizer.taken.step if self.kept else 0


class UnevenLife(UnevenOrigin):
    """`survive` on one rank of an uneven run, in one generation."""

    engine = None
    """Nothing of an engine has to be taken apart."""

    def __init__(self, channel: Channel, memory: KeptStages, waits: Waits, begin: Begin, report: RankReport) -> None:
        self._channel, self._memory, self._waits, self._begin = channel, memory, waits, begin
        self._words = LifeWords(channel, report, begin.generation)
        self._past: CommonPast | None = None
        self._why: str | None = None
        self._source = "memory"
        self._since = time.monotonic()

    def choose(self, setup: RankSetup) -> ChosenCheckpoint | None:
        """Return the checkpoint to begin with, or None if the ranks continue with what they hold."""
        require_supported(setup.config)
        self._group = HostGroup(dist.new_group(backend="gloo"), self._begin.rank, self._waits)
        self._meet()
        if self._past is not None:
            return None
        wait_for_writers()
        self._group.gather(None)
        return choose_from(load_in(self._begin.generation, setup), setup)

    def _meet(self) -> None:
        """Find the state that counts, and bring what this rank holds to it; a collective call."""
        memory = self._memory
        mine = memory.kept.past() if memory.kept else None, memory.began, memory.reached
        everywhere = self._group.gather(mine)
        memory.began = next((began for _, began, _ in everywhere if began is not None), None)
        memory.reached = max(reached for _, _, reached in everywhere)
        past = common_past([each for each, _, _ in everywhere])
        if past is None or past.missing:
            why = "no rank holds a state" if past is None else past.missing
            self._why = why if self._begin.generation else None
            return
        if self._begin.rank in past.pasts and memory.kept and memory.kept.optimizer.taken.step < past.taken.step:
            memory.kept.optimizer.take(past.taken)
        self._require_whole(past)

    def _require_whole(self, past: CommonPast) -> None:
        """Continue with this state if the copies of each parameter are equal; a collective call."""
        kept = self._memory.kept
        holds = self._begin.rank in past.pasts and kept is not None
        apart = find_apart(kept.digests() if holds and kept else {}, self._group)
        if apart is None:
            self._past = past
        else:
            self._why = f"the copies of {apart.unit} after step {past.taken.step} differ between ranks"

    def layout(self, config: RunConfig, num_ranks: int) -> UnevenLayout:
        if self._past is None:
            return first_layout(config, num_ranks)
        return next_layout(config, self._past.newest.layout, self._past.new_ranks, num_ranks)

    def joined(self, built: Built) -> None:
        engine: Any = built.engine
        mine = {lane_name(name, engine.lane): length for name, length in engine.optimizer.lengths.items()}
        everywhere = self._group.gather(mine)
        self._whole = {name: length for lengths in everywhere for name, length in lengths.items()}
        self._words.joined()

    def start(self, setup: RankSetup, engine: Any, chosen: ChosenCheckpoint | None) -> Start:
        memory, past = self._memory, self._past
        start = super().start(setup, engine, chosen) if past is None else self._continue(past, engine)
        if memory.began is None:
            memory.began = start.progress.step
        memory.kept = KeptStage(
            self._begin.generation,
            self._begin.rank,
            engine.layout,
            engine.optimizer,
            start.progress,
            engine.num_samples,
            start.progress.step,
            self._whole,
        )
        return replace(start, first_step=memory.began, reached=memory.reached)

    def _continue(self, past: CommonPast, engine: UnevenEngine) -> Start:
        """Set the engine to the state that counts; a collective call."""
        self._fetch(past, engine.optimizer, engine.lane)
        newest = past.newest
        ahead = past.taken.step - newest.taken.step
        progress = TrainingProgress(past.taken.step, newest.consumed_samples + ahead * engine.num_samples)
        untold = None
        if not past.is_told:
            taken, seconds = past.taken, time.monotonic() - self._since
            is_skipped = not math.isfinite(taken.norm)
            untold = StepDone(progress, (), taken.loss, engine.num_samples, taken.learning_rate, seconds, is_skipped)
        return Start(progress, is_restored=True, untold=untold)

    def _fetch(self, past: CommonPast, target: MasterAdamW, lane: int) -> None:
        """Fill `target` from what this rank holds and what others send.

        Raises:
            BslError: what has arrived is not what was sent; every rank raises it.
        """
        group, rank, kept = self._group, self._begin.rank, self._memory.kept
        version = StateVersion(past.taken.step, 0)
        wanted = group.gather(wanted_by(target.lengths, target.masters, lane))
        manifests = [
            [Holding(version, tuple(of_roles(past.pasts[each].held)), {})] if each in past.pasts else []
            for each in range(len(wanted))
        ]
        plan = plan_transfers(manifests, version, wanted)
        names = {name: lane_name(name, lane) for name in target.weights}
        found = {f"{role} {names[name]}": torch.empty(size) for name, size in target.lengths.items() for role in ROLES}
        held = kept.optimizer if kept is not None and rank in past.pasts else None
        sent, got = _carry_out(plan, held, found, group)
        require_equal(plan, sent, got, group)
        self._source = "buddies" if got else "memory"
        facts = next(each for _, each in sorted(past.pasts.items()) if each.taken.step == past.taken.step)
        states = {name: UnitState(*(found[f"{role} {names[name]}"] for role in ROLES)) for name in target.weights}
        target.load(states, past.taken, facts.num_skipped, facts.num_steps)

    def begin(self, start: Start) -> None:
        step, path = start.progress.step, str(start.folder) if start.folder else None
        if self._past is not None:
            self._words.restored(step, self._source)
        else:
            self._words.restored(step, "checkpoint" if path else "start", path, self._why)

    def before_step(self, step: int) -> None:
        self._words.require_present()
        self._memory.reached = max(self._memory.reached, step)

    def after_step(self, done: StepDone) -> None:
        self._words.require_present()
        assert self._memory.kept is not None
        self._memory.kept.told = done.progress.step
        self._words.stepped(done.progress.step)

    def finish(self) -> None:
        """Nothing is on its way."""


def _held_part(optimizer: MasterAdamW, wanted: Shard) -> Tensor:
    """Return elements that this rank holds, in host memory; `wanted.unit` names a role, this lane and a parameter."""
    role, _, name = wanted.unit.split(" ", 2)
    around = next(
        shard
        for shard in optimizer.masters
        if shard.unit == name and shard.start <= wanted.start and wanted.stop <= shard.stop
    )
    tensor: Tensor = getattr(optimizer.state_of(around), role)
    return tensor[wanted.start - around.start : wanted.stop - around.start].cpu()


@torch.no_grad()
def _carry_out(
    plan: Sequence[Transfer], held: MasterAdamW | None, found: dict[str, Tensor], group: HostGroup
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Send and receive this rank's part of a plan, and return the digests of what it has sent and got."""
    works: list[Any] = []
    outgoing: dict[int, Tensor] = {}
    incoming: dict[int, Tensor] = {}
    for tag, each in enumerate(plan):
        place = found.get(each.shard.unit, torch.empty(0))[each.shard.start : each.shard.stop]
        if each.source == group.rank:
            assert held is not None
            part = _held_part(held, each.shard)
            if each.destination == group.rank:
                place.copy_(part)
            else:
                outgoing[tag] = part
                works.append(group.send(part, each.destination, tag))
        elif each.destination == group.rank:
            incoming[tag] = place
            works.append(group.receive(place, each.source, tag))
    group.wait(works)
    return _all_digests(outgoing), _all_digests(incoming)


def _all_digests(tensors: dict[int, Tensor]) -> dict[int, list[int]]:
    return {tag: [digest64(each)] for tag, each in tensors.items()}
