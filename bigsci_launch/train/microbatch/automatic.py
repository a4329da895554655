"""`training.micro_batch_size: auto` on one rank: finds the size, keeps it, and takes a smaller one when it must.

All ranks search together: each tries a size alone, then all of them hear of all results, so no rank waits for one
that ran out of memory. In training, `agreement.py` makes a step that any rank cannot do undone on all of them, and the
same samples are trained on again in smaller micro-batches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from bigsci_launch.checkpoints.found_size import (
    FoundSize,
    WhySize,
    read_found_size,
    size_of_checkpoint,
    write_found_size,
)
from bigsci_launch.checkpoints.resume import describe_run
from bigsci_launch.config.micro_batches import legal_size_below, legal_sizes
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import MemoryShortageError
from bigsci_launch.plan.choose.automatic import expected_memory, expected_size
from bigsci_launch.topology import Topology
from bigsci_launch.train.device.gpu import computes_on_gpu
from bigsci_launch.train.guards.engine.companion import Checks
from bigsci_launch.train.microbatch.agreement import Agreement, Shortage, StepDiscarded, says_shortage
from bigsci_launch.train.microbatch.probe import Prober, SizeTrial, make_moments, num_retries, open_communicators
from bigsci_launch.train.microbatch.search import SizeSearch, SizeVerdict
from bigsci_launch.train.microbatch.traffic import Traffic, end_traffic, stand_in_between
from bigsci_launch.train.parallel.pipeline import SPLIT_FURTHER, Build, planned_setup
from bigsci_launch.train.rank.collective import gather, on_first_rank
from bigsci_launch.train.rank.rng import capture_generators, restore_generators
from bigsci_launch.train.steps.companion import Built, Companion, RankSetup, Start, StepDone, TrainingProgress
from bigsci_launch.train.steps.word import StepWord

log = logging.getLogger(__name__)

THRASHING_STEPS = 2
"""After so many steps in a row in which torch had to empty its cache, the size counts as too large."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What all ranks found of a size: their trials, by rank. There may be no smaller size to take."""

    trials: tuple[SizeTrial, ...]
    is_smallest: bool = False

    @property
    def fits(self) -> bool:
        """Whether it can be taken. A cache that has to be emptied makes it slow, which is better than no size."""
        return all(each.fits and (self.is_smallest or not each.retries) for each in self.trials)

    @property
    def verdict(self) -> SizeVerdict:
        return SizeVerdict(self.trials[0].size, self.fits, max(each.seconds for each in self.trials))

    @property
    def used_bytes(self) -> int | None:
        """Memory in use at the peak, on the fullest device; None if it is not counted."""
        return max((each.used_bytes for each in self.trials if each.used_bytes is not None), default=None)

    @property
    def words(self) -> str:
        """Say which ranks it does not fit on, and where."""
        short = [f"rank {rank} in {each.place}" for rank, each in enumerate(self.trials) if not each.fits]
        tight = [f"rank {rank}" for rank, each in enumerate(self.trials) if each.fits and each.retries]
        if short:
            return f"{self.trials[0].size} does not fit: {', '.join(short)}"
        if tight:
            return f"{self.trials[0].size} fits only after the cache was emptied: {', '.join(tight)}"
        return f"{self.trials[0].size} fits"


