"""Checks AdamW itself: its settings in every step, its arithmetic and its state when a step is checked.

The update is recomputed in float64 on a sample of elements from the values just before it, with the learning rate that
the schedule gives and the settings of the run file, and compared with what the step has left at its end:

    m' = b1 m + (1-b1) g,  v' = b2 v + (1-b2) g^2,
    w' = w (1 - lr decay) - lr m' / (1-b1^t) / (sqrt(v' / (1-b2^t)) + eps).

So a rate that is tripled, a wrong count of steps and a wrong formula are seen where no other rank has a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from bigsci_launch.adam_limits import ABSURD, moment_bound
from bigsci_launch.config.schema.run import OptimizerSection, RunConfig
from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.engine.hooks import before_call
from bigsci_launch.train.guards.engine.padding import find_used_padding, padding_of
from bigsci_launch.train.guards.engine.state import OptimizerPartition, flats_of, partitions
from bigsci_launch.train.guards.fingerprint import StateFingerprint, sample_of
from bigsci_launch.train.guards.flat import Flat
from bigsci_launch.train.guards.moments import (
    FIRST,
    SECOND,
    MomentLimits,
    find_wrong_state,
    largest_factor,
    largest_size,
)
from bigsci_launch.train.guards.ratios import power, ratio
from bigsci_launch.train.steps.schedule import LearningRate

_RECOMPUTED = 64
_ROUNDING = 1e-5
# A step of AdamW may be far below the last bit of the weight that it moves.
_LAST_BIT = 2.0**-22
_UPDATE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Before:
    """Sampled elements of a partition just before AdamW's step, in float64, and the step count that it will reach."""

    at: Tensor
    weight: Tensor
    first: Tensor
    second: Tensor
    gradient: Tensor
    count: float


