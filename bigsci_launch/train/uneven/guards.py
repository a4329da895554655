"""The guards of an uneven run: a unit's owners hold the same, and its gradient is the sum of theirs.

When a step is checked, the owners of each unit compare digests of its weights, masters and moments, and of its gradient
after the sum; the sum itself is compared with one of sampled elements that the owners form on their own. What one step
has left is what the next one must find. All else, such as when to check and what to do about a finding, is as with
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigsci_launch.recover.holding import Shard
from bigsci_launch.train.device.digest import digests64
from bigsci_launch.train.guards.copies import CopyAxes, Violation, Watched
from bigsci_launch.train.guards.engine.data import DataWatch, find_other_tokens
from bigsci_launch.train.guards.engine.hooks import before_call
from bigsci_launch.train.guards.engine.judge import Judge
from bigsci_launch.train.guards.engine.samples import spread
from bigsci_launch.train.guards.engine.watch import EngineGuards
from bigsci_launch.train.guards.fingerprint import StateFingerprint
from bigsci_launch.train.guards.flat import Flat
from bigsci_launch.train.guards.places import Places
from bigsci_launch.train.rank.bits import as_bits
from bigsci_launch.train.steps.companion import Built, RankSetup
from bigsci_launch.train.steps.word import DataWord, StepWord
from bigsci_launch.train.uneven.engine import UnevenEngine
from bigsci_launch.train.uneven.optimizer import MOMENTS, ROLES, is_split
from bigsci_launch.train.uneven.stage import unit_of

SAMPLED = 32
"""Elements of each gradient whose sum is formed twice."""
TOLERANCE = 1e-4
"""Of the sum of their sizes: sums in another order."""
NUMBERS = (("gradient norm", "gradient norm"), ("learning rate", "learning rate"))


class UnevenGuards(EngineGuards):
    """The guards of one rank. All public methods are collective calls."""

    def __init__(self, setup: RankSetup, built: Built, judge: Judge) -> None:
        engine: Any = built.engine
        self._layout = engine.layout
        topology = engine.layout.topology
        ranks = range(setup.identity.world_size)
        members = tuple({axis: topology.group(axis, rank) for axis in ("tp", "pp")} for rank in ranks)
        judge.name_by(Places(setup.identity.rank, members, topology))
        super().__init__(setup, built, judge)
        self.data = OwnData(setup.batches)

    def _watches(self, setup: RankSetup, built: Built) -> tuple[Any, Any]:
        engine: Any = built.engine
        return SumWatch(engine, setup.identity.rank), StateWatch(
            engine, setup.config.guards.interval, setup.identity.rank
        )

    def _watched_here(self, places: Places) -> list[Watched]:
        engine: Any = self._engine
        owners = {name: self._held_by(name, engine.owners[unit_of(name)]) for name in engine.optimizer.weights}
        everyone = (("world", tuple(range(len(places.members)))),)
        return [
            *(self._watched_shard(title, shard) for title, shard, _ in tensors_of(engine)),
            *(Watched(f"gradient of {name}", owners[name], "reduced gradients") for name in engine.optimizer.weights),
            *(Watched(name, everyone, check, is_number=True) for name, check in NUMBERS),
        ]

    def _watched_shard(self, title: str, shard: Shard) -> Watched:
        engine: Any = self._engine
        length = engine.optimizer.lengths[shard.unit]
        holders = engine.owners[unit_of(shard.unit)] if title == "weight" else engine.shards.holders(shard, length)
        return Watched(shard_name(title, shard, length), self._held_by(shard.unit, holders))

    def _held_by(self, name: str, holders: tuple[int, ...]) -> CopyAxes:
        """Return who has the same of a parameter: these ranks, and those of the stage if they do not split it."""
        engine: Any = self._engine
        if engine.layout.tp == 1 or is_split(engine.optimizer.weights[name]):
            return (("dp", holders),)
        return ("dp", holders), ("tp", engine.layout.topology.group("tp", engine.rank))

    def _digests(self, with_gradients: bool = False) -> list[int]:
        engine: Any = self._engine
        sums: Any = self._gradients
        names, reduced = engine.optimizer.weights, sums.digests if with_gradients else []
        numbers = (engine.get_global_grad_norm() if with_gradients else 0.0, engine.optimizer.param_groups[0]["lr"])
        states = digests64([tensor for *_, tensor in tensors_of(engine)])
        return [*states, *(reduced or [0] * len(names)), *map(as_bits, numbers)]

    def state_flats(self) -> dict[str, Flat]:
        """Return nothing: the fingerprint of the optimizer has the weights too."""
        return {}

    def begin(self, step: int, folder: Path | None) -> None:
        """Check the data and the state after `step`. The files of its checkpoint are those of other ranks."""
        super().begin(step, None)

    def after_words(self, step: int, words: Sequence[StepWord]) -> None:
        """Judge the data of the step: the first and the last stage of a pipeline read the same."""
        if wrong := [*find_other_tokens([word.data for word in words], self._layout.topology)]:
            self.judge.act(step, wrong)
        if any(word.alarm for word in words):
            self.judge.judge(step, self._alarming)
            self._optimizer.violations = []

    def _check_whole(self, step: int) -> list[Violation]:
        return self._exchange([*self._gradients.find_after_step()], self._digests(with_gradients=True))

    def _static_violations(self, step: int) -> list[Violation]:
        return []


class OwnData(DataWatch):
    """Remembers what this rank has read; which samples are due is not asked of a grid."""

    def word(self) -> DataWord:
        return DataWord(self.digest()) if self._num_read else DataWord()


def tensors_of(engine: UnevenEngine) -> Iterator[tuple[str, Shard, Tensor]]:
    """Yield (what it is, shard, tensor) of the state of a rank; in fp32, masters are in the weights."""
    optimizer = engine.optimizer
    for name, weight in optimizer.weights.items():
        yield "weight", Shard(name, 0, weight.numel()), weight
        roles = MOMENTS if weight.dtype == torch.float32 else ROLES
        for shard in engine.shards.held(name, weight.numel()):
            yield from ((role, shard, getattr(optimizer.state_of(shard), role)) for role in roles)


def shard_name(title: str, shard: Shard, length: int) -> str:
    """`exp_avg of 3.norm.weight`, and which elements of it, if a rank does not hold all."""
    part = "" if (shard.start, shard.stop) == (0, length) else f"[{shard.start}:{shard.stop}]"
    return f"{title} of {shard.unit}{part}"


class SumWatch:
    """Compares the gradients of one rank before and after the sums over their owners."""

    tied_names: Sequence[str] = ()
    is_timed = False
    seconds = 0.0

    def __init__(self, engine: UnevenEngine, rank: int) -> None:
        self._engine, self._rank = engine, rank
        places = {name: spread(weight.numel(), SAMPLED) for name, weight in engine.optimizer.weights.items()}
        self._at = {name: torch.tensor(each, device=engine.device) for name, each in places.items()}
        self.is_armed = False
        self.clear()
        before_call(engine.groups, "sum", self._see_local)
        before_call(engine, "take_step", self._see_reduced)

    def begin(self, step: int, *, is_armed: bool) -> None:
        """Prepare for a step."""
        self.clear()
        self.is_armed = is_armed

    def clear(self) -> None:
        """Forget the last step."""
        self._local: dict[str, Tensor] = {}
        self._reduced: dict[str, Tensor] = {}
        self.digests: list[int] = []

    def find_in_step(self, clip: float) -> list[Violation]:
        """A step that is not checked shows nothing."""
        return []

    def _see_local(self) -> None:
        if self.is_armed:
            self._local = self._sampled()

    def _see_reduced(self) -> None:
        if self.is_armed:
            self._reduced = self._sampled()
            self.digests = digests64([*self._gradients().values()])

    def _gradients(self) -> dict[str, Tensor]:
        optimizer, found = self._engine.optimizer, self._engine.optimizer.gradients()
        return {
            name: each for unit, names in optimizer.units.items() for name, each in zip(names, found[unit], strict=True)
        }

    def _sampled(self) -> dict[str, Tensor]:
        found = self._gradients()
        return {name: found[name].reshape(-1)[at].double() for name, at in self._at.items()}

    @torch.no_grad()
    def find_after_step(self) -> list[Violation]:
        """Find sums that are not those of the owners' gradients; a collective call of the owners of each unit."""
        found = []
        for group, units in self._engine.groups.shared():
            names = [name for unit in units for name in self._engine.optimizer.units[unit]]
            mine = torch.cat([self._local[name] for name in names])
            both = torch.stack([mine, mine.abs()])
            dist.all_reduce(both, group=group)
            sizes = [len(self._at[name]) for name in names]
            for name, total, size in zip(names, *(torch.split(each, sizes) for each in both), strict=True):
                # What is not a number is within no limit.
                is_close = (self._reduced[name] - total).abs() <= TOLERANCE * size + 1e-30
                if count := int((~is_close & torch.isfinite(total)).sum()):
                    text = f"{count} of {len(total)} compared elements are not the sum over the owners"
                    found.append(Violation("gradient reduction", name, (self._rank,), text, is_decided=False))
        return found