class AutoSize(Companion):
    """The size of micro-batches of this rank."""

    def __init__(self, setup: RankSetup, checks: Checks) -> None:
        self._config, self._topology, self._batches = setup.config, setup.topology, setup.batches
        self._rank, self._run, self._report = setup.identity.rank, setup.identity.run, setup.report
        self._checks = checks
        self._sizes = legal_sizes(self._config.training, self._topology.dp)
        self._num_thrashing = 0
        self._retries = num_retries()
        stand_in_between()

    @property
    def size(self) -> int:
        return self.found.size

    def record(self, progress: TrainingProgress) -> dict[str, Any]:
        return {"micro_batch": self.found.document}

    def before_build(self, build: Build) -> Build:
        """Build for the expected size. On a CPU the ranks of a node share its memory."""
        setup = planned_setup(self._config, self._topology)
        self._guess = size = on_first_rank(lambda: expected_size(setup, self._sizes, _memory_gib()))
        self._batches.cut(size)
        training = build.config.training.model_copy(update={"micro_batch_size": size})
        return replace(build, config=build.config.model_copy(update={"training": training}))

    def after_build(self, built: Built) -> None:
        self._engine, self._config, guards = built.engine, built.config, self._checks.guards
        self._fingerprint = fingerprint(self._config, self._topology)
        traffic = Traffic()
        self._agreement = Agreement(built.engine, self._rank, traffic, lambda: guards is not None and guards.is_armed)
        self._prober = Prober(built.engine, self._config, traffic, self._agreement, self._topology.dp, guards)
        self._group = dist.new_group(backend="gloo")

    def close(self) -> None:
        end_traffic()

    def prepare(self, start: Start) -> None:
        """Take the size that is remembered, or find one.

        Raises:
            MemoryShortageError: not even the smallest size fits.
        """
        saved = size_of_checkpoint(start.record.micro_batch) if start.record else None
        step = start.progress.step
        make_moments(self._engine.optimizer.optimizer)
        open_communicators(self._engine)
        known = on_first_rank(lambda: self._remembered(saved))
        if known is not None:
            self.found = known
            outcome = self._try(known.size)
            if outcome.fits:
                self._begin_with("remembered", known.size, step, outcome, "as before")
                return
        self._find(known, step)

    def _remembered(self, saved: FoundSize | None) -> FoundSize | None:
        """Return the smaller one of what the checkpoint and the run hold, if it holds here."""
        own = read_found_size(self._run)
        held = [each for each in (saved, own) if each is not None and each.fingerprint == self._fingerprint]
        known = min(held, key=lambda each: each.size, default=None)
        if known is None or known.size not in self._sizes:
            return None
        return replace(known, history=own.history if own else ())

    def _find(self, known: FoundSize | None, step: int) -> None:
        guess = known.size if known else self._guess
        samples = self._config.training.global_batch_size // self._topology.dp
        search = SizeSearch(self._sizes, guess, self._topology.pp, samples)
        outcomes = {}
        while (size := search.next_size()) is not None:
            outcomes[size] = self._try(size)
            search.note(outcomes[size].verdict)
        if search.answer is None:
            raise self._nothing_fits(list(outcomes[self._sizes[0]].trials))
        answer = search.answer
        if self._engine.micro_batch_size != answer:
            outcomes[answer] = self._try(answer)
        words = "; ".join(outcomes[each].words for each in sorted(outcomes))
        old = read_found_size(self._run)
        self.found = FoundSize(answer, answer, self._fingerprint, search.too_large, history=old.history if old else ())
        trials = "1 trial" if len(outcomes) == 1 else f"{len(outcomes)} trials"
        self._begin_with("found", answer, step, outcomes[answer], f"{trials}: {words}")

    def _begin_with(self, why: WhySize, size: int, step: int, outcome: _Outcome, words: str) -> None:
        self._batches.cut(size)
        evaluation = self._find_evaluation(size)
        self.found = replace(self.found, evaluation_size=evaluation, headroom=_headroom(outcome))
        self._take(why, size, step, words)

    def _find_evaluation(self, size: int) -> int:
        """Return the largest size up to `size` with which the forward pass of an evaluation fits; a collective call."""
        if self._config.monitor.eval_interval is None or not self._config.data.held_out:
            return size
        for each in sorted((legal for legal in self._sizes if legal <= size), reverse=True):
            if _Outcome(tuple(gather(self._prober.try_evaluation(each), self._group))).fits:
                break
        self._prober.prepare(size)
        return each

    def _try(self, size: int) -> _Outcome:
        trials = tuple(gather(self._prober.try_training(size), self._group))
        outcome = _Outcome(trials, is_smallest=size == self._sizes[0])
        fields = {"fits": outcome.fits, "seconds": outcome.verdict.seconds, "used_bytes": outcome.used_bytes}
        self._report.event("trial", size=size, **fields)
        return outcome

    def around_step(self, step: int, work: Callable[[], float]) -> float:
        """Do the work of a step, which takes its samples again whenever it is called.

        Raises:
            MemoryShortageError: a rank has run out of memory with the smallest size.
        """
        generators = capture_generators()
        while True:
            try:
                return float(self._agreement.run(work))
            except StepDiscarded as error:
                restore_generators(generators)
                self._take_smaller("out_of_memory", step - 1, error.shortages)
            except RuntimeError as error:
                if not says_shortage(error):
                    raise
                raise self._alone(step, error) from error

    def _alone(self, step: int, error: RuntimeError) -> RuntimeError:
        """Return the error for a shortage that this rank could not tell its peers of, and remember a smaller size: with
        `survive` the next generation takes it, without it the next attempt."""
        smaller = legal_size_below(self._sizes, self.size)
        if smaller is None:
            return error
        words = f"rank {self._rank} in step {step}, where the step could not be discarded"
        found = replace(self.found, too_large=self.size)
        self._write(found.changed("out_of_memory", smaller, step=step - 1, words=words))
        text = str(error).splitlines()[0]
        return torch.OutOfMemoryError(f"{text}; the next start takes micro-batches of {smaller}, not {self.size}")

    def around_evaluation(self, work: Callable[[], Any]) -> Any:
        """Do the work of an evaluation, which has a size of its own.

        Raises:
            MemoryShortageError: a rank has run out of memory with the smallest size.
        """
        size = self.found.evaluation_size
        while True:
            self._prepare(size)
            try:
                result = self._agreement.run(work)
            except StepDiscarded as error:
                size = self._smaller_evaluation(size, error.shortages)
                continue
            self._prepare(self.size)
            return result

    def _prepare(self, size: int) -> None:
        if size != self._engine.micro_batch_size:
            self._prober.prepare(size)
        self._batches.cut(size)

    def _smaller_evaluation(self, size: int, shortages: list[Shortage]) -> int:
        smaller = legal_size_below(self._sizes, size)
        if smaller is None:
            raise self._nothing_fits([], shortages)
        self._prober.try_evaluation(smaller)
        self.found = replace(self.found, evaluation_size=smaller)
        words = ", ".join(f"rank {each.rank} in {each.place}" for each in shortages)
        self._report.event("micro_batch", why="out_of_memory", evaluation_size=smaller, was=size, words=words)
        if self._rank == 0:
            self._write(self.found)
        return smaller

    def word(self, word: StepWord) -> StepWord:
        return replace(word, thrashes=self.has_thrashed())

    def after_step(self, done: StepDone) -> None:
        """Take a smaller size if any rank has had to empty its cache in two steps in a row."""
        self._num_thrashing = self._num_thrashing + 1 if any(word.thrashes for word in done.words) else 0
        if self._num_thrashing >= THRASHING_STEPS and legal_size_below(self._sizes, self.size) is not None:
            self._num_thrashing = 0
            self._take_smaller("thrash", done.progress.step, [])

    def has_thrashed(self) -> bool:
        """Return whether torch has had to empty its cache on this rank since the last call."""
        before, self._retries = self._retries, num_retries()
        return self._retries > before

    def _take_smaller(self, why: WhySize, step: int, shortages: list[Shortage]) -> None:
        words = ", ".join(f"rank {each.rank} in {each.place}" for each in shortages) or "the cache was emptied"
        size, trials = self.size, list[SizeTrial]()
        while True:
            smaller = legal_size_below(self._sizes, size)
            if smaller is None and why == "thrash":
                self._prober.prepare(self.size)
                return
            if smaller is None:
                raise self._nothing_fits(trials, shortages)
            size, outcome = smaller, self._try(smaller)
            trials = list(outcome.trials)
            if outcome.fits:
                break
        self.found = replace(self.found, too_large=self.size, evaluation_size=min(self.found.evaluation_size, size))
        self._batches.cut(size)
        self._take(why, size, step, words)

    def _take(self, why: WhySize, size: int, step: int, words: str) -> None:
        was = self.found.history[-1].size if self.found.history else None
        self.found = self.found.changed(why, size, step=step, words=words)
        self._retries = num_retries()
        self._report.event("micro_batch", why=why, size=size, was=was, words=words, headroom=self.found.headroom)
        if self._rank == 0:
            self._write(self.found)

    def _write(self, found: FoundSize) -> None:
        """Write down what was found. A full disk must not end a training that goes well."""
        try:
            write_found_size(self._run, found)
        except OSError as error:
            log.warning("%s: %s, so the next start looks for the size again", self._run.micro_batch, error.strerror)

    def _nothing_fits(self, trials: list[SizeTrial], shortages: list[Shortage] | None = None) -> MemoryShortageError:
        smallest = self._sizes[0]
        short = [f"rank {rank} in {each.place}" for rank, each in enumerate(trials) if not each.fits]
        short = short or [f"rank {each.rank} in {each.place}" for each in shortages or ()]
        expected = expected_memory(planned_setup(self._config, self._topology), smallest)
        recomputes = self._config.training.activation_checkpointing is True
        used = _Outcome(tuple(trials)).used_bytes
        measured = "" if used is None else f"; {used / 2**30:.3g} GiB were in use when it ran out"
        return MemoryShortageError(
            f"training.micro_batch_size: auto: not even {smallest} fits: out of memory on {', '.join(short)}. The "
            f"fullest rank is expected to need {expected.words}{measured}",
            hint=SPLIT_FURTHER if recomputes else f"set training.activation_checkpointing: true, or {SPLIT_FURTHER}",
        )


def _memory_gib() -> float:
    if computes_on_gpu():
        return torch.cuda.mem_get_info()[0] / 2**30
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / 2**30


def fingerprint(config: RunConfig, topology: Topology) -> dict[str, Any]:
    """Return what a size holds for: the model, how it is cut, the device and the versions."""
    record = describe_run(config, topology)
    device: dict[str, Any] = {"name": "cpu", "memory": None}
    if computes_on_gpu():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = {"name": properties.name, "memory": properties.total_memory}
    return {
        "model": record.model,
        "topology": record.topology,
        "precision": config.training.precision,
        "activation_checkpointing": config.training.activation_checkpointing,
        "compile": config.training.compile,
        "device": device,
        "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__},
    }


def _headroom(outcome: _Outcome) -> float | None:
    if outcome.used_bytes is None:
        return None
    return 1 - outcome.used_bytes / torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
