"""One watcher: each round it reads, judges and looks, keeps its open findings, acts if it may, and sends a heartbeat.

Health and blindness are two things. What cannot be seen is reported, and is never healthy.
"""

from __future__ import annotations

import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bigsci_launch.errors import BslError
from bigsci_launch.progress import Report
from bigsci_launch.runs.watching.heartbeat import Health, agent_of, own_heartbeat, remove_heartbeat, write_heartbeat
from bigsci_launch.runs.watching.ledger import RunFinding
from bigsci_launch.runs.watching.records import remarks
from bigsci_launch.units import format_age
from bigsci_launch.watch.act.request_handler import RequestHandler, grace_s
from bigsci_launch.watch.facts.look import Look
from bigsci_launch.watch.facts.standing import OtherWatchers
from bigsci_launch.watch.judge.progress import ProgressTracker
from bigsci_launch.watch.judge.silence import Silence
from bigsci_launch.watch.notify.of_run import NotifyFinding, deliver_waiting
from bigsci_launch.watch.rounds.acting import Acting
from bigsci_launch.watch.rounds.one_attempt import AttemptWatch, WatchRound, expected
from bigsci_launch.watch.rounds.open_findings import OpenFindings
from bigsci_launch.watch.watched import WatchedRun, watched_run

LEAST_EVERY_S, MOST_EVERY_S = 2.0, 10.0
"""Time between two rounds: about a step."""
_NUMBERS = re.compile(r"[\d.]+( (s|min|h))?")
SOON_S = 0.5
"""The least time until a look that is due soon."""


@dataclass(frozen=True, slots=True)
class WatchStatus:
    """What a watcher knows after the round `seen`, also from the ledger. `blind` is what it could not see, `remarks`
    what is not a finding."""

    seen: WatchRound
    attempt: str | None
    health: Health
    sentence: str
    findings: tuple[RunFinding, ...]
    blind: tuple[str, ...]
    remarks: tuple[str, ...]
    look: Look | None
    every_s: float


