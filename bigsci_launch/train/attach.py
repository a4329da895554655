"""The guards as a library, for training loops that are not `bsl train`.

    from bigsci_launch.train.attach import Guards

    guards = Guards(model, optimizer)
    for tokens in batches:
        guards.batch(tokens)        # once per micro-batch
        loss = ...; loss.backward()
        guards.gradients()          # before clipping and before the optimizer's step
        optimizer.step(); optimizer.zero_grad()
        guards.step(loss)           # raises GuardError if anything is wrong

Every rank gets the findings of all ranks, so all ranks decide alike. It needs torch, but neither DeepSpeed nor a run
file. A loop may be plain DDP, FSDP2, accelerate or a DeepSpeed engine.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigsci_launch.errors import BslError, GuardError
from bigsci_launch.train.device.digest import digests_on_device
from bigsci_launch.train.device.gpu import finish_queued_work
from bigsci_launch.train.guards.copies import CopyChecker, Violation, by_cause, merge
from bigsci_launch.train.guards.findings import Findings, find_load_differences
from bigsci_launch.train.guards.fingerprint import StateFingerprint
from bigsci_launch.train.guards.gradient_check import Gradient, GradientCheck, group_of
from bigsci_launch.train.guards.interval import AutoInterval
from bigsci_launch.train.guards.loop_state import LoopState, Sharded, by_marks, local
from bigsci_launch.train.guards.loop_word import SLOTS, WORD_LENGTH, LoopWord, find_wrong_batches
from bigsci_launch.train.guards.places import find_places
from bigsci_launch.train.guards.records import open_records
from bigsci_launch.train.rank.collective import gather
from bigsci_launch.train.rank.exchange import Exchange

__all__ = ["GuardError", "Guards"]

_AIM = 0.0025
"""The share of the training time that `interval="auto"` aims at: half of what the guards may take."""
_EARLY = 2


def own_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return `parameter.grad`, where most loops have the reduced gradient."""
    return parameter.grad


