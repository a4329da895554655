"""Where each rank is by its heartbeats: in which phase, at which step, and which ranks are behind the others."""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.topology.naming import agree, name_ranks
from bigsci_launch.watch.judge.durations import Usual
from bigsci_launch.watch.judge.log_event import LogEvent
from bigsci_launch.watch.judge.state import WARM_UP, Candidate, Learned

STARTING = ("init", "load", "loaded")
MOST_KEPT = 256
"""Heartbeats that ranks went through, whose order is remembered."""

Spot = tuple[int, str]
"""The step, and the phase within it."""


@dataclass(slots=True)
class RankSpot:
    """Where a rank is since `time`, by its own clock. `begun` is when it started; `num_steps` those begun since."""

    place: Spot
    time: float | None
    begun: float | None
    num_steps: int = 0


class Heartbeats:
    """Follows the heartbeats of all ranks. Durations are taken from one of them, by its own clock."""

    def __init__(self, learned: Learned) -> None:
        self._learned = learned
        self._ranks: dict[int, RankSpot] = {}
        self._order: dict[Spot, int] = {}
        self._ended: set[int] = set()
        self._has_generations = False
        self._world_size: int | None = None

    @property
    def are_known(self) -> bool:
        return bool(self._ranks)

    @property
    def usual_step(self) -> Usual | None:
        return self._learned.usual("step")

    def resize(self, batch_size: int | None) -> None:
        """Note the global batch size, which the records of steps have."""
        self._learned.step.resize(batch_size)

    def learn_save(self, step: int | None, seconds: float | None) -> None:
        """Note how long a save in the background has taken: no phase of the ranks lasts as long."""
        if seconds is not None:
            self._learned.phases["save"].add(seconds)
            self._learned.interval("save").begins(step or 0)

    def restart(self) -> None:
        """Forget where ranks are; what was learned stays."""
        self._ranks.clear()
        self._order.clear()
        self._ended.clear()

    def new_attempt(self) -> None:
        """Forget where ranks are, and that there were generations."""
        self.restart()
        self._has_generations, self._world_size = False, None

    def regroup(self, world_size: int | None) -> None:
        """Note that a generation begins with the first `world_size` ranks, which all have to start again."""
        self._has_generations, self._world_size = True, world_size
        ranks = [rank for rank in self._ranks if self._takes_part(rank)]
        self.restart()
        for rank in ranks:
            self._ranks[rank] = RankSpot((0, "init"), None, None)
        self._note_order((0, "init"))

    def take(self, log_event: LogEvent) -> None:
        """Take a heartbeat, or the start or the end of a rank."""
        rank = log_event.rank
        if rank is None or not self._takes_part(rank):
            return
        if log_event.kind == "start":
            if rank in self._ranks and not self._has_generations:
                self.restart()  # the ranks of the next attempt
            self._ended.discard(rank)
            self._ranks[rank] = RankSpot((0, "init"), log_event.time, log_event.time)
            self._note_order((0, "init"))
        elif log_event.kind == "end" or log_event.phase == "end":
            self._ended.add(rank)
        else:
            self._enter(rank, log_event)

    def _takes_part(self, rank: int) -> bool:
        """Whether the present generation has the rank: what one of an earlier generation wrote may come late."""
        return self._world_size is None or rank < self._world_size

    def _enter(self, rank: int, log_event: LogEvent) -> None:
        here = self._ranks.setdefault(rank, RankSpot((0, "init"), None, None))
        place = (log_event.step or 0, log_event.phase or "unknown")
        if rank == min(self._ranks):
            self._learn(here, place, log_event.time)
        here.num_steps += place[1] == "step"
        here.place, here.time = place, log_event.time
        self._note_order(place)

    def _learn(self, here: RankSpot, place: Spot, time: float | None) -> None:
        if time is None or here.time is None or time < here.time:
            return
        phase, seconds = here.place[1], time - here.time
        if phase in STARTING:
            if place[1] == "step" and here.begun is not None:
                self._learned.phases["start"].add(time - here.begun)
            return
        if phase == "step":
            if here.num_steps >= WARM_UP:
                self._learned.step.add(seconds)
        elif phase in self._learned.phases:
            self._learned.phases[phase].add(seconds)
            if phase in ("eval", "save"):
                self._learned.interval(phase).begins(here.place[0])

    def _note_order(self, place: Spot) -> None:
        if place not in self._order:
            self._order[place] = max(self._order.values(), default=0) + 1
            if len(self._order) > MOST_KEPT:
                del self._order[min(self._order, key=lambda each: self._order[each])]

    def _behind(self) -> tuple[Spot, list[int], Spot]:
        """Return the earliest place where ranks are, those ranks, and the place of the ranks that are furthest."""
        running = {rank: here.place for rank, here in self._ranks.items() if rank not in self._ended}
        last = min(running.values(), key=lambda place: self._order.get(place, 0))
        first = max(running.values(), key=lambda place: self._order.get(place, 0))
        return last, sorted(rank for rank, place in running.items() if place == last), first

    @property
    def have_ended(self) -> bool:
        return bool(self._ranks) and self._ended >= set(self._ranks)

    @property
    def step(self) -> int | None:
        """The last step that every running rank has finished; None if there is none."""
        if self.have_ended:
            return max((here.place[0] for here in self._ranks.values()), default=None)
        step, phase = self._behind()[0]
        return (step - 1 if phase in ("step", "dump") else step) or None

    def candidates(self) -> list[Candidate]:
        """Return the phases that the ranks which are behind may be in."""
        if self.have_ended:
            return [Candidate("end", None, True)]
        (_, phase), ranks, _ = self._behind()
        if phase in STARTING:
            return [Candidate("start", self._learned.usual("start"), True)]
        found = [Candidate(phase, self._learned.usual(phase), True)]
        if phase == "step" and self._ranks[ranks[0]].num_steps < WARM_UP:
            found.append(Candidate("warm-up", None, False))
        is_silent = self._learned.eval.interval is None and not self._learned.eval.was_seen
        return [*found, Candidate("eval", None, False)] if phase == "step" and is_silent else found

    def describe(self) -> str:
        """Say which ranks are behind, as the end of a sentence; nothing if none is."""
        if self.have_ended:
            return ""
        last, ranks, first = self._behind()
        if last == first:
            return ""
        others = [rank for rank, here in self._ranks.items() if here.place == first and rank not in self._ended]
        return (
            f"{name_ranks(ranks)} {agree('is', ranks)} behind: {name_place(last)}, while {name_ranks(others)} "
            f"{agree('is', others)} at {name_place(first)}"
        )


def name_place(place: Spot) -> str:
    """`step 12`, `the save after step 12`, `the start`."""
    step, phase = place
    names = {
        "step": f"step {step}",
        "eval": f"the evaluation after step {step}",
        "save": f"the save after step {step}",
        "copy": f"the copy of the state after step {step}",
        "dump": f"the dump of weights at step {step}",
        "init": "the start",
        "load": "the load of a checkpoint",
        "loaded": "the start",
    }
    return names.get(phase, f"phase {phase} at step {step}")
