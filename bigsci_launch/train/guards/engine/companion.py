"""What the guards do at each moment of the training. The loss and the skipped steps are watched in every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from bigsci_launch.train.guards.engine.data import saved_data
from bigsci_launch.train.guards.engine.judge import Judge
from bigsci_launch.train.guards.engine.nonfinite import FiniteWatch
from bigsci_launch.train.guards.engine.watch import EngineGuards
from bigsci_launch.train.steps.companion import Built, Companion, RankSetup, Start, StepDone, TrainingProgress
from bigsci_launch.train.steps.word import StepWord


class Checks(Companion):
    """The checks of a run on this rank, by its engine's guards. `guards` is None where `guards.interval` is `off`."""

    def __init__(self, setup: RankSetup, guards: type[EngineGuards]) -> None:
        self._setup = setup
        self._guards = guards
        self._judge = Judge(setup.config, setup.topology, setup.identity.rank, setup.report)
        self.guards: EngineGuards | None = None

    def after_build(self, built: Built) -> None:
        setup = self._setup
        if setup.config.guards.interval != "off":
            self.guards = self._guards(setup, built, self._judge)
        self._finite = FiniteWatch(built.engine, setup.config, setup.topology, setup.identity.rank, self._judge)

    def begin(self, start: Start) -> None:
        if self.guards:
            self.guards.begin(start.progress.step, start.folder)

    def before_step(self, step: int) -> None:
        if self.guards:
            self.guards.before_step(step)

    def samples(
        self, taken: Iterator[tuple[Tensor, Tensor]], consumed_samples: int, num_micro_batches: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if self.guards is None:
            return taken
        return self.guards.data.watch(taken, consumed_samples, num_micro_batches)

    def after_batch(self, step: int, seconds: float) -> None:
        if self.guards:
            self.guards.check_step(step, seconds)

    def word(self, word: StepWord) -> StepWord:
        if self.guards is None:
            return word
        return replace(word, alarm=self.guards.alarm(), data=self.guards.data.word())

    def after_step(self, done: StepDone) -> None:
        guards, step = self.guards, done.progress.step
        if guards is None:
            self._finite.after_step(step, done.words)
            return
        guards.after_words(step, done.words)
        self._finite.after_step(step, done.words, lambda: guards.find_causes(step))
        guards.after_step(step)

    def wants_one_more(self) -> bool:
        return self.guards is not None and self.guards.checks_one_more()

    def before_save(self, step: int) -> None:
        if self.guards:
            self.guards.before_save(step)

    def record(self, progress: TrainingProgress) -> dict[str, Any]:
        data = saved_data(self._setup.batches, progress.consumed_samples)
        return {"health": self._judge.health(progress.step), "data": data}

    def after_save(self, step: int) -> None:
        self._judge.saved(step)
