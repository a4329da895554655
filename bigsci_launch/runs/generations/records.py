"""The generations of an attempt with `survive`, as values: who took part, what ended each, how the next one came back.

A generation is ended by a failure, and the next one begins. Times are seconds since the epoch by the controller's
clock; only `died` is by that of the node. What was not recorded is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bigsci_launch.topology import Topology

JOINED, RESTORED, FIRST_STEP = "joined", "restored", "first_step"
PHASES = (JOINED, RESTORED, FIRST_STEP)
CAUSES = ("died", "left_early", "lost_runner", "lost_node", "hung", "stopped", "asked")
CONSEQUENCES = ("lost_peer", "stuck")
"""Kinds of failures that follow from another one, if there is one."""
ENDED_ON_REQUEST = "the job was told to end"
"""What the controller gives as its reason if it was ended itself: it is none of its own."""
LONGEST_NOTICE_S = 60.0
"""The controller misses a lost node after its lease of 15 s. A longer time shows that two clocks differ."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rank of a generation, and the slot that it has."""

    rank: int
    slot: int | None
    node: str | None


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What ended a generation, or came of its end. `died` is by the clock of the node, `noticed` by the controller's.

    `kind` is one of `CAUSES` or `CONSEQUENCES`, or a word that a newer version wrote.
    """

    kind: str
    rank: int | None = None
    node: str | None = None
    code: int | None = None
    signal: str | None = None
    step: int | None = None
    words: str | None = None
    died: float | None = None
    noticed: float | None = None

    @property
    def noticed_s(self) -> float | None:
        """Seconds from death to notice; None where the two clocks cannot be compared."""
        if self.died is None or self.noticed is None:
            return None
        seconds = self.noticed - self.died
        return seconds if 0 <= seconds <= LONGEST_NOTICE_S else None


@dataclass(frozen=True, slots=True)
class PassedPhase:
    """A phase that the last rank has finished, `seconds` after the generation began."""

    seconds: float | None
    step: int | None = None
    source: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """When all ranks had left a generation. `step` is the highest that was finished; `seconds` began at the failure."""

    time: float | None
    step: int | None
    seconds: float | None
    killed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeLeftOut:
    """A node that gets no rank until a moment; None: as long as the attempt lasts."""

    node: str
    reason: str
    until: float | None


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation. `began` is None if the line that says it is missing. `phases` are those that all ranks passed."""

    number: int
    began: float | None = None
    world_size: int | None = None
    topology: Topology | None = None
    members: tuple[Member, ...] = ()
    num_spares: int = 0
    phases: Mapping[str, PassedPhase] = field(default_factory=dict)
    failures: tuple[RankFailure, ...] = ()
    ended: Ended | None = None
    left_out: tuple[NodeLeftOut, ...] = ()

    @property
    def cause(self) -> RankFailure | None:
        """The failure that ended it: the first that another one cannot have caused, else the first."""
        own = [each for each in self.failures if each.kind not in CONSEQUENCES]
        return next(iter([*own, *self.failures]), None)

    @property
    def is_disturbed(self) -> bool:
        return bool(self.failures) or self.ended is not None

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that have a rank."""
        return frozenset(member.node for member in self.members if member.node)


@dataclass(frozen=True, slots=True)
class Generations:
    """All generations of an attempt, the oldest first; at least one, unless the controller gave up before.

    `exit_code` is that of an attempt whose ranks have ended, `gave_up` why the controller began no further generation.
    `unknown` are events that this version does not know.
    """

    all: tuple[Generation, ...]
    exit_code: int | None = None
    gave_up: str | None = None
    unknown: tuple[str, ...] = ()

    @property
    def newest(self) -> Generation:
        return self.all[-1]

    @property
    def is_over(self) -> bool:
        return self.exit_code is not None or self.gave_up is not None

    def needs(self, node: str) -> bool:
        """Whether the newest generation has a rank on a node, as far as is known."""
        return not self.newest.nodes or node in self.newest.nodes

    def has(self, rank: int) -> bool:
        """Whether the newest generation has a rank: it may have fewer than earlier ones."""
        return self.newest.world_size is None or rank < self.newest.world_size

    @property
    def have_phases(self) -> bool:
        """Whether ranks say which phases they pass; only those of `bsl train` do."""
        return any(each.phases for each in self.all)

    @property
    def is_recovering(self) -> bool:
        """Whether a failure has not been overcome: the first step after it has not been finished, as far as ranks say
        it; otherwise, the programs have not been started again."""
        newest = self.newest
        if self.is_over:
            return False
        if newest.is_disturbed:
            return True
        return len(self.all) > 1 and self.have_phases and FIRST_STEP not in newest.phases

    @property
    def recovering_since(self) -> float | None:
        """When the failure was noticed that has not been overcome; None if there is none, or if it was not recorded."""
        if not self.is_recovering:
            return None
        failed = self.newest if self.newest.is_disturbed else self.all[-2]
        return failed.cause.noticed if failed.cause else failed.ended.time if failed.ended else None


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a generation came back from the failure of the one before. Seconds of its phases, None if not known.

    `left_s`: until all ranks had left. `slots_s`: until enough slots were ready. `total_s` is from the death, or from
    its notice where that is not known, to the first step, or to the start of programs that say nothing of their steps.
    `step` is the one after which it continued, from `source`; `replayed` steps had been finished before.
    `needed_no_step`: that was the last step of the run, which then finished.
    """

    failed: Generation
    generation: Generation
    noticed_s: float | None
    left_s: float | None
    slots_s: float | None
    grouped_s: float | None
    restored_s: float | None
    first_step_s: float | None
    total_s: float | None
    step: int | None
    source: str | None
    why: str | None
    replayed: int | None
    needed_no_step: bool

    @property
    def first_step(self) -> int | None:
        """The first step that was finished; None if none was."""
        phase = self.generation.phases.get(FIRST_STEP)
        return phase.step if phase else None


