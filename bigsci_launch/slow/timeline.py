"""What one rank did, from its ring: pieces of its own work, with their phase, and its ends of collectives and messages.

Only the thread that communicates is followed. Of a call inside another one, the outer one counts if it communicates,
else the inner one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from bigsci_launch.slow.straggler import StepPhase
from bigsci_launch.spy.evidence.calls.ring import Ring, RingCall

OF_CALLS = {
    "next batch": StepPhase.DATA,
    "forward": StepPhase.FORWARD,
    "backward": StepPhase.BACKWARD,
    "optimizer step": StepPhase.OPTIMIZER,
    "garbage collection": StepPhase.GARBAGE_COLLECTION,
    "torch.save": StepPhase.SAVE,
}
OF_MARKS = {"save": StepPhase.SAVE, "copy": StepPhase.SAVE, "eval": StepPhase.EVALUATION}
"""Phases that a program has marked itself, apart from `step`, which has several."""
MARK = "phase"
COUNTING = "optimizer step"
REDUCTION = "gradient reduction"
FROM_ROOT = ("broadcast", "scatter")

Key = tuple[str, str | int, int, int, int]
"""What the ends of one collective or message have in common."""


class Doing(Enum):
    """What a piece of a timeline is. Work that a rank has only begun has a `BEGIN` without length."""

    OWN = auto()
    IDLE = auto()
    BEGIN = auto()
    WAIT = auto()


@dataclass(frozen=True, slots=True)
class TimelinePiece:
    """Times are seconds by the clock of the rank's node. A `WAIT` ends when all of `needs` have begun `key`, or later.

    Pieces that are `IDLE` wait for something that no ring shows, such as a key of a store.
    """

    doing: Doing
    step: int
    begin: float
    end: float
    phase: StepPhase = StepPhase.UNKNOWN
    site: str | None = None
    key: Key | None = None
    needs: tuple[int, ...] = ()
    size: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class WithoutCore:
    """For how many seconds of a step a quota of CPU time held a process up, and for how many its thread was ready
    without a core, as the kernel counts. The second has the first in it, unless the thread waited for others then."""

    held: float = 0.0
    ready: float = 0.0


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """The pieces of a rank, oldest first. `threads` is how many of its threads communicate.

    `without_core` has steps that it is known of.
    """

    rank: int
    pieces: tuple[TimelinePiece, ...]
    threads: int
    without_core: Mapping[int, WithoutCore] = field(default_factory=dict)

    @property
    def steps(self) -> range:
        """Its complete steps."""
        return range(self.pieces[0].step + 1, self.pieces[-1].step) if self.pieces else range(0)

    def within(self, steps: range) -> RankTimeline:
        pieces = tuple(piece for piece in self.pieces if piece.step in steps)
        known = {step: each for step, each in self.without_core.items() if step in steps}
        return replace(self, pieces=pieces, without_core=known)


def timeline_of(rank: int, ring: Ring) -> RankTimeline:
    """Return what a rank did, since when its ring holds everything, until the call that it has not left."""
    held = set(ring.calls)
    calls = [*(call for call in ring.open_calls if call not in held), *ring.calls, *ring.phases]
    threads = {call.thread for call in calls if _meets(call)}
    main = max(threads, key=lambda thread: sum(_meets(call) and call.thread == thread for call in calls), default=None)
    own = sorted((call for call in calls if call.thread == main), key=_order)
    until = min((call.entered for call in own if call.left is None and not call.is_async), default=float("inf"))
    pieces = _Sweep(rank).pieces([call for call in own if call.entered < until])
    return RankTimeline(rank, tuple(_with_sites(_with_phases(pieces))), len(threads), _without_core(own))


def _without_core(calls: Iterable[RingCall]) -> dict[int, WithoutCore]:
    """Return what the steps of optimizers have counted (diagnostics/ring_phases.py), in microseconds."""
    found: dict[int, WithoutCore] = {}
    for call in calls:
        if call.operation == COUNTING and call.step is not None and call.tag is not None:
            before = found.get(call.step, WithoutCore())
            found[call.step] = WithoutCore(before.held + (call.peer or 0) / 1e6, before.ready + call.tag / 1e6)
    return found


def _order(call: RingCall) -> tuple[float, float]:
    return call.entered, -(call.left or float("inf"))


def _meets(call: RingCall) -> bool:
    return bool(call.number or call.is_message)


class _Sweep:
    """Walks through the calls of a thread, which are nested in each other."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._found: list[TimelinePiece] = []
        self._inside: list[RingCall] = []
        self._at, self._step = 0.0, 0
        self._begun: set[Key] = set()
        self._messages: dict[tuple[int, int, int, int], int] = {}
        self._waited: dict[tuple[int, int, int, int], int] = {}

    def pieces(self, calls: Sequence[RingCall]) -> list[TimelinePiece]:
        if calls:
            self._at, self._step = calls[0].entered, calls[0].step or 0
        for call in calls:
            self._leave_until(call.entered)
            self._to(call.entered)
            self._step = call.step if call.step is not None else self._step
            if not any(_meets(outer) for outer in self._inside):
                self._enter(call)
        self._leave_until(float("inf"))
        return self._found

    def _enter(self, call: RingCall) -> None:
        if call.operation == MARK:
            here = TimelinePiece(
                Doing.OWN, self._step, call.entered, call.entered, OF_MARKS.get(call.tensors or "", StepPhase.UNKNOWN)
            )
            self._found.append(replace(here, site=MARK))
        elif _meets(call):
            begins = call.is_async or call.operation == REDUCTION or not self._is_begun(call)
            key, needs = self._key(call, begins=begins)
            made = TimelinePiece(Doing.BEGIN, self._step, call.entered, call.entered, site=call.place, key=key)
            if begins:
                self._found.append(made)
                self._begun.add(key)
            if not call.is_async:
                self._found.append(
                    replace(made, doing=Doing.WAIT, end=call.left or call.entered, needs=needs, size=_size(call))
                )
                self._inside.append(call)
        elif call.left is not None:
            self._inside.append(call)

    def _leave_until(self, moment: float) -> None:
        while self._inside and (self._inside[-1].left or moment) <= moment:
            self._to(self._inside[-1].left or moment)
            self._inside.pop()

    def _to(self, moment: float) -> None:
        """Write what the time until `moment` was spent with."""
        begin, self._at = self._at, max(self._at, moment)
        if moment <= begin or any(_meets(outer) for outer in self._inside):
            return
        inner = self._inside[-1] if self._inside else None
        if inner is None:
            self._found.append(TimelinePiece(Doing.OWN, self._step, begin, moment))
        elif (phase := OF_CALLS.get(inner.operation or "")) is not None:
            self._found.append(TimelinePiece(Doing.OWN, self._step, begin, moment, phase, inner.place))
        else:
            self._found.append(TimelinePiece(Doing.IDLE, self._step, begin, moment))

    def _is_begun(self, call: RingCall) -> bool:
        """Whether the call waits for what an earlier one of this rank has begun."""
        if call.is_message:
            return call.operation in ("isend", "irecv")
        return self._key(call, begins=False)[0] in self._begun

    def _key(self, call: RingCall, *, begins: bool) -> tuple[Key, tuple[int, ...]]:
        if call.is_message:
            return self._message(call, begins=begins)
        members = members_of(call.group or "")
        kind = "gradients" if call.operation == REDUCTION else "group"
        needs = members if call.operation not in FROM_ROOT or call.peer is None else (call.peer,)
        return (kind, call.group or "?", call.number, 0, 0), needs

    def _message(self, call: RingCall, *, begins: bool) -> tuple[Key, tuple[int, ...]]:
        peer, tag = call.peer or 0, call.tag or 0
        ends = (self._rank, peer) if "send" in (call.operation or "") else (peer, self._rank)
        way = (*ends, tag, self._step)
        counts = self._messages if begins else self._waited
        number = counts.get(way, 0)
        counts[way] = number + 1
        return ("message", *way[:3], (self._step << 20) + number), ends


