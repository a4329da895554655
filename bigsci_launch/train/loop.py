"""The training loop of one rank."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from bigsci_launch.config.schema.guards import FaultSpec
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import CheckpointError, SaveError
from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.runs.checkpoints import CheckpointsDir, record_path
from bigsci_launch.runs.sizes.record import size_of_checkpoint
from bigsci_launch.topology import Coordinate, Topology
from bigsci_launch.train.batches import Batches, open_batches
from bigsci_launch.train.collective import on_first_rank
from bigsci_launch.train.device.gpu import memory_figures
from bigsci_launch.train.evaluation import Evaluation, evaluate, format_evaluation, is_evaluation_due
from bigsci_launch.train.flight_recorder import offered_recorder
from bigsci_launch.train.flops import FlopCounter
from bigsci_launch.train.guards.data import saved_data
from bigsci_launch.train.guards.judge import Judge
from bigsci_launch.train.guards.nonfinite import FiniteWatch
from bigsci_launch.train.guards.step_word import AskedWord, DataWord, StepWord, exchange_words
from bigsci_launch.train.guards.watch import Guards, make_guards
from bigsci_launch.train.identity import RankIdentity
from bigsci_launch.train.log_line import StepResult, format_step, step_record
from bigsci_launch.train.microbatch.automatic import AutoSize, no_room, with_guessed_size
from bigsci_launch.train.microbatch.traffic import stand_in_between
from bigsci_launch.train.mischief.budget import MemoryBudget, build_within
from bigsci_launch.train.mischief.defects import Defects
from bigsci_launch.train.mischief.faults import Faults
from bigsci_launch.train.optimizer import loss_scale, set_learning_rate
from bigsci_launch.train.parallel.pipeline import build_engine, describe_layout
from bigsci_launch.train.parallel.tensor import make_tensor_parallel
from bigsci_launch.train.rank_events import RankReport
from bigsci_launch.train.schedule import BatchSize, LearningRate
from bigsci_launch.train.startup import join_ranks
from bigsci_launch.train.state.checkpoint import (
    ChosenCheckpoint,
    TrainingProgress,
    choose_checkpoint,
    describe,
    load_checkpoint,
    save_checkpoint,
)
from bigsci_launch.train.state.dump import dump_weights
from bigsci_launch.train.state.durable import RankCheckpointEngine
from bigsci_launch.train.state.rng import seed_generators
from bigsci_launch.train.state.saves import Saves
from bigsci_launch.train.stop import StopFlag, Wishes, watched_wishes
from bigsci_launch.train.survive.life import RankLife

EndReason = Literal["finished", "signal", "asked", "stop_after_steps"]


@dataclass(frozen=True, slots=True)
class Training:
    """What one rank trains with: everything that stays the same from step to step."""

    config: RunConfig
    """The run file, with the size of micro-batches that the engine was built for where it says `auto`."""
    written: RunConfig
    """The run file as it is."""
    topology: Topology
    coordinate: Coordinate
    identity: RankIdentity
    report: RankReport
    engine: PipelineEngine
    batches: Batches
    faults: Faults
    defects: Defects
    judge: Judge
    finite: FiniteWatch
    guards: Guards | None
    stop: StopFlag
    wishes: Wishes
    saves: Saves
    checkpoints: CheckpointsDir
    learning_rate: LearningRate
    batch_size: BatchSize
    flops: FlopCounter
    life: RankLife | None
    budget: MemoryBudget
    auto_size: AutoSize | None

    @property
    def tells(self) -> bool:
        """Whether this rank prints the run's log lines: the first rank of the last stage does."""
        is_first = self.coordinate.dp_rank == 0 and self.coordinate.tp_rank == 0
        return is_first and self.coordinate.pp_rank == self.topology.pp - 1


def train(
    config: RunConfig,
    topology: Topology,
    identity: RankIdentity,
    report: RankReport,
    stop: StopFlag,
    life: RankLife | None = None,
) -> EndReason:
    """Train until the run is finished or this attempt is asked to stop; a collective call of all ranks."""
    with watched_wishes(identity.attempt, identity.rank) as wishes:
        return _train(config, topology, identity, report, stop, wishes, life)


