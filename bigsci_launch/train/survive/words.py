"""What a rank of a loop says about its life in a generation: to its runner, and in its records; or to none of them."""

from __future__ import annotations

import time
from typing import Any

from bigsci_launch.train.rank.events import RankReport
from bigsci_launch.train.survive.channel import Channel

SAY_S = 1.0
"""Least seconds between two words about steps."""


class LifeWords:
    """The words of one generation. A loop that nothing leads has neither channel nor report."""

    def __init__(self, channel: Channel | None, report: RankReport | None, generation: int) -> None:
        self._channel, self._report = channel, report
        self.generation = generation
        self._since = self._began_step = time.monotonic()
        self._said = -SAY_S

    def require_present(self) -> None:
        """Return if the generation still runs.

        Raises:
            GenerationOver: it does not.
        """
        if self._channel is not None:
            self._channel.require_present()

    def joined(self) -> None:
        """Say that the process groups stand."""
        self._say("joined")

    def restored(self, step: int, source: str, path: str | None = None, why: str | None = None) -> None:
        """Say which state the generation begins with, where it comes from, and why it is no newer one."""
        fields = {"source": source, "path": path, "why": why}
        if self._report is not None:
            self._report.step = step
            self._report.event("restored", generation=self.generation, restored_step=step, **fields)
        self._say("restored", step=step, **fields)

    def begin_step(self, step: int) -> None:
        """Note that this rank begins a step, if the generation still runs."""
        self.require_present()
        self._began_step = time.monotonic()
        if self._report is not None:
            self._report.step = step
            self._report.phase("step")

    def record_step(self, loss: float | None, consumed: int, batch_size: int) -> None:
        """Record that a step is done, for all ranks."""
        if self._report is not None:
            samples = {"consumed_samples": consumed, "global_batch_size": batch_size}
            self._report.event("step", loss=loss, seconds=time.monotonic() - self._began_step, **samples)

    def stepped(self, step: int) -> None:
        """Say that a step is done, if the last such word is long ago."""
        now = time.monotonic()
        if self._channel is not None and now - self._said >= SAY_S:
            self._said = now
            self._channel.say("stepped", generation=self.generation, step=step)

    def _say(self, word: str, **fields: Any) -> None:
        now = time.monotonic()
        if self._channel is not None:
            self._channel.say(word, generation=self.generation, **fields, seconds=round(now - self._since, 4))
        self._since = now
