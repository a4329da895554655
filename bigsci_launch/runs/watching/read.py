"""What watchers say of a run, for people who ask for its status."""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.runs.watching.heartbeat import WatcherHeartbeat, read_all_heartbeats
from bigsci_launch.runs.watching.ledger import Act, RunFinding, read_acts, read_all_findings
from bigsci_launch.runs.watching.outbox import undelivered
from bigsci_launch.runs.watching.records import remarks, remarks_on_colleagues

NUM_ACTS = 3
HEARTBEATS_KEPT_S = 86400.0
"""A watcher that left no sign for this long is history."""


@dataclass(frozen=True, slots=True)
class Watching:
    """The watchers of the newest attempt, what is wrong now, and the newest acts, oldest first, each as it ended."""

    heartbeats: tuple[WatcherHeartbeat, ...] = ()
    findings: tuple[RunFinding, ...] = ()
    acts: tuple[Act, ...] = ()
    undelivered: tuple[str, ...] = ()
    """Messages that could not be delivered, one sentence for each way."""
    remarks: tuple[str, ...] = ()
    """What is not believed of the records, one sentence for each file."""


UNWATCHED = Watching()


def read_watching(run: RunDir, attempt: AttemptDir, now: float) -> Watching:
    """Return what is known at `now` (seconds since the epoch); nothing if it was not watched."""
    heartbeats = [
        heartbeat
        for heartbeat in read_all_heartbeats(run)
        if heartbeat.attempt == attempt.name and not heartbeat.ended and now - heartbeat.time < HEARTBEATS_KEPT_S
    ]
    latest = {act.key: act for act in read_acts(run)}
    findings = [finding for finding in read_all_findings(run) if finding.cleared is None]
    return Watching(
        tuple(heartbeats),
        tuple(finding for finding in findings if finding.attempt in (attempt.name, None)),
        tuple(list(latest.values())[-NUM_ACTS:]),
        tuple(undelivered(run, now)),
        (*remarks(run), *remarks_on_colleagues(run)),
    )
