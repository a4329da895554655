"""Stops a run whose numbers are no longer finite, and names where that began.

A loss that is not finite stops the run in its step: every rank has it. A step whose gradients are not finite is
skipped by the optimizer. That is ordinary in fp16 while the loss scale is still too high, so only
`guards.max_skipped_steps` of them in a row stop the run. The first skipped step names the tensors after the sum over
dp; from the second on the gradients are also looked at before it, so the data-parallel rank is known too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.topology import Topology
from bigsci_launch.train.guards.copies import Violation, by_cause
from bigsci_launch.train.guards.engine.hooks import before_call, before_instruction
from bigsci_launch.train.guards.engine.judge import Judge
from bigsci_launch.train.guards.flat import Flat
from bigsci_launch.train.guards.moments import MomentLimits, find_wrong_state
from bigsci_launch.train.parallel.optimizer import local_gradient, loss_scale
from bigsci_launch.train.steps.word import StepWord

CHECK = "not finite"
_NAMED_PER_RANK = 3


class FiniteWatch:
    """Watches the loss and the skipped steps of a run, on one rank."""

    def __init__(self, engine: PipelineEngine, config: RunConfig, topology: Topology, rank: int, judge: Judge) -> None:
        self._engine, self._topology, self._rank, self._judge = engine, topology, rank, judge
        self._limit = config.guards.max_skipped_steps
        self._num_skipped = 0
        self._began: list[Violation] = []
        self._local: list[Violation] = []
        self._reduced: list[Violation] = []
        if config.parallelism.engine == "uneven":
            before_call(engine.groups, "sum", self._see_local)
            before_call(engine, "take_step", self._see_reduced)
            return
        before_instruction(engine, schedule.ReduceGrads, self._see_local)
        is_bf16 = isinstance(engine.optimizer, BF16_Optimizer)
        before_call(engine.optimizer, "clear_hp_grads" if is_bf16 else "_update_scale", self._see_reduced)

    def after_step(
        self, step: int, words: Sequence[StepWord], find_more: Callable[[], Sequence[Violation]] = list
    ) -> None:
        """Judge the loss and the skipping of `step`; a collective call.

        `find_more` looks for causes in the state of this rank, if there is something to explain.

        Raises:
            GuardError: the loss is not finite, or too many steps in a row were skipped.
        """
        losses = [word.loss for word in words]
        skips = [rank for rank, word in enumerate(words) if word.skipped]
        if not all(map(math.isfinite, losses)):
            found = self._judge.gather([*find_more(), *self._find_wrong_weights(), *self._find_wrong_loss()])
            self._judge.act(step, by_cause(found) or [self._unexplained(losses)])
        elif 0 < len(skips) < len(words):
            text = "skipped the step, which other ranks have done"
            self._judge.act(step, [Violation(CHECK, "all gradients", tuple(skips), text)])
        self._count(step, bool(skips), find_more)
        self._local, self._reduced = [], []

    def _count(self, step: int, is_skipped: bool, find_more: Callable[[], Sequence[Violation]]) -> None:
        if not is_skipped:
            self._num_skipped, self._began = 0, []
            return
        self._num_skipped += 1
        seen = self._judge.gather(self._local) or self._judge.gather(self._reduced)
        if self._num_skipped <= 2:
            self._began = self._furthest_first(seen) or self._began
        first = step - self._num_skipped + 1
        sentences = [self._judge.describe(each) for each in self._began[:1]]
        scale = loss_scale(self._engine.optimizer)
        self._judge.skipped(step, in_a_row=self._num_skipped, first=first, loss_scale=scale, began=sentences)
        if self._num_skipped >= self._limit:
            found = by_cause(self._judge.gather(list(find_more()))) + self._began
            text = f"{self._num_skipped} steps in a row were skipped, the first of them step {first}"
            everywhere = tuple(range(self._topology.world_size))
            self._judge.act(
                step,
                [*map(_with(text), found[:1]), *found[1:]]
                or [Violation(CHECK, "all", everywhere, text, is_decided=False)],
            )
            self._num_skipped = 0

    def _furthest_first(self, found: Sequence[Violation]) -> list[Violation]:
        """Sort gradients as the backward pass made them: what is not finite spreads to the stages before."""
        return sorted(found, key=lambda each: -max(self._topology.coordinate(rank).pp_rank for rank in each.ranks))

    def _unexplained(self, losses: Sequence[float]) -> Violation:
        ranks = tuple(rank for rank, loss in enumerate(losses) if not math.isfinite(loss))
        text = f"is {losses[ranks[0]]}; weights and optimizer state are finite"
        return Violation(CHECK, "the loss", ranks, text, is_decided=len(ranks) == 1)

    def _find_wrong_weights(self) -> Iterator[Violation]:
        weights = [Flat.whole(name, each, "weight {}") for name, each in self._engine.module.named_parameters()]
        found = find_wrong_state([({"": flat}, MomentLimits()) for flat in weights], self._rank)
        return (replace(each, check=CHECK) for each in found)

    def _find_wrong_loss(self) -> Iterator[Violation]:
        """Name the data-parallel replica whose own loss is not finite."""
        own = getattr(self._engine, "dp_group_loss", None)
        if own is not None and self._engine.is_last_stage() and not math.isfinite(float(own)):
            yield Violation(CHECK, "the loss", (self._rank,), f"is {float(own)} on the samples of this rank")

    def _see_local(self) -> None:
        if self._num_skipped:
            module = self._engine.module.named_parameters()
            self._local = self._name([(name, local_gradient(parameter)) for name, parameter in module], "")

    def _see_reduced(self) -> None:
        """Look at the gradients of a step that is being skipped, before the optimizer throws them away."""
        # The engine clears them again after the optimizer has.
        if self._engine.optimizer.overflow and not self._reduced:
            named = [*reduced_gradients(self._engine)]
            self._reduced = self._name(named, "; seen after the sum over dp, so it may come from any of these ranks")

    @torch.no_grad()
    def _name(self, gradients: Sequence[tuple[str, Tensor | None]], more: str) -> list[Violation]:
        """Return the gradients that are not finite, the last layer's first."""
        found: list[Violation] = []
        for name, gradient in reversed(gradients):
            if gradient is None or math.isfinite(float(gradient.double().sum())):
                continue
            count = gradient.numel() - int(torch.isfinite(gradient).sum())
            if count and len(found) < _NAMED_PER_RANK:
                text = f"{count} of {gradient.numel()} elements are not finite{more}"
                found.append(Violation(CHECK, f"gradient of {name}", (self._rank,), text, is_decided=not more))
        return found


def reduced_gradients(engine: PipelineEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients that the optimizer holds after their sum over dp, as far as this rank has them."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    if isinstance(optimizer, BF16_Optimizer):
        for group, gradients in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
            yield from ((names[id(parameter)], each) for parameter, each in zip(group, gradients, strict=True))
        return
    for name, parameter in engine.module.named_parameters():
        gradient = local_gradient(parameter)
        if gradient is not None:
            yield name, gradient


def _with(text: str) -> Callable[[Violation], Violation]:
    return lambda each: replace(each, text=f"{each.text}; {text}")