def recoveries(found: Generations) -> list[Recovery]:
    """Return how each generation but the first came back, the oldest first."""
    return [_recovery(failed, generation, found) for failed, generation in zip(found.all, found.all[1:], strict=False)]


def _recovery(failed: Generation, generation: Generation, found: Generations) -> Recovery:
    cause, ended = failed.cause, failed.ended
    joined, restored, first = (generation.phases.get(name) for name in PHASES)
    noticed_s = cause.noticed_s if cause else None
    noticed, began = cause.noticed if cause else None, generation.began
    back_s = (first.seconds if first else None) if found.have_phases else 0.0
    total_s = None
    if noticed is not None and began is not None and back_s is not None:
        total_s = (noticed_s or 0.0) + began - noticed + back_s
    step = restored.step if restored else None
    return Recovery(
        failed=failed,
        generation=generation,
        noticed_s=noticed_s,
        left_s=ended.seconds if ended else None,
        slots_s=_between(ended.time if ended else None, began),
        grouped_s=joined.seconds if joined else None,
        restored_s=_between(joined.seconds if joined else None, restored.seconds if restored else None),
        first_step_s=_between(restored.seconds if restored else None, first.seconds if first else None),
        total_s=total_s,
        step=step,
        source=restored.source if restored else None,
        why=restored.why if restored else None,
        replayed=_replayed(ended.step if ended else None, step),
        needed_no_step=found.exit_code == 0 and generation is found.newest and first is None and step is not None,
    )


def _between(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(0.0, other - one)


def _replayed(finished: int | None, step: int | None) -> int | None:
    """Return how many finished steps are done again. Ranks that died before they could say how far they were may have
    finished more than is known, so a generation that continues further on does not show it."""
    if finished is None or step is None or step > finished:
        return None
    return finished - step
