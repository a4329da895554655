"""A job whose controller is asked step by step, with a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bigsci_launch.recover.generation import Instant, Level, Slot
from bigsci_launch.recover.members import BatchSizes, Rules, WantedLayout
from bigsci_launch.recover.orders import (
    Archived,
    ArchiveRecords,
    DropSlot,
    FinishJob,
    JobEvent,
    LeaveOut,
    LookAtRanks,
    RankEnded,
    RankSaid,
    RanksSeen,
    RecordLine,
    RequestAnswer,
    SayLine,
    SendToSlot,
    SlotJoined,
    SlotLost,
    SlotOrder,
    SlotReady,
    StartRunner,
)
from bigsci_launch.recover.state_machine import JobStateMachine
from bigsci_launch.runs.control.request import Request
from bigsci_launch.topology import Topology

EPOCH = 1_000_000.0


def slots_on(*sizes: int) -> list[Slot]:
    """Return slots on nodes n0, n1, .. with that many slots each."""
    places = [(f"n{node}", local) for node, size in enumerate(sizes) for local in range(size)]
    return [Slot(number, node, node, local, 100 + number) for number, (node, local) in enumerate(places)]


class Job:
    """A controller's machine, and what it has ordered so far. With `is_disk_stuck`, nobody looks for last words."""

    def __init__(self, rules: Rules, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.clock = 0.0
        self.machine = JobStateMachine(rules, self._now)
        self.told: dict[int, list[dict[str, Any]]] = {slot.number: [] for slot in slots}
        self.records: list[dict[str, Any]] = []
        self.answers: list[str | None] = []
        self.said: list[str] = []
        self.dropped: list[int] = []
        self.restarted: list[int] = []
        self.archived: list[int] = []
        self.bad_nodes: list[str] = []
        self.code: int | None = None
        self.step: int | None = None
        self.is_disk_stuck = False
        self.words: dict[int, str] = {}
        self.accused: dict[int, tuple[int, ...]] = {}

    def take(self, event: JobEvent) -> None:
        self._carry_out(self.machine.take(event, self._now))
        self._carry_out(self.machine.wake(self._now))

    def wait(self, seconds: float) -> None:
        """Let time pass, looking ten times a second."""
        end = self.clock + seconds
        while self.clock < end:
            self.clock = min(end, self.clock + 0.1)
            self._carry_out(self.machine.wake(self._now))

    @property
    def _now(self) -> Instant:
        return Instant(self.clock, EPOCH + self.clock)

    def _carry_out(self, orders: Sequence[SlotOrder]) -> None:
        for order in orders:
            match order:
                case SendToSlot():
                    self.told[order.slot].append(order.message)
                case RecordLine():
                    self.records.append({"event": order.event, "generation": order.generation, **order.fields})
                case ArchiveRecords():
                    self.archived.append(order.generation)
                    self.take(Archived(order.generation))
                case LookAtRanks() if not self.is_disk_stuck:
                    step = self.step if order.since is not None else None
                    words = {rank: self.words[rank] for rank in order.ranks if rank in self.words}
                    self.take(RanksSeen(order.generation, step, words, self.accused))
                case RequestAnswer():
                    self.answers.append(order.refused)
                case SayLine():
                    self.said.append(order.text)
                case StartRunner():
                    self.restarted.append(order.slot)
                case DropSlot():
                    self.dropped.append(order.slot)
                case LeaveOut():
                    self.bad_nodes.append(order.node)
                case FinishJob():
                    self.code = order.code

    # ------------------------------------------------------------------------------------------- what happens

    def join(self, slot: int) -> None:
        self.take(SlotJoined(self.slots[slot]))
        self.ready(slot, None)

    def ready(self, slot: int, generation: int | None = -1) -> None:
        self.take(SlotReady(slot, self.number if generation == -1 else generation, 20000 + slot))

    def end(self, rank: int, code: int | None = 1, signal: str | None = None, **more: Any) -> None:
        """The process of a rank ends."""
        facts = {"was_requested": False, "is_final": False, "words": None, **more}
        self.take(
            RankEnded(self.slot_of(rank), self.number, rank, code if signal is None else None, signal, 1.0, **facts)
        )

    def kill(self, rank: int) -> None:
        """The process of a rank is killed, and its slot is ready again."""
        slot = self.slot_of(rank)
        self.end(rank, signal="SIGKILL")
        self.ready(slot)

    def lose(self, *slots: int, is_silent: bool = False) -> None:
        for slot in slots:
            self.take(SlotLost(slot, "the connection to its runner was closed", is_silent))

    def say(self, rank: int, word: str, **fields: Any) -> None:
        self.take(RankSaid(self.slot_of(rank), self.number, word, fields))

    def leave(self, *ranks: int) -> None:
        """Ranks leave the generation that ends, as in-place processes do; their slots are ready again."""
        number, slots = self.number, list(enumerate(self.generation))
        for rank, slot in slots:
            told = [message["do"] for message in self.since_begin(slot)]
            if self.number == number and "end" in told and (not ranks or rank in ranks):
                self.say(rank, "left", step=None)
                self.ready(slot, number)

    def ask(self, verb: str, rank: int | None = None, generation: int | None = None, **more: Any) -> None:
        number = self.number if generation is None else generation
        asked = Request("asked", verb, "bsl watch", "it hangs", generation=number, rank=rank, **more)
        self.take(asked)

    # ------------------------------------------------------------------------------------------- what was ordered

    @property
    def number(self) -> int:
        assert self.machine.generation is not None
        return self.machine.generation.number

    @property
    def generation(self) -> list[int]:
        """The slot of every rank of the newest generation."""
        assert self.machine.generation is not None
        return [slot.number for slot in self.machine.generation.slots]

    def slot_of(self, rank: int) -> int:
        return self.generation[rank]

    def since_begin(self, slot: int) -> list[dict[str, Any]]:
        """What a slot was told since the newest generation began."""
        told = self.told[slot]
        begins = [at for at, message in enumerate(told) if message["do"] == "begin"]
        return told[begins[-1] + 1 :] if begins else told

    def records_of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["event"] == event]

    @property
    def failures(self) -> list[tuple[int, str, int | None]]:
        """Generation, kind and rank of every recorded failure."""
        return [(record["generation"], record["kind"], record["rank"]) for record in self.records_of("failed")]


@pytest.fixture
def make_job() -> Any:
    """`make_job("in_place", dp=2, nodes=(2, 2))`: a job all of whose slots are ready, but for those that are absent."""

    def make(
        level: Level,
        *,
        dp: int = 2,
        pp: int = 2,
        nodes: Sequence[int] = (2, 2),
        shrink: bool = True,
        batches: BatchSizes | None = None,
        wait_s: float = 60.0,
        suffix: str | None = "-ib",
        absent: Sequence[int] = (),
    ) -> Job:
        slots = slots_on(*nodes)
        wanted = WantedLayout(Topology(pp=pp, dp=dp), shrink, batches)
        job = Job(Rules(level, wanted, len(slots), wait_s, address_suffix=suffix), slots)
        for slot in slots:
            if slot.number not in absent:
                job.join(slot.number)
        return job

    return make
