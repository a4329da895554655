"""One watcher: round after round it reads, judges and looks, keeps the books, does what it may, and says that it lives.

Health and blindness are two things. What cannot be seen is said, and is never healthy.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bigsci_launch.errors import BslError
from bigsci_launch.runs.generations.records import Generations
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.runs.watching.beat import Health, agent_of, own_beat, remove_beat, write_beat
from bigsci_launch.runs.watching.ledger import RunFinding
from bigsci_launch.runs.watching.records import remarks
from bigsci_launch.scheduler.job import JobInfo
from bigsci_launch.scheduler.slurm import partition_nodes
from bigsci_launch.units import format_age
from bigsci_launch.watch.act.deeds import end_hang, finish_end, pin_around
from bigsci_launch.watch.act.desk import Desk
from bigsci_launch.watch.act.fence import RecoveryWish, ask_controller, follow_wishes
from bigsci_launch.watch.act.jobs import end_ranks, kill_ranks
from bigsci_launch.watch.act.patience import patience_s
from bigsci_launch.watch.books import Books, Say, TellFinding
from bigsci_launch.watch.judge.course import Course
from bigsci_launch.watch.judge.silence import Silence
from bigsci_launch.watch.one_attempt import AttemptWatch, WatchRound, expected
from bigsci_launch.watch.others import OtherWatchers
from bigsci_launch.watch.ranks.look import Look
from bigsci_launch.watch.ranks.stalls import STALL
from bigsci_launch.watch.tell.told import deliver_waiting
from bigsci_launch.watch.watched import WatchedRun, watched_run

LEAST_EVERY_S, MOST_EVERY_S = 2.0, 10.0
"""Time between two rounds: about a step."""
SPIKES = ("loss_spike", "grad_spike", "nan")
LASTING = (*SPIKES, "slower", "restart_spike")
"""Findings that stay until the run has recovered, or the attempt is over: they are noticed once."""
STALLS = ("hang", "dead")
SETTLED_S = 900.0
"""After this long, a watcher has seen and asked everything that shows whether a finding holds."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What a watcher knows after one round. `blind` says what it could not see, `remarks` what is no finding.
    `has_own`: some of the findings were seen in this round, and are not known from the ledger alone."""

    attempt: str | None
    health: Health
    sentence: str
    findings: tuple[RunFinding, ...]
    has_own: bool
    blind: tuple[str, ...]
    remarks: tuple[str, ...]
    silence: Silence
    job: JobInfo
    look: Look | None
    is_running: bool
    is_over: bool
    goes_on: bool
    every_s: float


class Watcher:
    """Watches one run, attempt after attempt, or one job of somebody else.

    `say` gets a line for people who look; `tell` gets each new finding. One thread uses it.
    """

    def __init__(self, watched: WatchedRun, *, name: str, may_act: bool, say: Say, tell: TellFinding) -> None:
        self._home = watched.home
        self._name = name
        self._who = f"watcher {name} on {socket.gethostname()}"
        self._is_agent = watched.attempt is not None and name == agent_of(watched.attempt.name)
        self._may_act = may_act
        self._say = say
        self._books = Books(watched.home, say, tell)
        self._others = OtherWatchers(watched.home, name)
        self._said: tuple[str, ...] = ()
        self._unsigned = self._undone = self._unserved = self._asked = ""
        self._held: set[str] = set()
        self._began = time.monotonic()
        self._now = AttemptWatch(watched, Course(expected(watched.config)))
        self._now.start()
        self._desk = Desk(watched.run, name, self._take_bundle) if watched.run is not None else None

    def close(self, glance: Glance | None) -> None:
        """Stop asking, and say that this watcher leaves by itself: one that was killed says nothing, and is missed."""
        self._now.stop()
        if self._is_agent and glance is not None:
            self._leave_sign(glance, has_ended=True)
        elif not self._is_agent:
            with suppress(OSError):
                remove_beat(self._home, self._name)

    @property
    def has_nothing_left(self) -> bool:
        """Whether what is watched was removed. A round would then make the folder of the run again."""
        return self._now.watched.is_gone

    def tick(self, *, serves: bool = True) -> Glance:
        """Read, judge, look and act once. With `serves`, what people ask in `control/` is done."""
        self._follow()
        now = time.monotonic()
        seen = self._now.round(now)
        standing = [*seen.standing]
        if self._now.name is not None and not seen.view.is_over:
            standing += self._others.findings(self._now.name, now)
        self._books.note(seen.news)
        self._books.raise_all([*seen.events, *standing])
        self._clear(seen, {finding.key for finding in standing}, now)
        if self._may_act:
            self._act(seen)
        glance = self._glance(seen)
        self._leave_sign(glance)
        if serves:
            self._serve()
        glance = replace(glance, remarks=(*glance.remarks, *filter(None, [self._unsigned, self._unserved])))
        deliver_waiting(self._now.watched)
        self._say_new((*glance.blind, *glance.remarks))
        return glance

    def look(self) -> Glance:
        """Look at the ranks now, whatever the silence means, and take what they show into account."""
        now = time.monotonic()
        self._now.stalls.look_now(self._now.course.silence(now), now)
        return self.tick(serves=False)

    def _serve(self) -> None:
        """Do what people ask in `control/`."""
        if self._desk is None:
            return
        course = self._now.course
        patience = patience_s(course.usual_s, self._now.watched.config)
        try:
            for act in self._desk.serve(time.time(), course.step, patience):
                self._say(f"{act.what} ({act.who}: {act.why}): {act.state}: {act.words}")
            self._unserved = ""
        except (BslError, OSError) as error:
            self._unserved = f"what is asked in control/ is not served: {error}"

    def _take_bundle(self) -> tuple[Path | None, str]:
        look = self._now.take_evidence()
        return look.bundle, look.sentence

    def _follow(self) -> None:
        """Turn to the next attempt of the run when it has begun."""
        run = self._now.watched.run
        if run is None or self._is_agent:
            return  # each attempt has an agent of its own
        try:
            watched = watched_run(run)
        except BslError:
            return  # its directory cannot be read now; the round says so
        if watched.attempt == self._now.watched.attempt:
            return
        ended = self._now
        self._books.clear([each.key for each in self._books.open if each.attempt == ended.name], "the attempt is over")
        ended.stop()
        ended.course.new_attempt(time.monotonic())
        self._now = AttemptWatch(watched, ended.course)
        self._now.start()
        self._say(f"attempt {self._now.name} has begun")

    def _clear(self, seen: WatchRound, standing: set[str], now: float) -> None:
        """Note what is over: what no longer holds, what the run has recovered from, and what earlier attempts had.

        What another watcher has found, and this one has never seen hold, is not over because this one does not see it.
        """
        self._held |= standing
        old = [each.key for each in self._books.open if each.attempt not in (None, self._now.name)]
        self._books.clear(old, "the attempt is over")
        gone = [each for each in self._books.open if each.kind not in LASTING and each.key not in standing]
        known = [each.key for each in gone if seen.view.is_over or self._knows_over(each, now)]
        self._books.clear(known, "the job is over" if seen.view.is_over else "it no longer holds")
        over = [each.key for each in self._books.open if each.kind in seen.passed]
        self._books.clear(over, "the run has recovered")

    def _knows_over(self, finding: RunFinding, now: float) -> bool:
        """Whether this watcher can tell that a finding, which it does not see, is over."""
        if finding.key.startswith(STALL):
            return finding.key in self._held or self._now.has_moved
        return finding.key in self._held or now - self._began > SETTLED_S

    def _act(self, seen: WatchRound) -> None:
        """Do what this watcher may do. What cannot be written down is not done, and that is said once."""
        run, attempt = self._now.watched.run, self._now.watched.attempt
        if run is None or attempt is None:
            return
        try:
            for finding in self._books.open:
                if finding.kind in SPIKES and finding.step is not None:
                    self._say_all(pin_around(run, self._who, finding))
            if seen.view.is_running:
                self._say_all([finish_end(run, attempt, partial(kill_ranks, attempt), time.time())])
                if (survive := self._now.survives) is not None:
                    self._recover(run, attempt, seen, begins_again=survive.on_unexplained_hang == "restart")
                else:
                    self._end_hang(run, attempt, seen)
            self._undone = ""
        except (BslError, OSError) as error:
            if str(error) != self._undone:
                self._say(f"nothing was done: {error}")
            self._undone = str(error)

    def _end_hang(self, run: RunDir, attempt: AttemptDir, seen: WatchRound) -> None:
        stalled = next((each for each in seen.standing if each.kind in STALLS and each.key.startswith(STALL)), None)
        if stalled is None or not self._now.stalls.may_act(seen.silence):
            return
        if self._now.read(time.monotonic()):
            return  # it moves after all
        nodes, why_not = self._nodes_to_leave_out(seen)
        self._say_all([end_hang(run, attempt, self._who, stalled, nodes, partial(end_ranks, attempt)), why_not])

    def _recover(self, run: RunDir, attempt: AttemptDir, seen: WatchRound, *, begins_again: bool) -> None:
        """Have the controller of `survive` fence the rank that holds up the others. Nothing is killed if nobody is to
        blame, unless the run file allows it."""
        generations, stalls = self._now.generations, self._now.stalls
        if generations is None or (found := generations.found) is None:
            return
        self._say_all(follow_wishes(run, attempt, found, time.time()))
        stalled = next((each for each in seen.standing if each.key.startswith(STALL)), None)
        if stalled is None or (look := stalls.look) is None or found.newest.is_disturbed or generations.is_ending:
            return
        is_certain = stalled.kind in STALLS and bool(look.suspects) and stalls.may_act(seen.silence)
        if not (is_certain or (begins_again and stalls.is_unexplained(seen.silence))):
            return
        if self._now.read(time.monotonic()):
            return  # it moves after all
        wish = _wish_for(found, look, begins_again=begins_again)
        if wish is not None:
            self._say_new_act(ask_controller(run, attempt, self._who, stalled, wish))

    def _say_new_act(self, words: str) -> None:
        if words != self._asked:
            self._say_all([words])
        self._asked = words or self._asked

    def _nodes_to_leave_out(self, seen: WatchRound) -> tuple[tuple[str, ...], str]:
        """Return the node of the suspects, if it may be the cause and another can take its place; else why not."""
        look, job = self._now.stalls.look, seen.view.job
        if look is None or len(look.nodes) != 1 or self._now.watched.is_local:
            return (), ""
        node = look.nodes[0]
        try:
            num_nodes = len(partition_nodes(job.partition or None))
        except BslError as error:
            return (), f"{node} is not left out: it is not known if there are other nodes: {error.message}"
        if num_nodes <= (job.num_nodes or 0):
            return (), f"{node} is not left out: partition {job.partition} has no other"
        return look.nodes, ""

    def _say_all(self, lines: Iterable[str]) -> None:
        for words in lines:
            if words:
                self._say(words)

    def _glance(self, seen: WatchRound) -> Glance:
        findings = tuple(self._books.open)
        blind = seen.blind
        health = Health.FINDING if findings else Health.BLIND if blind else Health.HEALTHY
        return Glance(
            attempt=self._now.name,
            health=health,
            sentence=_sentence(seen, findings, blind),
            findings=findings,
            has_own=bool(seen.standing or seen.events),
            blind=blind,
            remarks=(*seen.remarks, *filter(None, [self._books.unwritten]), *remarks(self._home)),
            silence=seen.silence,
            job=seen.view.job,
            look=self._now.stalls.look,
            is_running=seen.view.is_running,
            is_over=seen.view.is_over,
            goes_on=seen.goes_on,
            every_s=_pause(seen.silence),
        )

    def _say_new(self, lines: tuple[str, ...]) -> None:
        """Say what is not a finding, once, as long as it stays the same."""
        for line in lines:
            if line not in self._said:
                self._say(line)
        self._said = lines

    def _leave_sign(self, glance: Glance, *, has_ended: bool = False) -> None:
        try:
            write_beat(
                self._home,
                own_beat(
                    self._name,
                    every_s=glance.every_s,
                    health=glance.health,
                    sentence=glance.sentence,
                    attempt=glance.attempt,
                    may_act=self._may_act,
                    blind=glance.blind,
                    ended=has_ended,
                ),
            )
            self._unsigned = ""
        except OSError as error:
            self._unsigned = f"{self._home.watch}: no sign of life can be left: {error.strerror or error}"


def _wish_for(found: Generations, look: Look, *, begins_again: bool) -> RecoveryWish | None:
    """Return what to ask for: the first suspect that takes part; without any suspect, all ranks if that is allowed."""
    taking_part = [rank for rank in look.suspects if found.has(rank)]
    number = found.newest.number
    if taking_part:
        return RecoveryWish(number, taking_part[0], look.sentence, tuple(taking_part[1:]), look.is_stopped)
    return RecoveryWish(number, None, look.sentence) if begins_again and not look.suspects else None


def _pause(silence: Silence) -> float:
    """Return the time until the next round: about a step, short while it is being learned how long one takes."""
    if silence.usual_s is None:
        return MOST_EVERY_S if silence.step is None else LEAST_EVERY_S
    return min(max(silence.usual_s, LEAST_EVERY_S), MOST_EVERY_S)


def _sentence(seen: WatchRound, findings: tuple[RunFinding, ...], blind: tuple[str, ...]) -> str:
    """Return the state of the run in one sentence."""
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
    step = "no step yet" if silence.step is None else f"step {silence.step}"
    return f"{step}, in {silence.phase} for {format_age(silence.lasts_s)}{usual}"
