"""Saves and loads the whole state of a run: DeepSpeed's files, random states per rank, and a record of them.

An `Origin` says where training begins: with the checkpoint that `checkpoint.load` names, or with new weights.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

import bigsci_launch
from bigsci_launch.checkpoints.changes import (
    Acceptance,
    RunChange,
    change_lines,
    find_changes,
    read_accepted,
    read_run_id,
    require_accepted,
)
from bigsci_launch.checkpoints.folder import (
    OTHER_CHECKPOINT,
    CheckpointRecord,
    CheckpointsDir,
    begin_checkpoint,
    commit_checkpoint,
    find_checkpoint,
    finish_interrupted,
    list_files,
    read_record,
    require_complete,
    write_record,
)
from bigsci_launch.checkpoints.resume import describe_run, require_not_lost, require_same_run
from bigsci_launch.checkpoints.verify import (
    finish_deletions,
    prune_checkpoints,
    require_agreement,
    with_digest,
)
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.data.fingerprint import compare_with_saved
from bigsci_launch.errors import CheckpointError, SaveError
from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.launch.provenance import describe_repository
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.topology import Coordinate, Topology
from bigsci_launch.topology.naming import name_ranks_and_part
from bigsci_launch.train.device.gpu import computes_on_gpu
from bigsci_launch.train.guards.engine.data import is_order_kept
from bigsci_launch.train.guards.engine.state import state_document
from bigsci_launch.train.parallel.optimizer import apply_settings, choose_kernel
from bigsci_launch.train.parallel.pipeline import Build, build_engine
from bigsci_launch.train.parallel.tensor import TensorParallel
from bigsci_launch.train.rank.collective import gather, on_first_rank
from bigsci_launch.train.rank.events import is_lost_peer
from bigsci_launch.train.rank.identity import RankIdentity
from bigsci_launch.train.rank.quiet import talk_as_debug
from bigsci_launch.train.rank.rng import capture_generators, restore_generators, seed_generators
from bigsci_launch.train.samples.batches import Batches
from bigsci_launch.train.state.durable import (
    RankCheckpointEngine,
    disk_errors,
    errors_of_rank,
    refused_to,
)
from bigsci_launch.train.state.foreign import is_foreign, load_plain, plain_loads, require_plain_checkpoint
from bigsci_launch.train.steps.companion import Built, Companion, RankSetup, Start, TrainingProgress

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenCheckpoint:
    """The checkpoint that a run starts from, and what has changed since it was saved.

    If it `is_foreign`, others may exchange it until it is loaded, whatever is found in its place then.
    """

    folder: Path
    record: CheckpointRecord
    is_foreign: bool
    changes: tuple[RunChange, ...]
    accepted: Acceptance

    @property
    def lines(self) -> list[str]:
        """The changes as text."""
        return change_lines(self.folder.name, self.changes, self.accepted)


def describe(config: RunConfig, topology: Topology, progress: TrainingProgress, run: RunDir) -> CheckpointRecord:
    """Return the record of a checkpoint of this run, without its files."""
    at = {"step": progress.step, "consumed_samples": progress.consumed_samples}
    return describe_run(config, topology, **at, run_id=read_run_id(run))


@lru_cache(maxsize=1)
def running_code() -> dict[str, Any]:
    """Return what code this process runs: the package's git revision (None outside a repository), whether it has
    uncommitted changes, and versions."""
    repository = describe_repository(Path(bigsci_launch.__file__).parent)
    changed = repository.get("changed_files")
    return {
        "revision": repository.get("revision"),
        "dirty": None if changed is None else bool(changed),
        "bigsci_launch": bigsci_launch.__version__,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
    }


def universal_info(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what DeepSpeed's converter to universal checkpoints must know.

    This is how each parameter is split over tp, and that the tied embedding is one parameter: otherwise a race decides
    which stage's copy is taken.
    """
    tied = model["tied_embeddings"]
    positions = [r"1\.weight"] if model.get("positions", "learned") == "learned" else []
    last = model["num_layers"] + 2 + len(positions) + model["embedding_norm"]
    table = [r"tied_modules\.embedding\.weight"]
    # The converter refuses patterns that match nothing.
    row_biases = [r"\d+\.attention\.output\.bias", r"\d+\.mlp\.down\.bias"] if model.get("biases", True) else []
    return {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": model["vocab_size"],
        "tp_replicated_parameter_patterns": [
            *positions,
            r"\d+\.norm\..*",
            r"\d+\.attention_norm\..*",
            r"\d+\.mlp_norm\..*",
            *row_biases,
        ],
        "parameter_with_row_parallelism_patterns": [r"\d+\.attention\.output\.weight", r"\d+\.mlp\.down\.weight"],
        "vocabulary_parameter_patterns": table if tied else [r"0\.weight", rf"{last}\.weight"],
        "pipeline_replicated_parameter_patterns": table if tied else [],
        "parameter_to_average_patterns": [],
        "parameter_with_2_sub_params_cat_dim_0": [],
    }


