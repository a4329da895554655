"""What a watcher knows of one attempt, or of one job that `bsl` did not submit, round after round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.survive import SurviveSection
from bigsci_launch.runs.attempts import ended_state, read_exit
from bigsci_launch.runs.chain.records import read_next
from bigsci_launch.runs.ending.failures import failure_text
from bigsci_launch.runs.watching.ledger import RunFinding
from bigsci_launch.scheduler.slurm import SLURM_EVERY_S
from bigsci_launch.units import format_age
from bigsci_launch.watch.facts.generations import GenerationWatch
from bigsci_launch.watch.facts.job import JobPoller, JobView
from bigsci_launch.watch.facts.look import Keep, Look, take_look
from bigsci_launch.watch.facts.restart import RestartWatch
from bigsci_launch.watch.facts.stalls import StallWatch
from bigsci_launch.watch.facts.standing import StandingFacts, Tempo
from bigsci_launch.watch.facts.stragglers import StragglerWatch
from bigsci_launch.watch.judge.progress import ProgressTracker
from bigsci_launch.watch.judge.silence import Noticed, Silence
from bigsci_launch.watch.judge.state import Expected
from bigsci_launch.watch.read.sources import AttemptTail, LogTail
from bigsci_launch.watch.watched import WatchedRun

LOCAL_LOOK_S, SLURM_LOOK_S = 3.0, 10.0
"""The least time between two looks at the ranks. Each starts a step on every node of a Slurm job."""
LOCAL_GAP_S = 5.0
"""The time after which a second look confirms a failure, without Slurm."""
OLD_S = 600.0
"""If Slurm has not reported the job's state for this long, it counts as unknown."""
QUIET_ENDS = ("finished", "stopped", "cancelled", "requeued", "preempted")
"""Ends that were wanted, or that Slurm mends by itself."""


def expected(config: RunConfig | None) -> Expected:
    """Return what a run file says. For `bsl train`, an interval that it leaves out means never; for others, unknown."""
    if config is None:
        return Expected()
    never = 0 if config.run.starts_trainer else None
    return Expected(
        eval_interval=config.monitor.eval_interval or never,
        eval_time_s=config.monitor.eval_time_s or None,
        save_interval=config.checkpoint.save_interval or never,
    )


@dataclass(frozen=True, slots=True)
class WatchRound:
    """What one round has shown. `events` happened once; `standing` hold now. `passed` are kinds that are over.
    `goes_on`: the attempt is over, but the run is not."""

    view: JobView
    silence: Silence
    events: tuple[RunFinding, ...] = ()
    standing: tuple[RunFinding, ...] = ()
    passed: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    goes_on: bool = False
    news: tuple[RunFinding, ...] = ()
    """What is over already, and worth telling: a run has come back from a failure."""


