"""Whether the next generation can begin, has to wait, or never will. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from bigsci_launch.recover.generation import Membership, Slot
from bigsci_launch.recover.members import WantedLayout, choose_members
from bigsci_launch.recover.orders import SayLine, SendToSlot, SlotOrder, StartRunner
from bigsci_launch.topology import compress_ranks

HELLO_S = 60.0
"""How long the first generation waits for slots that have never connected, after the newest one that has."""
SAME_SLOT_S = 2.0
"""How long a lost process may take to be replaced in its own slot, if a spare slot is ready."""
FIRST_READY_S = 600.0
"""How long programs may take to import everything, when a job starts on a cold file system."""
SAY_EVERY_S = 10.0
"""A generation that has not begun after this long says what it waits for, and then again when that has changed."""
READY_S = 120.0
"""The same for the process that replaces one, if there is no spare."""
MAX_DEATHS = 3
"""A slot whose process dies so often before it takes a rank gets none."""
MAX_RUNNERS = 3
"""How often the runner of a slot is started again."""
RUNNER_S = 15.0
"""How long a runner that was started again may take to connect."""
NODE_DIES_S = 1.0
"""How long the other slots of a node have to show that they do not die with the first one."""


@dataclass(frozen=True, slots=True)
class MustWait:
    """The generation cannot begin yet. What it waits for, in words."""

    text: str


@dataclass(frozen=True, slots=True)
class CannotBegin:
    """No generation can begin, and nothing will change that."""

    why: str


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The slots while a generation gathers. Times are in seconds.

    `slots` are connected and may take a rank, `ready` are those of them that can do so now. `absent` have never
    connected. `waited_s` counts from the end of the generation before, and from the newest slot that has connected;
    None if none has.
    """

    wanted: WantedLayout
    before: Membership | None
    slots: Mapping[int, Slot]
    ready: Collection[int]
    absent: Collection[int]
    gone: Mapping[int, str]
    waited_s: float | None

    def decide(self) -> Membership | MustWait | CannotBegin:
        """Return who takes part, what is waited for, or why the job cannot continue."""
        waits_for_absent = self.before is None and bool(self.absent) and not self._has_waited(HELLO_S)
        best = choose_members(self.wanted, self.slots, self.before)
        if isinstance(best, Membership) and self._is_ready(best) and not (waits_for_absent and self._may_improve(best)):
            return best
        if waits_for_absent:
            return MustWait(f"slots {compress_ranks(self.absent)} have not connected")
        if isinstance(best, str):
            return CannotBegin(self._explain(best))
        now = choose_members(self.wanted, {number: self.slots[number] for number in self.ready}, self.before)
        if not self._has_waited(self._grace_s(best, now)):
            return MustWait(f"slots {compress_ranks(self.slots.keys() - set(self.ready))} are not ready")
        return CannotBegin(self._explain(now)) if isinstance(now, str) else now

    def _is_ready(self, line: Membership) -> bool:
        return all(slot.number in self.ready for slot in line.slots)

    def _may_improve(self, line: Membership) -> bool:
        """Whether the slots that have not connected would change who takes part."""
        return [slot.number for slot in line.slots] != list(range(self.wanted.topology.world_size))

    def _grace_s(self, best: Membership, now: Membership | str) -> float:
        if isinstance(now, Membership) and now.topology.dp == best.topology.dp:
            return SAME_SLOT_S if self.before is not None else HELLO_S
        return READY_S if self.before is not None else FIRST_READY_S

    def _has_waited(self, seconds: float) -> bool:
        return self.waited_s is not None and self.waited_s >= seconds

    def _explain(self, why: str) -> str:
        """Return `why`, with the slots that are missing."""
        parts = [why]
        if self.absent:
            parts.append(f"slots that never connected: {compress_ranks(self.absent)}")
        if late := self.slots.keys() - set(self.ready):
            parts.append(f"slots that were not ready in time: {compress_ranks(late)}")
        parts += [f"slot {number}: {text}" for number, text in sorted(self.gone.items())[:4]]
        return "; ".join(parts)


