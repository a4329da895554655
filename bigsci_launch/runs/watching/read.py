"""What watchers say of a run, for people who ask for its status."""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.runs.watching.beat import Beat, read_all_beats
from bigsci_launch.runs.watching.ledger import Act, RunFinding, read_acts, read_all_findings
from bigsci_launch.runs.watching.outbox import not_told
from bigsci_launch.runs.watching.records import remarks, remarks_on_colleagues

NUM_ACTS = 3
BEATS_KEPT_S = 86400.0
"""A watcher that left no sign for this long is history."""


@dataclass(frozen=True, slots=True)
class Watching:
    """The watchers of the newest attempt, what is wrong now, and the newest acts, oldest first, each as it ended."""

    beats: tuple[Beat, ...] = ()
    findings: tuple[RunFinding, ...] = ()
    acts: tuple[Act, ...] = ()
    not_told: tuple[str, ...] = ()
    """Ways by which people could not be told, one sentence each."""
    remarks: tuple[str, ...] = ()
    """What is not believed of the records, one sentence for each file."""


UNWATCHED = Watching()


def read_watching(run: RunDir, attempt: AttemptDir, now: float) -> Watching:
    """Return what is known at `now` (seconds since the epoch); nothing if nobody has watched."""
    beats = [
        beat
        for beat in read_all_beats(run)
        if beat.attempt == attempt.name and not beat.ended and now - beat.time < BEATS_KEPT_S
    ]
    latest = {act.key: act for act in read_acts(run)}
    findings = [finding for finding in read_all_findings(run) if finding.cleared is None]
    return Watching(
        tuple(beats),
        tuple(finding for finding in findings if finding.attempt in (attempt.name, None)),
        tuple(list(latest.values())[-NUM_ACTS:]),
        tuple(not_told(run, now)),
        (*remarks(run), *remarks_on_colleagues(run)),
    )