class Watcher:
    """Watches one run, attempt after attempt, or one job that `bsl` did not submit.

    `say` gets a line for the screen; `tell` gets each new finding. One thread uses it.
    """

    def __init__(self, watched: WatchedRun, *, name: str, may_act: bool, say: Report, tell: NotifyFinding) -> None:
        self._name = name
        self._say = say
        self._open_findings = OpenFindings(watched.home, say, tell)
        self._others = OtherWatchers(watched.home, name)
        self._acting = Acting(f"watcher {name} on {socket.gethostname()}", say) if may_act else None
        self._said: tuple[str, ...] = ()
        self._now = AttemptWatch(watched, ProgressTracker(expected(watched.config)))
        self._now.start()
        self._handler = RequestHandler(watched.run, name, self._take_bundle) if watched.run is not None else None

    def close(self, status: WatchStatus | None) -> None:
        """Stop polling, and record that this watcher leaves by itself: one that was killed cannot, and is missed."""
        self._now.stop()
        if self._is_agent and status is not None:
            self._leave_sign(status, has_ended=True)
        elif not self._is_agent:
            with suppress(OSError):
                remove_heartbeat(self._now.watched.home, self._name)

    @property
    def _is_agent(self) -> bool:
        """Whether this is the watcher of the job script: each attempt has one of its own."""
        return self._now.name is not None and self._name == agent_of(self._now.name)

    @property
    def label(self) -> str:
        return self._now.watched.name

    @property
    def has_nothing_left(self) -> bool:
        """Whether what is watched was removed. A round would then make the folder of the run again."""
        return self._now.watched.is_gone

    def tick(self, *, serves: bool = True) -> WatchStatus:
        """Read, judge, look and act once. With `serves`, what people ask in `control/` is done."""
        self._follow()
        now = time.monotonic()
        seen = self._now.round(now)
        standing = [*seen.standing]
        if self._now.name is not None and not seen.view.is_over:
            standing += self._others.findings(self._now.name, now)
        self._open_findings.note(seen.news)
        self._open_findings.raise_all([*seen.events, *standing])
        self._open_findings.settle(
            self._now.name,
            {finding.key for finding in standing},
            seen.passed,
            is_over=seen.view.is_over,
            has_moved=bool(self._now.has_moved),
        )
        if self._acting is not None:
            self._acting.act(self._now, seen, self._open_findings.open)
        status = self._status(seen)
        troubles = [self._leave_sign(status), self._serve() if serves else ""]
        status = replace(status, remarks=(*status.remarks, *filter(None, troubles)))
        deliver_waiting(self._now.watched)
        self._say_new((*status.blind, *status.remarks))
        return status

    def look(self) -> WatchStatus:
        """Look at the ranks now, whatever the silence means, and take what they show into account."""
        now = time.monotonic()
        self._now.stalls.look_now(self._now.tracker.silence(now), now)
        return self.tick(serves=False)

    def _serve(self) -> str:
        """Do what people ask in `control/`. Return why that was not possible; empty if it was."""
        if self._handler is None:
            return ""
        tracker = self._now.tracker
        grace = grace_s(tracker.usual_s, self._now.watched.config)
        try:
            for act in self._handler.serve(time.time(), tracker.step, grace):
                self._say(f"{act.what} ({act.who}: {act.why}): {act.state}: {act.words}")
        except (BslError, OSError) as error:
            return f"requests in control/ are not served: {error}"
        return ""

    def _take_bundle(self) -> tuple[Path | None, str]:
        look = self._now.take_evidence()
        return look.bundle, look.sentence

    def _follow(self) -> None:
        run = self._now.watched.run
        if run is None or self._is_agent:
            return  # each attempt has an agent of its own
        try:
            watched = watched_run(run)
        except BslError:
            return  # its directory cannot be read now; the round reports that
        if watched.attempt == self._now.watched.attempt:
            return
        ended = self._now
        ended.stop()
        ended.tracker.new_attempt(time.monotonic())
        self._now = AttemptWatch(watched, ended.tracker)
        self._now.start()
        self._say(f"attempt {self._now.name} has begun")

    def _status(self, seen: WatchRound) -> WatchStatus:
        findings = tuple(self._open_findings.open)
        blind = seen.blind
        health = Health.FINDING if findings else Health.BLIND if blind else Health.HEALTHY
        return WatchStatus(
            seen=seen,
            attempt=self._now.name,
            health=health,
            sentence=_sentence(seen, findings, blind),
            findings=findings,
            blind=blind,
            remarks=(*seen.remarks, *filter(None, [self._open_findings.unwritten]), *remarks(self._now.watched.home)),
            look=self._now.stalls.look,
            every_s=_pause(seen.silence, self._now.stalls.due_in_s(seen.silence, time.monotonic())),
        )

    def _say_new(self, lines: tuple[str, ...]) -> None:
        """Say what is not a finding, once, as long as nothing but its numbers changes."""
        shapes = tuple(_NUMBERS.sub("#", line) for line in lines)
        for line, shape in zip(lines, shapes, strict=True):
            if shape not in self._said:
                self._say(line)
        self._said = shapes

    def _leave_sign(self, status: WatchStatus, *, has_ended: bool = False) -> str:
        """Write the heartbeat of this watcher. Return why that was not possible; empty if it was."""
        home = self._now.watched.home
        try:
            write_heartbeat(
                home,
                own_heartbeat(
                    self._name,
                    every_s=status.every_s,
                    health=status.health,
                    sentence=status.sentence,
                    attempt=status.attempt,
                    may_act=self._acting is not None,
                    blind=status.blind,
                    ended=has_ended,
                ),
            )
        except OSError as error:
            return f"{home.watch}: cannot write the heartbeat: {error.strerror or error}"
        return ""


def _pause(silence: Silence, look_in_s: float) -> float:
    """Return the time until the next round: about a step, or until the ranks are to be looked at.

    Where it is not known how long a step takes, it grows with the silence; the rhythm of calls, which is quicker than
    that of steps, is as coarse as the rounds that see it.
    """
    usual_s = silence.usual_s if silence.usual_s is not None else silence.lasts_s / 10
    pause = LEAST_EVERY_S if silence.quiet_s is not None else min(max(usual_s, LEAST_EVERY_S), MOST_EVERY_S)
    return min(pause, max(look_in_s, SOON_S)) if look_in_s > 0 else pause


def _sentence(seen: WatchRound, findings: tuple[RunFinding, ...], blind: tuple[str, ...]) -> str:
    if findings:
        return findings[-1].sentence
    if blind:
        return blind[0]
    if seen.view.is_over:
        return seen.remarks[0] if seen.remarks else "the job is over"
    if seen.view.job.state.is_queued:
        return f"the job waits in the queue: {seen.view.job.reason or seen.view.job.state.value}"
    silence = seen.silence
    usual = "" if silence.usual_s is None else f", usually {format_age(silence.usual_s)}"
    if silence.step is None and silence.phase == "start":
        return f"no step has been seen; the newest sign of life came {format_age(silence.lasts_s)} ago"
    step = "no step yet" if silence.step is None else f"step {silence.step}"
    return f"{step}, in {silence.phase} for {format_age(silence.lasts_s)}{usual}"
