"""How a watcher sends messages: by the ways of the run's newest attempt. A job that is not a run of `bsl` has none."""

from __future__ import annotations

import shlex
import socket
import time
from collections.abc import Callable

from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.ledger import BY_WATCHERS, RunFinding, read_acts
from bigsci_launch.runs.watching.outbox import KEPT_S
from bigsci_launch.watch.notify.deliver import deliver, tell
from bigsci_launch.watch.notify.message import notice_of_act, notice_of_finding
from bigsci_launch.watch.watched import WatchedRun

NotifyFinding = Callable[[RunFinding], None]
LOOKS = {"hang": "spy", "dead": "spy", "ended": "why", "straggler": "slow"}
"""The command that shows more of a finding than `bsl status` does."""
_told_acts: set[tuple[str, str]] = set()
"""Messages of this process about acts, so that the outbox is not read for each of them at every look."""


def deliver_waiting(watched: WatchedRun) -> None:
    """Tell what watchers have done, and send what else waits in the run's outbox: also the messages of watchers on
    machines without a way out."""
    if watched.run is not None:
        _tell_acts(watched.run)
        deliver(watched.run)


def _tell_acts(run: RunDir) -> None:
    """Tell what watchers have done to the run in the last day. What a person asked for is on that person's screen."""
    for act in read_acts(run):
        if act.what not in BY_WATCHERS or act.state == "begun" or time.time() - act.time > KEPT_S:
            continue
        notice = notice_of_act(run, act, _look("status", run))
        if (notice.run, notice.key) not in _told_acts:
            _told_acts.add((notice.run, notice.key))
            tell(run, notice)


def notifier_of(watched: WatchedRun, name: str) -> NotifyFinding:
    """Return what tells a finding."""
    run = watched.run
    if run is None:
        return lambda finding: None
    who = f"watcher {name} on {socket.gethostname()}"

    def notify_finding(finding: RunFinding) -> None:
        tell(run, notice_of_finding(run, finding, who, _look(LOOKS.get(finding.kind, "status"), run)))

    return notify_finding


def _look(command: str, run: RunDir) -> str:
    """Return a command to paste in any folder: the message is read elsewhere."""
    return f"bsl {command} {shlex.quote(str(run.path))}"
