"""What one attempt, or one job of somebody else, shows: everything that a watcher knows of it, round after round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.survive import SurviveSection
from bigsci_launch.errors import BslError
from bigsci_launch.runs.attempts import ended_state, read_exit
from bigsci_launch.runs.chain.records import read_next
from bigsci_launch.runs.restart.restart import Restart, find_restart
from bigsci_launch.runs.watching.ledger import RunFinding
from bigsci_launch.units import format_age
from bigsci_launch.watch import facts
from bigsci_launch.watch.generations import GenerationWatch
from bigsci_launch.watch.job import SLURM_EVERY_S, JobPoller, JobView
from bigsci_launch.watch.judge.course import Course
from bigsci_launch.watch.judge.expected import Expected
from bigsci_launch.watch.judge.silence import Noticed, Silence
from bigsci_launch.watch.ranks.look import Look, take_look
from bigsci_launch.watch.ranks.stalls import StallWatch
from bigsci_launch.watch.read.sources import AttemptTail, LogTail
from bigsci_launch.watch.seam import audit_restart
from bigsci_launch.watch.watched import WatchedRun

FACTS_EVERY_S = 30.0
LOCAL_GAP_S = 5.0
RESTART_STEPS = (1, 5, 20)
"""After how many steps of a restart its loss is compared with that before: a mean over several steps says more."""
OLD_S = 600.0
"""If Slurm has not said the job's state for this long, nobody knows it."""
QUIET_ENDS = ("finished", "stopped", "cancelled", "requeued", "preempted")
"""Ends that somebody wanted, or that Slurm mends by itself."""


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

    def __init__(self, watched: WatchedRun, course: Course) -> None:
        self.watched = watched
        self.name = watched.attempt.name if watched.attempt is not None else None
        self.course = course
        self._poller = JobPoller(watched)
        self._tail = AttemptTail(watched.attempt) if watched.attempt is not None else None
        self.generations = GenerationWatch(watched.attempt) if watched.attempt is not None else None
        self._log = LogTail(watched.log) if watched.attempt is None and watched.log is not None else None
        self.stalls = StallWatch(self._look, LOCAL_GAP_S if watched.is_local else SLURM_EVERY_S)
        self._facts_due = 0.0
        self._facts: tuple[tuple[RunFinding, ...], tuple[str, ...]] = ((), ())
        self._restart_checks = list(RESTART_STEPS)
        self._num_steps = 0
        self._has_read = False
        self.has_moved = False
        """Whether anything but chatter has come since this watch began; what was there before is old."""

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
        tail = self._tail or self._log
        sightings = tail.read() if tail is not None else []
        self.course.take(sightings, now, tail.blind if tail is not None else ())
        self._num_steps += sum(1 for sighting in sightings if sighting.kind == "step")
        is_news = any(sighting.kind != "output" for sighting in sightings)
        self.has_moved = self.has_moved or (is_news and self._has_read)
        self._has_read = True
        return is_news

    def round(self, now: float) -> WatchRound:
        """Read, judge, and look at the ranks if that is due. `now` is the watcher's monotonic clock."""
        self.read(now)
        view, silence, generations = self.view, self.course.silence(now), self.generations
        if view.is_running and not self._is_being_ended and not (generations and generations.is_ending):
            self.stalls.consider(silence, now)
        noticed = self.course.noticed()
        events = [*self._events(noticed, view), *self._restart()]
        found, unknown = self._known_facts(now, view)
        standing, blind, remarks = list(found), [*unknown, *self._unseen(now, view)], []
        if view.is_running:
            stall = self.stalls.finding(silence, self.name)
            standing += [stall] if stall is not None else []
            blind += [text] if (text := self.stalls.blindness(silence)) else []
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
        """What the run file says of `survive`, if a controller has begun a generation; None without."""
        config = self.watched.config
        has_begun = self.generations is not None and self.generations.found is not None
        return config.survive if config is not None and has_begun else None

    @property
    def _is_being_ended(self) -> bool:
        """Whether somebody ends the ranks from outside: what they show from then on says nothing of the run."""
        return self.watched.attempt is not None and self.watched.attempt.ended_by.exists()

    def _look(self, settle_s: float) -> Look:
        return take_look(self.watched, self.view.job, settle_s)

    def take_evidence(self) -> Look:
        """Look at the ranks now, whatever they do, and keep what is found."""
        return take_look(self.watched, self.view.job, LOCAL_GAP_S, keep_all=True)

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

    def _known_facts(self, now: float, view: JobView) -> tuple[tuple[RunFinding, ...], tuple[str, ...]]:
        if now < self._facts_due:
            return self._facts
        self._facts_due = now + FACTS_EVERY_S
        try:
            self._facts = self._read_facts(view)
        except BslError as error:
            self._facts = (self._facts[0], (error.message,))
        return self._facts

    def _read_facts(self, view: JobView) -> tuple[tuple[RunFinding, ...], tuple[str, ...]]:
        run, attempt = self.watched.run, self.watched.attempt
        lost, unknown = facts.lost_nodes(attempt, view)
        found = [*lost, *facts.near_limits(attempt, view, self._tempo())]
        if run is not None and attempt is not None:
            found += [*facts.dead_ranks(attempt, view), *facts.full_disk(run), *facts.refused_saves(attempt, view)]
            config = self.watched.config
            found += facts.epoch_end(run, config, self._tempo()) if config and config.run.starts_trainer else []
            found += facts.chain_warnings(run, attempt) if not view.is_over else []
        return tuple(found), tuple(unknown)

    def _tempo(self) -> facts.Tempo:
        course = self.course
        return facts.Tempo(course.step, course.usual_s("step"), course.usual_s("save"), course.save_interval)

    def _unseen(self, now: float, view: JobView) -> Iterator[str]:
        """Yield what cannot be seen: the job's state, logs, records."""
        if view.seen is None:
            yield f"the state of the job is not known: {view.why or view.job.reason}"
        elif now - view.seen > OLD_S and not view.is_over:
            yield f"the state of the job has not been known for {format_age(now - view.seen)}: {view.why}"
        if self._tail is not None:
            yield from self._tail.troubles
        elif self._log is None:
            yield "Slurm does not say where the job prints to, so that only its state is seen"
        elif self._log.trouble:
            yield self._log.trouble

    def _restart(self) -> Iterator[RunFinding]:
        """Compare the loss across the restart, as soon as there are steps, and say what its weights show."""
        run, attempt = self.watched.run, self.watched.attempt
        if run is None or attempt is None or not self._restart_checks or self._num_steps < self._restart_checks[0]:
            return
        self._restart_checks = [number for number in self._restart_checks if number > self._num_steps]
        restart = find_restart(run, attempt)
        if restart is None or not restart.is_changed:
            return
        self._restart_checks = []
        yield _restart_finding(restart)

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
        """Return what is wrong with how the attempt ended, or what is to be said of it."""
        attempt = self.watched.attempt
        if attempt is None:
            return None, f"the job is over: {view.job.raw_state or view.job.state.value}"
        ended, decision = read_exit(attempt), read_next(attempt)
        reason = str(ended["reason"]) if ended is not None else None
        words = f"attempt {attempt.name} ended: {reason or 'why is not known'}"
        if self._goes_on() or reason in QUIET_ENDS:
            return None, words + (f"; {decision.sentence}" if decision is not None else "")
        after = f"; {decision.sentence}" if decision is not None else "; nothing starts it again"
        evidence = _evidence(ended or {})
        finding = RunFinding("ended", f"ended:{attempt.name}", words + after, time.time(), attempt.name)
        return replace(finding, details=evidence, bundle=(ended or {}).get("spy_bundle")), ""


def _evidence(ended: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what exit.json says about the cause, as sentences."""
    first = ended.get("first_failure")
    who = [f"first failure: rank {first.get('rank')} on {first.get('node')}"] if isinstance(first, Mapping) else []
    cause = [str(ended["cause"])] if ended.get("cause") else []
    return (*who, *cause, *(str(text) for text in ended.get("evidence") or ()))


def _restart_finding(restart: Restart) -> RunFinding:
    audit = audit_restart(restart)
    causes = (*restart.causes, *audit.causes)
    sentence = "; ".join((restart.sentence, *causes[:1]))
    details = (*causes[1:], *(f"not known: {text}" for text in restart.not_known), *filter(None, [audit.unknown]))
    step = restart.jump.step if restart.jump is not None else None
    name = restart.attempt.name
    return RunFinding("restart_spike", f"restart:{name}", sentence, time.time(), name, step, details=details)
