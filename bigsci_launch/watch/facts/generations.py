"""What a watcher reports of the generations with `survive`: each recovery once, and one that lasts long."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bigsci_launch.errors import BslError
from bigsci_launch.runs.generations.read import read_generations
from bigsci_launch.runs.generations.records import FIRST_STEP, Generations, Recovery, recoveries
from bigsci_launch.runs.generations.recovery_text import (
    LONG_RECOVERY_S,
    began_text,
    left_out_text,
    recovering_text,
    source_text,
    timing_text,
)
from bigsci_launch.runs.generations.samples import read_recorded_steps
from bigsci_launch.runs.layout import AttemptDir, rank_files, read_json
from bigsci_launch.runs.watching.ledger import RunFinding

NEWS_S = 600.0
"""A recovery that is older than this when a watcher first looks has been reported, or is no longer news."""
BACK = "recovered"
"""The kind of finding that tells of a recovery: it is over when it is found."""


class GenerationWatch:
    """Follows the generations of one attempt. Durations are by this watcher's own clock."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._told: set[int] | None = None
        self._recovers_since: dict[int, float] = {}
        self.found: Generations | None = None
        """What the controller has recorded; None without `survive`, and before the first generation."""

    def read(self, now: float) -> None:
        self.found = found = read_generations(self._attempt)
        if found is not None and found.is_recovering:
            self._recovers_since.setdefault(_recovering_from(found), now)

    @property
    def is_ending(self) -> bool:
        """Whether ranks have failed and the controller has not recorded the end of their generation yet."""
        if self.found is None or self.found.is_over or self.found.is_recovering:
            return False
        return any(_has_failed(self._attempt, rank) for rank in _files(self._attempt))

    def news(self) -> Iterator[RunFinding]:
        """Yield the recoveries that this watcher has not reported yet."""
        found = self.found
        came_back = [each for each in recoveries(found) if _is_back(each, found)] if found else []
        if found is None:
            return
        if self._told is None:
            recent = time.time() - NEWS_S
            self._told = {each.generation.number for each in came_back if (each.generation.began or 0.0) < recent}
        for each in came_back:
            if each.generation.number not in self._told:
                self._told.add(each.generation.number)
                yield self._finding(each, found)

    def _finding(self, back: Recovery, found: Generations) -> RunFinding:
        left_out = [left_out_text(each) for each in (*back.failed.left_out, *back.generation.left_out)]
        sentence = began_text(back, has_phases=found.have_phases)
        name, now = self._attempt.name, time.time()
        return RunFinding(
            BACK,
            f"{BACK}:{name}:{back.generation.number}",
            sentence,
            now,
            name,
            back.first_step,
            back.failed.cause.noticed if back.failed.cause else None,
            (
                timing_text(back, has_phases=found.have_phases),
                source_text(back, read_recorded_steps(self._attempt)),
                *left_out,
            ),
            cleared=now,
        )

    def long_recovery(self, now: float) -> Iterator[RunFinding]:
        """Yield a finding if a recovery has lasted too long since this watcher saw it."""
        found = self.found
        if found is None or not found.is_recovering:
            return
        number = _recovering_from(found)
        if now - self._recovers_since[number] > LONG_RECOVERY_S:
            name = self._attempt.name
            words = recovering_text(found, time.time())
            yield RunFinding("recovery", f"recovery:{name}:{number}", words, time.time(), name)

    @property
    def remark(self) -> str:
        """What is to be said of a recovery in progress; empty if there is none."""
        return recovering_text(self.found, time.time()) if self.found and self.found.is_recovering else ""


def _recovering_from(found: Generations) -> int:
    return found.newest.number if found.newest.is_disturbed else found.all[-2].number


def _is_back(each: Recovery, found: Generations | None) -> bool:
    if found is None:
        return False
    return FIRST_STEP in each.generation.phases if found.have_phases else each.generation.began is not None


def _files(attempt: AttemptDir) -> list[int]:
    try:
        return list(rank_files(attempt.exits, ".json"))
    except BslError:
        return []


def _has_failed(attempt: AttemptDir, rank: int) -> bool:
    try:
        record = read_json(attempt.exit_file(rank))
    except BslError:
        return False
    return isinstance(record, dict) and bool(record.get("code") or record.get("signal"))