def _train(
    config: RunConfig,
    topology: Topology,
    identity: RankIdentity,
    report: RankReport,
    stop: StopFlag,
    wishes: Wishes,
    life: RankLife | None,
) -> EndReason:
    coordinate = topology.coordinate(identity.rank)
    batches = open_batches(config, topology, coordinate)
    if config.training.micro_batch_size == "auto":
        stand_in_between()
    join_ranks(config.training, identity)
    written, config = config, with_guessed_size(config, topology, batches)
    checkpoints = CheckpointsDir(identity.run.checkpoints)
    report.phase("load")
    chosen = _choose(written, topology, identity, batches, life)
    report.phase("init")
    seed_generators(config.run.seed, coordinate)
    batch_size = BatchSize.of_config(config.training)
    ranks = make_tensor_parallel(topology.groups("tp"), identity.rank)
    defects = Defects(config.faults, identity.rank)
    first_batch_size = batch_size.at(chosen.record.consumed_samples if chosen else 0)
    try:
        build_within(config.faults, identity.rank)
        engine = build_engine(config, topology, ranks, first_batch_size, defects)
    except torch.OutOfMemoryError:
        raise no_room(config, topology) from None
    engine.checkpoint_engine = RankCheckpointEngine()
    if life:
        life.joined(engine, config)
    judge = Judge(config, topology, identity.rank, report)
    guards = make_guards(config, topology, identity.rank, engine, ranks.group, report, batches, judge)
    finite = FiniteWatch(engine, config, topology, identity.rank, judge)
    # They stand around all that the guards have put into the schedule.
    budget = MemoryBudget(config.faults, identity.rank, engine)
    is_auto = written.training.micro_batch_size == "auto"
    auto_size = AutoSize(config, topology, identity, engine, batches, report, guards) if is_auto else None
    training = Training(
        config=config,
        written=written,
        topology=topology,
        coordinate=coordinate,
        identity=identity,
        report=report,
        engine=engine,
        batches=batches,
        faults=Faults(_new_faults(config, life), identity.rank, report, engine, defects),
        defects=defects,
        judge=judge,
        finite=finite,
        guards=guards,
        stop=stop,
        wishes=wishes,
        saves=Saves(identity, report, stop),
        checkpoints=checkpoints,
        learning_rate=LearningRate.of_config(config.optimizer, config.training),
        batch_size=batch_size,
        flops=FlopCounter.of_config(config),
        life=life,
        budget=budget,
        auto_size=auto_size,
    )
    with offered_recorder(identity):
        reason = _run(training, chosen)
    if life:
        life.finish()
    return reason


def _choose(
    config: RunConfig, topology: Topology, identity: RankIdentity, batches: Batches, life: RankLife | None
) -> ChosenCheckpoint | None:
    load = config.checkpoint.load
    if life:
        life.meet()
        if life.restores:
            return None
        load = life.load(config, identity)
    expected = describe(config, topology, TrainingProgress(), identity.run)
    try:
        return choose_checkpoint(load, identity, expected, batches)
    except CheckpointError as error:
        raise life.refused(error) if life else error from None


def _new_faults(config: RunConfig, life: RankLife | None) -> list[FaultSpec]:
    """Return the faults that an earlier generation cannot have begun: each occurs once."""
    reached = life.reached if life else 0
    return [fault for fault in config.faults if fault.kind not in ("hang", "skip", "die") or fault.step > reached]


def _begin(training: Training, chosen: ChosenCheckpoint | None) -> TrainingProgress:
    training.budget.begin_step(1 if chosen is None else chosen.record.step + 1)
    if training.life and training.life.restores:
        progress = training.life.restore()
        if training.auto_size:
            training.auto_size.begin(None, progress.step)
        if training.guards:
            training.guards.after_restore(progress.step)
        return progress
    progress = _resume(training, chosen) if chosen else TrainingProgress()
    if training.auto_size:
        training.auto_size.begin(size_of_checkpoint(chosen.record.micro_batch) if chosen else None, progress.step)
    if training.guards and not chosen:
        training.guards.before_first_step()
    return progress


def _run(training: Training, chosen: ChosenCheckpoint | None) -> EndReason:
    progress = _begin(training, chosen)
    if training.life:
        training.life.began(progress, str(chosen.folder) if chosen else None)
    if training.tells:
        _announce(training, progress)
    first_step, steps = progress.step, training.config.training.steps
    if training.life:
        first_step = training.life.first_step(first_step)
        if training.life.restores and progress.step > first_step:
            reason = _follow(training, progress, first_step, ())
            if reason and progress.step < steps:
                return reason
    while progress.step < steps:
        progress, words = _step(training, progress)
        if training.life:
            training.life.after_step(progress)
        reason = _follow(training, progress, first_step, words)
        if reason and progress.step < steps:
            return reason
    return "finished"