class StateWatch:
    """Compares the state at the end of a step with that before the next one. Findings wait in `violations`."""

    def __init__(self, engine: UnevenEngine, interval: int | str, rank: int) -> None:
        self._engine, self._memory = engine, StateFingerprint("memory", rank)
        self.is_whole = isinstance(interval, int)
        self.violations: list[Violation] = []

    def begin(self, step: int) -> None:
        """Take the state after `step` for what the next step begins with."""
        self.fingerprint(step, is_next_checked=True)

    def before_step(self, step: int, *, is_armed: bool) -> None:
        """Compare the state."""
        self.violations = self.find_changed_state()

    def end_step(self) -> None:
        """Nothing is put off."""

    def find_wrong_state(self, step: int) -> list[Violation]:
        """All owners have the whole state, so its copies show what is wrong."""
        return []

    def find_changed_state(self) -> list[Violation]:
        return [*self._memory.find_changed(self._flats(), self._counts())]

    def fingerprint(self, step: int, *, is_next_checked: bool) -> None:
        """Remember the state after `step`, all of it if the next step is checked."""
        is_whole = self.is_whole and is_next_checked
        self._memory.take(self._flats(), step, is_whole=is_whole, counts=self._counts())

    def _flats(self) -> dict[str, Flat]:
        lengths = self._engine.optimizer.lengths
        found = {shard_name(title, at, lengths[at.unit]): each for title, at, each in tensors_of(self._engine)}
        return {name: Flat.whole(name, tensor) for name, tensor in found.items()}

    def _counts(self) -> dict[str, float | None]:
        return {"number of steps": float(self._engine.optimizer.num_steps)}
