"""How a watcher tells people: by the ways of the run's newest attempt. A job that is no run of `bsl` has none."""

from __future__ import annotations

import socket

from bigsci_launch.runs.watching.ledger import RunFinding
from bigsci_launch.watch.books import TellFinding
from bigsci_launch.watch.tell.tell import deliver, tell
from bigsci_launch.watch.tell.words import notice_of_finding
from bigsci_launch.watch.watched import WatchedRun


def deliver_waiting(watched: WatchedRun) -> None:
    """Send what waits in the run's outbox, also the messages of watchers on machines without a way out."""
    if watched.run is not None:
        deliver(watched.run)


def teller(watched: WatchedRun, name: str) -> TellFinding:
    """Return what tells a finding."""
    run = watched.run
    if run is None:
        return lambda finding: None
    who = f"watcher {name} on {socket.gethostname()}"

    def tell_finding(finding: RunFinding) -> None:
        tell(run, notice_of_finding(run, finding, who, f"bsl status {run.path}"))

    return tell_finding
