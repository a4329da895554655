"""Whether the next generation can begin, has to wait, or never will. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from bigsci_launch.recover.generation import LineUp, Seat
from bigsci_launch.recover.members import WantedLayout, line_up
from bigsci_launch.topology import compress_ranks

HELLO_S = 60.0
"""How long the first generation waits for seats that have never connected, after the newest one that has."""
SAME_SEAT_S = 2.0
"""How long a lost process may take to be replaced in its own seat, if a spare seat is ready."""
FIRST_READY_S = 600.0
"""How long programs may take to import everything, when a job starts on a cold file system."""
SAY_AFTER_S = 10.0
"""A generation that has not begun after this long says what it waits for."""
READY_S = 120.0
"""The same for the process that replaces one, if there is no spare."""


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


def seats_to_avoid(unfit: Seat, seats: Mapping[int, Seat], world_size: int) -> list[int]:
    """Return which seats get no rank because the node of one failed a check: all of that node if the layout fits
    without it, else that one alone. `seats` are those that could take a rank until now."""
    elsewhere = sum(seat.node != unfit.node for seat in seats.values())
    if elsewhere < world_size:
        return [unfit.number]
    return [number for number, seat in seats.items() if seat.node == unfit.node]