def _size(call: RingCall) -> str:
    return f"{call.operation} {call.tensors or ''}"


def members_of(group: str) -> tuple[int, ...]:
    """Return the ranks of `0: 0,1,2,3`; nothing where they are not known."""
    ranks = group.partition(": ")[2].split(",")
    return tuple(map(int, ranks)) if all(rank.isdigit() for rank in ranks) else ()


def _with_phases(pieces: Sequence[TimelinePiece]) -> Iterator[TimelinePiece]:
    """Give each piece between two recorded calls the phase that its neighbours and the program's marks say."""
    has_data = any(piece.phase is StepPhase.DATA for piece in pieces)
    following = _next_phases(pieces)
    before, marked, has_met = StepPhase.UNKNOWN, StepPhase.UNKNOWN, False
    for piece, after in zip(pieces, following, strict=True):
        if piece.site == MARK and piece.doing is Doing.OWN and piece.begin == piece.end:
            marked = piece.phase
            continue
        if piece.doing is not Doing.OWN:
            has_met = True
            yield piece
        elif piece.phase is not StepPhase.UNKNOWN and marked is StepPhase.UNKNOWN:
            if piece.phase is not StepPhase.GARBAGE_COLLECTION:
                before, has_met = piece.phase, False
            yield piece
        elif marked is not StepPhase.UNKNOWN:
            is_other = piece.phase is StepPhase.GARBAGE_COLLECTION
            yield piece if is_other else replace(piece, phase=marked)
        else:
            yield replace(piece, phase=_between(before, after, has_data=has_data, has_met=has_met))


def _next_phases(pieces: Sequence[TimelinePiece]) -> list[StepPhase]:
    found, after = [], StepPhase.UNKNOWN
    for piece in reversed(pieces):
        found.append(after)
        if piece.doing is Doing.OWN and piece.phase not in (StepPhase.UNKNOWN, StepPhase.GARBAGE_COLLECTION):
            after = piece.phase
    return found[::-1]


def _between(before: StepPhase, after: StepPhase, *, has_data: bool, has_met: bool) -> StepPhase:
    """Return what a rank does between two recorded phases; `has_met`: it has communicated since the first one."""
    if after is StepPhase.BACKWARD:
        starts_in = before in (StepPhase.DATA, StepPhase.FORWARD, StepPhase.BACKWARD)
        return StepPhase.FORWARD if starts_in or has_met else StepPhase.UNKNOWN
    if after is StepPhase.OPTIMIZER:
        return StepPhase.OPTIMIZER if before in (StepPhase.BACKWARD, StepPhase.OPTIMIZER) else StepPhase.UNKNOWN
    if after is StepPhase.FORWARD:
        return StepPhase.FORWARD if before is StepPhase.DATA else StepPhase.UNKNOWN if has_data else StepPhase.DATA
    if after is StepPhase.DATA and before is StepPhase.DATA:
        return StepPhase.FORWARD
    return StepPhase.UNKNOWN


def _with_sites(pieces: Iterable[TimelinePiece]) -> list[TimelinePiece]:
    """Give each piece without a place in the code that of the next call that communicates."""
    found, site = [], None
    for piece in reversed(list(pieces)):
        if piece.doing in (Doing.BEGIN, Doing.WAIT):
            site = piece.site
        found.append(replace(piece, site=site) if piece.doing is Doing.OWN and piece.site is None else piece)
    return found[::-1]