class Guards:
    """The guards of one rank. Every method but `batch`, `touched` and `end` is a collective call of all ranks.

    Args:
        model: the model, wrapped or not.
        optimizer: its optimizer, wrapped or not. AdamW's moments are checked; of others, only that they are finite.
        groups: the process group, or one-dimensional device mesh, of each axis: dp, tp, pp, cp, ep. Without any, all
            ranks are data-parallel.
        events: a file for this rank's records, or False for none. By default they go into the attempt that
            `bsl submit` has started, if any.
        interval: steps between checks of gradients, copies and moments; `auto` aims at 0.25 % of the training time.
            Loss and data are looked at in every step.
        action: `stop` raises GuardError on every rank; `warn` prints and continues.
        tied: pairs of parameters that must be equal, by name, such as the embedding and the last layer.
        sharded: the axes along which a parameter is cut. By default, Megatron's marks say; a DTensor knows itself.
        gradient: returns the reduced gradient of a parameter, for engines that keep it elsewhere than in `.grad`.
        reduction: whether gradients are the `mean` or the `sum` over the data-parallel ranks.
        save_every: steps between saves: the step before each is checked.
        max_skipped: steps that may be skipped in a row because gradients overflow.
        fresh_data: in how many steps no batch may come twice on a rank; 0 allows it.

    Raises:
        BslError: torch.distributed is not initialized, or an argument is wrong.
        GuardError: the ranks do not begin with the same weights.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        groups: Mapping[str, Any] | None = None,
        events: Path | str | bool | None = None,
        interval: int | str = "auto",
        action: str = "stop",
        tied: Sequence[tuple[str, str]] = (),
        sharded: Sharded = by_marks,
        gradient: Gradient = own_gradient,
        reduction: str = "mean",
        save_every: int | None = None,
        max_skipped: int = 20,
        fresh_data: int = 0,
    ) -> None:
        _require("interval", interval, interval == "auto" or (isinstance(interval, int) and interval > 0))
        _require("action", action, action in ("stop", "warn"))
        _require("reduction", reduction, reduction in ("mean", "sum"))
        self._places = find_places(groups)
        self._rank, self._group, self._gradient = self._places.rank, group_of(groups or {}), gradient
        self._state = LoopState(model, optimizer, self._places, tied, sharded)
        self._auto = AutoInterval(_AIM) if interval == "auto" else None
        self.interval = interval if isinstance(interval, int) else 1
        self._save_every = save_every
        self._max_skipped, self._num_skipped = max_skipped, 0
        self._fresh_data, self._batches = fresh_data, dict[int, int]()
        ranks = self._places.mine.get("dp", ())
        self._factor = 1 / len(ranks) if reduction == "mean" and ranks else 1.0
        # With context parallelism, loops differ in what they divide by.
        self._gradient_check = GradientCheck(model) if ranks and len(self._places.mine.get("cp", ())) < 2 else None
        self._fingerprint = StateFingerprint("changed between steps", self._rank)
        self._exchanges = Exchange(self._state.device)
        self.steps_done = 0
        self.gradients_checked: int | None = None
        self._records = open_records(events, os.environ)
        announces, stops = self._rank == 0, action == "stop"
        self._findings = Findings(self._places, self._records, announces=announces, stops=stops, hint=self._hint)
        self._records.start(self._places.coordinate(self._rank))
        self._records.phase("init")
        everywhere = gather(self._state.watched())
        self._copies, self._width = CopyChecker(everywhere), max(len(each) for each in everywhere)
        self._check_now([])

    def _begin_step(self) -> None:
        number = self.steps_done + 1
        saves_after = self._save_every is not None and number % self._save_every == 0
        self._is_armed = self.steps_done < _EARLY or number % self.interval == 0 or saves_after
        self._found: list[Violation] = []
        self._gradient_digests: list[int] = []
        self._data: list[int] = []
        self._samples, self._cost, self._saw_gradients = 0, 0.0, False
        self._count_before = self._state.step_count()
        self._started = time.monotonic()
        if self._gradient_check is not None:
            self._gradient_check.is_armed = self._is_armed
            self._gradient_check.clear()

    def batch(self, tokens: Tensor) -> None:
        """Note the samples of this micro-batch, the first axis counting them; call it before the forward pass."""
        started = time.monotonic()
        if not self._data:
            self._records.step = self.steps_done + 1
            self._records.phase("step")
        self._data += digests_on_device([tokens])
        self._samples += int(tokens.shape[0]) if tokens.dim() else 1
        self._cost += time.monotonic() - started

    def gradients(self) -> None:
        """Look at the reduced gradients; call it after the last backward pass, before clipping and the step."""
        self._settle_clock()
        started = time.monotonic()
        self._saw_gradients = True
        self._found += self._fingerprint.find_changed(self._state.state_flats())
        self._fingerprint.forget()
        if self._is_armed:
            self._look_at_gradients()
        self._settle_clock()
        self._cost += time.monotonic() - started

    def _settle_clock(self) -> None:
        """Before and after what is timed: let the GPU finish, so that its work is counted where it belongs."""
        if self._auto is not None and self._is_armed:
            finish_queued_work()

    @torch.no_grad()
    def _look_at_gradients(self) -> None:
        found = {name: self._gradient(parameter) for name, parameter in self._state.parameters.items()}
        present = {name: local(each) for name, each in found.items() if each is not None}
        self._gradient_digests = self._state.gradient_digests(present)
        if not present and any(each.requires_grad for each in self._state.parameters.values()):
            text = "no parameter has a gradient after the backward pass, so nothing would be trained"
            self._found.append(Violation("missing gradients", "all gradients", (self._rank,), text))
        if self._gradient_check is not None:
            self._found += self._gradient_check.find_wrong(self._gradient, self._group, self._rank, self._factor)

    def step(
        self, loss: Tensor | float | None = None, *, norm: Tensor | float | None = None, lr: float | None = None
    ) -> None:
        """Check the step; call it after the optimizer's step.

        Args:
            loss: this rank's loss. One that is not finite stops the run in this step.
            norm: the gradient norm that clipping used. It may be infinite only if the optimizer skipped the step.
            lr: the learning rate that the schedule gives for this step; every optimizer group must have it.

        Raises:
            GuardError: anything is wrong on any rank, and the action is `stop`.
        """
        self._settle_clock()
        started = time.monotonic()
        seconds = max(0.0, started - self._started - self._cost)
        self.steps_done += 1
        self._records.step = self.steps_done
        value = None if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)
        self._find_in_step(value, None if norm is None else float(norm), lr)
        mine = math.nan if value is None else value
        word = LoopWord(mine, value is not None, _slots(self._data), len(self._found))
        words, found = self._exchange(word)
        self._record_step(words, seconds)
        after_step = time.monotonic()
        self._fingerprint.take(self._state.state_flats(), self.steps_done, is_whole=self._is_armed)
        self._settle_clock()
        now = time.monotonic()
        if self._is_armed:
            # Looking at the fingerprint will take as long again.
            self._choose_interval(self._cost + now - started + now - after_step, seconds)
        if self._saw_gradients and self._is_armed:
            self.gradients_checked = self.steps_done
        self._act(found)
        self._begin_step()

    def _find_in_step(self, loss: float | None, norm: float | None, lr: float | None) -> None:
        self._note_skipped(norm)
        is_wrong = loss is not None and not math.isfinite(loss)
        if is_wrong:
            self._found.append(Violation("non-finite", "loss", (self._rank,), f"is {loss}"))
        if is_wrong or self._is_armed:
            self._found += self._state.find_wrong()
        if lr is not None:
            self._found += self._state.find_wrong_lr(lr, self.steps_done)
        self._found += self._find_replayed()

    def _note_skipped(self, norm: float | None) -> None:
        """Count steps that left the optimizer where it was; too many in a row are a finding."""
        after, is_finite = self._state.step_count(), norm is None or math.isfinite(norm)
        was_skipped = after == self._count_before and (after > 0 or not is_finite)
        self._num_skipped = self._num_skipped + 1 if was_skipped else 0
        if was_skipped:
            self._records.event("skipped", in_a_row=self._num_skipped, norm=norm)
        elif not is_finite:
            text = f"is {norm}, and the optimizer has taken the step"
            self._found.append(Violation("non-finite", "gradient norm", (self._rank,), text))
        if self._num_skipped > self._max_skipped:
            text = f"has skipped {self._num_skipped} steps in a row"
            self._found.append(Violation("skipped steps", "optimizer", (self._rank,), text))
        if not after >= self._count_before:
            text = f"fell from {self._count_before:g} to {after:g}"
            self._found.append(Violation("moments", "step count", (self._rank,), text))

    def _find_replayed(self) -> list[Violation]:
        if not self._fresh_data:
            return []
        first = self.steps_done - self._fresh_data
        self._batches = {digest: step for digest, step in self._batches.items() if step >= first}
        replayed = [self._batches[digest] for digest in self._data if digest in self._batches]
        self._batches.update(dict.fromkeys(self._data, self.steps_done))
        text = f"the samples of step {min(replayed, default=0)} have been read again"
        return [Violation("data", "batch", (self._rank,), text)] if replayed else []

    def _exchange(self, word: LoopWord) -> tuple[list[LoopWord], list[Violation]]:
        values = self._state.values(self._gradient_digests) if self._is_armed else []
        table = self._exchanges.rows([*word.row(), *values], WORD_LENGTH + (self._width if self._is_armed else 0))
        words = [LoopWord.of_row(row) for row in table[:, :WORD_LENGTH].tolist()]
        found = self._copies.find_unequal(table[:, WORD_LENGTH:]) if self._is_armed else []
        for slot in zip(*(each.data for each in words), strict=True):
            found += find_wrong_batches(slot, self._places.members)
        if any(each.num_findings for each in words):
            found += self._findings.gather(self._found)
        return words, by_cause(merge(found))

    def _choose_interval(self, mine: float, seconds: float) -> None:
        """With `auto`, take in another timing, that of the slowest check and of the fastest step of all ranks."""
        if self._auto is None or self.steps_done < _EARLY:
            return
        choice = self._auto.add(*self._exchanges.slowest(mine, seconds))
        if choice is None:
            return
        self.interval = choice.interval
        self._findings.say_interval(choice)

    def _record_step(self, words: Sequence[LoopWord], seconds: float) -> None:
        if self._rank == 0:
            losses = [each.loss for each in words if each.has_loss]
            mean = sum(losses) / len(losses) if losses else None
            self._records.event("step", loss=mean, seconds=seconds, num_samples=self._samples or None)

    def _act(self, found: Sequence[Violation]) -> None:
        try:
            self._findings.act(self.steps_done, found)
        except GuardError as error:
            self._records.fail(error)
            self._records.close()
            raise

    def _hint(self) -> str:
        checked = f"at step {self.gradients_checked}" if self.gradients_checked else "at no step"
        return f"gradients were last checked {checked}: what was saved after it is suspect"

    def _check_now(self, found: Sequence[Violation]) -> list[Violation]:
        """Check weights, moments and settings apart from any step, and begin the next step."""
        self._begin_step()
        self._is_armed = True
        self._found = [*found, *self._state.find_wrong()]
        _, everything = self._exchange(LoopWord(math.nan, False, _slots([]), len(self._found)))
        self._act(everything)
        self._begin_step()
        return everything

    def before_save(self) -> dict[str, Any]:
        """Check the state that is about to be saved, and return what `after_load` compares; keep it with the save.

        The document says whether the checks passed, what they found, at which step gradients were last checked, and
        has a digest of everything that this rank will save. With `warn`, look at `passed` before the save becomes the
        one to continue from.

        Raises:
            GuardError: anything is wrong on any rank, and the action is `stop`.
        """
        self._records.phase("save")
        found = self._check_now([*self._fingerprint.find_changed(self._state.state_flats())])
        return {
            "step": self.steps_done,
            "rank": self._rank,
            "world_size": self._places.world_size,
            "passed": not found,
            "findings": [self._findings.describe(each) for each in found],
            "gradients_checked": self.gradients_checked,
            "digests": self._state.document(),
        }

    def after_load(self, saved: Mapping[str, Any] | None = None, *, step: int | None = None) -> None:
        """Check the state after a load, and compare it with the document of `before_save` if the ranks are the same.

        Args:
            saved: what `before_save` returned on this rank. Without it, or with another number of ranks, what was
                loaded is checked, but it is not known whether it is what was saved; the records say so.
            step: the step to continue from, if no document says it.

        Raises:
            GuardError: anything is wrong on any rank, and the action is `stop`.
        """
        self._records.phase("load")
        self._fingerprint.forget()
        self.steps_done = int(step if step is not None else (saved or {}).get("step", self.steps_done))
        self._records.step = self.steps_done
        is_same = saved and (saved["rank"], saved["world_size"]) == (self._rank, self._places.world_size)
        self._records.event("load", compared=bool(is_same))
        found = find_load_differences(saved["digests"], self._state.document(), self._rank) if saved and is_same else ()
        self._check_now([*found])
        self._fingerprint.take(self._state.state_flats(), self.steps_done, is_whole=True)

    def touched(self) -> None:
        """Say that the loop itself has just changed weights or moments between two steps; not collective."""
        self._fingerprint.forget()

    def end(self, reason: str = "finished") -> None:
        """Record that this rank ends as it should, and write what is still queued; not collective."""
        self._records.end(reason)
        self._records.close()
        self._exchanges.settle()


def _slots(digests: Sequence[int]) -> tuple[int, ...]:
    """Return one digest per slot of a word, 0 where there is none."""
    slots = [0] * SLOTS
    for number, digest in enumerate(digests):
        mixed = (slots[number % SLOTS] * 31 + digest) % (1 << 64)
        slots[number % SLOTS] = (mixed - (1 << 64) if mixed >> 63 else mixed) or 1
    return tuple(slots)


def _require(name: str, value: object, is_right: bool) -> None:
    if not is_right:
        raise BslError(f"{name}: {value!r} is not allowed", hint="`help(Guards)` lists what is")