def generators_path(folder: Path, rank: int) -> Path:
    """Return the file of a checkpoint that holds the random states of `rank`."""
    return folder / f"rng_rank_{rank:04d}.pt"


def save_checkpoint(
    engine: PipelineEngine,
    identity: RankIdentity,
    record: CheckpointRecord,
    coordinate: Coordinate,
    keep_last: int | None,
) -> Path:
    """Save the state after `record.step` and return its folder; a collective call, done once `latest` names it.

    Older checkpoints are deleted, except the newest `keep_last` (None keeps all) and those that must not be deleted.

    Raises:
        SaveError: the disk refuses the part of a rank; on all ranks alike. `latest` names an earlier checkpoint then,
            or none, and nothing of this one is left. It can be tried again.
    """
    staged = stage_checkpoint(engine, identity, record)
    files: RankCheckpointEngine = engine.checkpoint_engine
    if files.refused is None:
        document = state_document(engine, rank=identity.rank, coordinate=coordinate, step=record.step)
        files.write_document(staged, identity.rank, document)
    require_accepted_parts(files.refused, identity, engine.device)
    return on_first_rank(lambda: commit(staged, record, identity, keep_last))


def stage_checkpoint(
    engine: PipelineEngine, identity: RankIdentity, record: CheckpointRecord, *, keeps: bool = False
) -> Path:
    """Let DeepSpeed write the files of a checkpoint, without the digests, and return the folder that it is staged in.

    A collective call. What the disk refuses is kept in the engine's `checkpoint_engine`; `keeps`: so are the files.
    """
    checkpoints, tag = CheckpointsDir(identity.run.checkpoints), checkpoint_tag(record.step)
    files: RankCheckpointEngine = engine.checkpoint_engine
    files.begin(keeps=keeps)
    staging = on_first_rank(lambda: begin_staging(checkpoints, tag, identity))
    with talk_as_debug(), _script_errors_kept(engine, staging):
        engine.save_checkpoint(str(staging), tag=tag, client_state=client_state(record), save_latest=False)
    files.save(capture_generators(), str(generators_path(staging / tag, identity.rank)))
    return staging / tag


def require_accepted_parts(refused: SaveError | None, identity: RankIdentity, device: torch.device) -> None:
    """Return if the disk took the parts of all ranks; `refused` is what it refused this one. A collective call.

    Raises:
        SaveError: it did not; on all ranks alike. What was staged is removed.
    """
    is_refused = torch.tensor([refused is not None], dtype=torch.int32, device=device)
    dist.all_reduce(is_refused, dist.ReduceOp.MAX)
    if not is_refused.item():
        return
    everywhere = gather((identity.node, refused))
    ranks = [rank for rank, (_, error) in enumerate(everywhere) if error is not None]
    node, error = everywhere[ranks[0]]
    on_first_rank(lambda: _clean_up(CheckpointsDir(identity.run.checkpoints)))
    raise refused_to(error, ranks, node)


@contextlib.contextmanager
def _script_errors_kept(engine: PipelineEngine, staging: Path) -> Iterator[None]:
    """Keep what the disk refuses when DeepSpeed copies its scripts: the only files that do not pass its engine."""
    copy = engine._copy_recovery_script

    def keep(folder: str) -> None:
        with engine.checkpoint_engine.keeping_errors(staging):
            copy(folder)

    engine._copy_recovery_script = keep
    try:
        yield
    finally:
        del engine._copy_recovery_script