def _follow(
    training: Training, progress: TrainingProgress, first_step: int, words: Sequence[StepWord]
) -> EndReason | None:
    """Do what is due after a step, and return why training ends with it, if it does.

    There are no `words` if the step was done in an earlier generation, which may have ended before this.
    """
    config, step = training.config, progress.step
    reason = _stop_reason(training, words, step - first_step)
    if reason == "asked" and step < config.training.steps:
        training.wishes.record_stop()
    asked = bool(words) and words[0].asked.save
    is_last = bool(reason) or step == config.training.steps
    if (is_last or asked or _is_save_due(config, step)) and (words or not _is_saved(training, step)):
        _save(training, progress, is_last=is_last, stops=bool(reason))
    if not reason and is_evaluation_due(config, step):
        _evaluate(training, progress)
    return reason


def _is_saved(training: Training, step: int) -> bool:
    return on_first_rank(lambda: record_path(training.checkpoints.folder(checkpoint_tag(step))).is_file())


def _resume(training: Training, chosen: ChosenCheckpoint) -> TrainingProgress:
    training.report.phase("load")
    progress = load_checkpoint(training.engine, chosen, training.config, training.coordinate, training.defects)
    training.report.step = progress.step
    training.report.event("load", path=str(chosen.folder), checkpoint_step=progress.step)
    if training.tells:
        _tell_changes(training, chosen)
    if training.guards:
        training.guards.after_load(chosen.folder, progress.step)
    return progress


def _tell_changes(training: Training, chosen: ChosenCheckpoint) -> None:
    for change in chosen.changes:
        fields = {"accepted": chosen.accepted.covers(change), "checkpoint_step": chosen.record.step}
        training.report.event("changed", **change.document, **fields)
    for line in chosen.lines:
        print(line, flush=True)


def _announce(training: Training, progress: TrainingProgress) -> None:
    lines = describe_layout(training.config, training.topology)
    print(f"topology {training.topology}: {training.identity.world_size} ranks", *lines, sep="\n", flush=True)
    print(f"starting after step {progress.step} of {training.config.training.steps}", flush=True)


def _is_save_due(config: RunConfig, step: int) -> bool:
    interval = config.checkpoint.save_interval
    return interval is not None and step % interval == 0


def _stop_reason(training: Training, words: Sequence[StepWord], num_own_steps: int) -> EndReason | None:
    asked = words[0].asked if words else AskedWord()
    if asked.stop or any(word.wants_stop for word in words):
        if not asked.is_exact and training.guards and training.guards.checks_one_more():
            return None
        return "asked" if asked.stop else "signal"
    limit = training.config.training.stop_after_steps
    return "stop_after_steps" if limit is not None and num_own_steps >= limit else None


def _save(training: Training, progress: TrainingProgress, *, is_last: bool, stops: bool) -> None:
    """Save. What the disk refuses is tried again: in a later step, or at once if none follows. A collective call.

    Raises:
        SaveError: no step follows, and no try has worked. All ranks raise it.
    """
    saves, step = training.saves, progress.step
    while (error := _try_to_save(training, progress)) is not None:
        saves.refused(error, step, training.wishes.save_key, is_last=is_last)
        if not is_last:
            return
        saves.wait(error, step, stops=stops)


def _try_to_save(training: Training, progress: TrainingProgress) -> SaveError | None:
    """Save, or return what the disk refuses; on all ranks alike."""
    training.report.phase("save")
    if training.life:
        training.life.before_words()
    if training.guards:
        training.guards.before_save(progress.step)
    started = time.monotonic()
    record = replace(
        describe(training.written, training.topology, progress, training.identity.run),
        micro_batch=training.auto_size.document if training.auto_size else None,
        health=training.judge.health(progress.step),
        data=saved_data(training.batches, progress.consumed_samples),
    )
    keep_last = training.config.checkpoint.keep_last
    try:
        folder = save_checkpoint(
            training.engine, training.identity, record, training.coordinate, training.defects, keep_last
        )
    except SaveError as error:
        return error.with_traceback(None)
    _tell_save(training, progress, folder, time.monotonic() - started)
    return None


def _tell_save(training: Training, progress: TrainingProgress, folder: Path, seconds: float) -> None:
    training.judge.saved(progress.step)
    request = {"request": training.wishes.save_key} if training.wishes.save_key else {}
    training.report.event("save", path=str(folder), seconds=seconds, **request, **training.saves.worked())
    if training.tells:
        print(f"saved {folder} in {seconds:.2f} s", flush=True)


def _evaluate(training: Training, progress: TrainingProgress) -> None:
    training.report.phase("eval")

    def work() -> Evaluation:
        training.budget.begin_step(progress.step)
        return evaluate(training.engine, training.batches, training.config, training.topology)

    found = training.auto_size.evaluate(work) if training.auto_size else work()
    if training.tells:
        print(format_evaluation(found, progress.step), flush=True)
    fields = {"loss": found.loss, "loss_hex": found.loss.hex(), "samples": found.num_samples, "seconds": found.seconds}
    training.report.event("evaluation", **fields)


