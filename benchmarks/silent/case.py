"""What an injected defect is, what is true of it, and what was seen: values between the field and the judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Group = Literal["data", "state", "nan", "gradients", "restart", "healthy", "heldout"]
Wanted = Literal["stop", "name", "nothing", "anything"]

STEPS, SAVE_EVERY, AT = 12, 4, 6


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true of a defect, known from how it is made.

    `wanted` is what the run must do: `stop` (or be refused), `name` the defect and continue, say `nothing` because
    nothing is wrong, or `anything`, because the defect cannot be told from a healthy run: `why` says the reason. At
    least one finding must match all of `check`, `tensor` and `words` (regular expressions), and blame no rank outside
    of `ranks` (None: not judged, because two that disagree do not know which of them is wrong). `late` is how many
    steps late it may be found if every step is checked; a defect that `is_saved` is in the checkpoints after it.
    """

    wanted: Wanted = "stop"
    check: str = "."
    tensor: str = "."
    words: str = "."
    ranks: tuple[int, ...] | None = None
    why: str = ""
    late: int = 1
    is_saved: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """A defect, where it is injected, and what is true of it.

    `defect` is a name in `defects.py`: it acts on `ranks` (empty: all of them) from step `at` on. `edit` is a name in
    `edits.py`: it changes the files of the run between two attempts. A case with a `base` resumes from that run's
    checkpoint; a healthy case resumes from its own.
    """

    name: str
    group: Group
    what: str
    shape: str = "dp=2"
    defect: str = ""
    edit: str = ""
    at: int = AT
    ranks: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""
    truth: Truth = Truth()


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that the run said: by which check, of which tensor and ranks, in which step (None: before a step)."""

    step: int | None
    check: str
    tensor: str
    ranks: tuple[int, ...] | None
    text: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What an attempt with a defect left.

    `ended` is `finished`, `stopped` (a guard), `refused` (before the first step), `crashed` or `hung`. `stopped_at` is
    the step in which it was stopped. `saved` are the steps after which it saved, `latest` the step of the checkpoint
    from which the next attempt would resume; None without one. `jump` is the loss minus that of the same run without
    the defect, where they differ most; None if they have no step in common.
    """

    ended: str
    stopped_at: int | None = None
    findings: tuple[Finding, ...] = ()
    saved: tuple[int, ...] = ()
    latest: int | None = None
    jump: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A judged case. `verdict` is what happened, `cause` whether it was named right, `is_right` whether all of it is as
    it must be. `tainted` is whether a checkpoint with the defect in it became `latest`."""

    name: str
    verdict: str
    cause: str
    tainted: bool
    is_right: bool
    said: str = ""
    jump: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
