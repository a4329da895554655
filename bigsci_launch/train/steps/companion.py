"""Those who accompany the training of a rank, and the moments at which the loop calls them.

The loop knows no guard, no search for a size and no fault. It calls all companions at each moment, in the order that
`train/companions.py` argues. A companion overrides the moments that concern it; here they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from bigsci_launch.checkpoints.folder import CheckpointRecord
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.topology import Coordinate, Topology
from bigsci_launch.train.parallel.pipeline import Build
from bigsci_launch.train.parallel.tensor import TensorParallel
from bigsci_launch.train.rank.events import RankReport
from bigsci_launch.train.rank.identity import RankIdentity
from bigsci_launch.train.samples.batches import Batches
from bigsci_launch.train.steps.word import StepWord


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What is known of a rank before its engine is built."""

    config: RunConfig
    topology: Topology
    identity: RankIdentity
    report: RankReport
    batches: Batches

    @property
    def coordinate(self) -> Coordinate:
        return self.topology.coordinate(self.identity.rank)

    @property
    def tells(self) -> bool:
        """Whether this rank prints the run's log lines: the first rank of the last stage does."""
        at = self.coordinate
        return (at.pp_rank, at.dp_rank, at.tp_rank) == (self.topology.pp - 1, 0, 0)


@dataclass(frozen=True, slots=True)
class Built:
    """The engine of a rank. `config` is the run file, with a size of micro-batches where it says `auto`."""

    engine: PipelineEngine
    config: RunConfig
    ranks: TensorParallel


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """How far a run is: optimizer steps done, and the samples they consumed."""

    step: int = 0
    consumed_samples: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """The state that training begins with: new, of a checkpoint (in `folder`), or restored from memory.

    The attempt began after `first_step`; ranks of an earlier generation have begun steps up to `reached`. `untold` is
    the last step of that generation, if it ended before its ranks could say that it is done.
    """

    progress: TrainingProgress = TrainingProgress()
    folder: Path | None = None
    record: CheckpointRecord | None = None
    is_restored: bool = False
    first_step: int = 0
    reached: int = 0
    untold: StepDone | None = None


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step that this rank has done, and what all ranks said of it. `progress` includes it."""

    progress: TrainingProgress
    words: Sequence[StepWord]
    loss: float
    batch_size: int
    learning_rate: float
    seconds: float
    is_skipped: bool


class Companion:
    """One who accompanies the training of a rank. Each method is a moment; all ranks reach it together."""

    def before_build(self, build: Build) -> Build:
        """The ranks have joined. Return what the engine is to be built of."""
        return build

    def after_build(self, built: Built) -> None:
        """The engine stands; its state is not there yet."""

    def prepare(self, start: Start) -> None:
        """The state is there. What changes it, or the engine, does so now."""

    def begin(self, start: Start) -> None:
        """Training begins: the state is the one that the first step begins with."""

    def before_step(self, step: int) -> None:
        """A step begins; its time does not count yet."""

    def around_step(self, step: int, work: Callable[[], float]) -> float:
        """Do the work of a step, and return its loss. The first companion is the outermost."""
        return work()

    def samples(
        self, taken: Iterator[tuple[Tensor, Tensor]], consumed_samples: int, num_micro_batches: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the micro batches of a step, which the engine takes one by one."""
        return taken

    def after_batch(self, step: int, seconds: float) -> None:
        """The work of a step is done; the ranks have not exchanged their words."""

    def word(self, word: StepWord) -> StepWord:
        """Return the word of this rank, with what this companion has to say."""
        return word

    def after_step(self, done: StepDone) -> None:
        """A step is done, and all ranks know the words of all."""

    def wants_one_more(self) -> bool:
        """Whether a run that was asked to stop does one more step before it saves."""
        return False

    def before_save(self, step: int) -> None:
        """The state after `step` is about to be saved."""

    def record(self, progress: TrainingProgress) -> dict[str, Any]:
        """Return fields of the record of a checkpoint."""
        return {}

    def after_save(self, step: int) -> None:
        """The state after `step` is saved."""

    def around_evaluation(self, work: Callable[[], Any]) -> Any:
        """Do the work of an evaluation, and return its result."""
        return work()

    def close(self) -> None:
        """Training has ended, with an error or without."""