class WaitWords:
    """Says what a generation waits for when that has changed, and not too often: slots become ready one by one."""

    def __init__(self) -> None:
        self._text, self._said_at = "", 0.0

    def say(self, text: str, since: float, clock: float) -> Iterator[SlotOrder]:
        """Yield the order to say it, if it is time to; the generation gathers `since` then."""
        if text != self._text and clock >= max(since, self._said_at) + SAY_EVERY_S:
            self._text, self._said_at = text, clock
            yield SayLine(f"waiting: {text}")


class SlotDeaths:
    """How often processes have died in each slot while they waited for a rank. A slot where that goes too far is out:
    it gets no rank any more."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def is_out(self, slot: int) -> bool:
        return self._counts[slot] >= MAX_DEATHS

    def note(self, slot: int, *, is_final: bool) -> None:
        """Note a death; `is_final`: the slot itself expects no better one."""
        self._counts[slot] = MAX_DEATHS if is_final else self._counts[slot] + 1

    def rule_out(self, slot: int) -> None:
        self._counts[slot] = MAX_DEATHS

    def forget(self, slots: Iterable[int]) -> None:
        """Begin to count again for slots whose ranks have stepped, unless they are out."""
        for slot in slots:
            if not self.is_out(slot):
                del self._counts[slot]


class LostRunners:
    """Slots that have lost their runner, and who starts another one there: on this machine the controller itself, on
    other nodes a runner that lives on the same one."""

    def __init__(self, *, is_local: bool) -> None:
        self._is_local = is_local
        self._slots: dict[int, Slot] = {}
        self._starts: Counter[int] = Counter()
        self._doubtful: dict[int, float] = {}
        """Until when the loss of a runner may turn out to be that of its node."""
        self._due: dict[int, float] = {}
        """When the next runner of each slot is started: at once, or because the last one did not come."""

    def add(self, slot: Slot, clock: float) -> None:
        self._slots[slot.number] = slot
        self._due[slot.number] = self._doubtful[slot.number] = clock + (0.0 if self._is_local else NODE_DIES_S)

    def remove(self, number: int) -> None:
        """Note that a slot has a runner again, or will have none."""
        self._slots.pop(number, None)

    def coming(self, living: Mapping[int, Slot], clock: float) -> dict[int, Slot]:
        """Return the slots that may have a runner again soon."""
        return {
            number: slot
            for number, slot in self._slots.items()
            if (self._starts[number] < MAX_RUNNERS or clock < self._due[number])
            and (self._is_local or _neighbour(slot, living) is not None)
        }

    def are_doubtful(self, living: Mapping[int, Slot], clock: float) -> bool:
        """Whether a lost runner may be the first sign that its whole node is about to go."""
        return any(clock < self._doubtful[number] for number in self.coming(living, clock))

    def start(self, living: Mapping[int, Slot], clock: float) -> Iterator[SlotOrder]:
        """Yield the orders to start runners that are due now."""
        for number, slot in self.coming(living, clock).items():
            if clock >= self._due[number]:
                self._starts[number] += 1
                self._due[number] = clock + RUNNER_S
                yield self._order(slot, _neighbour(slot, living))

    def _order(self, slot: Slot, neighbour: Slot | None) -> SlotOrder:
        if self._is_local or neighbour is None:
            return StartRunner(slot.number, slot.runner_pid)
        names = {"slot": slot.number, "local_rank": slot.local_rank, "runner_pid": slot.runner_pid}
        return SendToSlot(neighbour.number, {"do": "start_runner", **names, "place": dict(slot.place)})


def _neighbour(slot: Slot, living: Mapping[int, Slot]) -> Slot | None:
    return next((each for _, each in sorted(living.items()) if each.node == slot.node), None)


def slots_to_avoid(unfit: Slot, slots: Mapping[int, Slot], world_size: int) -> list[int]:
    """Return which slots get no rank because the node of one failed a check: all of that node if the layout fits
    without it, else that one alone. `slots` are those that could take a rank until now."""
    elsewhere = sum(slot.node != unfit.node for slot in slots.values())
    if elsewhere < world_size:
        return [unfit.number]
    return [number for number, slot in slots.items() if slot.node == unfit.node]
