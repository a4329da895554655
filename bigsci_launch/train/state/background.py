"""Saves in the background: training continues while a thread of each rank writes the rank's part of a checkpoint.

At the end of a step, the ranks agree on the save, and DeepSpeed names the files and what they hold. The thread copies
that to host memory during the forward and backward passes of the next step; its optimizer waits for the copies. Then it
writes and syncs the files. Its last one, the digests, says that the part is complete. The thread of rank 0 waits for
those of all ranks and commits. No thread communicates, so a rank that hangs, or an error of the training, does not
keep a checkpoint from its name whose parts are all there.

What became of it, the ranks learn from their words at the end of a later step: rank 0 says that its thread has ended,
any rank that the disk has refused its part. If a process is killed, the checkpoint is not committed, as in a save that
training waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from bigsci_launch.checkpoints.folder import CheckpointRecord, digests_path
from bigsci_launch.errors import SaveError
from bigsci_launch.topology import Coordinate
from bigsci_launch.train.guards.engine.state import HeldState, held_state, partitions
from bigsci_launch.train.rank.collective import on_first_rank
from bigsci_launch.train.rank.identity import RankIdentity
from bigsci_launch.train.rank.stop import WRITER
from bigsci_launch.train.state.checkpoint import commit, require_accepted_parts, stage_checkpoint
from bigsci_launch.train.state.durable import RankCheckpointEngine
from bigsci_launch.train.state.host_copies import HostMemory, LiveState

PEERS_S = 5.0
"""How long rank 0 waits, once training has ended with an error, for the parts of ranks that may be gone."""
_LOOK_S = 0.05
_MORE_BYTES = 1 << 20
"""For random states, scalars, and the gaps between tensors."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank writes of a checkpoint: the files at `paths`, and its digests."""

    files: RankCheckpointEngine
    paths: tuple[str, ...]
    staged: Path
    identity: RankIdentity
    coordinate: Coordinate
    step: int

    def write(self, states: Sequence[Any], held: HeldState) -> None:
        """Write it. What the disk refuses is kept."""
        for path, state in zip(self.paths, states, strict=True):
            self.files.write(state, path)
        rank = self.identity.rank
        self.files.write_document(
            self.staged, rank, held.document(rank=rank, coordinate=self.coordinate, step=self.step)
        )

    def is_of_all(self) -> bool:
        """Whether the parts of all ranks are complete."""
        paths = {digests_path(self.staged, rank) for rank in range(self.identity.world_size)}
        # Not one by one: a client of a shared file system may remember for a while that a file was not there.
        return paths <= set(digests_path(self.staged, 0).parent.glob("*"))


class PartWriter(threading.Thread):
    """Writes a part; if it has to `commit`, it does so once the parts of all are there.

    It is no daemon: the process of a rank that has failed waits for it before it ends.
    """

    def __init__(self, part: RankPart, live: LiveState, memory: HostMemory, commit: Callable[[], Path] | None) -> None:
        super().__init__(name=WRITER)
        self.part = part
        self._live, self._memory, self._commit = live, memory, commit
        self._began = self._ended = time.monotonic()
        self._is_given_up = threading.Event()
        self._is_training_over = False
        self.copied, self.written = threading.Event(), threading.Event()
        self.folder: Path | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._write()
            self.written.set()
            if self._commit is not None and self.part.files.refused is None and self._waits_for_all():
                self.folder = self._commit()
        except BaseException as error:
            self.error = error.with_traceback(None)
        finally:
            self._ended = time.monotonic()
            self.copied.set()
            self.written.set()

    def _write(self) -> None:
        *states, held = self._live.copy_to(self._memory)
        del self._live, self._memory
        self.copied.set()
        self.part.write(states, HeldState(*held))

    def _waits_for_all(self) -> bool:
        """Return once the parts of all are there; False if that is given up."""
        waited = 0.0
        while not self.part.is_of_all():
            if self._is_given_up.wait(_LOOK_S) or waited >= PEERS_S:
                return False
            waited += _LOOK_S * self._is_training_over
        return True

    def give_up(self) -> None:
        """Wait no longer for the parts of others."""
        self._is_given_up.set()

    def end_with_training(self) -> None:
        """Wait for the parts of others, but not for ever: training has ended, and they may be gone."""
        self._is_training_over = True

    def outcome(self) -> tuple[Path, float]:
        """Wait for the end, and return the folder of the checkpoint and how many seconds it has taken.

        Raises:
            SaveError: the disk refused to commit it.
        """
        self.join()
        if self.error is not None:
            raise self.error
        assert self.folder is not None
        return self.folder, self._ended - self._began


class BackgroundSave:
    """A save that is under way, on one rank. To begin it is a collective call.

    Raises:
        SaveError: the disk refuses to stage it; on all ranks alike.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        identity: RankIdentity,
        record: CheckpointRecord,
        coordinate: Coordinate,
        keep_last: int | None,
        memory: HostMemory,
    ) -> None:
        self._identity, self._device = identity, engine.device
        staged = stage_checkpoint(engine, identity, record, keeps=True)
        self._files: RankCheckpointEngine = engine.checkpoint_engine
        paths, states = self._files.take_kept()
        held = held_state(engine)
        live = LiveState([*states, (held.weights, held.optimizer, held.random)])
        part = RankPart(self._files, paths, staged, identity, coordinate, record.step)
        work = partial(commit, staged, record, identity, keep_last) if identity.rank == 0 else None
        self._writer = PartWriter(part, live, memory, work)
        self._writer.start()

    @property
    def has_news(self) -> bool:
        """Whether the ranks must hear of it: rank 0 is done with it, or the disk has refused the part of this rank."""
        if self._writer.error is not None and not isinstance(self._writer.error, SaveError):
            raise self._writer.error
        is_done = self._identity.rank == 0 and not self._writer.is_alive()
        return is_done or self._files.refused is not None

    def wait_for_copies(self) -> None:
        """Return once the state of the engine may change."""
        self._writer.copied.wait()

    def settle(self) -> tuple[Path, float]:
        """Wait for its end and return the folder of the checkpoint and the seconds of rank 0; a collective call.

        Raises:
            SaveError: the disk refuses the part of a rank, or to commit it; on all ranks alike.
        """
        self._writer.written.wait()
        try:
            require_accepted_parts(self._files.refused, self._identity, self._device)
            return on_first_rank(self._writer.outcome)
        finally:
            self._writer.give_up()
            self._writer.join()

    def end_with_training(self) -> None:
        """Let it end by itself: training has ended, and this rank calls nothing collective again."""
        self._writer.end_with_training()


def num_bytes_held(engine: PipelineEngine) -> int:
    """Return about how many bytes a rank copies for a save: its weights, its masters and their two moments."""
    weights: int = sum(each.numel() * each.element_size() for each in engine.module.parameters())
    masters = [part.master for part in partitions(engine.optimizer)]
    return weights + 3 * sum(each.numel() * each.element_size() for each in masters) + _MORE_BYTES