class OptimizerWatch:
    """Watches the optimizer of one rank. Findings wait in `violations` until they are exchanged."""

    def __init__(self, engine: PipelineEngine, config: RunConfig, rank: int) -> None:
        self._engine, self._config, self._rank = engine, config.optimizer, rank
        self._schedule = LearningRate.of_config(config.optimizer, config.training)
        # Read once, here: during ZeRO's step the optimizer exposes one group at a time.
        self._parts = partitions(engine.optimizer)
        self._states = [engine.optimizer.optimizer.state[part.master] for part in self._parts]
        self._fingerprint = StateFingerprint("memory", rank)
        self._padding = [padding_of(engine.module, part, config.model.vocab_size) for part in self._parts]
        self.is_whole = isinstance(config.guards.interval, int)
        self._had_factor, self._had_size, self._began = 0.0, 0.0, 0.0
        self._is_padding_zero = True
        self._step, self._is_armed, self._is_fingerprint_due = 0, False, False
        self._due: list[tuple[OptimizerPartition, Mapping[str, Any], Before]] = []
        self._find_changed: Callable[[], Iterable[Violation]] = tuple
        self.violations: list[Violation] = []
        adam = engine.optimizer.optimizer
        before_call(adam, "step", lambda: self._look(adam.param_groups))

    def begin(self, step: int) -> None:
        """Take the state after `step`, just loaded or initial, for what the next steps begin with."""
        # A load may have replaced the objects that hold the state.
        self._states[:] = [self._engine.optimizer.optimizer.state[part.master] for part in self._parts]
        moments = [(state[FIRST], state[SECOND]) for state in self._states if FIRST in state]
        self._had_factor = max((largest_factor(*each) for each in moments), default=0.0)
        self._had_size = max((_size(*each) for each in moments), default=0.0)
        self._began = max((float(state["step"]) for state in self._states if "step" in state), default=0.0)
        self._is_padding_zero = not any(self._find_padding("master"))
        self.fingerprint(step, is_next_checked=True)

    def before_step(self, step: int, *, is_armed: bool) -> None:
        self._step, self._is_armed, self._is_fingerprint_due = step, is_armed, True
        self.violations, self._due, self._find_changed = [], [], tuple

    def fingerprint(self, step: int, *, is_next_checked: bool) -> None:
        """Take the fingerprint of the state after `step`: of all of it if the next step is checked."""
        is_whole = self.is_whole and is_next_checked
        self._fingerprint.take(self.state_flats(), step, is_whole=is_whole, counts=self._counts())

    def state_flats(self) -> dict[str, Flat]:
        return {
            flat.title.format(f"group {part.name}"): flat
            for part, state in zip(self._parts, self._states, strict=True)
            for flat in flats_of(part, state).values()
        }

    def _counts(self) -> dict[str, float | None]:
        """Return AdamW's step counts, as far as they can be read without waiting for a device."""
        steps = {part.name: state.get("step") for part, state in zip(self._parts, self._states, strict=True)}
        is_far = {name: isinstance(step, Tensor) and step.device.type != "cpu" for name, step in steps.items()}
        known = {name: None if step is None or is_far[name] else float(step) for name, step in steps.items()}
        return {f"step count of group {name}": step for name, step in known.items()}

    def end_step(self) -> None:
        """Check what AdamW has left, or the fingerprint of a step that the optimizer skipped."""
        if self._is_fingerprint_due:
            self._compare_fingerprint()
            if not getattr(self._engine.optimizer, "overflow", False):
                text = "AdamW was not run, though the gradients of the step were not skipped"
                self.violations.append(Violation("optimizer update", "all tensors", (self._rank,), text))
        self.violations += self._find_changed()
        for part, state, before in self._due:
            self.violations += self._find_wrong_update(part, state, before)
        self._due = []

    def _compare_fingerprint(self) -> None:
        if self._is_fingerprint_due:
            self._is_fingerprint_due = False
            self._find_changed = self._fingerprint.compare(self.state_flats(), self._counts())

    def find_changed_state(self) -> Iterator[Violation]:
        """Find what has changed since the fingerprint after the last step."""
        return self._fingerprint.find_changed(self.state_flats(), self._counts())

    def find_wrong_state(self, step: int) -> Iterator[Violation]:
        """Find moments, masters and step counts that a healthy run cannot have after `step`."""
        yield from self._find_wrong_counts(step)
        yield from self._find_wrong_moments()

    def find_in_check(self, step: int) -> Iterator[Violation]:
        """Find the same in a checked step; with `guards.interval: auto` only the counts, which cost nothing."""
        yield from self._find_wrong_counts(step)
        if self.is_whole:
            yield from self._find_wrong_moments()

    def _find_wrong_counts(self, step: int) -> Iterator[Violation]:
        expected = step - self._engine.skipped_steps
        for part, state in zip(self._parts, self._states, strict=True):
            if "step" in state and float(state["step"]) != expected:
                text = f"is {float(state['step']):g} after step {step}; {self._engine.skipped_steps} steps were skipped"
                yield Violation("optimizer step", f"step count of group {part.name}", (self._rank,), text)

    def _find_wrong_moments(self) -> Iterator[Violation]:
        size = largest_size(self._config.clip_grad, self._had_size)
        states = []
        for part, state in zip(self._parts, self._states, strict=True):
            num_steps = steps_since(self._began, float(state.get("step", 0)))
            factor = moment_bound(self._config.betas, num_steps, self._had_factor)
            kept = {key: flat for key, flat in flats_of(part, state).items() if key != "weight"}
            states.append((kept, MomentLimits(factor, size)))
        yield from (replace(each, check="moments") for each in find_wrong_state(states, self._rank))
        yield from self._find_padding(FIRST, SECOND)
        if self._is_padding_zero:
            yield from self._find_padding("master")

    def _find_padding(self, *keys: str) -> Iterator[Violation]:
        for part, state, ranges in zip(self._parts, self._states, self._padding, strict=True):
            flats = flats_of(part, state)
            yield from find_used_padding(ranges, [flats[key] for key in keys if key in flats], self._rank)

    def _look(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Look at what AdamW is about to update."""
        self._compare_fingerprint()
        self.violations += find_wrong_settings(groups, self._config, self._schedule.at(self._step), self._rank)
        if self._is_armed:
            self._due += [(part, state, _before(part, state, self._step)) for part, state in self._stepped(groups)]

    def _stepped(self, groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[OptimizerPartition, dict[str, Any]]]:
        chosen = {id(each) for group in groups for each in group["params"]}
        for part, state in zip(self._parts, self._states, strict=True):
            if id(part.master) in chosen and part.master.grad is not None and part.slices:
                yield part, state

    @torch.no_grad()
    def _find_wrong_update(
        self, part: OptimizerPartition, state: Mapping[str, Any], before: Before
    ) -> Iterator[Violation]:
        decay = self._config.weight_decay if part.name == "decay" else 0.0
        rate = self._schedule.at(self._step)
        expected = expected_update(before, self._config, rate, decay)
        allowed = tolerances(before, expected, self._config, rate)
        found = (part.master.detach(), state["exp_avg"], state["exp_avg_sq"])
        wrong = [
            (tensor[before.at].double() - value).abs() > tolerance
            for tensor, value, tolerance in zip(found, expected, allowed, strict=True)
        ]
        labels, flags = ("fp32 master", "first moment", "second moment"), torch.stack(wrong).any(dim=1).tolist()
        for label, tensor, value, elements, is_wrong in zip(labels, found, expected, wrong, flags, strict=True):
            if is_wrong:
                yield self._name_wrong_update(part, label, tensor, value, before, elements)

    def _name_wrong_update(
        self, part: OptimizerPartition, label: str, tensor: Tensor, value: Tensor, before: Before, wrong: Tensor
    ) -> Violation:
        place = int(before.at[wrong][0])
        name = next(name for name, (start, size) in part.slices.items() if start <= place < start + size)
        old = {"fp32 master": before.weight, "first moment": before.first, "second moment": before.second}[label]
        due, real = value - old, tensor[before.at].double() - old
        size = float(due @ due)
        times = ratio(float(real @ due), size)
        factor = f"; they moved {times:.3g} times as far as AdamW moves them" if size else ""
        text = f"{int(wrong.sum())} of {len(wrong)} checked elements differ from AdamW's result{factor}"
        return Violation("optimizer update", f"{label} of {name}", (self._rank,), text)


def steps_since(began: float, count: float) -> int:
    """Return how many steps a count has grown by; 0 for a count that is none, which has a finding of its own."""
    return max(0, round(count - began)) if math.isfinite(count - began) else 0


def _size(first: Tensor, second: Tensor) -> float:
    """Return the larger of max |m| and the root of max v; 0 if they are no sound moments."""
    if not first.numel():
        return 0.0
    largest = max(float(first.abs().max()), math.sqrt(max(0.0, float(second.max()))))
    return largest if largest < ABSURD else 0.0


def _before(part: OptimizerPartition, state: Mapping[str, Any], step: int) -> Before:
    at = sample_of([*part.slices.values()], step, _RECOMPUTED, part.master.device)
    zero = torch.zeros(len(at), dtype=torch.float64, device=at.device)
    gradient = part.master.grad
    assert gradient is not None
    return Before(
        at=at,
        weight=part.master.detach()[at].double(),
        first=state["exp_avg"][at].double() if "exp_avg" in state else zero,
        second=state["exp_avg_sq"][at].double() if "exp_avg_sq" in state else zero,
        gradient=gradient.reshape(-1)[at].double(),
        count=float(state.get("step", 0)) + 1,
    )


def expected_update(
    before: Before, config: OptimizerSection, learning_rate: float, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight, first and second moment as AdamW must leave them."""
    one, two = config.betas
    first = one * before.first + (1 - one) * before.gradient
    second = two * before.second + (1 - two) * before.gradient**2
    mean = first / (1 - power(one, before.count))
    spread = (second / (1 - power(two, before.count))).sqrt()
    weight = before.weight * (1 - learning_rate * decay) - learning_rate * mean / (spread + config.epsilon)
    return weight, first, second


def tolerances(
    before: Before, expected: tuple[Tensor, Tensor, Tensor], config: OptimizerSection, learning_rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return how far 32 bits may leave weight, first and second moment from `expected`.

    Where the gradient cancels the first moment, the bits that are lost may be most of the weight's step.
    """
    weight, _, second = expected
    one, two = config.betas
    moved = (weight - before.weight).abs()
    cancelled = (one * before.first.abs() + (1 - one) * before.gradient.abs()) / (1 - power(one, before.count))
    spread = (second / (1 - power(two, before.count))).sqrt() + config.epsilon
    lost_bits = _LAST_BIT * learning_rate * cancelled / spread
    return (
        _LAST_BIT * before.weight.abs() + _UPDATE_TOLERANCE * moved + lost_bits + 1e-30,
        _ROUNDING * (before.first.abs() + before.gradient.abs()) + 1e-30,
        _ROUNDING * (before.second.abs() + second.abs()) + 1e-37,
    )


def find_wrong_settings(
    groups: Sequence[Mapping[str, Any]], config: OptimizerSection, learning_rate: float, rank: int
) -> Iterator[Violation]:
    """Find groups that AdamW is about to update with other settings than the schedule and the run file give."""
    for group in groups:
        name, decay = group["name"], config.weight_decay if group["name"] == "decay" else 0.0
        if group["lr"] != learning_rate:
            text = f"AdamW used {group['lr']:.6g}; the schedule gives {learning_rate:.6g}"
            yield Violation("learning rate", f"group {name}", (rank,), text)
        if (group["weight_decay"], tuple(group["betas"]), group["eps"]) != (
            decay,
            tuple(config.betas),
            config.epsilon,
        ):
            text = (
                f"AdamW used weight decay {group['weight_decay']:g}, betas {tuple(group['betas'])} and epsilon "
                f"{group['eps']:g}, which are not those of the run file"
            )
            yield Violation("optimizer settings", f"group {name}", (rank,), text)