def _step(training: Training, progress: TrainingProgress) -> tuple[TrainingProgress, list[StepWord]]:
    """Train one step and return the new progress, and what the ranks said of it."""
    engine, report = training.engine, training.report
    step = report.step = progress.step + 1
    batch_size = training.batch_size.at(progress.consumed_samples)
    learning_rate = training.learning_rate.at(step)
    engine.set_train_batch_size(batch_size)
    set_learning_rate(engine.optimizer.param_groups, learning_rate)
    num_skipped = engine.skipped_steps
    _dump(training, step, "before")
    report.phase("step")
    if training.life:
        training.life.before_step(step)
    if training.guards:
        training.guards.before_step(step)
    started = time.monotonic()
    training.faults.before_step(step)
    work = partial(_train_batch, training, progress)
    loss = training.auto_size.train(step, work) if training.auto_size else work()
    seconds = time.monotonic() - started
    _dump(training, step, "after")
    skipped = engine.skipped_steps > num_skipped
    if training.guards:
        training.guards.check_step(step, seconds)
    if training.life:
        training.life.before_words()
    words = exchange_words(_word(training, step, skipped, loss), engine.device)
    _judge_step(training, step, words)
    progress = TrainingProgress(step, progress.consumed_samples + batch_size)
    if training.tells:
        _tell(training, progress, batch_size, learning_rate, loss, int(skipped), seconds)
    if training.auto_size:
        training.auto_size.after_words(step, any(word.thrashes for word in words))
    return progress, words


def _train_batch(training: Training, progress: TrainingProgress) -> float:
    """Train on the samples of the step after `progress`, and return the mean loss."""
    engine, guards = training.engine, training.guards
    training.budget.begin_step(progress.step + 1)
    taken = training.batches.step(progress.consumed_samples, engine.micro_batches)
    if guards:
        taken = guards.data.watch(taken, progress.consumed_samples, engine.micro_batches)
    return float(engine.train_batch(taken))


def _word(training: Training, step: int, skipped: bool, loss: float) -> StepWord:
    guards = training.guards
    alarm, data = (guards.alarm(), guards.data.word()) if guards else (False, DataWord())
    stop = training.wishes.stop_due(step)
    is_exact = stop is not None and stop.after_step is not None
    asked = AskedWord(training.wishes.save_due(step) or training.saves.is_due, stop is not None, is_exact)
    thrashes = training.auto_size is not None and training.auto_size.has_thrashed()
    return StepWord(training.stop.is_raised, skipped, alarm, loss, data, asked, thrashes)


def _judge_step(training: Training, step: int, words: Sequence[StepWord]) -> None:
    guards = training.guards
    if guards:
        guards.after_words(step, words)
    training.finite.after_step(step, words, (lambda: guards.find_causes(step)) if guards else list)
    if guards:
        guards.after_step(step)


def _dump(training: Training, step: int, when: str) -> None:
    if step not in training.config.monitor.dump_weights_steps:
        return
    training.report.phase("dump")
    rank = training.identity.rank
    path = training.identity.run.dump_file(step, when, rank)
    dump_weights(training.engine.module, path, rank=rank, coordinate=training.coordinate, step=step, when=when)


def _tell(
    training: Training,
    progress: TrainingProgress,
    batch_size: int,
    learning_rate: float,
    loss: float,
    num_skipped: int,
    seconds: float,
) -> None:
    """Print and record the result of a step."""
    config = training.config
    world_size = training.identity.world_size
    peak = config.monitor.peak_tflops_per_rank
    result = StepResult(
        step=progress.step,
        num_steps=config.training.steps,
        consumed_samples=progress.consumed_samples,
        sequence_length=config.model.sequence_length,
        learning_rate=learning_rate,
        global_batch_size=batch_size,
        micro_batch_size=training.engine.micro_batch_size,
        loss=loss,
        grad_norm=float(training.engine.get_global_grad_norm() or 0.0),
        num_skipped=num_skipped,
        num_nan=int(math.isnan(loss)),
        seconds=seconds,
        tflops=training.flops.tflops_per_rank(batch_size, seconds, world_size),
        utilization=training.flops.utilization(batch_size, seconds, world_size, peak) if peak else None,
        memory=memory_figures(),
        loss_scale=loss_scale(training.engine.optimizer),
    )
    print(format_step(result), flush=True)
    training.report.event("step", **step_record(result))