def client_state(record: CheckpointRecord) -> dict[str, Any]:
    """Return what a checkpoint's files of model states hold besides what DeepSpeed writes."""
    return {
        "iteration": record.step,
        "consumed_train_samples": record.consumed_samples,
        "universal_checkpoint_info": universal_info(record.model),
    }


def begin_staging(checkpoints: CheckpointsDir, tag: str, identity: RankIdentity) -> Path:
    """Return a new folder for the parts of a checkpoint. Raises SaveError where the disk refuses it."""
    with errors_of_rank(checkpoints.path, identity):
        finish_interrupted(checkpoints)
        return begin_checkpoint(checkpoints, tag)


def commit(staged: Path, record: CheckpointRecord, identity: RankIdentity, keep_last: int | None) -> Path:
    """Give a checkpoint whose parts are all staged its name, and return its folder.

    Raises:
        SaveError: the disk refuses it. What was staged is removed.
    """
    checkpoints = CheckpointsDir(identity.run.checkpoints)
    try:
        with errors_of_rank(checkpoints.path, identity):
            record = replace(record, files=list_files(staged), code=running_code())
            write_record(staged, with_digest(staged, record))
            commit_checkpoint(checkpoints, staged.name, record.step)
    except SaveError:
        _clean_up(checkpoints)
        raise
    if keep_last is not None:
        for problem in prune_checkpoints(checkpoints, keep_last):
            log.warning("%s; the next save tries again", problem)
    return checkpoints.folder(staged.name)


def _clean_up(checkpoints: CheckpointsDir) -> None:
    """Remove what is not committed: the room may be needed. A commit that has begun remains, for the next save."""
    with contextlib.suppress(OSError):
        finish_interrupted(checkpoints)


def choose_checkpoint(
    load: str, identity: RankIdentity, expected: CheckpointRecord, batches: Batches
) -> ChosenCheckpoint | None:
    """Find the checkpoint that `checkpoint.load` names and check that it fits the run; None means start at step 0.

    A collective call: rank 0 looks, and all ranks get its answer.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, mixed of several steps, or of another model or topology;
            others may have written it, and it would run something; or a change since then makes the run another one,
            and the user has not accepted it.
    """
    return on_first_rank(lambda: _choose(load, identity, expected, batches))


def _choose(load: str, identity: RankIdentity, expected: CheckpointRecord, batches: Batches) -> ChosenCheckpoint | None:
    own = CheckpointsDir(identity.run.checkpoints)
    running_code()  # read now, because the repository may change while the run trains
    with disk_errors(own.path):
        finish_interrupted(own)
        finish_deletions(own)
        folder = find_checkpoint(load, own)
    if folder is None:
        if load == "auto":
            require_not_lost(identity.run)
        return None
    record = read_record(folder)
    require_same_run(folder, record, expected)
    require_complete(folder, record)
    require_agreement(folder, record)
    with disk_errors(folder):
        found_foreign = is_foreign(folder, own.path)
    if found_foreign:
        require_plain_checkpoint(folder)
    changes = find_changes(
        record,
        expected,
        is_own=folder.parent.resolve() == own.path.resolve(),
        likeness=compare_with_saved(record.data, batches.dataset),
        is_order_kept=is_order_kept(record.data, batches),
    )
    accepted = read_accepted(identity.attempt)
    require_accepted(str(folder), changes, accepted)
    return ChosenCheckpoint(folder, record, found_foreign, tuple(changes), accepted)


