"""What the values of steps show: slower steps, spikes of loss and gradient, values that are no numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from bigsci_launch.watch.judge.printed import News
from bigsci_launch.watch.judge.sighting import Sighting
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
        self._last: Sighting | None = None
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
            if each.sighting.kind == "step":
                self._had_pause = (self._had_pause or each.had_pause) and not has_records
                found += [noticed for noticed in self._step(each.sighting) if noticed is not None]
            elif each.sighting.kind != "settings":
                self._had_pause = True
        return found

    def _step(self, sighting: Sighting) -> Iterator[Noticed | None]:
        last = self._last
        if last is not None and last.step is not None and sighting.step is not None and sighting.step < last.step:
            self.restart()
        self._count += 1
        self._since_start += 1
        step = sighting.step if sighting.step is not None else self._count
        if (seconds := self._seconds(sighting)) is not None and self._since_start > WARM_UP and not self._had_pause:
            yield self._times.add(TimedStep(step, seconds, sighting.time), sighting.batch_size)
        self._last, self._had_pause = sighting, False
        is_skipped = sighting.text == "skipped"
        yield self._finite.add(step, (sighting.loss, sighting.grad_norm), is_skipped, sighting.time)
        if is_skipped:
            return
        for spikes, value in ((self._loss, sighting.loss), (self._grad_norm, sighting.grad_norm)):
            if value is not None and math.isfinite(value):
                yield spikes.add(step, value, sighting.time)

    def _seconds(self, sighting: Sighting) -> float | None:
        """Return how long the step took, as it says, else by the times of its line and the last; None if not known."""
        last = self._last
        if sighting.seconds is not None:
            return sighting.seconds
        if last is None or last.time is None or sighting.time is None or last.rank != sighting.rank:
            return None
        if last.step is None or sighting.step is None or sighting.time <= last.time:
            return None
        return (sighting.time - last.time) / (sighting.step - last.step)
