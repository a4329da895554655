"""The verdict as a value."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.naming import agree, name_ranks_and_part


class Strength(Enum):
    """What a conclusion rests on, the weakest first.

    `confidence` is how often conclusions of this strength were right, in state and ranks. It is below what
    `benchmarks/hang_calibration.py` counts (1.00, 0.93, 1.00 and 1.00 of 30, 54, 60 and 25, the weakest first): the
    engine was built on many of these cases.
    """

    NOTHING = "nothing", 0.2
    GUESS = "a guess", 0.8
    DERIVED = "derived from several facts", 0.85
    AGREED = "two sources agree", 0.95
    DIRECT = "a direct fact", 0.97

    def __init__(self, words: str, confidence: float) -> None:
        self.words, self.confidence = words, confidence

    def raised(self, by: int) -> Strength:
        """Return the strength `by` levels higher, or lower if negative. Never above DIRECT or below GUESS."""
        levels = list(Strength)
        return levels[max(1, min(levels.index(self) + by, len(levels) - 1))]

    @property
    def level(self) -> int:
        return list(Strength).index(self)


class GracePeriod(Enum):
    """How long a job must be seen to stand still before a conclusion may call it a hang, in seconds.

    `asleep_s`: the rank that holds up the others has not run at all for that long. `late_s`: others have waited for it
    for that long, whatever it does. None: no length of time is enough.
    """

    NONE = 0.0, 0.0
    """Standing still is no part of the proof: a process that has ended or is stopped, recorded collectives."""
    LOCAL = 10.0, 300.0
    """It waits, without a time limit, for something on its own machine: a lock, a pipe, a thread, a child, ranks in a
    circle."""
    ELSEWHERE = 30.0, 300.0
    """It waits for something else: another machine, a file system, or what is not known."""
    TIMER = 120.0, 900.0
    """A timer will wake it."""
    ASLEEP = 1800.0, 1800.0
    """All sleep, and no rank is known to wait for another: what they sleep in may end by itself."""
    COMPUTES = None, 1800.0
    """It runs: an endless loop looks like work. gloo and NCCL end a job after 10 to 30 minutes by themselves."""

    def __init__(self, asleep_s: float | None, late_s: float) -> None:
        self.asleep_s, self.late_s = asleep_s, late_s


class Reason(Enum):
    """Why to look at a rank. `hit_rate` is how often the first rank with that reason was the right one, of the cases in
    which it came first: (hits + 1) / (cases + 2), counted by `benchmarks/hang_calibration.py`; None below 12 cases, and
    for the odd one out: that rate is only how often the many are right."""

    ACCUSED = "others wait for it, and it shows why", 0.99
    DEPARTED = "its recorded collectives differ", None
    DEPARTED_PEERS = "its recorded collectives differ from those of others", None
    AWAITED = "others wait for it", None
    AWAITED_MAYBE = "others wait for it, and it may wait itself", None
    IN_EACH_CIRCLE = "every circle of waits goes through it", None
    ODD_ONE_OUT = "the odd one out", None
    ODD_STACK = "its stack differs from most", None
    DISAGREES = "it disagrees with others about a collective", None
    OTHER_SIDE = "the many, if the odd one is right", None
    EQUAL_SIDE = "one of several sides of the same size", None
    COUNTED = "its number of collectives differs", None
    UNFINISHED = "it does not return from a collective", None
    NOT_READ = "it could not be read", None

    def __init__(self, words: str, hit_rate: float | None) -> None:
        self.words, self.hit_rate = words, hit_rate


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where to look first: a rank, why, and which sort of reason that is. Not an accusation."""

    rank: int
    why: str
    reason: Reason
    was_measured: bool = False
    """Whether the evidence is of the kind for which rates were counted: stacks of living processes."""

    @property
    def hit_rate(self) -> float | None:
        """How often such a pointer was right; None if that was not measured."""
        return self.reason.hit_rate if self.was_measured else None


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that the evidence accuses, and why."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks that are in the same communication, and where that is."""

    ranks: tuple[int, ...]
    where: str


@dataclass(frozen=True, slots=True)
class KnownHang:
    """A signature that the evidence matches: its name, why such a hang happens, and what ends it."""

    name: str
    explanation: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The verdict.

    `claim` is the one sentence; `evidence` supports it, `missing` would make it more certain, `next` are commands.
    `grace` is how long the job must have stood still for `claim` to be a hang. `look_first` are ranks in the order
    in which an engineer would look at them; unlike `suspects`, they are not accused. In `hang_in_s` seconds it may be
    called a hang if its ranks sleep until then, by the clock of the kernel; None if that is not known.
    """

    state: State
    claim: str
    strength: Strength
    hang_class: HangClass | None = None
    suspects: tuple[Suspect, ...] = ()
    sides: tuple[Side, ...] = ()
    evidence: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    next: tuple[str, ...] = ()
    signature: KnownHang | None = None
    grace: GracePeriod = GracePeriod.ELSEWHERE
    look_first: tuple[Pointer, ...] = ()
    hang_in_s: float | None = None
    if_hang: Conclusion | None = None
    """What would be concluded if the job were known to hang; None if it is, or if nothing suggests that it does."""

    @property
    def confidence(self) -> float:
        """From 0 to 1: how often conclusions of this strength were right."""
        return self.strength.confidence


def name_with_part(evidence: Evidence, ranks: Collection[int]) -> str:
    """`ranks 4-5 (dp0 pp1)`: the ranks, and which part of the grid they are."""
    if not all(map(evidence.is_numbered, ranks)):
        return evidence.names(ranks)
    return name_ranks_and_part(ranks, evidence.topology)


def name_and_verb(evidence: Evidence, ranks: Collection[int], words: str) -> str:
    """`rank 3 (pp1) is in`, `ranks 4-5 (dp0 pp1) are in`, for words that begin with a verb in the singular."""
    return f"{name_with_part(evidence, ranks)} {agree(words, ranks)}"


def where_shared(evidence: Evidence, ranks: Collection[int]) -> str:
    """Where several ranks are together: `all of node n1, pp3`. Empty if they share nothing."""
    ranks = frozenset(ranks)
    if len(ranks) < 2:
        return ""
    nodes = {seen.node for seen in evidence.ranks if seen.rank in ranks}
    on_node = [seen.rank for seen in evidence.ranks if seen.node in nodes] if len(nodes) == 1 and all(nodes) else []
    node = f"{'all of' if len(on_node) == len(ranks) else 'on'} node {next(iter(nodes))}" if on_node else ""
    return ", ".join(part for part in (node, evidence.part(ranks)) if part)
