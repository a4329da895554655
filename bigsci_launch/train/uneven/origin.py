"""Where an uneven run begins and what it saves: the same checkpoints as every other run, whatever saved them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from bigsci_launch.checkpoints.folder import CheckpointRecord, CheckpointsDir
from bigsci_launch.config.checks.uneven import require_supported
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import RunDirError
from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.plan.survive.uneven import UnevenLayout, first_layout
from bigsci_launch.runs.layout import read_json, write_json
from bigsci_launch.safe_files import append_line
from bigsci_launch.topology import Coordinate
from bigsci_launch.train.parallel.attention import prefer_fastest_attention
from bigsci_launch.train.parallel.pipeline import Build, require_precision
from bigsci_launch.train.parallel.tensor import TensorParallel
from bigsci_launch.train.rank.collective import on_first_rank
from bigsci_launch.train.rank.identity import RankIdentity
from bigsci_launch.train.state.checkpoint import (
    ChosenCheckpoint,
    Origin,
    begin_staging,
    client_state,
    commit,
    generators_path,
    require_accepted_parts,
)
from bigsci_launch.train.steps.companion import RankSetup, TrainingProgress
from bigsci_launch.train.uneven.engine import UnevenEngine
from bigsci_launch.train.uneven.files import StageFiles, load_files, part_of, saved_record


class UnevenOrigin(Origin):
    """The origin of a run with `parallelism.engine: uneven`."""

    def choose(self, setup: RankSetup) -> ChosenCheckpoint | None:
        require_supported(setup.config)
        return super().choose(setup)

    def layout(self, config: RunConfig, num_ranks: int) -> UnevenLayout:
        """Return the pipelines of this start."""
        return first_layout(config, num_ranks)

    def build(self, build: Build, setup: RankSetup, ranks: TensorParallel) -> UnevenEngine:
        self._config = build.config
        require_precision(build.config)
        prefer_fastest_attention()
        layout = self.layout(build.config, setup.identity.world_size)
        engine = UnevenEngine(build.config, layout, setup.identity.rank, ranks)
        begin_layout(setup, engine, layout)
        engine.listeners.append(partial(begin_layout, setup))
        return engine

    def load(self, engine: Any, chosen: ChosenCheckpoint, setup: RankSetup) -> TrainingProgress:
        load_files(engine, chosen.folder, chosen.record, setup.config)
        return TrainingProgress(chosen.record.step, chosen.record.consumed_samples)

    def save(self, *save: Any) -> Path:
        return save_uneven(self._config, *save)


def begin_layout(setup: RankSetup, engine: UnevenEngine, layout: UnevenLayout) -> None:
    """Take the micro batches of this rank's pipeline from now on, and record what it is."""
    setup.batches.begin_at(engine.pipeline.first)
    say_layout(setup, layout)
    setup.report.event(
        "pipeline",
        pipeline=layout.topology.coordinate(setup.identity.rank).dp_rank,
        stage=engine.stage,
        layers=(engine.module.numbers.start, engine.module.numbers.stop),
        micro_batches=engine.micro_batches,
        pipelines=[list(each.ranks) for each in layout.pipelines],
        means=layout.means,
        failures=layout.failures,
        wanted_failures=layout.wanted,
        planned_s=layout.seconds,
    )


def say_layout(setup: RankSetup, layout: UnevenLayout) -> None:
    """Write for `bsl spy`, `slow` and `status` where each rank is."""
    identity, coordinate = setup.identity, layout.topology.coordinate(setup.identity.rank)
    setup.report.coordinate = coordinate
    with contextlib.suppress(OSError, RunDirError):
        path = identity.attempt.pid_file(identity.rank)
        write_json(path, {**read_json(path), "coordinate": coordinate.as_dict()})
    if (hook := sys.modules.get("ring_hook")) is not None:
        hook.place(str(layout.topology))
    if identity.rank == 0:
        record = {"time": time.time(), "generation": int(os.environ.get("BSL_GENERATION", 0)), **layout.record()}
        with contextlib.suppress(OSError):
            append_line(identity.attempt.layouts, json.dumps(record))


def save_uneven(
    config: RunConfig,
    engine: UnevenEngine,
    identity: RankIdentity,
    record: CheckpointRecord,
    _coordinate: Coordinate,
    keep_last: int | None,
) -> Path:
    """Save the state after `record.step`, and return its folder; a collective call.

    Raises:
        SaveError: as `save_checkpoint`.
    """
    record = saved_record(record, engine.layout)
    checkpoints, tag, files = (
        CheckpointsDir(identity.run.checkpoints),
        checkpoint_tag(record.step),
        engine.checkpoint_engine,
    )
    files.begin()
    staged = on_first_rank(lambda: begin_staging(checkpoints, tag, identity)) / tag
    states, part = engine.optimizer.whole_states(engine.shards), part_of(engine)
    if part is not None:
        rank, coordinate = part
        mine = StageFiles(engine, config, states)
        mine.write(staged, client_state(record))
        held = mine.held()
        files.save(held.random, str(generators_path(staged, rank)))
        files.write_document(staged, rank, held.document(rank=rank, coordinate=coordinate, step=record.step))
    require_accepted_parts(files.refused, identity, engine.device)
    return on_first_rank(lambda: commit(staged, record, identity, keep_last))
