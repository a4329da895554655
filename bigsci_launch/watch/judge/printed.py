"""Where a run is by what it prints: lines of steps, evaluations and saves, without heartbeats."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigsci_launch.watch.judge.durations import Usual
from bigsci_launch.watch.judge.log_event import LogEvent
from bigsci_launch.watch.judge.state import WARM_UP, Candidate, Learned

RECENT = 8
FEW_LOOKS = 2
"""Steps must have been seen to arrive in so many looks: lines may wait in the buffers of a program."""
PHASES = ("eval", "save")
KINDS = ("step", "evaluated", "saving", "saved", "settings")


@dataclass(frozen=True, slots=True)
class News:
    """A line that shows progress. `had_pause`: a phase that prints nothing may be in the time before it."""

    log_event: LogEvent
    had_pause: bool = False


class Printed:
    """Follows the lines of one program. A gap is the time between two of them, and belongs to the phase that it ends.

    The times of the lines count where both have one. Otherwise it is the watcher's own clock, for lines that it saw
    arrive, and then the steps of one look share the time since the look before.
    """

    def __init__(self, learned: Learned) -> None:
        self._learned = learned
        self.step: int | None = None
        self._total_steps: int | None = None
        self._since_start = 0
        self._reporter: int | None = None
        self._is_saving = False
        self._has_ended = False
        self._may_go_back = False
        self._begun: float | None = None
        self._last: LogEvent | None = None
        self._strides: deque[int] = deque(maxlen=RECENT)
        self._quiets: deque[float] = deque(maxlen=RECENT)

    def end(self) -> None:
        """Note that the program printed its end."""
        self._has_ended = True

    def restart(self, now: float | None = None) -> None:
        """Note that the program begins again, at `now` if the watcher saw that. What was learned stays."""
        self._since_start, self._is_saving, self._last, self._begun = 0, False, None, now
        self._has_ended = False
        self._learned.eval.next_step()
        self._learned.save.next_step()

    def regroup(self, now: float) -> None:
        """Note that the ranks start again, all or some: steps may be done again, and another rank may report them."""
        self.restart(now)
        self._may_go_back = True

    @property
    def stride(self) -> int:
        """Steps between two lines of steps."""
        return max(1, int(statistics.median(self._strides))) if self._strides else 1

    def look(
        self, log_events: Sequence[LogEvent], now: float, arrived: float | None, quiet: float | None
    ) -> list[News]:
        """Take what one look has brought, and return what of it shows progress.

        `arrived` is how long ago the last news came by the watcher's clock, `quiet` how long it surely had seen nothing
        new when it looked before. None at the first look, which sees what is old.
        """
        news = self._news(log_events)
        num_steps = sum(log_event.kind == "step" for log_event in news)
        if quiet is not None and num_steps and not self._may_be_silent():
            self._quiets.append(quiet)
        found = []
        for index, log_event in enumerate(news):
            found.append(News(log_event, log_event.kind == "step" and bool(self._silent())))
            self._take(log_event, now, _share(log_event, index, num_steps, arrived, quiet))
        return found

    def _news(self, log_events: Sequence[LogEvent]) -> list[LogEvent]:
        """Return what shows progress: not the steps that another rank has reported already."""
        news, step, reporter = [], self.step, self._reporter
        for log_event in log_events:
            if log_event.kind == "step":
                is_old = step is not None and log_event.step is not None and log_event.step <= step
                is_old, self._may_go_back = is_old and not self._may_go_back, False
                if is_old and (log_event.step == step or log_event.rank != reporter):
                    continue
                step, reporter = log_event.step, log_event.rank
            if log_event.kind in KINDS:
                news.append(log_event)
        return news

    def _take(self, log_event: LogEvent, now: float, arrived: float | None) -> None:
        if log_event.kind == "settings":
            if self._since_start:
                self.restart()  # arguments are printed at a start
            self._take_setting(log_event.text)
            return
        gap = self._gap(log_event, arrived)
        if log_event.kind == "step":
            self._take_step(log_event, now, gap)
        else:
            self._take_phase(log_event, gap)
        self._last = replace(log_event, text="")

    def _gap(self, log_event: LogEvent, arrived: float | None) -> float | None:
        """Return the time since the last line: by the clock of both if they have one, which ran backwards in none."""
        last = self._last
        if last is not None and last.rank == log_event.rank and last.time is not None and log_event.time is not None:
            return log_event.time - last.time if log_event.time >= last.time else arrived
        return arrived

    def _take_step(self, log_event: LogEvent, now: float, gap: float | None) -> None:
        if self.step is not None and log_event.step is not None:
            if log_event.step < self.step:
                self.restart()
                gap = None
            elif self._since_start:
                self._strides.append(log_event.step - self.step)
        self._note_gap(log_event, now, gap)
        self.step, self._reporter = log_event.step, log_event.rank
        self._total_steps = log_event.total_steps or self._total_steps
        self._since_start += 1
        self._is_saving = False
        self._learned.eval.next_step()
        self._learned.save.next_step()

    def _note_gap(self, log_event: LogEvent, now: float, gap: float | None) -> None:
        """Add the gap before a step to the phase that it belongs to: one that was due and printed nothing took it."""
        learned = self._learned
        learned.step.resize(log_event.batch_size)
        if not self._since_start:
            if self._begun is not None:
                learned.phases["start"].add(now - self._begun)
            return
        if silent := self._silent():
            for phase in silent:
                learned.interval(phase).begins(self.step or 0)
                if gap is not None:
                    learned.phases[phase].add(gap)
        elif self._since_start >= WARM_UP:
            said = None if log_event.seconds is None else log_event.seconds * self.stride
            is_timed = self._last is not None and self._last.time is not None and log_event.time is not None
            if (taken := gap if is_timed or said is None else said) is not None:
                learned.step.add(taken)

    def _take_phase(self, log_event: LogEvent, gap: float | None) -> None:
        phase = "eval" if log_event.kind == "evaluated" else "save"
        interval, step = self._learned.interval(phase), log_event.step if log_event.step is not None else self.step
        if step is not None and log_event.kind == "saving":
            interval.begins(step)
        elif step is not None:
            interval.reports(step)
        taken = gap if gap is not None else log_event.seconds
        if log_event.kind != "saving" and taken is not None and self._since_start:
            self._learned.phases[phase].add(taken)
        self._is_saving = log_event.kind == "saving"

    def _take_setting(self, text: str) -> None:
        name, _, value = text.partition("=")
        if name in ("eval_interval", "save_interval") and value.isdecimal():
            self._learned.interval(name.partition("_")[0]).is_said(int(value))

    def _is_due(self, phase: str) -> bool | None:
        if self.step is None:
            return None
        interval = self._learned.interval(phase)
        is_due = interval.is_due(self.step, self.stride)
        if is_due is False and not interval.has_reported and self._total_steps and self.step >= self._total_steps:
            return None  # many programs evaluate and save at the end
        return is_due

    def _silent(self) -> list[str]:
        """Return the phases that are due after the last step and have printed nothing."""
        return [phase for phase in PHASES if self._is_due(phase) and not self._learned.interval(phase).has_reported]

    def _may_be_silent(self) -> bool:
        """Whether the run may be in another phase than a step."""
        return not self._since_start or self._is_saving or any(self._is_due(phase) is True for phase in PHASES)

    def candidates(self) -> list[Candidate]:
        """Return the phases that the run may be in, judging by its last line; the most likely one first."""
        learned = self._learned
        if self._has_ended:
            return [Candidate("end", None, True)]
        if not self._since_start:
            return [Candidate("start", learned.usual("start"), True)]
        if self._is_saving:
            return [Candidate("save", learned.usual("save"), True)]
        due = {phase: self._is_due(phase) for phase in PHASES}
        found = [
            Candidate(phase, learned.usual(phase), is_due is True, learned.interval(phase).is_in_parts)
            for phase, is_due in due.items()
            if is_due is not False
        ]
        certain = [each for each in found if each.is_certain]
        maybe = [each for each in found if not each.is_certain]
        if self._since_start < WARM_UP:
            maybe.append(Candidate("warm-up", None, False))
        return [*certain, Candidate("step", self.usual_step, True), *maybe]

    @property
    def usual_step(self) -> Usual | None:
        """Return how long it is usual to see no step: as long as one takes, or as long as lines wait in a buffer."""
        usual = self._learned.usual("step")
        if usual is None or len(self._quiets) < FEW_LOOKS:
            return None
        return Usual(max(usual.median, statistics.median(self._quiets)), max(usual.longest, *self._quiets))


def _share(log_event: LogEvent, index: int, num_steps: int, arrived: float | None, quiet: float | None) -> float | None:
    """Return which part of the time since the last news a line has, or the most that it may have.

    Several steps share that time. Lines after the first of a look came within the time since the look before.
    """
    if arrived is None or quiet is None:
        return None
    if log_event.kind == "step" and num_steps > 1:
        return arrived / num_steps
    return arrived if index == 0 else arrived - quiet
