"""Whether the next generation can begin, has to wait, or never will. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from bigsci_launch.recover.generation import LineUp, Seat
from bigsci_launch.recover.members import WantedLayout, line_up
from bigsci_launch.recover.orders import SayLine, SeatOrder, StartRunner, TellSeat
from bigsci_launch.topology import compress_ranks

HELLO_S = 60.0
"""How long the first generation waits for seats that have never connected, after the newest one that has."""
SAME_SEAT_S = 2.0
"""How long a lost process may take to be replaced in its own seat, if a spare seat is ready."""
FIRST_READY_S = 600.0
"""How long programs may take to import everything, when a job starts on a cold file system."""
SAY_EVERY_S = 10.0
"""A generation that has not begun after this long says what it waits for, and then again when that has changed."""
READY_S = 120.0
"""The same for the process that replaces one, if there is no spare."""
MAX_DEATHS = 3
"""A seat whose process dies so often before it takes a rank gets none."""
MAX_RUNNERS = 3
"""How often the runner of a seat is started again."""
RUNNER_S = 15.0
"""How long a runner that was started again may take to connect."""
NODE_DIES_S = 1.0
"""How long the other seats of a node have to show that they do not die with the first one."""


@dataclass(frozen=True, slots=True)
class MustWait:
    """The generation cannot begin yet. What it waits for, in words."""

    text: str


@dataclass(frozen=True, slots=True)
class CannotBegin:
    """No generation can begin, and nothing will change that."""

    why: str


@dataclass(frozen=True, slots=True)
class RollCall:
    """The seats while a generation gathers. Times are in seconds.

    `seats` are connected and may take a rank, `ready` are those of them that can do so now. `absent` have never
    connected. `waited_s` counts from the end of the generation before, and from the newest seat that has connected;
    None if none has.
    """

    wanted: WantedLayout
    before: LineUp | None
    seats: Mapping[int, Seat]
    ready: Collection[int]
    absent: Collection[int]
    gone: Mapping[int, str]
    waited_s: float | None

    def decide(self) -> LineUp | MustWait | CannotBegin:
        """Return who takes part, what is waited for, or why the job cannot continue."""
        waits_for_absent = self.before is None and bool(self.absent) and not self._has_waited(HELLO_S)
        best = line_up(self.wanted, self.seats, self.before)
        if isinstance(best, LineUp) and self._is_ready(best) and not (waits_for_absent and self._may_improve(best)):
            return best
        if waits_for_absent:
            return MustWait(f"seats {compress_ranks(self.absent)} have not connected")
        if isinstance(best, str):
            return CannotBegin(self._explain(best))
        now = line_up(self.wanted, {number: self.seats[number] for number in self.ready}, self.before)
        if not self._has_waited(self._patience_s(best, now)):
            return MustWait(f"seats {compress_ranks(self.seats.keys() - set(self.ready))} are not ready")
        return CannotBegin(self._explain(now)) if isinstance(now, str) else now

    def _is_ready(self, line: LineUp) -> bool:
        return all(seat.number in self.ready for seat in line.seats)

    def _may_improve(self, line: LineUp) -> bool:
        """Whether the seats that have not connected would change who takes part."""
        return [seat.number for seat in line.seats] != list(range(self.wanted.topology.world_size))

    def _patience_s(self, best: LineUp, now: LineUp | str) -> float:
        if isinstance(now, LineUp) and now.topology.dp == best.topology.dp:
            return SAME_SEAT_S if self.before is not None else HELLO_S
        return READY_S if self.before is not None else FIRST_READY_S

    def _has_waited(self, seconds: float) -> bool:
        return self.waited_s is not None and self.waited_s >= seconds

    def _explain(self, why: str) -> str:
        """Return `why`, with the seats that are missing."""
        parts = [why]
        if self.absent:
            parts.append(f"seats that never connected: {compress_ranks(self.absent)}")
        if late := self.seats.keys() - set(self.ready):
            parts.append(f"seats that were not ready in time: {compress_ranks(late)}")
        parts += [f"seat {number}: {text}" for number, text in sorted(self.gone.items())[:4]]
        return "; ".join(parts)


class WaitWords:
    """Says what a generation waits for when that has changed, and not too often: seats become ready one by one."""

    def __init__(self) -> None:
        self._text, self._said_at = "", 0.0

    def say(self, text: str, since: float, clock: float) -> Iterator[SeatOrder]:
        """Yield the order to say it, if it is time to; the generation gathers `since` then."""
        if text != self._text and clock >= max(since, self._said_at) + SAY_EVERY_S:
            self._text, self._said_at = text, clock
            yield SayLine(f"waiting: {text}")


class SeatDeaths:
    """How often processes have died in each seat while they waited for a rank. A seat where that goes too far is out:
    it gets no rank any more."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def is_out(self, seat: int) -> bool:
        return self._counts[seat] >= MAX_DEATHS

    def note(self, seat: int, *, is_final: bool) -> None:
        """Note a death; `is_final`: the seat itself expects no better one."""
        self._counts[seat] = MAX_DEATHS if is_final else self._counts[seat] + 1

    def rule_out(self, seat: int) -> None:
        self._counts[seat] = MAX_DEATHS

    def forget(self, seats: Iterable[int]) -> None:
        """Begin to count again for seats whose ranks have stepped, unless they are out."""
        for seat in seats:
            if not self.is_out(seat):
                del self._counts[seat]


