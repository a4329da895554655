"""What this rank communicates inside each instruction of a pipeline schedule, so that it can do so without data.

A rank that has run out of memory cannot compute its part of the step, but its peers wait for what it would send. It
therefore goes through the rest of the schedule with communication alone: the same calls, with zeros. How many calls an
instruction makes, and with what shapes, is known from the last time that it ran: a tape of each is kept.

The calls are seen in `torch.distributed`, which the trainer and DeepSpeed both use. Outside of instructions, and once a
tape is complete, all that this costs is a comparison.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

CALLS = ("all_reduce", "send", "recv", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")
_MAX_KEPT_ELEMENTS = 4096
_present: Traffic | None = None


class Instruction(NamedTuple):
    """A kind of instruction of a schedule. Guards communicate within the reductions of a step that they check."""

    name: str
    is_training: bool
    is_checked: bool


class UnknownCallsError(Exception):
    """A rank cannot finish an instruction without data: it has never completed it before."""


@dataclass(frozen=True, slots=True)
class Blank:
    """Stands for a tensor of a call. Integers describe shapes, so their values are kept."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    values: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> Blank:
        """Return what stands for `tensor`."""
        is_kept = not tensor.is_floating_point() and tensor.numel() <= _MAX_KEPT_ELEMENTS
        return cls(tensor.shape, tensor.dtype, tensor.device, tensor.detach().clone() if is_kept else None)

    def fill(self) -> Tensor:
        """Return a tensor to communicate."""
        if self.values is not None:
            return self.values.clone()
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call of a function of `torch.distributed`, without its data."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def repeat(self) -> None:
        """Make the call with zeros, and wait for it."""
        work = self.function(*_filled(self.arguments), **_filled(self.keywords))
        if work is not None and hasattr(work, "wait"):
            work.wait()


class _Done:
    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Traffic:
    """The tapes of a rank, one for each kind of instruction."""

    def __init__(self) -> None:
        global _present
        self._tapes: dict[Instruction, tuple[RecordedCall, ...]] = {}
        self._is_inside = self._is_muted = False
        self._num_made = 0
        self._recorded: list[RecordedCall] | None = None
        _present = self

    def forget(self, changes: Callable[[Instruction], bool]) -> None:
        """Forget the tapes of instructions whose shapes change."""
        self._tapes = {each: calls for each, calls in self._tapes.items() if not changes(each)}

    @contextmanager
    def inside(self, instruction: Instruction, *, is_muted: bool = False) -> Iterator[None]:
        """Count the calls of an instruction, and note them if it runs for the first time.

        If muted, no call is made: what it would bring stays as it is.
        """
        self._num_made, self._recorded = 0, None if instruction in self._tapes else []
        self._is_inside, self._is_muted = True, is_muted
        try:
            yield
        finally:
            self._is_inside = self._is_muted = False
        if self._recorded is not None:
            self._tapes[instruction] = tuple(self._recorded)

    def finish(self, instruction: Instruction) -> None:
        """Make the calls that an instruction had not made when an exception ended it.

        Raises:
            UnknownCallsError: it was never completed, so its calls are not known.
        """
        for call in self._tape(instruction)[self._num_made :]:
            call.repeat()

    def repeat(self, instruction: Instruction) -> None:
        """Make all calls of an instruction, without data."""
        for call in self._tape(instruction):
            call.repeat()

    def _tape(self, instruction: Instruction) -> tuple[RecordedCall, ...]:
        try:
            return self._tapes[instruction]
        except KeyError:
            raise UnknownCallsError(f"what {instruction} communicates is not recorded yet") from None

    def make(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Make a call, or leave it out, and count it."""
        if not self._is_inside:
            return function(*arguments, **keywords)
        call = None
        if self._recorded is not None:
            call = RecordedCall(function, _blanked(arguments), _blanked(keywords))
        result = _Done() if self._is_muted else function(*arguments, **keywords)
        # A call that fails for want of memory has not reached the peers, so it is counted only now.
        self._num_made += 1
        if self._recorded is not None and call is not None:
            self._recorded.append(call)
        return result


def end_traffic() -> None:
    """Note no calls any more, and let go of the groups that the tapes name."""
    global _present
    _present = None


def stand_in_between() -> None:
    """Let the calls of this process be seen, once. Do it before DeepSpeed starts: it keeps some of the functions."""
    for name in CALLS:
        function = getattr(dist, name)
        if not hasattr(function, "is_noted"):
            setattr(dist, name, _noted(function))


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*arguments: Any, **keywords: Any) -> Any:
        if _present is None:
            return function(*arguments, **keywords)
        return _present.make(function, arguments, keywords)

    noted.is_noted = True  # type: ignore[attr-defined]
    return noted


def _blanked(value: Any) -> Any:
    return _mapped(value, Tensor, Blank.of)


def _filled(value: Any) -> Any:
    return _mapped(value, Blank, Blank.fill)


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return `value` with everything of a `kind` inside it changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(each, kind, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(each, kind, change) for each in value)
    return value