class AttemptWatch:
    """Reads and judges one attempt. It asks Slurm at most every 30 s, apart from looks at ranks that show nothing."""

    def __init__(self, watched: WatchedRun, tracker: ProgressTracker) -> None:
        self.watched = watched
        self.tracker = tracker
        self._poller = JobPoller(watched)
        self._tail = _tail_of(watched)
        self.generations = GenerationWatch(watched.attempt) if watched.attempt is not None else None
        local = LOCAL_LOOK_S, LOCAL_GAP_S
        self.stalls = StallWatch(self._look, *(local if watched.is_local else (SLURM_LOOK_S, SLURM_EVERY_S)))
        self._facts = StandingFacts(watched)
        self._restart = RestartWatch(watched)
        self._stragglers = StragglerWatch(watched)
        self.has_moved: bool | None = None
        """Whether anything but chatter has come since this watch began; None before the first look: that is old."""

    @property
    def name(self) -> str | None:
        return self.watched.attempt.name if self.watched.attempt is not None else None

    def start(self) -> None:
        """Ask for the job's state, and again from time to time."""
        self._poller.start()

    def stop(self) -> None:
        self._poller.stop()

    @property
    def view(self) -> JobView:
        """What is known of the job. An attempt that has recorded its end is over, though its script may still run."""
        view, attempt = self._poller.view, self.watched.attempt
        ended = read_exit(attempt) if attempt is not None and attempt.exit.exists() else None
        if ended is None or ended.get("exit_code") is None or view.job.state.is_over:
            return view
        return replace(view, job=ended_state(view.job.job_id, ended))

    def read(self, now: float) -> bool:
        """Read what is new. Whether anything but chatter was."""
        if self.generations is not None:
            self.generations.read(now)
        log_events = self._tail.read() if self._tail is not None else []
        self.tracker.take(log_events, now, self._tail.blind if self._tail is not None else ())
        self._restart.num_steps += sum(1 for log_event in log_events if log_event.kind == "step")
        is_news = any(log_event.kind not in ("output", "call") for log_event in log_events)
        self.has_moved = self.has_moved or (is_news if self.has_moved is not None else False)
        return is_news

    def round(self, now: float) -> WatchRound:
        """Read, judge, and look at the ranks if that is due. `now` is the watcher's monotonic clock."""
        self.read(now)
        view, silence, generations = self.view, self.tracker.silence(now), self.generations
        if view.is_running and not self._is_being_ended and not (generations and generations.is_ending):
            self.stalls.consider(silence, now)
        noticed = self.tracker.noticed()
        events = [*self._events(noticed, view), *self._restart.findings()]
        if view.is_running and not self._is_being_ended:
            is_slower = any(each.kind == "slower" and not each.is_over for each in noticed)
            self._stragglers.consider(self.tracker.step, now, is_slower=is_slower)
        found, unknown = self._facts.read(now, view, self._tempo())
        standing, blind, remarks = list(found), [*unknown, *self._unseen(now, view)], []
        if view.is_running:
            stall = self.stalls.finding(silence, self.name)
            standing += [*self._stragglers.standing, *([stall] if stall is not None else [])]
            blind += [text for text in (self.stalls.blindness(silence), self._stragglers.trouble) if text]
            remarks += [text] if (text := self.stalls.remark(silence)) else []
            if generations is not None:
                standing += generations.long_recovery(now)
                remarks += [generations.remark] if generations.remark else []
        if view.is_over:
            ended, remark = self._end(view)
            standing += [ended] if ended is not None else []
            remarks += [remark] if remark else []
        passed = tuple(each.kind for each in noticed if each.is_over)
        goes_on = view.is_over and self._goes_on()
        news = tuple(generations.news()) if generations is not None else ()
        return WatchRound(
            view, silence, tuple(events), tuple(standing), passed, tuple(blind), tuple(remarks), goes_on, news
        )

    @property
    def survives(self) -> SurviveSection | None:
        """The `survive` section of the run file, if a controller has begun a generation; None without."""
        config = self.watched.config
        has_begun = self.generations is not None and self.generations.found is not None
        return config.survive if config is not None and has_begun else None

    @property
    def _is_being_ended(self) -> bool:
        """Whether the ranks are being ended from outside: what they show from then on says nothing about the run."""
        return self.watched.attempt is not None and self.watched.attempt.ended_by.exists()

    def _look(self, settle_s: float, keeps_doubt: bool) -> Look:
        return take_look(self.watched, self.view.job, settle_s, Keep.DOUBT if keeps_doubt else Keep.FAILURE)

    def take_evidence(self) -> Look:
        """Look at the ranks now, whatever they do, and keep what is found."""
        return take_look(self.watched, self.view.job, LOCAL_GAP_S, Keep.ALL)

    def _events(self, noticed: list[Noticed], view: JobView) -> Iterator[RunFinding]:
        for each in noticed:
            if each.is_over:
                continue
            details: tuple[str, ...] = ()
            bundle = None
            if each.kind == "slower" and view.is_running:
                look = self.take_evidence()
                details, bundle = (look.sentence, *look.details), str(look.bundle) if look.bundle else None
            key = f"{each.kind}:{self.name}:{each.step}"
            yield RunFinding(
                each.kind, key, each.sentence, time.time(), self.name, each.step, each.since, details, bundle
            )

    def _tempo(self) -> Tempo:
        tracker = self.tracker
        return Tempo(tracker.step, tracker.usual_s("step"), tracker.usual_s("save"), tracker.save_interval)

    def _unseen(self, now: float, view: JobView) -> Iterator[str]:
        if view.seen is None:
            yield f"the state of the job is unknown: {view.why or view.job.reason}"
        elif now - view.seen > OLD_S and not view.is_over:
            yield f"the state of the job has been unknown for {format_age(now - view.seen)}: {view.why}"
        if self._tail is None and self.watched.pid is None:
            yield "Slurm does not report the output file of the job, so only the state of the job is visible"
        elif self._tail is not None:
            yield from self._tail.troubles

    def _goes_on(self) -> bool:
        """Whether the run starts again after this attempt, as far as its records say."""
        run, attempt = self.watched.run, self.watched.attempt
        if run is None or attempt is None:
            return False
        decision = read_next(attempt)
        return bool(run.queued_attempts()) or (
            decision is not None and decision.attempt == attempt.name and decision.continues
        )

    def _end(self, view: JobView) -> tuple[RunFinding | None, str]:
        attempt = self.watched.attempt
        if attempt is None:
            return None, f"the job is over: {view.job.raw_state or view.job.state.value}"
        ended, decision = read_exit(attempt), read_next(attempt)
        reason = str(ended["reason"]) if ended is not None else None
        words = f"attempt {attempt.name} ended: {reason or 'reason unknown'}"
        if self._goes_on() or reason in QUIET_ENDS:
            return None, words + (f"; {decision.sentence}" if decision is not None else "")
        after = f"; {decision.sentence}" if decision is not None else "; it does not restart automatically"
        evidence = _evidence(ended or {})
        first = (ended or {}).get("first_failure")
        who = f"{failure_text(first)}; " if isinstance(first, dict) else ""
        finding = RunFinding("ended", f"ended:{attempt.name}", who + words + after, time.time(), attempt.name)
        return replace(finding, details=evidence, bundle=(ended or {}).get("spy_bundle")), ""


def _evidence(ended: Mapping[str, Any]) -> tuple[str, ...]:
    cause = [str(ended["cause"])] if ended.get("cause") else []
    return (*cause, *(str(text) for text in ended.get("evidence") or ()))


def _tail_of(watched: WatchedRun) -> AttemptTail | LogTail | None:
    if watched.attempt is not None:
        return AttemptTail(watched.attempt)
    return LogTail(watched.log) if watched.log is not None else None
