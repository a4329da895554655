"""The training loop of one rank. Who else has a part in it, `companions.py` says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Literal

from deepspeed.runtime.pipe.engine import PipelineEngine

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.topology import Topology
from bigsci_launch.train.companions import companions_of
from bigsci_launch.train.device.gpu import send
from bigsci_launch.train.parallel.optimizer import set_learning_rate
from bigsci_launch.train.parallel.pipeline import Build
from bigsci_launch.train.parallel.tensor import make_tensor_parallel
from bigsci_launch.train.rank.events import RankReport, each_batch_noted
from bigsci_launch.train.rank.flight_recorder import offered_recorder
from bigsci_launch.train.rank.identity import RankIdentity
from bigsci_launch.train.rank.rng import seed_generators
from bigsci_launch.train.rank.stop import StepRequests, StopFlag, followed_requests
from bigsci_launch.train.samples.batches import open_batches
from bigsci_launch.train.startup import join_ranks
from bigsci_launch.train.state.checkpoint import ChosenCheckpoint, Origin
from bigsci_launch.train.state.durable import RankCheckpointEngine
from bigsci_launch.train.state.saves import Saves
from bigsci_launch.train.steps.companion import Built, Companion, RankSetup, StepDone, TrainingProgress
from bigsci_launch.train.steps.evaluation import evaluate, format_evaluation, is_evaluation_due
from bigsci_launch.train.steps.schedule import BatchSize, LearningRate
from bigsci_launch.train.steps.word import AskedWord, StepWord, exchange_words

EndReason = Literal["finished", "signal", "asked", "stop_after_steps"]


@dataclass(frozen=True, slots=True)
class Training:
    """What one rank trains with: everything that stays the same from step to step."""

    setup: RankSetup
    engine: PipelineEngine
    companions: Sequence[Companion]
    saves: Saves
    stop: StopFlag
    requests: StepRequests
    learning_rate: LearningRate
    batch_size: BatchSize


def train(
    config: RunConfig,
    topology: Topology,
    identity: RankIdentity,
    report: RankReport,
    stop: StopFlag,
    origin: Origin | None = None,
) -> EndReason:
    """Train until the run is finished or this attempt is asked to stop; a collective call of all ranks."""
    batches = open_batches(config, topology, topology.coordinate(identity.rank))
    setup, origin = RankSetup(config, topology, identity, report, batches), origin or _origin_of(config)
    companions = companions_of(setup, origin)
    try:
        with followed_requests(identity.attempt, identity.rank) as requests:
            join_ranks(config.training, identity)
            report.phase("load")
            chosen = origin.choose(setup)
            report.phase("init")
            training = _build(setup, origin, companions, chosen, stop, requests)
            with offered_recorder(identity), closing(training.saves):
                return _run(training, origin, chosen)
    finally:
        for each in companions:
            each.close()


def _origin_of(config: RunConfig) -> Origin:
    if config.parallelism.engine == "deepspeed":
        return Origin()
    from bigsci_launch.train.uneven.origin import UnevenOrigin

    return UnevenOrigin()


def _build(
    setup: RankSetup,
    origin: Origin,
    companions: Sequence[Companion],
    chosen: ChosenCheckpoint | None,
    stop: StopFlag,
    requests: StepRequests,
) -> Training:
    config, rank = setup.config, setup.identity.rank
    seed_generators(config.run.seed, setup.coordinate)
    batch_size = BatchSize.of_config(config.training)
    build = Build(config, batch_size.at(chosen.record.consumed_samples if chosen else 0))
    for each in companions:
        build = each.before_build(build)
    splits_sequences = config.parallelism.sequence_parallel
    ranks = make_tensor_parallel(setup.topology.groups("tp"), rank, splits_sequences=splits_sequences)
    engine = origin.build(build, setup, ranks)
    engine.checkpoint_engine = RankCheckpointEngine()
    built = Built(engine, build.config, ranks)
    origin.joined(built)
    for each in companions:
        each.after_build(built)
    saves = Saves(setup, engine, companions, stop, origin.save)
    learning_rate = LearningRate.of_config(config.optimizer, config.training)
    return Training(setup, engine, companions, saves, stop, requests, learning_rate, batch_size)


def _run(training: Training, origin: Origin, chosen: ChosenCheckpoint | None) -> EndReason:
    start = origin.start(training.setup, training.engine, chosen)
    for each in training.companions:
        each.prepare(start)
    for each in training.companions:
        each.begin(start)
    if start.untold is not None:
        for each in training.companions:
            each.after_step(start.untold)
    progress, steps = start.progress, training.setup.config.training.steps
    if start.is_restored and progress.step > start.first_step:
        reason = _follow(training, progress, start.first_step, ())
        if reason and progress.step < steps:
            return reason
    while progress.step < steps:
        done = _step(training, progress)
        progress = done.progress
        reason = _follow(training, progress, start.first_step, done.words)
        if reason and progress.step < steps:
            return reason
    return "finished"


def _step(training: Training, progress: TrainingProgress) -> StepDone:
    engine, report, companions = training.engine, training.setup.report, training.companions
    step = report.step = progress.step + 1
    batch_size = training.batch_size.at(progress.consumed_samples)
    learning_rate = training.learning_rate.at(step)
    engine.set_train_batch_size(batch_size)
    set_learning_rate(engine.optimizer.param_groups, learning_rate)
    num_skipped = engine.skipped_steps
    for each in companions:
        each.before_step(step)
    report.phase("step")
    started = time.monotonic()
    work: Callable[[], float] = partial(_train_batch, training, progress)
    for each in reversed(companions):
        work = partial(each.around_step, step, work)
    loss = work()
    seconds = time.monotonic() - started
    for each in companions:
        each.after_batch(step, seconds)
    is_skipped = engine.skipped_steps > num_skipped
    words = exchange_words(_word(training, step, is_skipped, loss), engine.device)
    after = TrainingProgress(step, progress.consumed_samples + batch_size)
    done = StepDone(after, words, loss, batch_size, learning_rate, seconds, is_skipped)
    for each in companions:
        each.after_step(done)
    return done


def _train_batch(training: Training, progress: TrainingProgress) -> float:
    """Train on the samples of the step after `progress`, and return the mean loss."""
    engine = training.engine
    taken = training.setup.batches.step(progress.consumed_samples, engine.micro_batches)
    for each in training.companions:
        taken = each.samples(taken, progress.consumed_samples, engine.micro_batches)
    taken = each_batch_noted(taken)
    sent = ((send(tokens, engine.device), send(labels, engine.device)) for tokens, labels in taken)
    return float(engine.train_batch(sent))


def _word(training: Training, step: int, is_skipped: bool, loss: float) -> StepWord:
    stop = training.requests.stop_due(step)
    is_exact = stop is not None and stop.after_step is not None
    asked = AskedWord(training.requests.save_due(step) or training.saves.is_due, stop is not None, is_exact)
    has_news = training.saves.has_news
    word = StepWord(training.stop.is_raised, is_skipped, alarm=False, loss=loss, asked=asked, save_ended=has_news)
    for each in training.companions:
        word = each.word(word)
    return word


def _follow(
    training: Training, progress: TrainingProgress, first_step: int, words: Sequence[StepWord]
) -> EndReason | None:
    """Do what is due after a step, and return why training ends with it, if it does.

    There are no `words` if the step was done in an earlier generation, which may have ended before this.
    """
    config, step, saves = training.setup.config, progress.step, training.saves
    reason = _stop_reason(training, words, step - first_step)
    if reason == "asked" and step < config.training.steps:
        training.requests.record_stop()
    if any(word.save_ended for word in words):
        saves.settle()
    asked = bool(words) and words[0].asked.save
    is_last = bool(reason) or step == config.training.steps
    if (is_last or asked or _is_save_due(config, step)) and (words or not saves.is_saved(step)):
        saves.save(progress, training.requests.save_key, is_last=is_last, stops=bool(reason))
    if not reason and is_evaluation_due(config, step):
        _evaluate(training, step)
    return reason


def _stop_reason(training: Training, words: Sequence[StepWord], num_own_steps: int) -> EndReason | None:
    asked = words[0].asked if words else AskedWord()
    if asked.stop or any(word.wants_stop for word in words):
        if not asked.is_exact and any([each.wants_one_more() for each in training.companions]):
            return None
        return "asked" if asked.stop else "signal"
    limit = training.setup.config.training.stop_after_steps
    return "stop_after_steps" if limit is not None and num_own_steps >= limit else None


def _is_save_due(config: RunConfig, step: int) -> bool:
    interval = config.checkpoint.save_interval
    return interval is not None and step % interval == 0


def _evaluate(training: Training, step: int) -> None:
    setup = training.setup
    setup.report.phase("eval")
    work = partial(evaluate, training.engine, setup.batches, setup.config, setup.topology)
    for each in reversed(training.companions):
        work = partial(each.around_evaluation, work)
    found = work()
    if setup.tells:
        print(format_evaluation(found, step), flush=True)
    fields = {"loss": found.loss, "loss_hex": found.loss.hex(), "samples": found.num_samples, "seconds": found.seconds}
    setup.report.event("evaluation", **fields)
