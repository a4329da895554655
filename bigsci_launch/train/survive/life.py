"""What `survive` does for one rank in one generation: where it resumes, what is kept of each step, what is reported.

The rule of commitment: a rank waits until its copy of step k, and the copies that it keeps of others, have arrived
before it enters the exchange of words of the next step. So once any rank has a snapshot of a later step, everything of
step k is held twice, and two buffers are enough.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from bigsci_launch.checkpoints.folder import CheckpointsDir, record_path
from bigsci_launch.errors import CheckpointError
from bigsci_launch.recover.holding import (
    Manifest,
    Restorable,
    Shard,
    StateVersion,
    choose_version,
    keepers,
    plan_transfers,
    without,
)
from bigsci_launch.train.rank.events import RankReport
from bigsci_launch.train.rank.rng import seed_generators
from bigsci_launch.train.rank.stop import wait_for_writers
from bigsci_launch.train.state.checkpoint import ChosenCheckpoint, Origin, choose_from
from bigsci_launch.train.steps.companion import Built, RankSetup, Start, StepDone, TrainingProgress
from bigsci_launch.train.survive.buddies import Buddies, HostGroup
from bigsci_launch.train.survive.channel import Begin, Channel
from bigsci_launch.train.survive.engine_state import read_state, shape_of, unit_lengths, write_generators, write_state
from bigsci_launch.train.survive.restore import fetch, find_apart
from bigsci_launch.train.survive.snapshot import DOCUMENT_BYTES, Copy, Memory, Shape
from bigsci_launch.train.survive.waits import Waits
from bigsci_launch.train.survive.words import LifeWords


class RankLife(Origin):
    """`survive` on one rank, in one generation."""

    def __init__(self, channel: Channel, memory: Memory, waits: Waits, begin: Begin, report: RankReport) -> None:
        self._channel, self._memory, self._waits = channel, memory, waits
        self._begin = begin
        self._words = LifeWords(channel, report, begin.generation)
        self._restorable = Restorable(None)
        self._restored: dict[str, Any] = {}
        self._interval = 1
        self.engine: PipelineEngine | None = None

    def __repr__(self) -> str:
        return f"RankLife(generation {self._begin.generation})"

    def choose(self, setup: RankSetup) -> ChosenCheckpoint | None:
        """Return the checkpoint to begin with, or None if the ranks restore their state from memory."""
        self._meet()
        if self._restores:
            return None
        wait_for_writers()
        self._group.gather(None)
        try:
            return choose_from(load_in(self._begin.generation, setup), setup)
        except CheckpointError as error:
            raise self._refused(error) from None

    def _meet(self) -> None:
        """Find the newest state that the ranks of this generation hold together; a collective call."""
        self._group = HostGroup(dist.new_group(backend="gloo"), self._begin.rank, self._waits)
        mine = self._memory.manifest(), self._memory.reached, self._memory.began
        everywhere = self._group.gather(mine)
        self._manifests: list[Manifest] = [manifest for manifest, _, _ in everywhere]
        self._memory.reached = max(reached for _, reached, _ in everywhere)
        self._memory.began = next((began for _, _, began in everywhere if began is not None), None)
        self._restorable = self._agree()
        self._memory.keep_only(self._restorable.version)

    def _agree(self) -> Restorable:
        """Choose the state to restore; one whose copies differ is none. A collective call."""
        damaged = None
        while True:
            found = choose_version(self._manifests)
            if found.version is None or (apart := self._apart(found.version)) is None:
                return Restorable(found.version, damaged or found.why)
            damaged = damaged or f"the copies of {apart.unit} after step {found.version.step} differ"
            self._manifests = [without(manifest, found.version) for manifest in self._manifests]

    def _apart(self, version: StateVersion) -> Shard | None:
        return find_apart(self._memory.digests(version), self._group)

    @property
    def _restores(self) -> bool:
        """Whether the state is restored from memory."""
        return self._restorable.version is not None

    def _refused(self, error: CheckpointError) -> CheckpointError:
        """Return the error for a checkpoint that this generation cannot load, with the reason why it must."""
        if self._begin.generation == 0:
            return error
        dp = self._begin.topology.dp
        return CheckpointError(
            f"generation {self._begin.generation} cannot restore its state from memory ({self._restorable.why}), nor "
            f"load a checkpoint with {dp} data-parallel replicas: {error.message}",
            hint=error.hint,
        )

    def joined(self, built: Built) -> None:
        """Say that process group and engine stand, and learn what every rank holds from now on; a collective call."""
        engine, self._config = built.engine, built.config
        self.engine = engine
        self._interval = self._config.survive.snapshot_steps if self._config.survive else 1
        rank, topology = self._begin.rank, self._begin.topology
        self._coordinate = topology.coordinate(rank)
        mine = shape_of(engine, self._coordinate), unit_lengths(engine, self._coordinate)
        everywhere = self._group.gather(mine)
        self._shapes: list[Shape] = [shape for shape, _ in everywhere]
        self._whole = {unit: length for _, lengths in everywhere for unit, length in lengths.items()}
        self._whole |= {shape.document: DOCUMENT_BYTES for shape in self._shapes}
        replicas = [topology.coordinate(each).dp_rank for each in range(topology.world_size)]
        self._buddies = Buddies(self._group, keepers(self._begin.nodes, replicas))
        self._words.joined()

    def start(self, setup: RankSetup, engine: PipelineEngine, chosen: ChosenCheckpoint | None) -> Start:
        start = Start(self._restore(), is_restored=True) if self._restores else super().start(setup, engine, chosen)
        if self._memory.began is None:
            self._memory.began = start.progress.step
        return replace(start, first_step=self._memory.began, reached=self._memory.reached)

    def _restore(self) -> TrainingProgress:
        """Set the engine to the state that the ranks have agreed on; a collective call."""
        version, rank = self._restorable.version, self._begin.rank
        assert version is not None
        target = self._place(rank, version)
        plan = plan_transfers(self._manifests, version, [shape.shards for shape in self._shapes])
        was_sent = fetch(self._memory, version, plan, target, self._group)
        has_document = any(each.destination == rank and each.shard.unit == target.shape.document for each in plan)
        document = target.read_document() if has_document else None
        facts = self._common_facts(document)
        write_state(self.engine, target, facts)
        progress = TrainingProgress(facts["step"], facts["consumed_samples"])
        if document is None:
            seed_generators(self._config.run.seed, self._coordinate, progress.step)
            read_state(self.engine, target, {"step": progress.step, "consumed_samples": progress.consumed_samples})
        else:
            write_generators(document)
        target.is_complete = True
        self._restored = {"source": "buddies" if was_sent else "memory", "path": None, "why": None}
        return progress

    def _common_facts(self, document: dict[str, Any] | None) -> dict[str, Any]:
        """Return a document without generators: this rank's, or another's if it has none."""
        facts = document and {name: value for name, value in document.items() if name != "generators"}
        everywhere = self._group.gather(facts)
        found: dict[str, Any] = facts or next(each for each in everywhere if each)
        return found

    def begin(self, start: Start) -> None:
        """Say which state the generation begins with, and keep it."""
        progress, path = start.progress, str(start.folder) if start.folder else None
        if not self._restores:
            why = self._restorable.why if self._begin.generation else None
            self._restored = {"source": "checkpoint" if path else "start", "path": path, "why": why}
        self._memory.done = progress.step
        self._words.restored(progress.step, **self._restored)
        self._keep(progress, self._restorable.version or StateVersion(progress.step, self._begin.generation))

    def before_step(self, step: int) -> None:
        """Note that this rank begins `step`."""
        self._channel.require_present()
        self._memory.reached = max(self._memory.reached, step)

    def after_batch(self, step: int, seconds: float) -> None:
        """Wait until the last snapshot is held twice: the rule of commitment."""
        self._buddies.wait()

    def before_save(self, step: int) -> None:
        self._buddies.wait()

    def after_step(self, done: StepDone) -> None:
        """Keep the state after a step, if it is due, and say that the step is done."""
        progress = done.progress
        # What a step computes after its generation was ended is worth nothing.
        self._channel.require_present()
        self._memory.done = progress.step
        self._memory.release_others([self._shapes[rank] for rank in (self._begin.rank, *self._buddies.kept)])
        if progress.step % self._interval == 0:
            self._keep(progress, StateVersion(progress.step, self._begin.generation))
        self._words.stepped(progress.step)

    def _keep(self, progress: TrainingProgress, version: StateVersion) -> None:
        own = self._place(self._begin.rank, version)
        if not own.is_complete:
            read_state(self.engine, own, {"step": progress.step, "consumed_samples": progress.consumed_samples})
            own.is_complete = True
        self._buddies.begin(own, [(rank, self._place(rank, version)) for rank in self._buddies.kept])

    def _place(self, rank: int, version: StateVersion) -> Copy:
        return self._memory.place(self._shapes[rank], version, self._whole)

    def finish(self) -> None:
        """Wait for what is still on its way."""
        self._buddies.wait()


def load_in(generation: int, setup: RankSetup) -> str:
    """Return what `checkpoint.load` means in a generation: what this attempt has saved comes first."""
    load, checkpoints = setup.config.checkpoint.load, CheckpointsDir(setup.identity.run.checkpoints)
    if generation == 0:
        return load
    began = setup.identity.attempt.config.stat().st_mtime
    records = [record_path(checkpoints.folder(tag)) for tag in checkpoints.tags()]
    has_saved = any(record.is_file() and record.stat().st_mtime >= began for record in records)
    return "auto" if has_saved else load
