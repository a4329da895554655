"""Watches a run until it is over, until this process is ended by a signal, or until nothing is left to watch; or once.

One look takes as long as it needs: what seems silent is watched for two steps first. Ages of files prove little on a
login node, whose clock may be off by minutes. What this process sees change does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from bigsci_launch.progress import Report
from bigsci_launch.runs.attempts import read_job
from bigsci_launch.runs.watching.heartbeat import Health, agent_of
from bigsci_launch.units import format_age
from bigsci_launch.watch.notify.of_run import notifier_of
from bigsci_launch.watch.rounds.loop import Watcher, WatchStatus
from bigsci_launch.watch.watched import WatchedRun, find_watched

EXIT_FINDING, EXIT_BLIND = 1, 4
SIGNAL_S = 0.2
"""How soon it is noticed that a signal has come."""
GONE_LOOKS, GONE_S = 3, 2.0
"""How often, and how many seconds apart, it is looked whether the directory of the run is really gone."""
BLIND_S = 10.0
"""Seconds until the next look after one that the file system did not allow."""
RECORD_S = 0.2
LEAST_S, MOST_S = 10.0, 300.0
"""How long a run that shows nothing new is watched: twice as long as its steps usually take, within these."""
PAUSE_S = 1.0


class EndSignals:
    """Whether a signal has ended this process. A `threading.Event` would not do: its lock is held when a wait ends, and
    a handler that is called at that moment waits for it for ever."""

    def __init__(self) -> None:
        self.have_come = False
        self.was_interrupted = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.have_come = True
        self.was_interrupted = number == signal.SIGINT

    def wait(self, seconds: float) -> None:
        """Wait that long, or until one comes."""
        until = time.monotonic() + seconds
        while not self.have_come and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, SIGNAL_S))


def find_recorded(run: str | None, jobid: str | None, grace_s: float, pid: int | None = None) -> WatchedRun:
    """Return what is to be watched, after waiting so long for the record of its job.

    Raises:
        RunDirError, JobNotFound, SlurmUnavailable, CollectError: it is not found.
    """
    deadline = time.monotonic() + grace_s
    while True:
        watched = find_watched(run, jobid, pid)
        if watched.attempt is None or read_job(watched.attempt) is not None or time.monotonic() >= deadline:
            return watched
        time.sleep(RECORD_S)


def make_watcher(watched: WatchedRun, say: Report, *, may_act: bool = False, is_agent: bool = False) -> Watcher:
    """Return a watcher: the agent of the job script, or one of this process."""
    is_of_attempt = is_agent and watched.attempt is not None
    own = f"{socket.gethostname()}-{os.getpid()}"
    name = agent_of(watched.attempt.name) if is_of_attempt and watched.attempt is not None else own
    return Watcher(watched, name=name, may_act=may_act, say=say, tell=notifier_of(watched, name))


def watch_until_over(
    watcher: Watcher, signals: EndSignals, show: Callable[[WatchStatus], None], say: Report, *, is_agent: bool
) -> WatchStatus | None:
    """Watch round after round, and `show` each. Return the last status; None if nothing was seen, or nothing is left.

    Errors of the disk do not end it: they may last for a time only.
    """
    status: WatchStatus | None = None
    try:
        while True:
            if _is_removed(watcher, signals):
                say(f"{watcher.label} was removed: nothing is left to watch")
                status = None
                break
            is_last = signals.have_come
            status = look_and_show(watcher, show, say) or status
            if is_last or (status is not None and status.seen.view.is_over and (is_agent or not status.seen.goes_on)):
                break
            signals.wait(BLIND_S if status is None else status.every_s)
    finally:
        watcher.close(status)
    return status


def look_and_show(watcher: Watcher, show: Callable[[WatchStatus], None], say: Report) -> WatchStatus | None:
    """Look once, and return what was seen; None if the file system gives an error, as it does for a time.

    The log of an agent is on the same disk.
    """
    try:
        status = watcher.tick()
        show(status)
    except OSError as error:
        with contextlib.suppress(OSError):
            say(f"this round failed: {error}")
        return None
    return status


def _is_removed(watcher: Watcher, signals: EndSignals) -> bool:
    """Return whether what is watched is gone, and stays gone for some seconds."""
    for _ in range(GONE_LOOKS):
        if signals.have_come or not watcher.has_nothing_left:
            return False
        signals.wait(GONE_S)
    return watcher.has_nothing_left


def exit_code_of(status: WatchStatus | None) -> int:
    """Return the exit code for what was seen last."""
    if status is None:
        return EXIT_BLIND
    return {Health.HEALTHY: 0, Health.FINDING: EXIT_FINDING, Health.BLIND: EXIT_BLIND}[status.health]


def look_once(watcher: Watcher) -> WatchStatus:
    """Return what is known of the run. If nothing new is seen and nothing is found, it is not known to be healthy.

    What other watchers have found may be over: it counts if nothing is seen to move.
    """
    began = time.monotonic()
    status = watcher.tick(serves=False)
    while status.seen.view.is_running and not (status.seen.standing or status.seen.events):
        waited = time.monotonic() - began
        if status.seen.silence.lasts_s < waited - PAUSE_S:
            return status  # something new has come
        if waited >= min(max(2 * (status.seen.silence.usual_s or 0.0), LEAST_S), MOST_S):
            return _unmoved(status if status.look is not None else watcher.look(), waited)
        time.sleep(PAUSE_S)
        status = watcher.tick(serves=False)
    return status


def _unmoved(status: WatchStatus, waited: float) -> WatchStatus:
    if status.health is Health.FINDING or (status.look is not None and status.look.is_moving):
        return status
    seen = f": {status.look.sentence}" if status.look is not None else ""
    sentence = f"no progress was seen in {format_age(waited)}{seen}"
    return replace(status, health=Health.BLIND, sentence=sentence, blind=(*status.blind, sentence))
