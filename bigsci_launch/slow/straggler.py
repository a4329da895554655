"""What an answer about a slow job consists of: ranks that hold the others up, in which phase, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StepPhase(str, Enum):
    """What a rank does outside communication."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    SAVE = "save"
    EVALUATION = "evaluation"
    GARBAGE_COLLECTION = "garbage collection"
    OUTSIDE_PYTHON = "outside of Python"
    UNKNOWN = "unknown"

    __str__ = str.__str__


class SlowKind(str, Enum):
    """What is slow."""

    RANK = "slow rank"
    STAGE = "slow stage"
    LINK = "slow link"
    CUT = "uneven cut"

    __str__ = str.__str__


@dataclass(frozen=True, slots=True)
class Cost:
    """What the job loses in a step of average length, in ms, with a 95 % interval; None where no interval is known.

    `share` is the part of a step, with its own interval. Without it, a step would last `share` less.
    """

    ms_per_step: float | None
    low: float | None
    high: float | None
    share: float | None
    share_low: float | None = None
    share_high: float | None = None


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks that the others wait for. `ranks` has one rank, all ranks of a stage, or both ends of a link.

    `site` is where in the code, as `train.py:31 forward`; None if that is not known. `causes` are sentences about the
    node, each of which was read and not assumed.
    """

    kind: SlowKind
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    phase: StepPhase
    cost: Cost
    site: str | None = None
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Work that is shared unevenly by nature, such as the loss on the last stage: it blames no rank."""

    ranks: tuple[int, ...]
    reason: str
    cost: Cost


@dataclass(frozen=True, slots=True)
class SlowAnswer:
    """What is known of a slow job. `undecided` is why no rank can be named; None if one is, or if none is slow.

    `num_steps` is None where steps cannot be counted. `missing` are the things that could not be looked at, and why
    messages that are late accuse no link.
    """

    how: str
    num_steps: int | None
    seconds: float
    step_ms: float | None
    stragglers: tuple[Straggler, ...] = ()
    imbalances: tuple[Imbalance, ...] = ()
    missing: tuple[str, ...] = ()
    undecided: str | None = None