class LostRunners:
    """Seats that have lost their runner, and who starts another one there: on this machine the controller itself, on
    other nodes a runner that lives on the same one."""

    def __init__(self, *, is_local: bool) -> None:
        self._is_local = is_local
        self._seats: dict[int, Seat] = {}
        self._starts: Counter[int] = Counter()
        self._doubtful: dict[int, float] = {}
        """Until when the loss of a runner may turn out to be that of its node."""
        self._due: dict[int, float] = {}
        """When the next runner of each seat is started: at once, or because the last one did not come."""

    def add(self, seat: Seat, clock: float) -> None:
        self._seats[seat.number] = seat
        self._due[seat.number] = self._doubtful[seat.number] = clock + (0.0 if self._is_local else NODE_DIES_S)

    def remove(self, number: int) -> None:
        """Note that a seat has a runner again, or will have none."""
        self._seats.pop(number, None)

    def coming(self, living: Mapping[int, Seat], clock: float) -> dict[int, Seat]:
        """Return the seats that may have a runner again soon."""
        return {
            number: seat
            for number, seat in self._seats.items()
            if (self._starts[number] < MAX_RUNNERS or clock < self._due[number])
            and (self._is_local or _neighbour(seat, living) is not None)
        }

    def are_doubtful(self, living: Mapping[int, Seat], clock: float) -> bool:
        """Whether a lost runner may be the first sign that its whole node is about to go."""
        return any(clock < self._doubtful[number] for number in self.coming(living, clock))

    def start(self, living: Mapping[int, Seat], clock: float) -> Iterator[SeatOrder]:
        """Yield the orders to start runners that are due now."""
        for number, seat in self.coming(living, clock).items():
            if clock >= self._due[number]:
                self._starts[number] += 1
                self._due[number] = clock + RUNNER_S
                yield self._order(seat, _neighbour(seat, living))

    def _order(self, seat: Seat, neighbour: Seat | None) -> SeatOrder:
        if self._is_local or neighbour is None:
            return StartRunner(seat.number, seat.runner_pid)
        names = {"seat": seat.number, "local_rank": seat.local_rank, "runner_pid": seat.runner_pid}
        return TellSeat(neighbour.number, {"do": "start_runner", **names, "place": dict(seat.place)})


def _neighbour(seat: Seat, living: Mapping[int, Seat]) -> Seat | None:
    return next((each for _, each in sorted(living.items()) if each.node == seat.node), None)


def seats_to_avoid(unfit: Seat, seats: Mapping[int, Seat], world_size: int) -> list[int]:
    """Return which seats get no rank because the node of one failed a check: all of that node if the layout fits
    without it, else that one alone. `seats` are those that could take a rank until now."""
    elsewhere = sum(seat.node != unfit.node for seat in seats.values())
    if elsewhere < world_size:
        return [unfit.number]
    return [number for number, seat in seats.items() if seat.node == unfit.node]
