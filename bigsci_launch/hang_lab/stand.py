"""Waits until a reproduction has reached its state, as seen from the notes and processes of its ranks.

There are no fixed sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.errors import INSTALL_TRAIN, LabError
from bigsci_launch.hang_lab.catalogue import Stand
from bigsci_launch.hang_lab.processes import rest_marks
from bigsci_launch.runs.events import read_last_events
from bigsci_launch.runs.layout import AttemptDir, read_json
from bigsci_launch.safe_files import read_file

POLL_S = 0.05
REST_S = 0.4
"""A reproduction is at rest if nothing has moved for this long."""
LEFT_BEHIND_S = 5.0
"""Ranks that have rested this long after others crashed are taken to stay: gloo sometimes leaves one waiting when a
peer aborts."""
NUM_STEPS_AFTER = 3
"""Number of steps that a rank must have done since the culprit struck, to count as moving."""


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks of a reproduction. `notes` is the folder where each rank notes that it has struck. `is_here` says
    whether their processes are on this machine."""

    attempt: AttemptDir
    notes: Path
    world_size: int
    culprit: int
    is_here: bool = True

    def struck(self) -> set[int]:
        return {int(path.name.partition("-")[2]) for path in self.notes.glob("struck-*")}

    def ended(self) -> set[int]:
        return {rank for rank in range(self.world_size) if self.attempt.exit_file(rank).exists()}

    def pids(self) -> dict[int, int]:
        files = {rank: self.attempt.pid_file(rank) for rank in range(self.world_size)}
        return {rank: int(read_json(path)["pid"]) for rank, path in files.items() if path.exists()}

    def reports(self) -> dict[int, int]:
        """Return the number of bytes that each rank has reported."""
        files = {rank: self.attempt.event_file(rank) for rank in range(self.world_size)}
        return {rank: path.stat().st_size for rank, path in files.items() if path.exists()}

    def steps(self) -> dict[int, int]:
        return {rank: self._step(rank) for rank in range(self.world_size)}

    def _step(self, rank: int) -> int:
        return max((event.get("step") or 0 for event in read_last_events(self.attempt.event_file(rank))), default=0)

    def last_words(self, rank: int) -> str:
        log = self.attempt.log_file(rank)
        lines = read_file(log).decode("utf-8", "replace").splitlines() if log.exists() else []
        return lines[-1] if lines else "its log is empty"


def wait_for_stand(job: Job, stand: Stand, timeout_s: float) -> None:
    """Return once `job` has reached the state `stand`.

    Raises:
        LabError: it does not within `timeout_s`, or a rank has ended that should not have.
    """
    deadline = time.monotonic() + timeout_s
    moments = _moments(job)
    while not _stands(job, stand, moments):
        _require_alive(job, stand)
        if time.monotonic() > deadline:
            raise LabError(f"the reproduction did not reach its state within {timeout_s:.0f} s: {_describe(job)}")
        time.sleep(POLL_S)


def _stands(job: Job, stand: Stand, moments: Iterator[float]) -> bool:
    rest_s = next(moments)
    struck, ended, everybody = job.struck(), job.ended(), set(range(job.world_size))
    if stand is Stand.ALL_ENDED:
        return ended == everybody or (bool(ended) and rest_s >= LEFT_BEHIND_S)
    if stand is Stand.LEAVING:
        return struck == everybody
    if not struck or len(job.pids()) < job.world_size:
        return False
    if stand is Stand.MOVING:
        return _has_moved_on(job)
    if stand is Stand.CULPRIT_ENDED:
        return ended == {job.culprit} and rest_s >= REST_S
    if stand is Stand.OTHERS_ENDED:
        return ended == everybody - {job.culprit} and rest_s >= REST_S
    if stand is Stand.JOINING:
        return job.reports().keys() == everybody and _reported_nothing_for(job) >= REST_S
    return rest_s >= REST_S


def _reported_nothing_for(job: Job) -> float:
    """Return the seconds since any rank last reported."""
    return time.time() - max(job.attempt.event_file(rank).stat().st_mtime for rank in range(job.world_size))


def _has_moved_on(job: Job) -> bool:
    struck_at = min(path.stat().st_mtime for path in job.notes.glob("struck-*"))
    events = read_last_events(job.attempt.event_file((job.culprit + 1) % job.world_size))
    beats = [event for event in events if event["kind"] == "heartbeat" and event["time"] > struck_at]
    return len(beats) >= NUM_STEPS_AFTER


def _moments(job: Job) -> Iterator[float]:
    """Yield for how long all ranks that have not struck have neither run nor reported anything."""
    seen: object = None
    since = time.monotonic()
    while True:
        now = _marks(job.reports(), job.pids() if job.is_here else {}, job.struck() | job.ended())
        if now != seen:
            seen, since = now, time.monotonic()
        yield time.monotonic() - since


def _marks(reports: Mapping[int, int], pids: Mapping[int, int], exempt: Collection[int]) -> object:
    return reports, rest_marks(pid for rank, pid in pids.items() if rank not in exempt)


def _require_alive(job: Job, stand: Stand) -> None:
    ended = job.ended()
    may_end = {
        Stand.ALL_ENDED: ended,
        Stand.LEAVING: ended,
        Stand.CULPRIT_ENDED: {job.culprit},
        Stand.OTHERS_ENDED: ended - {job.culprit},
    }.get(stand, set())
    for rank in ended - may_end:
        words = job.last_words(rank)
        hint = INSTALL_TRAIN if "ModuleNotFoundError" in words else None
        raise LabError(f"rank {rank} of the reproduction has ended: {words}", hint=hint)


def _describe(job: Job) -> str:
    steps = job.steps()
    return (
        f"{len(job.pids())} of {job.world_size} ranks were started, {len(job.struck())} have struck, "
        f"{len(job.ended())} have ended; steps {min(steps.values())} to {max(steps.values())}"
    )
