"""What the ranks of a generation know together of the ones before: which step counts, and who holds what of it. Pure.

A step counts if any rank that is left has taken it: then all have its summed gradients (see `engine`), and the others
take it now. If none has, it is done again: its result is lost with those who had it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bigsci_launch.plan.survive.uneven import UnevenLayout
from bigsci_launch.recover.holding import Holding, Shard, StateVersion, choose_version
from bigsci_launch.train.uneven.optimizer import ROLES, ReducedStep

CHUNK = 1 << 22
"""Elements of a parameter that one owner sends: a large one comes from several."""


@dataclass(frozen=True, slots=True)
class Past:
    """What a process has kept: the layout of generation `line`, in which it was `rank`, and its state there.

    `consumed_samples` belong to `taken`; a step has `num_samples`. `began_after` is the step with which the generation
    began, `told` the last one that this rank has said to be done. `held` are the shards of parameters that it
    holds, `whole` has the lengths of the model's.
    """

    line: int
    rank: int
    layout: UnevenLayout
    taken: ReducedStep
    summed: int
    num_steps: int
    num_skipped: int
    consumed_samples: int
    began_after: int
    told: int
    held: tuple[Shard, ...]
    whole: Mapping[str, int]

    def reaches(self, step: int) -> bool:
        """Whether this rank has taken `step`, or can take it now."""
        return step == self.taken.step or step == self.taken.step + 1 == self.summed


@dataclass(frozen=True, slots=True)
class CommonPast:
    """The state that counts: after `taken`. `pasts` are those who hold it, by their new ranks."""

    taken: ReducedStep
    pasts: Mapping[int, Past]

    @property
    def newest(self) -> Past:
        """One of the newest line, which names the layout before."""
        return max(self.pasts.values(), key=lambda past: past.line)

    @property
    def new_ranks(self) -> dict[int, int]:
        """The new rank of every rank of that layout that is left."""
        line = self.newest.line
        return {past.rank: rank for rank, past in self.pasts.items() if past.line == line}

    @property
    def is_told(self) -> bool:
        """Whether it is certain that the last step was said to be done; rank 0 says it."""
        tellers = [past for past in self.pasts.values() if past.line == self.newest.line and past.rank == 0]
        return self.taken.step <= self.newest.began_after or any(each.told >= self.taken.step for each in tellers)

    @property
    def missing(self) -> str | None:
        """Why the state cannot be restored: elements of a parameter that no rank holds."""
        version, whole = StateVersion(self.taken.step, 0), self.newest.whole
        found = choose_version([[Holding(version, past.held, whole)] for past in self.pasts.values()])
        return found.why if found.version is None else None


def common_past(everywhere: Sequence[Past | None]) -> CommonPast | None:
    """Return the state that counts, of what all ranks have kept; None if none has kept any."""
    known = {rank: past for rank, past in enumerate(everywhere) if past is not None}
    if not known:
        return None
    taken = max((past.taken for past in known.values()), key=lambda taken: taken.step)
    return CommonPast(taken, {rank: past for rank, past in known.items() if past.reaches(taken.step)})


def of_lane(shards: Iterable[Shard], lane: int) -> list[Shard]:
    """Return shards of parameters as those of a lane: other lanes have other parts of these parameters."""
    return [Shard(lane_name(shard.unit, lane), shard.start, shard.stop) for shard in shards]


def lane_name(name: str, lane: int) -> str:
    """Return what a lane's part of a parameter is called: `tp0 3.norm.weight`."""
    return f"tp{lane} {name}"


def of_roles(shards: Iterable[Shard], roles: Sequence[str] = ROLES) -> list[Shard]:
    """Return the master and the moments of shards of parameters, as they travel: apart, and in chunks."""
    return [
        Shard(f"{role} {shard.unit}", start, min(start + CHUNK, shard.stop))
        for shard in shards
        for role in roles
        for start in range(shard.start, shard.stop, CHUNK)
    ]


def wanted_by(lengths: Mapping[str, int], held: Iterable[Shard], lane: int) -> list[Shard]:
    """Return what a rank needs to begin: the masters of all its parameters, and the moments of what it holds."""
    whole = [Shard(name, 0, length) for name, length in lengths.items()]
    return of_roles(of_lane(whole, lane), ROLES[:1]) + of_roles(of_lane(held, lane), ROLES[1:])
