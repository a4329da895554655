"""The rows of `bsl top`: their order, which are shown, and which is selected. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bigsci_launch.runs.layout import RunDir
from bigsci_launch.scheduler.job import JobInfo, JobState

LONGEST_NUMBER = 12
"""Numbers in names are in their order up to so many digits."""
_DIGITS = re.compile(r"[0-9]+")
ORDERS = ("activity", "name", "step", "GPU-hours")


@dataclass(frozen=True, slots=True)
class TopDetails:
    """What the records of a run show. Times in seconds; what is not known is None."""

    job: JobInfo
    label: str = ""
    step: int | None = None
    total_steps: int | None = None
    seconds: float | None = None
    loss: float | None = None
    phase: str = ""
    findings: tuple[str, ...] = ()
    gpu_hours: float | None = None
    next: str = ""
    last_sign: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class TopRow:
    """A run of `bsl`, or a job that it did not submit. `key` is the same at each look; `job` is Slurm's last answer."""

    key: str
    name: str
    job: JobInfo | None
    run: RunDir | None = None
    gpus: int | None = None
    details: TopDetails | None = None

    @property
    def state(self) -> JobState | None:
        """The state of its job; None if it was not looked up yet."""
        if self.job is not None:
            return self.job.state
        return self.details.job.state if self.details is not None else None

    @property
    def argument(self) -> tuple[str, ...]:
        """What commands are given to name it."""
        return (str(self.run.path),) if self.run is not None else ("--jobid", self.job.job_id if self.job else "")


@dataclass(frozen=True, slots=True)
class TopState:
    """What the screen shows: of all rows that were `found`, those with the words that are looked for, in their order;
    the selected one, and the first that is visible."""

    found: tuple[TopRow, ...] = ()
    rows: tuple[TopRow, ...] = ()
    selected: str = ""
    is_chosen: bool = False
    """Whether a person has moved the selection; until then it is the first row, whichever that is."""
    first: int = 0
    order: str = ORDERS[0]
    words: str = ""
    """Only rows are shown whose name, job or state has these words."""
    asked: float | None = None
    """When Slurm was asked, in seconds since the epoch; None if it was not yet."""
    trouble: str = ""
    """Why Slurm's jobs are not known; empty if they are."""
    details: Mapping[str, TopDetails] = field(default_factory=dict)

    @property
    def at(self) -> int:
        """The place of the selected row."""
        return next((place for place, row in enumerate(self.rows) if row.key == self.selected), 0)

    @property
    def row(self) -> TopRow | None:
        return self.rows[self.at] if self.rows else None

    def visible(self, height: int) -> tuple[TopRow, ...]:
        return self.rows[self.first : self.first + height]


def with_rows(state: TopState, rows: Iterable[TopRow], asked: float, trouble: str = "") -> TopState:
    """Return the state with what was found now. The selection stays with its row, wherever that is then."""
    found = tuple(replace(row, details=state.details.get(row.key)) for row in rows)
    return _arranged(replace(state, found=found, asked=asked, trouble=trouble))


def with_details(state: TopState, details: Mapping[str, TopDetails]) -> TopState:
    """Return the state with what the records of some runs show."""
    found = tuple(replace(row, details=details[row.key]) if row.key in details else row for row in state.found)
    return _arranged(replace(state, found=found, details={**state.details, **details}))


def with_words(state: TopState, words: str) -> TopState:
    """Return the state with only the rows that have all the words in their name, job or state."""
    return _arranged(replace(state, words=words, first=0))


def moved(state: TopState, by: int, height: int) -> TopState:
    """Return the state with the selection `by` rows further down, and visible in `height` rows."""
    if not state.rows:
        return state
    at = min(max(state.at + by, 0), len(state.rows) - 1)
    return scrolled(replace(state, selected=state.rows[at].key, is_chosen=at > 0), height)


def scrolled(state: TopState, height: int) -> TopState:
    """Return the state whose selected row is visible in `height` rows."""
    lowest = max(0, state.at - max(1, height) + 1)
    return replace(state, first=min(max(state.first, lowest), state.at))


def next_order(state: TopState) -> TopState:
    place = (ORDERS.index(state.order) + 1) % len(ORDERS)
    return _arranged(replace(state, order=ORDERS[place]))


def _arranged(state: TopState) -> TopState:
    wanted = state.words.casefold().split()
    shown = (row for row in state.found if all(word in _text(row) for word in wanted))
    rows = tuple(sorted(shown, key=lambda row: _place(row, state.order)))
    is_there = state.is_chosen and any(row.key == state.selected for row in rows)
    selected = state.selected if is_there else rows[0].key if rows else ""
    return replace(state, rows=rows, selected=selected)


def _text(row: TopRow) -> str:
    job = row.job.job_id if row.job is not None else ""
    return f"{row.name} {job} {row.state.value if row.state else ''}".casefold()


def _place(row: TopRow, order: str) -> tuple[float | str, ...]:
    """Return where a row is in an order: what needs a person first, then what runs, waits, and has ended. Runs of `bsl`
    come before other jobs."""
    details, name = row.details, _DIGITS.sub(lambda digits: digits[0].zfill(LONGEST_NUMBER), row.name)
    if order == "name":
        return (name, row.key)
    if order == "step":
        return (-(details.step or 0) if details else 0, name, row.key)
    if order == "GPU-hours":
        return (-(details.gpu_hours or 0.0) if details else 0.0, name, row.key)
    state = row.state
    group = 3 if state is None else 2 if state.is_over else 1 if state.is_queued else 0
    is_found = bool(details and details.findings) and state is not None and not state.is_over
    ended = -(details.last_sign or 0.0) if details and group >= 2 else 0.0
    return (0 if is_found else 1, group, row.run is None, ended, name, row.key)
