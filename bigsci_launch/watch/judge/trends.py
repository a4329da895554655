"""What the values of steps show: slower steps, spikes of loss and gradient, values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from bigsci_launch.watch.judge.log_event import LogEvent
from bigsci_launch.watch.judge.printed import News
from bigsci_launch.watch.judge.silence import Noticed
from bigsci_launch.watch.judge.slower import StepTimes, TimedStep
from bigsci_launch.watch.judge.spikes import GRAD_NORM, LOSS, Finite, Spikes
from bigsci_launch.watch.judge.state import WARM_UP


class Trends:
    """Follows the steps of a run, over all its attempts. A step next to an evaluation or a save is not timed."""

    def __init__(self) -> None:
        self._times = StepTimes()
        self._loss = Spikes("loss_spike", "loss", LOSS)
        self._grad_norm = Spikes("grad_spike", "norm of the gradient", GRAD_NORM)
        self._finite = Finite()
        self._last: LogEvent | None = None
        self._count = 0
        self._since_start = 0
        self._had_pause = False

    def restart(self) -> None:
        """Note that the run starts again."""
        self._since_start, self._last, self._had_pause = 0, None, False
        self._times.restart()

    def forget_times(self) -> None:
        """Note that steps take another time from now on, for a known reason."""
        self._times = StepTimes()

    def take(self, news: Iterable[News], *, has_records: bool) -> list[Noticed]:
        """Take what is new, and return what it shows. Records have the time of the step alone, lines may not."""
        found: list[Noticed] = []
        for each in news:
            if each.log_event.kind == "step":
                self._had_pause = (self._had_pause or each.had_pause) and not has_records
                found += [noticed for noticed in self._step(each.log_event) if noticed is not None]
            elif each.log_event.kind != "settings":
                self._had_pause = True
        return found

    def _step(self, log_event: LogEvent) -> Iterator[Noticed | None]:
        last = self._last
        if last is not None and last.step is not None and log_event.step is not None and log_event.step < last.step:
            self.restart()
        self._count += 1
        self._since_start += 1
        step = log_event.step if log_event.step is not None else self._count
        if (seconds := self._seconds(log_event)) is not None and self._since_start > WARM_UP and not self._had_pause:
            yield self._times.add(TimedStep(step, seconds, log_event.time), log_event.batch_size)
        self._last, self._had_pause = log_event, False
        is_skipped = log_event.text == "skipped"
        yield self._finite.add(step, (log_event.loss, log_event.grad_norm), is_skipped, log_event.time)
        if is_skipped:
            return
        for spikes, value in ((self._loss, log_event.loss), (self._grad_norm, log_event.grad_norm)):
            if value is not None and math.isfinite(value):
                yield spikes.add(step, value, log_event.time)

    def _seconds(self, log_event: LogEvent) -> float | None:
        """Return how long the step took, as it says, else by the times of its line and the last; None if not known."""
        last = self._last
        if log_event.seconds is not None:
            return log_event.seconds
        if last is None or last.time is None or log_event.time is None or last.rank != log_event.rank:
            return None
        if last.step is None or log_event.step is None or log_event.time <= last.time:
            return None
        return (log_event.time - last.time) / (log_event.step - last.step)
