"""Runs the guards: when to check, what to exchange, how to react.

Every rank gets the findings of all ranks, so all ranks decide alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bigsci_launch.checkpoints.folder import digests_path
from bigsci_launch.errors import CheckpointError
from bigsci_launch.safe_files import parse_json, read_file
from bigsci_launch.train.device.digest import digests64
from bigsci_launch.train.device.gpu import finish_queued_work, send
from bigsci_launch.train.guards.copies import CopyChecker, Violation, Watched, by_cause, counted_once
from bigsci_launch.train.guards.engine.adam import OptimizerWatch
from bigsci_launch.train.guards.engine.agreement import agreed_digests, agreed_values, find_shared_randomness
from bigsci_launch.train.guards.engine.data import (
    DataWatch,
    compare_fingerprints,
    find_wrong_data,
)
from bigsci_launch.train.guards.engine.gradients import GradientWatch, find_wrong_norm
from bigsci_launch.train.guards.engine.judge import Judge
from bigsci_launch.train.guards.engine.state import (
    find_masters_apart,
    find_wrong_groups,
    find_wrong_load,
    partitions,
    state_document,
    watched_weights,
)
from bigsci_launch.train.guards.fingerprint import StateFingerprint
from bigsci_launch.train.guards.flat import Flat
from bigsci_launch.train.guards.interval import AutoInterval
from bigsci_launch.train.guards.places import Places
from bigsci_launch.train.parallel.optimizer import gradient_norm
from bigsci_launch.train.rank.collective import gather
from bigsci_launch.train.rank.exchange import Exchange
from bigsci_launch.train.steps.companion import Built, RankSetup
from bigsci_launch.train.steps.word import StepWord

SHARE = 0.005
"""The share of the training time that guards may take."""

AIM = 0.3 * SHARE
"""The share that the interval is chosen for. A check costs more than the time it takes, because it leaves caches cold
and ranks out of step: up to 1.9 times as much was measured (`benchmarks/guards_cost.py`). What guards do in every step
comes on top."""

ONE_MORE_S = 10.0
"""Seconds that a step may take to be checked and done after a signal has asked the run to stop."""


class EngineGuards:
    """The guards of one rank. All public methods are collective calls."""

    def __init__(self, setup: RankSetup, built: Built, judge: Judge) -> None:
        config, topology, rank = setup.config, setup.topology, setup.identity.rank
        engine, batches = built.engine, setup.batches
        self._config, self._topology, self._rank, self._engine = config, topology, rank, engine
        self.judge = judge
        self.data = DataWatch(batches)
        self._batches = batches
        self._gradients, self._optimizer = self._watches(setup, built)
        self._exchanges = Exchange(engine.device)
        self._watched = gather(self._watched_here(Places.of_topology(topology, rank)))
        self._copies = CopyChecker(self._watched)
        self._counted = counted_once(self._watched, topology, rank)
        interval = config.guards.interval
        self._auto = AutoInterval(AIM) if interval == "auto" else None
        self.interval = interval if isinstance(interval, int) else 1
        self._due_early = 2
        self._first_step, self._seconds, self._is_last_asked = 0, 0.0, False
        self._alarming: list[Violation] = []
        self._checked: list[Violation] = []
        self._weights = StateFingerprint("memory", rank)

    def _watches(self, setup: RankSetup, built: Built) -> tuple[GradientWatch, OptimizerWatch]:
        rank = setup.identity.rank
        gradients = GradientWatch(built.engine, built.ranks.group, rank)
        return gradients, OptimizerWatch(built.engine, setup.config, rank)

    def _watched_here(self, places: Places) -> list[Watched]:
        stages = places.copies("pp")
        return [
            *watched_weights(self._engine.module, places),
            *(Watched(f"gradient of {name}", stages, "tied gradients") for name in self._gradients.tied_names),
            *agreed_values(self._engine.module, places),
        ]

    def begin(self, step: int, folder: Path | None) -> None:
        """Check the data, weights, masters and optimizer groups of the state after `step`, before any training.

        `folder` is the checkpoint that was loaded, if any: it must have been restored as it was saved.
        """
        if wrong := compare_fingerprints(gather(self._batches.fingerprint)):
            self.judge.act(step, wrong)
        found: list[Violation] = []
        if folder is not None:
            coordinate = self._topology.coordinate(self._rank)
            loaded = state_document(self._engine, rank=self._rank, coordinate=coordinate, step=step)
            found += find_wrong_load(read_state_document(folder, self._rank), loaded, self._rank)
        self._first_step = step
        self.judge.begin(step)
        self._optimizer.begin(step)
        self._judge(step, [*found, *self._static_violations(step)], self._digests())

    def before_step(self, step: int) -> None:
        """Arm the watches if this step is due for a check."""
        self._gradients.begin(step, is_armed=self._due_early > 0 or self._is_due(step))
        self._gradients.is_timed = self._is_timed
        self._optimizer.before_step(step, is_armed=self._gradients.is_armed)
        if self._weights.is_taken:
            self._optimizer.violations += self._weights.find_changed(self.state_flats())

    def state_flats(self) -> dict[str, Flat]:
        """Return the weights that this rank computes with, those whose masters other ranks have included.

        A wrong one spoils a step, and then the all-gather of new weights hides it.
        """
        return {name: Flat.whole(name, each, "weight {}") for name, each in self._engine.module.named_parameters()}

    @property
    def is_armed(self) -> bool:
        return self._gradients.is_armed

    @contextmanager
    def as_in_step(self, *, is_checked: bool) -> Iterator[None]:
        """Let the watches do, inside the `with` block, what they do in a step that is checked, or one that is not."""
        before, self._gradients.is_armed = self._gradients.is_armed, is_checked
        try:
            yield
        finally:
            self._gradients.is_armed = before

    def forget_step(self) -> None:
        """Forget what was seen of a step that all ranks have discarded."""
        self._gradients.clear()

    def _is_due(self, step: int) -> bool:
        """Return whether `step` is to be checked, early steps apart: it is its turn, or its result will be saved."""
        save_interval, training = self._config.checkpoint.save_interval, self._config.training
        is_saved = save_interval is not None and step % save_interval == 0
        last = (training.steps, self._first_step + (training.stop_after_steps or 0))
        return self._is_last_asked or is_saved or step in last or step % self.interval == 0

    def checks_one_more(self) -> bool:
        """Return whether the run does one more step, a checked one, before it saves and stops; a collective call.

        It does if the step just done was not checked and another one takes less than `ONE_MORE_S`.
        """
        if self._gradients.is_armed:
            return False
        slowest = torch.tensor([self._seconds], dtype=torch.float64, device=self._engine.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self._is_last_asked = float(slowest) <= ONE_MORE_S
        return self._is_last_asked

    def alarm(self) -> bool:
        """Return whether this rank has found something in the step just done, which all ranks must hear of."""
        self._optimizer.end_step()
        self._alarming = [*self._optimizer.violations]
        if not self._gradients.is_armed:
            self._alarming += self._gradients.find_in_step(self._config.optimizer.clip_grad)
        return bool(self._alarming)

    def find_causes(self, step: int) -> list[Violation]:
        """Find, in the state of this rank, what may have made the numbers of `step` wrong."""
        return [*self._alarming, *self._optimizer.find_wrong_state(step)]

    def after_words(self, step: int, words: Sequence[StepWord]) -> None:
        """Judge what is looked at in every step: its data, and what any rank raised an alarm for."""
        if wrong := find_wrong_data([word.data for word in words], self._topology):
            self.judge.act(step, wrong)
        if any(word.alarm for word in words):
            self.judge.judge(step, self._alarming)
            self._optimizer.violations = []

    def check_step(self, step: int, seconds: float) -> None:
        """Check the whole step, which took `seconds`, if it was due; `after_step` acts on what was found.

        It comes before the ranks exchange their words. So every step ends with the same collective, and `bsl spy` can
        compare the next step with all steps before it.
        """
        self._seconds = seconds
        self._checked = self._check_step(step, seconds) if self._gradients.is_armed else []

    def after_step(self, step: int) -> None:
        """Act on what a checked step has shown, and fingerprint the state that it leaves.

        Raises:
            GuardError: something was found, and `guards.action` is to stop.
        """
        if self._checked:
            self.judge.act(step, self._checked)
        elif self._gradients.is_armed:
            self.judge.passed(step)
        is_next_checked = self._due_early > 0 or self._is_due(step + 1)
        self._optimizer.fingerprint(step, is_next_checked=is_next_checked)
        self._weights.forget()
        if self._optimizer.is_whole and is_next_checked:
            self._weights.take(self.state_flats(), step, is_whole=True)

    def _check_step(self, step: int, seconds: float) -> list[Violation]:
        if self._is_timed:
            finish_queued_work()
        started = time.monotonic()
        violations = self._check_whole(step)
        watched = self._gradients.seconds
        self._gradients.clear()
        if self._is_timed:
            finish_queued_work()
            self._choose_interval(time.monotonic() - started + watched, seconds - watched)
        self._due_early = max(0, self._due_early - 1)
        return violations

    def _check_whole(self, step: int) -> list[Violation]:
        """Return what all ranks find in the step just done."""
        norm, lost = self._independent_norm()
        used, clip = gradient_norm(self._engine), self._config.optimizer.clip_grad
        found = [
            *self._gradients.violations,
            *self._gradients.find_after_step(),
            *find_masters_apart(partitions(self._engine.optimizer), self._rank),
        ]
        # A step whose gradients are not finite is skipped on all ranks, and may keep the norm of the step before.
        if clip > 0 and not getattr(self._engine.optimizer, "overflow", False):
            found += find_wrong_norm(norm, used, self._rank, lost)
        found += self._gradients.find_wrong_feed(self.data.taken)
        found += self._gradients.find_wrong_clipping(used if clip > 0 else norm, clip)
        found += self._optimizer.find_in_check(step)
        return self._exchange(found, self._digests(with_gradients=True))

    def before_save(self, step: int) -> None:
        """Check the state about to be saved."""
        found = [*self._optimizer.find_changed_state(), *self._static_violations(step)]
        self._judge(step, found, self._digests())

    def _static_violations(self, step: int) -> list[Violation]:
        module, optimizer = self._engine.module, self._engine.optimizer
        found = find_wrong_groups(module, optimizer, self._config.optimizer, self._rank)
        return [*find_masters_apart(partitions(optimizer), self._rank), *found, *self._optimizer.find_wrong_state(step)]

    def _digests(self, with_gradients: bool = False) -> list[int]:
        tied = self._gradients.tied_digests if with_gradients else [0] * len(self._gradients.tied_names)
        agreed = agreed_digests(self._engine.module, self._engine.optimizer.param_groups)
        return [*digests64([*self._engine.module.parameters()]), *tied, *agreed]

    def _independent_norm(self) -> tuple[float, float]:
        """Return the gradient norm, and how much of it the clipping norm may have lost to rounding."""
        mine = [self._gradients.squared_norm(self._counted), self._gradients.lost_square / self._topology.dp]
        total = send(torch.tensor(mine, dtype=torch.float64), self._engine.device)
        dist.all_reduce(total)
        square, lost = total.tolist()
        norm = math.sqrt(square)
        return norm, lost / (2 * norm) if norm else 0.0

    def _judge(self, step: int, found: Sequence[Violation], digests: Sequence[int]) -> None:
        """Exchange the findings of all ranks and act on them.

        Raises:
            GuardError: something was found, and `guards.action` is to stop.
        """
        if violations := self._exchange(found, digests):
            self.judge.act(step, violations)

    def _exchange(self, found: Sequence[Violation], digests: Sequence[int]) -> list[Violation]:
        """Return the findings of all ranks, causes first."""
        width = max(len(each) for each in self._watched)
        table = self._exchanges.rows([*digests, *[0] * (width - len(digests)), len(found)], width + 1)
        violations = self._copies.find_unequal(table[:, :-1])
        if self._config.model.dropout > 0:
            violations += find_shared_randomness(self._watched, table, self._topology)
        if table[:, -1].any():
            violations += self.judge.gather(found)
        return by_cause(violations)

    @property
    def _is_timed(self) -> bool:
        """Whether the interval is chosen, and the first step is over, which takes longer than any other."""
        return self._auto is not None and self._due_early < 2

    def _choose_interval(self, cost: float, step_seconds: float) -> None:
        """With `auto`, take in another timing, that of the slowest check and of the fastest step of all ranks."""
        timing = self._exchanges.slowest(cost, step_seconds)
        if self._auto is None or (choice := self._auto.add(*timing)) is None:
            return
        self.interval = choice.interval
        self.judge.say_interval(choice)


def read_state_document(folder: Path, rank: int) -> dict[str, Any]:
    """Return the digests that `rank` left in a checkpoint.

    Raises:
        CheckpointError: they are missing or cannot be read.
    """
    path = digests_path(folder, rank)
    try:
        document: dict[str, Any] = parse_json(read_file(path, follow=True), allow_nan=True)
        return document
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
