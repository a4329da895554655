"""What `bsl` asks of an experiment tracker, and which trackers there are.

Another one is an entry point in the group `bigsci_launch.trackers`: a function that takes a `TrackedRun`, and returns a
`Tracker`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from bigsci_launch.config.schema.monitor import TRACKER_GROUP, TRACKER_PACKAGES
from bigsci_launch.errors import BslError, ConfigError

PROJECT = "bsl"
"""The project or experiment of a run, where the environment names no other."""
NO_STEP = -1
WRITTEN_S = 60.0
"""How long a tracker may take to write what it was given, and to end after the process that gave it."""
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as a tracker knows it. `id` is the same for all attempts, `folder` is for files of the tracker."""

    name: str
    id: str
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Sections of the run file; no values of `env` or `monitor`."""


@dataclass(frozen=True, slots=True)
class TrackedStep:
    """The values of one step. `time` is in seconds since the epoch; None if it is not known."""

    step: int
    time: float | None
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrackedNote:
    """What happened at a step: an attempt began, or a watcher found something. `key` is the same each time."""

    key: str
    title: str
    text: str
    step: int | None
    time: float


class Tracker(Protocol):
    """One run of a tracker, which is resumed if it is there."""

    def newest_step(self) -> int | None:
        """Return the newest step that the tracker has, and NO_STEP if it has none; None if it cannot tell."""

    def log(self, steps: Sequence[TrackedStep]) -> None:
        """Add steps, each higher than all before it."""

    def annotate(self, note: TrackedNote) -> None:
        """Add a note, as far as the tracker has any."""

    def close(self) -> None:
        """Write what is not written yet. The run may be resumed."""


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Return the tracker of that name with the run.

    Raises:
        BslError: its package is missing; ConfigError: there is no such tracker.
    """
    if name in TRACKER_PACKAGES:
        if find_spec(name) is None:
            raise missing(name)
        module = import_module(f"{__package__}.{name}_run")
        return cast(Callable[[TrackedRun], Tracker], module.open_run)(run)
    for entry in entry_points(group=TRACKER_GROUP, name=name):
        return cast(Tracker, entry.load()(run))
    raise ConfigError(
        f"monitor.trackers: there is no tracker {name!r}",
        hint=f"there are {', '.join(known_names())}; another one is an entry point in the group {TRACKER_GROUP}",
    )


def wait_until_written(holds: Callable[[], bool], trouble: str) -> None:
    """Wait until a tracker that writes in its own time has written.

    Raises:
        BslError: it does not, in the words of `trouble`.
    """
    deadline = time.monotonic() + WRITTEN_S
    while not holds():
        if time.monotonic() > deadline:
            raise BslError(f"{trouble} after {WRITTEN_S:.0f} s")
        time.sleep(LOOK_S)


def known_names() -> list[str]:
    return [*TRACKER_PACKAGES, *sorted(entry.name for entry in entry_points(group=TRACKER_GROUP))]


def missing(name: str) -> BslError:
    return BslError(
        f"monitor.trackers: {name} needs the package {name}, which is not installed",
        hint=f"install it for the Python of bsl, {sys.executable}",
    )