def load_checkpoint(
    engine: PipelineEngine, chosen: ChosenCheckpoint, config: RunConfig, coordinate: Coordinate
) -> TrainingProgress:
    """Load model, optimizer and random states and return the saved progress; a collective call.

    If a conversion to another topology could not keep the random states, they are seeded again.

    Raises:
        CheckpointError: DeepSpeed could not load it, or loaded nothing; or a file is of another step than the record.
    """
    folder, record = chosen.folder, chosen.record
    try:
        with talk_as_debug(), plain_loads() if chosen.is_foreign else contextlib.nullcontext():
            path, counters = engine.load_checkpoint(str(folder.parent), tag=folder.name)
        generators = _read_generators(folder, record)
    except Exception as error:
        if is_lost_peer(error):
            raise
        raise CheckpointError(f"{folder}: cannot be loaded: {type(error).__name__}: {error}") from error
    if path is None:
        raise CheckpointError(f"{folder}: DeepSpeed loaded nothing from it")
    _require_counters(engine, folder, record, counters)
    if generators is None:
        seed_generators(config.run.seed, coordinate, record.step)
    else:
        remark = restore_generators(generators)
        if remark and config.model.dropout:
            log.warning("%s: %s", folder, remark)
    apply_settings(engine.optimizer.param_groups, config.optimizer)
    choose_kernel(engine.optimizer.optimizer, fused=computes_on_gpu())
    engine.optimizer.clip_grad = config.optimizer.clip_grad
    return TrainingProgress(record.step, record.consumed_samples)


def _require_counters(
    engine: PipelineEngine, folder: Path, record: CheckpointRecord, counters: Mapping[str, Any]
) -> None:
    """Check that the loaded files count the same steps and samples as the record; all ranks raise alike."""
    found = {
        "iteration": (counters.get("iteration"), record.step),
        "consumed_train_samples": (counters.get("consumed_train_samples"), record.consumed_samples),
        "global_steps": (engine.global_steps, record.step),
    }
    wrong = [
        f"{key} is {value}, but {asked} in checkpoint.json" for key, (value, asked) in found.items() if value != asked
    ]
    everywhere = gather(wrong)
    ranks = [rank for rank, each in enumerate(everywhere) if each]
    if ranks:
        where = name_ranks_and_part(ranks, Topology(**record.topology))
        raise CheckpointError(
            f"{folder}: in the files of {where}: {'; '.join(everywhere[ranks[0]])}", hint=OTHER_CHECKPOINT
        )


def _read_generators(folder: Path, record: CheckpointRecord) -> dict[str, Any] | None:
    if record.converted_from and record.converted_from["random_states"] == "new":
        return None
    states: dict[str, Any] = load_plain(generators_path(folder, dist.get_rank()))
    return states


class Origin(Companion):
    """Finds the state that training begins with, and sets the engine to it."""

    def choose(self, setup: RankSetup) -> ChosenCheckpoint | None:
        """Return the checkpoint to begin with, or None. A collective call.

        Raises:
            CheckpointError: as `choose_checkpoint`.
        """
        return choose_from(setup.config.checkpoint.load, setup)

    def joined(self, built: Built) -> None:
        """Note that process group and engine stand."""

    def build(self, build: Build, setup: RankSetup, ranks: TensorParallel) -> PipelineEngine:
        """Return the engine of this rank; a collective call."""
        return build_engine(build, setup.topology, ranks)

    def start(self, setup: RankSetup, engine: PipelineEngine, chosen: ChosenCheckpoint | None) -> Start:
        """Set the engine to the state to begin with; a collective call."""
        if chosen is None:
            return Start()
        report, record = setup.report, chosen.record
        report.phase("load")
        progress = self.load(engine, chosen, setup)
        report.step = progress.step
        report.event("load", path=str(chosen.folder), checkpoint_step=progress.step)
        if setup.tells:
            for change in chosen.changes:
                fields = {"accepted": chosen.accepted.covers(change), "checkpoint_step": record.step}
                report.event("changed", **change.document, **fields)
            for line in chosen.lines:
                print(line, flush=True)
        return Start(progress, chosen.folder, record, first_step=progress.step)

    def load(self, engine: PipelineEngine, chosen: ChosenCheckpoint, setup: RankSetup) -> TrainingProgress:
        """Set the engine to a checkpoint, and return its progress; a collective call."""
        return load_checkpoint(engine, chosen, setup.config, setup.coordinate)

    def save(self, *save: Any) -> Path:
        """Save, with the arguments of `save_checkpoint`; a collective call."""
        return save_checkpoint(*save)


def choose_from(load: str, setup: RankSetup) -> ChosenCheckpoint | None:
    """Return the checkpoint that `load` means for this run."""
    expected = describe(setup.config, setup.topology, TrainingProgress(), setup.identity.run)
    return choose_checkpoint(load, setup.identity, expected, setup.batches)
