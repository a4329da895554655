"""Follows a run by what its ranks record and print: how long it is silent, whether that is usual, and what is odd.

`now` is the watcher's own monotonic clock. A silence is measured by when the watcher saw something new, because the
clocks of other hosts may be wrong by minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bigsci_launch.units import format_age
from bigsci_launch.watch.judge.durations import generous
from bigsci_launch.watch.judge.heartbeats import Heartbeats
from bigsci_launch.watch.judge.log_event import IN_BACKGROUND, LogEvent
from bigsci_launch.watch.judge.printed import Printed
from bigsci_launch.watch.judge.pulse import CALLS_LOOK_S, LEAST_LOOK_S, OUTPUT_LOOK_S, Pulse, look_after
from bigsci_launch.watch.judge.silence import Noticed, Pace, Silence
from bigsci_launch.watch.judge.state import Candidate, Expected, Learned
from bigsci_launch.watch.judge.trends import Trends

END_S = 900.0
"""A program may linger this long after its ranks have reported their end: launchers wait for their agents."""
AFTER_ERROR_S = 60.0
"""A program that prints an error and nothing more for this long is worth a look."""
UNKNOWN_S, UNKNOWN_START_S = 180.0, 300.0
"""Phases of unknown length, and starts, are not doubted before."""
RECOVERY_S = 60.0
"""A recovery in which nothing happens for longer than this does not continue by itself."""
TRACEBACK = "Traceback"

NAMES = {
    "start": ("no step has been seen", "starts"),
    "step": ("step {next} has not ended", "steps"),
    "eval": ("the evaluation after step {step} has not ended", "evaluations"),
    "save": ("the save after step {step} has not ended", "saves"),
    "copy": ("the copy of the state after step {step} has not ended", "such copies"),
    "load": ("the load of a checkpoint has not ended", "loads"),
    "dump": ("the dump of weights at step {next} has not ended", "dumps"),
    "end": ("its ranks have ended, but not the job", "ends"),
    "recovery": ("the recovery from a failure has not ended", "recoveries"),
}


class ProgressTracker:
    """What is known of a run, from the first look on. Give it what was seen at each look, then ask.

    It may follow several attempts of one run: it keeps what it has learned.
    """

    def __init__(self, expected: Expected | None = None) -> None:
        known = expected or Expected()
        self._from_records, self._from_lines = Learned(known), Learned(known)
        self._heartbeats = Heartbeats(self._from_records)
        self._printed = Printed(self._from_lines)
        self._trends = Trends()
        self._last_look: float | None = None
        self._last_news: float | None = None
        self._has_step = self._has_shown = False
        self._output, self._calls = Pulse(OUTPUT_LOOK_S), Pulse(LEAST_LOOK_S, CALLS_LOOK_S)
        self._error: str | None = None
        self._blind: tuple[str, ...] = ()
        self._noticed: list[Noticed] = []
        self._says_phases = self._recovers = False
        self._world_size: int | None = None
        self._step_before: int | None = None

    def take(self, log_events: Sequence[LogEvent], now: float, blind: Sequence[str] = ()) -> None:
        """Take what was seen at one look, the oldest of each file first. The first look may see what is old.

        `blind` is what could not be seen: then a silence means nothing, until it can be seen again.
        """
        is_news = [self._take(log_event, now) for log_event in log_events]
        arrived = now - self._last_news if self._last_news is not None else None
        quiet = (
            self._last_look - self._last_news if self._last_look is not None and self._last_news is not None else None
        )
        news = self._printed.look(log_events, now, arrived, quiet)
        self._noticed += self._trends.take(news, has_records=self._heartbeats.are_known)
        if any(is_news) or news:
            self._output.beat(now)
            self._has_shown = self._has_shown or self._last_look is not None
        if any(is_news) or news or self._last_news is None:
            self._last_news = now
        self._last_look, self._blind = now, tuple(blind)

    def new_attempt(self, now: float) -> None:
        """Note that the run starts again: nothing that follows belongs to what was seen before."""
        self._heartbeats.new_attempt()
        self._printed.restart(now)
        self._trends.restart()
        self._error, self._last_news = None, now
        self._has_shown = False
        self._output.restart()
        self._calls.restart()
        self._says_phases = self._recovers = False
        self._world_size = self._step_before = None

    def _take(self, log_event: LogEvent, now: float) -> bool:
        """Take a log event, and return whether it is a sign of life.

        Mere output is one before the first step, and so it is for programs whose lines are not known.
        """
        if log_event.kind == "generation":
            self._take_generation(log_event, now)
            return True
        if log_event.kind == "call":
            self._calls.beat(now)
            return False
        if log_event.kind == "end" and log_event.rank is None:
            self._printed.end()
            return True
        if log_event.kind in ("phase", "start", "end"):
            self._heartbeats.take(log_event)
            self._error = None
            return True
        if log_event.kind == "failed" and (self._error is None or TRACEBACK in self._error):
            self._error = log_event.text  # the first one with a text
        if log_event.kind == "saved" and log_event.text == IN_BACKGROUND and log_event.rank == 0:
            self._heartbeats.learn_save(log_event.step, log_event.seconds)
        if log_event.kind == "step":
            self._has_step, self._error = True, None
            self._heartbeats.resize(log_event.batch_size)
        return log_event.kind == "output" and not self._has_step and not self._heartbeats.are_known

    def _take_generation(self, log_event: LogEvent, now: float) -> None:
        """Take what the controller of `survive` says: between the end of a generation and the restored state of the
        next one, or the start of programs that say nothing of it, the run recovers."""
        if log_event.phase in ("failed", "ended"):
            self._recovers = True
        elif log_event.phase == "began":
            self._recovers = self._recovers and self._says_phases
            if self._world_size is not None:
                self._regroup(log_event.world_size, now)
            self._world_size = log_event.world_size
        elif log_event.phase in ("joined", "restored", "first_step"):
            self._says_phases = True
            self._recovers = self._recovers and log_event.phase == "joined"
        else:
            self._recovers = False

    def _regroup(self, world_size: int | None, now: float) -> None:
        self._step_before = self.step
        self._heartbeats.regroup(world_size)
        self._printed.regroup(now)
        self._trends.restart()
        self._error = None
        if world_size and self._world_size and world_size != self._world_size:
            self._trends.forget_times()
            for learned in (self._from_records, self._from_lines):
                learned.step.rescale(self._world_size / world_size)

    @property
    def recovers(self) -> bool:
        """Whether a generation has ended, and the next one has not come back yet."""
        return self._recovers

    @property
    def step(self) -> int | None:
        """The last finished step; None if none was seen."""
        step = self._source.step
        return step if step is not None else self._step_before

    def usual_s(self, phase: str) -> float | None:
        """Return how long a phase usually takes, in seconds; None if it is not known."""
        usual = self._learned.usual(phase)
        return usual.median if usual else None

    @property
    def save_interval(self) -> int | None:
        """Steps between two saves; None if it is not known, or if the run does not save between."""
        return self._learned.save.interval or None

    @property
    def _learned(self) -> Learned:
        return self._from_records if self._heartbeats.are_known else self._from_lines

    @property
    def _source(self) -> Heartbeats | Printed:
        return self._heartbeats if self._heartbeats.are_known else self._printed

    def silence(self, now: float) -> Silence:
        """Return how long nothing new was seen, and what that means."""
        lasts = now - (self._last_news if self._last_news is not None else now)
        calls_in_s = max(self._calls.look_in_s(now), self._calls.look_after_s - lasts)
        candidates = [Candidate("recovery", None, True)] if self._recovers else self._source.candidates()
        pace = self._pace(lasts, candidates)
        first = candidates[0]
        return Silence(
            pace=pace,
            phase=first.phase if first.phase in NAMES else "unknown",
            step=self.step,
            lasts_s=lasts,
            usual_s=first.usual.median if first.usual else None,
            sentence=self._sentence(lasts, candidates, pace),
            look_in_s=min(self._look_after(candidates) - lasts, calls_in_s),
            has_shown=self._has_shown,
            quiet_s=self._calls.silent_s(now),
            calls_in_s=calls_in_s,
        )

    def _look_after(self, candidates: Sequence[Candidate]) -> float:
        """Return after how long a silence of the output the ranks are worth a look."""
        if self._recovers:
            return RECOVERY_S
        if candidates[0].phase == "end":
            return UNKNOWN_START_S
        after = look_after((each.usual for each in candidates if each.usual and each.is_certain), self._output)
        return min(after, OUTPUT_LOOK_S) if self._error else after

    def _pace(self, lasts: float, candidates: Sequence[Candidate]) -> Pace:
        pace = self._pace_by_clock(lasts, candidates)
        if self._blind and pace is not Pace.USUAL:
            return Pace.UNKNOWN
        return Pace.LONG if pace is Pace.USUAL and self._error and lasts >= AFTER_ERROR_S else pace

    def _pace_by_clock(self, lasts: float, candidates: Sequence[Candidate]) -> Pace:
        if self._recovers:
            return Pace.USUAL if lasts < RECOVERY_S else Pace.TOO_LONG
        known = [each.usual for each in candidates if each.usual]
        is_unknown = any(each.usual is None for each in candidates)
        bounds = [usual.too_long for usual in known] + ([self._bound(candidates)] if is_unknown else [])
        if lasts >= max(bounds):
            return Pace.TOO_LONG
        certain = [each.usual.long for each in candidates if each.usual and each.is_certain]
        if lasts < max([self._least(candidates), *certain]):
            return Pace.USUAL
        return Pace.UNKNOWN if is_unknown or not all(each.is_certain for each in candidates) else Pace.LONG

    def _least(self, candidates: Sequence[Candidate]) -> float:
        """Return how long any phase may take, whatever is known of it."""
        if candidates[0].phase in ("start", "load", "end"):
            return UNKNOWN_START_S
        step = self._source.usual_step
        return step.long if step else UNKNOWN_S

    def _bound(self, candidates: Sequence[Candidate]) -> float:
        return END_S if candidates[0].phase == "end" else generous(self._source.usual_step)

    def _sentence(self, lasts: float, candidates: Sequence[Candidate], pace: Pace) -> str:
        first, step = candidates[0], self.step
        words, plural = NAMES.get(first.phase, ("phase {phase} has not ended", "such phases"))
        after = "" if step is None else f" since step {step}"
        parts = [
            f"nothing new{after} for {format_age(lasts)}: "
            + words.format(step=step, next=(step or 0) + 1, phase=first.phase)
        ]
        if first.usual and first.in_parts:
            parts.append(f"its results usually come {format_age(first.usual.median)} apart")
        elif first.usual:
            parts.append(f"{plural} usually take {format_age(first.usual.median)}")
        parts += [f"not seen: {trouble}" for trouble in self._blind]
        if pace in (Pace.UNKNOWN, Pace.TOO_LONG):
            parts += self._doubts(candidates)
        if self._heartbeats.are_known and pace is not Pace.USUAL and (behind := self._heartbeats.describe()):
            parts.append(behind)
        if self._error:
            parts.append(f"an error was printed: {self._error}")
        return "; ".join(parts)

    def _doubts(self, candidates: Sequence[Candidate]) -> Iterable[str]:
        unknown = [each for each in candidates if each.usual is None]
        if not unknown or self._recovers:
            return
        bound = format_age(self._bound(candidates))
        names = {
            "eval": "an evaluation",
            "save": "a save",
            "start": "the start",
            "step": "a step",
            "warm-up": "each of the first steps",
        }
        listed = " or ".join(names.get(each.phase, f"phase {each.phase}") for each in unknown)
        yield f"the usual duration of {listed} is not known yet; after {bound} it counts as a stall"

    def noticed(self) -> list[Noticed]:
        """Return what was noticed since the last call."""
        found, self._noticed = self._noticed, []
        return found
